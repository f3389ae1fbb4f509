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
    from alphatoken.config import ScorerConfig
    from alphatoken.direction.drift import FisherDrift
    from alphatoken.direction.fisher import fit_fisher
    from alphatoken.direction.influence import InfluenceFactors, fit_influence
    from alphatoken.errors import (
        AlphaTokenError,
        AlphaTokenWarning,
        ColumnsError,
        ConfigError,
        CoverageError,
        DataError,
        FisherError,
        InputError,
        ModelError,
        NumericalError,
        UnsupportedError,
    )
    from alphatoken.estimate.observed import Observed
    from alphatoken.estimate.proofs import CoverageReport
    from alphatoken.model.batch import PreferenceBatch, token_losses
    from alphatoken.model.protocol import DecoderAdapter, register_adapter
    from alphatoken.scorer import Scorer
    from alphatoken.select.losses import dpo_coefficient, masked_dpo_loss, masked_sft_loss
    from alphatoken.select.masks import (
        response_values,
        select_bottom,
        select_random,
        select_top,
    )
    from alphatoken.values import TokenValues

__version__ = "0.2.0"

__all__ = [
    "AlphaTokenError",
    "AlphaTokenWarning",
    "ColumnsError",
    "ConfigError",
    "CoverageError",
    "CoverageReport",
    "DataError",
    "DecoderAdapter",
    "FisherDrift",
    "FisherError",
    "InfluenceFactors",
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
    "fit_influence",
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
    "model.protocol": ("DecoderAdapter", "register_adapter"),
    "model.batch": ("PreferenceBatch", "token_losses"),
    "config": ("ScorerConfig",),
    "direction.drift": ("FisherDrift",),
    "errors": (
        "AlphaTokenError",
        "AlphaTokenWarning",
        "ColumnsError",
        "ConfigError",
        "CoverageError",
        "DataError",
        "FisherError",
        "InputError",
        "ModelError",
        "NumericalError",
        "UnsupportedError",
    ),
    "direction.fisher": ("fit_fisher",),
    "direction.influence": ("InfluenceFactors", "fit_influence"),
    "select.losses": ("dpo_coefficient", "masked_dpo_loss", "masked_sft_loss"),
    "estimate.proofs": ("CoverageReport",),
    "scorer": ("Scorer",),
    "estimate.observed": ("Observed",),
    "select.masks": ("response_values", "select_bottom", "select_random", "select_top"),
    "values": ("TokenValues",),
}
"""Module -> what the package offers of it; the imports above, for run time."""

_MODULES = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a name of ``__all__`` from its module, once."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Everything that the package offers, loaded or not."""
    return sorted({*globals(), *__all__})
