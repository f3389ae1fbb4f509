"""What scoring costs on this model and batch, part by part, beside one training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alphatoken.direction.objective import scoring_forward
from alphatoken.estimate.gradients import gradient_of
from alphatoken.fidelity.cost import Cost, measure
from alphatoken.model.batch import read_batch, token_losses
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.scorer import Scorer

__all__ = ["ScoringCost", "direction_cost", "step_cost", "values_cost"]


@dataclass(frozen=True)
class ScoringCost:
    """The scoring side of one step, beside the step.

    FLOPs are counted as they run: matrix products, and attention as if it were not causal.

    Attributes:
        direction: M from all validation rows and the retention term.
        values: of the batch, in the forward that training runs anyway.
        step: forward and backward of the batch, all trainable parameters, no optimizer.
    """

    direction: Cost
    values: Cost
    step: Cost

    @property
    def direction_share(self) -> float:
        """M over step, in FLOPs."""
        return self.direction.flops / self.step.flops

    @property
    def values_share(self) -> float:
        """Values over step, in FLOPs."""
        return self.values.flops / self.step.flops

    def record(self) -> dict[str, Any]:
        """As cells of a table."""
        return {
            "validation FLOPs / step": self.direction_share,
            "scoring FLOPs / step": self.values_share,
            "validation seconds": self.direction.seconds,
            "scoring seconds": self.values.seconds,
            "step seconds": self.step.seconds,
        }


def values_cost(scorer: Scorer, batch: Mapping[str, Tensor], *, repeats: int) -> Cost:
    """Of the values of an observed forward; the forward, M and the proofs are not counted."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    with torch.enable_grad(), scorer.observe() as observed:
        logits = scorer.adapter.forward(inputs)
        observed.values(logits, batch["labels"])
        return measure(lambda: observed.values(logits, batch["labels"]), repeats=repeats)


def direction_cost(scorer: Scorer, *, repeats: int) -> Cost:
    """Of building M anew, both sides, in projected form."""

    def build() -> None:
        scorer.refresh()
        _ = scorer.direction

    return measure(build, repeats=repeats)


def step_cost(adapter: DecoderAdapter, batch: Mapping[str, Tensor], *, repeats: int) -> Cost:
    """Of forward and backward as a trainer runs them; no ``.grad`` is touched."""
    checked = read_batch(batch, max_length=adapter.max_positions())
    trained = [p for p in adapter.model.parameters() if p.requires_grad]

    def step() -> None:
        with scoring_forward(adapter, None):
            losses = token_losses(adapter.forward(checked.inputs), checked.labels)
            gradient_of(losses.sum(), trained)

    return measure(step, repeats=repeats)
