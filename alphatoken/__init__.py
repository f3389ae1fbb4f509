"""AlphaToken: what each response token of post-training data is worth.

Names are loaded from their modules when they are first used (PEP 562), so that ``import
alphatoken`` costs nothing and ``alphatoken --help`` needs no torch.

>>> from alphatoken import Scorer, ScorerConfig, select_top
>>> ScorerConfig().estimator
'alphatoken'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alphatoken.adapter import DecoderAdapter, register_adapter
    from alphatoken.batch import PreferenceBatch, token_losses
    from alphatoken.config import ScorerConfig
    from alphatoken.drift import FisherDrift
    from alphatoken.errors import (
        AlphaTokenError,
        ConfigError,
        CoverageError,
        DataError,
        FisherError,
        InputError,
        ModelError,
        NumericalError,
        UnsupportedError,
    )
    from alphatoken.fisher import fit_fisher
    from alphatoken.losses import dpo_coefficient, masked_dpo_loss, masked_sft_loss
    from alphatoken.scorer import AlphaTokenWarning, CoverageReport, Observed, Scorer
    from alphatoken.selection import (
        response_values,
        select_bottom,
        select_random,
        select_top,
    )
    from alphatoken.values import TokenValues

__version__ = "0.1.0"

__all__ = [
    "AlphaTokenError",
    "AlphaTokenWarning",
    "ConfigError",
    "CoverageError",
    "CoverageReport",
    "DataError",
    "DecoderAdapter",
    "FisherDrift",
    "FisherError",
    "InputError",
    "ModelError",
    "NumericalError",
    "Observed",
    "PreferenceBatch",
    "Scorer",
    "ScorerConfig",
    "TokenValues",
    "UnsupportedError",
    "__version__",
    "dpo_coefficient",
    "fit_fisher",
    "masked_dpo_loss",
    "masked_sft_loss",
    "register_adapter",
    "response_values",
    "select_bottom",
    "select_random",
    "select_top",
    "token_losses",
]

_HOMES = {
    "adapter": ("DecoderAdapter", "register_adapter"),
    "batch": ("PreferenceBatch", "token_losses"),
    "config": ("ScorerConfig",),
    "drift": ("FisherDrift",),
    "errors": (
        "AlphaTokenError",
        "ConfigError",
        "CoverageError",
        "DataError",
        "FisherError",
        "InputError",
        "ModelError",
        "NumericalError",
        "UnsupportedError",
    ),
    "fisher": ("fit_fisher",),
    "losses": ("dpo_coefficient", "masked_dpo_loss", "masked_sft_loss"),
    "scorer": ("AlphaTokenWarning", "CoverageReport", "Observed", "Scorer"),
    "selection": ("response_values", "select_bottom", "select_random", "select_top"),
    "values": ("TokenValues",),
}
"""Module -> what the package offers of it; the imports above, for run time."""

_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a name of ``__all__`` from its module, once."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Everything that the package offers, loaded or not."""
    return sorted({*globals(), *__all__})
