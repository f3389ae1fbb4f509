"""Policies that the tests of the trainers train with: ones a user would write."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from alphatoken.train.policy import (
    Needs,
    PolicyBatch,
    PolicySettings,
    PolicyStage,
    TokenPolicy,
)


class Surprising(TokenPolicy):
    """Unlikely tokens first."""

    name = "surprising"

    def scores(self, batch: PolicyBatch) -> Tensor:
        return -batch.log_probs


class Middle(TokenPolicy):
    """Likely tokens first, but none above a floor of its loss."""

    name = "middle"
    family = "both"

    def __init__(self, settings: PolicySettings | None = None, *, floor: float = 0.5) -> None:
        super().__init__(settings)
        self.floor = floor

    def scores(self, batch: PolicyBatch) -> Tensor:
        return batch.log_probs.clamp(max=-self.floor)


class Nameless(TokenPolicy):
    """Forgets its name."""

    def scores(self, batch: PolicyBatch) -> Tensor:
        return batch.log_probs


class RuleOfStep(Surprising):
    """Ranks a step, and weighs by a rule that only micro-batches know."""

    name = "rule-of-step"
    scope = "step"

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        return batch.log_probs.exp()


class Ruleless(TokenPolicy):
    """Forgets its rule."""

    name = "ruleless"


class Valuable(TokenPolicy):
    """Valuable tokens first, of a forward whose attention it has, too."""

    name = "valuable"
    family = "both"
    needs = Needs(values=True, attention=True)

    def scores(self, batch: PolicyBatch) -> Tensor:
        assert batch.values is not None
        assert batch.attention is not None
        return batch.values


class ValuedIfAsked(TokenPolicy):
    """Tokens by their value, where its option asks for values; else by their ids."""

    name = "valued-if-asked"

    def __init__(self, settings: PolicySettings | None = None, *, valued: bool = False) -> None:
        super().__init__(settings)
        self.valued = valued

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        return Needs(values=self.valued)

    def scores(self, batch: PolicyBatch) -> Tensor:
        return batch.labels.float() if batch.values is None else batch.values


class EvenIds(TokenPolicy):
    """Tokens with an even id, and the mean over them."""

    name = "even-ids"
    static = True
    denominator = "kept"

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        return (batch.labels % 2 == 0).float() * batch.mask


class UnknownAhead(EvenIds):
    """The same, without saying that it is known ahead."""

    name = "even-ids-late"
    static = False


class FirstRows(TokenPolicy):
    """Some rows, all their tokens."""

    name = "first-rows"
    chosen: Sequence[int] = (5, 2, 9, 4, 7, 1, 8, 3)

    def choose_rows(self, stage: PolicyStage) -> Sequence[int]:
        torch.rand(3)  # a policy that draws disturbs nobody
        assert stage.rows[0]["input_ids"]
        return self.chosen

    def scores(self, batch: PolicyBatch) -> Tensor:
        return torch.zeros_like(batch.log_probs)

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        return batch.mask.float()


class OwnDPO(TokenPolicy):
    """DPO written as a policy's own loss, beside TRL's."""

    name = "own-dpo"
    family = "preference"
    published_loss = "dpo"
    needs = Needs(reference=True)

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        return batch.mask.float()

    def loss(self, batch: PolicyBatch, log_probs: Tensor, weights: Tensor) -> Tensor:
        chosen, rejected = (weights * (log_probs - batch.reference)).sum(-1).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


class ValuedDPO(OwnDPO):
    """A loss that reads values, which are of training rows alone."""

    name = "valued-dpo"
    needs = Needs(reference=True, values=True)

    def loss(self, batch: PolicyBatch, log_probs: Tensor, weights: Tensor) -> Tensor:
        assert batch.values is not None
        return super().loss(batch, log_probs, weights * batch.values)


class NoLoss(OwnDPO):
    """Says that it has a loss of its own, and gives none."""

    name = "no-loss"
    needs = Needs()

    def loss(self, batch: PolicyBatch, log_probs: Tensor, weights: Tensor) -> Tensor:
        return None  # type: ignore[return-value]
