"""What a computation costs, in FLOPs and seconds; scoring part by part, beside a training step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from alphatoken.direction.objective import scoring_forward
from alphatoken.estimate.gradients import gradient_of
from alphatoken.model.batch import read_batch, token_losses
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.scorer import Scorer
from alphatoken.support.machine import timed

__all__ = ["Cost", "direction_cost", "measure", "step_cost", "values_cost"]


def _attention(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))


_AT = torch.ops.aten
# torch counts the attention kernels of accelerators; the CPU's is the same product.
_CPU_ATTENTION: dict[Any, Any] = {
    _AT._scaled_dot_product_flash_attention_for_cpu: _attention,
    _AT._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(frozen=True)
class Cost:
    """Price of one piece of work.

    Attributes:
        flops: of matrix products and attention kernels (``torch.utils.flop_counter``): elementwise
            work is not counted.
        seconds: median of the repeats, on this machine as busy as it was.
    """

    flops: float
    seconds: float


def measure(work: Callable[[], object], *, repeats: int = 3) -> Cost:
    """Run ``work`` once to count, then ``repeats`` times against the clock.

    The counted run also warms up; without repeats there are no seconds (NaN). On an accelerator
    the clock waits for it.
    """
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
        work()
    taken = sorted(timed(work) for _ in range(repeats))
    middle = taken[len(taken) // 2] if taken else math.nan
    return Cost(float(counter.get_total_flops()), middle)


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
