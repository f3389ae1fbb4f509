"""Rho-1: learn on the tokens on which the model is furthest behind a reference model."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from alphatoken.errors import ConfigError
from alphatoken.policies.static import model_losses
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings, PolicyStage, TokenPolicy
from alphatoken.train.token_table import TokenTable

__all__ = ["Rho1"]

_COLUMN = "reference_losses"


class Rho1(TokenPolicy):
    """Selective language modelling by excess loss.

        s_t = l_t(theta) - l_t(theta_RM),    l_t = -log p(y_t | x, y_<t)
        keep the ceil(k N) tokens of the batch with the largest s;  L = mean of l over them

    Signed, a hard mask, ranked anew at every step with the current model. The reference is the
    same base model after training on good rows (``policy_reference``); its losses are computed
    once. Published for pre-training; on response tokens it is the analogue for fine-tuning.

    Args:
        settings: see ``PolicySettings``.
        ratio: k, the published budget: 0.6 (1B) or 0.7 (7B).

    Raises:
        ConfigError: ratio outside (0, 1]; no reference model when the static pass begins.

    Source: Lin et al., arXiv 2404.07965; microsoft/rho has no training code.
    """

    name: ClassVar[str] = "rho-1"
    needs: ClassVar[Needs] = Needs(columns=(_COLUMN,), scorer_model=True)
    scope: ClassVar[str] = "batch"
    rounding: ClassVar[str] = "ceil"
    denominator: ClassVar[str] = "kept"
    direction: ClassVar[str] = "tokens that the reference has learned and the model has not first"
    source: ClassVar[str] = "arXiv 2404.07965"

    def __init__(self, settings: PolicySettings | None = None, *, ratio: float = 0.6) -> None:
        super().__init__(settings)
        if not 0 < ratio <= 1:
            raise ConfigError("ratio must lie in (0, 1]", got=repr(ratio))
        self.native_ratio = ratio

    def prepare(self, stage: PolicyStage) -> TokenTable:
        """Losses of all response tokens under the reference model."""
        return model_losses(stage, stage.reference_model, _COLUMN, cache_key="reference-losses")

    def scores(self, batch: PolicyBatch) -> Tensor:
        """``s_t``, the excess loss."""
        return -batch.log_probs - batch.columns[_COLUMN]
