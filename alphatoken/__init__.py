"""AlphaToken: what each response token of post-training data is worth.

>>> from alphatoken import Scorer, ScorerConfig, select_top
>>> ScorerConfig().estimator
'alphatoken'
"""

from __future__ import annotations

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
from alphatoken.selection import select_bottom, select_random, select_top
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
    "select_bottom",
    "select_random",
    "select_top",
    "token_losses",
]
