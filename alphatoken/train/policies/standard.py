"""The baselines that choose nothing: all tokens, a random share, and DPO as it is."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from alphatoken.train.policy import PolicyBatch, TokenPolicy

__all__ = ["DPO", "Random", "Standard"]


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
    direction: ClassVar[str] = "no order: all tokens"
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


class Random(TokenPolicy):
    """A uniformly random share of the response tokens: the control of equal budget.

        w_t = 1 for ceil(rho n) tokens drawn without replacement from the n of a batch

    There is no published rule beside the budget. Drawn anew for every micro-batch, from the run's
    seed, the step, the micro-batch and the process. Equal to ``select_random``, bit for bit.
    """

    name: ClassVar[str] = "random"
    family: ClassVar[str] = "both"
    denominator: ClassVar[str] = "response"
    direction: ClassVar[str] = "no order: at random"
    source: ClassVar[str] = "control"

    def scores(self, batch: PolicyBatch) -> Tensor:
        """Uniform numbers, drawn pool after pool."""
        found = torch.zeros(batch.mask.shape)
        for rows in batch.pools:
            found[rows] = torch.rand(found[rows].shape, generator=batch.generator)
        return found.to(batch.mask.device)
