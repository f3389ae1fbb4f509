"""The trainers' own policies: top, random, bottom and all, each a share of the response tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from alphatoken.select.masks import response_values, select_bottom, select_random
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings, TokenPolicy

__all__ = [
    "RATIO_POLICIES",
    "AllTokensPolicy",
    "BottomRatioPolicy",
    "RandomRatioPolicy",
    "TopRatioPolicy",
]


class TopRatioPolicy(TokenPolicy):
    """The most valuable tokens among those that are ranked together.

        w_t = 1 for the ceil(rho n) largest of n values v_t, of equal ones the first;  else 0

    A run that keeps all tokens (rho = 1) trains on those without a value too, which only padding
    predicts: it is the run of the trainer below. With any other rho their weight is 0.

    Args:
        settings: see ``PolicySettings``; both modes keep ``keep_ratio``.
        unit: "token"; or "response", ranked by its mean value and kept or dropped whole.

    Raises:
        NumericalError: a value to rank by is NaN or infinite.

    Source: eq. sft_masked_loss. Oracle: ``tests/property/test_trainer_oracle.py``.
    """

    name: ClassVar[str] = "top"
    family: ClassVar[str] = "both"
    needs: ClassVar[Needs] = Needs(values=True)
    divisor_scope: ClassVar[str] = "step"
    source: ClassVar[str] = "AlphaToken"

    def __init__(self, settings: PolicySettings | None = None, *, unit: str = "token") -> None:
        super().__init__(settings)
        self.unit = unit

    def keeps_all(self, full: bool) -> bool:
        """True if the budget is every token, whatever happens to be kept in one micro-batch."""
        return self.settings.keep_ratio == 1

    def scores(self, batch: PolicyBatch) -> Tensor:
        """(b, t) values of the tokens, or of the responses that they are in."""
        assert batch.values is not None
        if self.unit == "response":
            return response_values(batch.values, batch.mask)
        return batch.values


class BottomRatioPolicy(TopRatioPolicy):
    """The least valuable tokens: a control of equal budget."""

    name: ClassVar[str] = "bottom"

    def select(
        self, scores: Tensor, mask: Tensor, ratio: float, generator: torch.Generator | None
    ) -> Tensor:
        """True for the ``ratio`` of smallest value."""
        return select_bottom(scores, mask, ratio)


class RandomRatioPolicy(TopRatioPolicy):
    """Tokens drawn uniformly: a control of equal budget, which values nothing.

    A draw is a function of (run seed, step, micro-batch, process).
    """

    name: ClassVar[str] = "random"
    needs: ClassVar[Needs] = Needs()

    def scores(self, batch: PolicyBatch) -> Tensor:
        """0: no token goes before another."""
        return torch.zeros_like(batch.log_probs)

    def select(
        self, scores: Tensor, mask: Tensor, ratio: float, generator: torch.Generator | None
    ) -> Tensor:
        """True for a uniformly random ``ratio``."""
        return select_random(mask, ratio, generator=generator)


class AllTokensPolicy(TopRatioPolicy):
    """Every token with weight 1; values are for the ledger and the page only."""

    name: ClassVar[str] = "all"

    def keeps_all(self, full: bool) -> bool:
        """True, whatever ``keep_ratio`` is."""
        return True

    def select(
        self, scores: Tensor, mask: Tensor, ratio: float, generator: torch.Generator | None
    ) -> Tensor:
        """True for every response token."""
        return mask


RATIO_POLICIES: dict[str, type[TopRatioPolicy]] = {
    "top": TopRatioPolicy,
    "random": RandomRatioPolicy,
    "bottom": BottomRatioPolicy,
    "all": AllTokensPolicy,
}
"""Policies of the trainers themselves, all of whose settings are options of the run."""
