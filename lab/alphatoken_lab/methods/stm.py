"""STM: selective token masking by the perplexity that the model itself gives each token."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from alphatoken.errors import ConfigError
from alphatoken.train.policy import PolicySettings, PolicyStage
from alphatoken_lab.methods.static import model_losses
from alphatoken_lab.methods.static_mask import StaticMask
from alphatoken_lab.methods.token_table import TokenTable


class STM(StaticMask):
    """Train on the tokens that the initial model finds likely.

        keep t  iff  exp(l_t(theta_0)) <= threshold      budget: the lowest perplexities

    One forward of the model before training. ``threshold`` 2.5 keeps p >= 0.4; perplexity is a
    token's, not a sequence's.

    Args:
        settings: mode, budget, scope, rounding.
        threshold: tau, above 1. [above 1; raise it to keep more tokens; the paper's 2.5; it tried
            1.5 to 1,000]

    Raises:
        ConfigError: a threshold of 1 or less (a perplexity is at least 1).

    Source: arXiv 2501.14315; appier-research/robust-llm-finetunes (``label[ppl>threshold]=-100``).
    """

    name: ClassVar[str] = "stm"
    source: ClassVar[str] = "arXiv 2501.14315; github.com/appier-research/robust-llm-finetunes"

    def __init__(self, settings: PolicySettings | None = None, *, threshold: float = 2.5) -> None:
        super().__init__(settings)
        if not math.isfinite(threshold) or threshold <= 1:
            raise ConfigError(
                "threshold of STM is a perplexity above 1",
                got=repr(threshold),
                why="no token's perplexity is below 1: hardly anything would be kept",
                remedy="2.5 is published; 1.5 to 1000 were tried",
            )
        self.threshold = threshold

    def measured(self, stage: PolicyStage) -> TokenTable:
        """-log p under the model as it is before training."""
        return model_losses(stage, stage.model, "loss")

    def static_scores(self, table: TokenTable) -> NDArray[Any]:
        """-log perplexity, which ranks like -perplexity and cannot overflow."""
        return -table.columns["loss"]

    def native_keep(self, table: TokenTable) -> NDArray[Any]:
        """Perplexity of at most the threshold."""
        with np.errstate(over="ignore"):  # a token of probability 0: inf is above any threshold
            return np.asarray(np.exp(table.columns["loss"]) <= self.threshold)
