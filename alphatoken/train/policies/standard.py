"""The baselines that choose nothing: all tokens, and DPO as it is."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from alphatoken.train.policy import PolicyBatch, TokenPolicy

__all__ = ["DPO", "Standard"]


class Standard(TokenPolicy):
    """Every response token with weight 1: TRL's own fine-tuning.

        w_t = 1

    As the name in the options it is TRL's trainer untouched, without token values; as an object it
    goes the way of all policies, and gives the same update bit for bit. A budget has no meaning
    here: mode "budget" keeps all too.
    """

    name: ClassVar[str] = "standard"
    family: ClassVar[str] = "both"
    published_loss: ClassVar[str] = "cross_entropy"
    static: bool = True
    source: ClassVar[str] = "supervised fine-tuning"

    def scores(self, batch: PolicyBatch) -> Tensor:
        """0: no token goes before another."""
        return torch.zeros_like(batch.log_probs)

    def budget_weights(self, batch: PolicyBatch) -> Tensor:
        """1 on the response, whatever the budget."""
        return batch.mask.to(batch.log_probs.dtype)


class DPO(Standard):
    """Direct preference optimisation as TRL has it, with every token of both responses.

        L = -log sigma(beta [sum_t Delta_t^w - sum_t Delta_t^l]),  Delta_t = log pi/pi_ref (y_t)

    beta is TRL's option (0.1).

    Source: Rafailov et al., arXiv 2305.18290; TRL's ``DPOTrainer``.
    """

    name: ClassVar[str] = "dpo"
    family: ClassVar[str] = "preference"
    published_loss: ClassVar[str] = "dpo"
    source: ClassVar[str] = "arXiv 2305.18290; TRL"
