"""DFT: weigh each token by its probability."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from alphatoken.train.policy import PolicyBatch, TokenPolicy


class DFT(TokenPolicy):
    """Dynamic fine-tuning, a policy.

        w_t = p_t
        L = sum_t w_t l_t / (response tokens)

    ``w`` is a constant, from the current model. The gradient is that of minus the mean probability;
    TRL's ``loss_type="dft"`` is the same in its own SFT trainer, and here it is had in every
    trainer, beside logs and values.

    At a budget: the most likely tokens first.

    Source: arXiv 2508.05629.
    """

    name: ClassVar[str] = "dft"
    by_confidence: ClassVar[bool] = True
    source: ClassVar[str] = "arXiv 2508.05629"

    def scores(self, batch: PolicyBatch) -> Tensor:
        """``log p``: the order of the weights."""
        return batch.log_probs

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        """Weights equal to ``p``."""
        return batch.log_probs.exp()
