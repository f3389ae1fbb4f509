"""FLOW: give less weight to samples that the model finds hard before training."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from torch import Tensor

from alphatoken.errors import ConfigError, require_choice
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings, PolicyStage, TokenPolicy
from alphatoken_lab.methods.static import keep_best, model_losses
from alphatoken_lab.methods.token_table import TokenTable

_WEIGHT, _KEPT = "flow_weights", "flow_kept"
_LEVELS = ("sample", "token")


class Flow(TokenPolicy):
    """Sample weights from the loss before training.

        f_i = mean_t l_it(theta_0),    tau = median_i f_i,    w_i = exp(-f_i / tau)
        L = sum_i w_i sum_t l_it / (response tokens)

    One weight a sample, computed once. Undivided, as in the code: a sample of median loss weighs
    1/e, so the effective learning rate is smaller. Every response token of a document counts in
    f_i, in all its turns; with packed rows a sample is a document.

    At a budget: the tokens of the heaviest samples first, by dataset (our reading).

    Args:
        settings: see ``PolicySettings``.
        tau: temperature; None for the median. [null, or above 0; raise it to weigh rows more alike;
            the paper's median]
        level: "sample", or "token" for ``exp(-l_t / tau)`` (the code has both; its median is then
            over tokens). ["sample" or "token"; "token" where rows are of mixed quality; the paper
            weighs samples]
        normalize_weights: divide by the mean weight over all response tokens. [true or false; true
            for a step as long as plain training; the code has false]

    Raises:
        ConfigError: an unknown level, or tau not above 0.

    Source: Sanyal et al., arXiv 2502.02797; sanyalsunny111/FLOW_finetuning@f0011b7.
    """

    name: ClassVar[str] = "flow"
    scope: ClassVar[str] = "dataset"
    static: bool = True
    source: ClassVar[str] = "arXiv 2502.02797; sanyalsunny111/FLOW_finetuning"

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        tau: float | None = None,
        level: str = "sample",
        normalize_weights: bool = False,
    ) -> None:
        super().__init__(settings)
        require_choice("level", level, _LEVELS)
        if tau is not None and not tau > 0:
            raise ConfigError("tau must be above 0", got=repr(tau))
        self.tau, self.level, self.normalize_weights = tau, level, normalize_weights

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """The weights, and at a budget over the data set the tokens that are kept."""
        return Needs(columns=(_WEIGHT, _KEPT) if self.settings.mode == "budget" else (_WEIGHT,))

    def prepare(self, stage: PolicyStage) -> TokenTable:
        """Losses under the initial model, then weights.

        Raises:
            ConfigError: the median is 0, so that there is no temperature.
        """
        table = model_losses(stage, stage.model, "losses")
        losses = np.asarray(table.columns["losses"], np.float64)
        means = losses if self.level == "token" else table.means(losses)
        tau = float(np.median(means)) if self.tau is None else self.tau
        if not tau > 0:
            raise ConfigError(
                "FLOW has no temperature for these rows",
                got=f"the median loss is {tau}",
                why="every weight would be exp(-x / 0)",
                remedy='policy_options: {"tau": 1.0}',
            )
        weights = np.exp(-means / tau)
        if self.level == "sample":
            weights = table.spread(weights)
        if self.normalize_weights:
            weights = weights / weights.mean()
        weighted_table = table.with_columns(**{_WEIGHT: weights})
        if self.settings.mode == "budget":
            kept = keep_best(weighted_table, weights, self.settings.keep_ratio, self.rounding)
            weighted_table = weighted_table.with_columns(**{_KEPT: kept})
        return weighted_table

    def scores(self, batch: PolicyBatch) -> Tensor:
        """The weight of the token's sample."""
        return batch.columns[_WEIGHT]

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        """``w_i`` on every response token of sample i."""
        return batch.columns[_WEIGHT].to(batch.log_probs.dtype)

    def budget_weights(self, batch: PolicyBatch) -> Tensor:
        """1 on the kept tokens."""
        return (batch.columns[_KEPT] > 0).to(batch.log_probs.dtype)
