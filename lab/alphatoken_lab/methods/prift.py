"""PriFT: weigh each token by its probability under the model before training."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from alphatoken.train.policy import Needs, PolicyBatch, PolicyStage, TokenPolicy
from alphatoken_lab.methods.static import model_losses
from alphatoken_lab.methods.token_table import TokenTable

_COLUMN = "start_losses"


class PriFT(TokenPolicy):
    """Prior-support guided fine-tuning by probabilities (PriFT-prob), a policy.

        w_t = p_t(theta_0) = exp(-l_t(theta_0))
        L = sum_t w_t l_t(theta) / (response tokens)

    DFT with the frozen start model in place of the current one: what the model learns does not
    change what counts. The start model's losses are computed once, before training.

    At a budget: the tokens that the start model finds likeliest first, of the micro-batch.

    Exactness: exact. Source: Wang et al., arXiv 2606.09396, whose abstract was read: its weights
        are the pretrained model's probabilities. A power of them, a floor, or another divisor would
        be in the text. PriFT-mass is left out. Oracle: the start model's losses by hand.
    """

    name: ClassVar[str] = "prift"
    needs: ClassVar[Needs] = Needs(columns=(_COLUMN,))
    static: bool = True
    by_confidence: ClassVar[bool] = True
    source: ClassVar[str] = "arXiv 2606.09396"

    def prepare(self, stage: PolicyStage) -> TokenTable:
        """Losses of all response tokens under the model as it is before training."""
        return model_losses(stage, stage.model, _COLUMN)

    def scores(self, batch: PolicyBatch) -> Tensor:
        """``log p`` under the start model: the order of the weights."""
        return -batch.columns[_COLUMN]

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        """Weights equal to ``p`` under the start model."""
        return self.scores(batch).exp().to(batch.log_probs.dtype)
