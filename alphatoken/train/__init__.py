"""Trainers: Alpha-SFT and Alpha-DPO over TRL, and the same for transformers' Trainer.

Needs ``alphatoken[train]``. Names are imported on first use, so that options can be read without
TRL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from alphatoken.errors import ConfigError

if TYPE_CHECKING:
    from alphatoken.train.dpo import AlphaDPOConfig, AlphaDPOTrainer
    from alphatoken.train.options import AlphaOptions
    from alphatoken.train.sft import AlphaSFTConfig, AlphaSFTTrainer
    from alphatoken.train.trainer import AlphaConfig, AlphaTrainer

__all__ = [
    "AlphaConfig",
    "AlphaDPOConfig",
    "AlphaDPOTrainer",
    "AlphaOptions",
    "AlphaSFTConfig",
    "AlphaSFTTrainer",
    "AlphaTrainer",
]

_PLACES = {
    "AlphaConfig": "trainer",
    "AlphaDPOConfig": "dpo",
    "AlphaDPOTrainer": "dpo",
    "AlphaOptions": "options",
    "AlphaSFTConfig": "sft",
    "AlphaSFTTrainer": "sft",
    "AlphaTrainer": "trainer",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'alphatoken.train' has no attribute '{name}'")
    try:
        return getattr(import_module(f"alphatoken.train.{_PLACES[name]}"), name)
    except ModuleNotFoundError as missing:
        if missing.name not in ("trl", "accelerate", "datasets"):
            raise
        raise ConfigError(
            f"{name} needs a package that is not installed",
            got=str(missing.name),
            remedy="pip install 'alphatoken[train]'",
        ) from missing
