"""One micro-batch of a training step, as it is handed from part to part.

The trainer's hooks cannot hand anything to each other but the batch itself. So what is decided
where the batches of a step are gathered (``get_batch_samples``) travels inside the batch, under the
key ``PLAN_KEY``, to where it is trained on. ``training_step`` takes it out again before anything
else reads the batch: overrides of ``_prepare_inputs`` and ``compute_loss`` see what the collator
made. Labels do not travel: they are read in ``compute_loss``, from the inputs of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from alphatoken.values import TokenValues

__all__ = [
    "PLAN_KEY",
    "MicroBatch",
    "MicroBatchPlan",
    "MicroBatchValues",
    "normalised",
    "undivided",
]

PLAN_KEY = "alphatoken_carried"
"""Key of a batch under which its ``MicroBatchPlan`` travels from one hook to the next."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """Decisions of the optimizer step's plan for one micro-batch.

    Attributes:
        index: number of this micro-batch within its optimizer step.
        kept_share: kept tokens over those of the loss, of the whole step, where they divide it.
        weights: (b, t), where a threshold over the whole step decided them; None otherwise.
        values: that the weights came from, if any.
        extra: inputs that valuing added, such as the reference's log-probabilities.
        columns: of a policy's static pass, where counting needed them already.
    """

    index: int
    kept_share: float | None = None
    weights: Tensor | None = None
    values: MicroBatchValues | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Tensor] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class MicroBatch:
    """Facts that the parts of a run share about one micro-batch. It never changes; see ``replace``.

    Attributes:
        inputs: the trainer's batch.
        labels: (b, t) unshifted labels, -100 off the response.
        mask: (b, t) response tokens, those that have a value.
        loss_mask: (b, t) tokens that the trainer's own loss counts: beside ``mask`` those that
            padding predicts, as it does the first one of a row padded on the left.
        rank_groups: rows that are ranked together; chosen, then rejected, in a preference trainer.
        unit_of: (loss_mask, num_items) -> ``unit``; called only where it is needed, because it
            waits for the device.
        plan: what the plan of its step decided for it.
        num_items: transformers' count of the tokens of the step's loss, or None.
    """

    inputs: Mapping[str, Any] = field(repr=False)
    labels: Tensor
    mask: Tensor
    loss_mask: Tensor
    rank_groups: Sequence[slice]
    unit_of: Callable[[Tensor, Any], float] = field(repr=False)
    plan: MicroBatchPlan
    num_items: Any = None

    @property
    def unit(self) -> float:
        """Weight of one token's loss in the trainer's own loss, beside ``value_weights``."""
        return self.unit_of(self.loss_mask, self.num_items)


@dataclass(frozen=True)
class MicroBatchValues:
    """Values of one micro-batch: totals to rank by, and what the records need.

    Attributes:
        totals: (b, t) value of each response token.
        token_values: as the scorer gave them; None where there is no response to value.
        seconds: spent on scoring, the shared forward not included.
    """

    totals: Tensor
    token_values: TokenValues | None = None
    seconds: float = 0.0


def undivided(batch: MicroBatch, kind: str) -> float:
    """Factor that undoes the trainer's divisor if the loss is to be a sum; else 1."""
    return 1.0 / batch.unit if kind == "sum" else 1.0


def normalised(
    weights: Tensor, batch: MicroBatch, kind: str, kept_share: float | None = None
) -> Tensor:
    """Weights under one normalisation of the loss.

    Args:
        weights: (b, t) of the tokens.
        batch: whose they are.
        kind: "response" (the trainer's own divisor), "kept" (the kept tokens) or "sum" (none).
        kept_share: kept tokens over those of the loss, of the whole step; None takes the
            micro-batch's own.
    """
    if kind != "kept":
        return weights * undivided(batch, kind)
    if kept_share is not None:
        return weights * (1 / kept_share)
    return weights * (batch.loss_mask.sum() / weights.sum().clamp(min=1e-12))
