"""Trainers: Alpha-SFT and Alpha-DPO over TRL, and the same for transformers' Trainer.

Needs ``alphatoken[train]``. Names are imported on first use, so that options can be read without
TRL. Below ``sft``, ``dpo`` and ``trainer``, which say how one kind of trainer makes a loss of
response tokens, the room is read from a step of training:

1. :mod:`~alphatoken.train.options`, ``refusals``, ``python_rows``, ``run_rows``: before the first
   step. Fields that configurations gain, what is refused by name, validation and retention rows
   prepared, a Fisher fitted or read from the cache.
2. :mod:`~alphatoken.train.mixin`: the hooks. ``get_batch_samples`` lets a weigher plan the step;
   ``compute_loss`` hands it each micro-batch (``MicroBatch``).
   Parts of a run see of the trainer what :mod:`~alphatoken.train.interface` names, and weigher and
   valuation its loss alone.
3. :mod:`~alphatoken.train.weigher`: from a policy (``policy``, ``policies``, ``policy_stage``) to
   the loss of a step, by what ``trainer_loss`` says of the trainer's own. The values, and which
   validation rows and direction hold at a step, are in ``valuation`` and ``pool``.
4. :mod:`~alphatoken.train.log_prob_proxy`: weights act on the update and not on the loss that
   is reported.
5. :mod:`~alphatoken.train.records`: what was trained with which weight, for the logs and, with
   ``ledger``, for values over the run.
6. :mod:`~alphatoken.train.checkpoint`: checkpoints that are whole or not there, and runs that go on
   from them bitwise; ``manifest`` says what a checkpoint holds and whose it is.

``distributed`` and ``shards`` hold what changes with several processes.

**Mathematics**: the weighted update is eq. sft_masked_loss and eq. dpo_masked_loss, the ledger the
in-run values of Appendix A. **May import** the scorer and the rooms of the core, ``data`` and
``score``; not ``cli``. **Oracle**: a reference step
written from the definitions alone, with which a trainer's values, masks, gradients, updates,
ledger and logs are compared (``tests/property/test_trainer_oracle.py``); with every weight 1 a step
equals TRL's bit for bit.
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
