"""Cost of a computation in FLOPs: the parts of scoring, beside a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

__all__ = ["direction_flops", "flops", "step_flops", "values_flops"]


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


def flops(work: Callable[[], object]) -> float:
    """FLOPs of matrix products and attention kernels of one call, as torch counts them."""
    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
        work()
    return float(counter.get_total_flops())


def values_flops(scorer: Scorer, batch: Mapping[str, Tensor]) -> float:
    """FLOPs of the values of an observed forward, without the forward, M and the proofs."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    with torch.enable_grad(), scorer.observe() as observed:
        logits = scorer.adapter.forward(inputs)
        observed.values(logits, batch["labels"])
        return flops(lambda: observed.values(logits, batch["labels"]))


def direction_flops(scorer: Scorer) -> float:
    """FLOPs of building M anew, both sides, in projected form."""

    def build() -> None:
        scorer.refresh()
        _ = scorer.direction

    return flops(build)


def step_flops(adapter: DecoderAdapter, batch: Mapping[str, Tensor]) -> float:
    """FLOPs of forward and backward as a trainer runs them; no ``.grad`` is touched."""
    checked = read_batch(batch, max_length=adapter.max_positions())
    trained = [p for p in adapter.model.parameters() if p.requires_grad]

    def step() -> None:
        with scoring_forward(adapter, None):
            losses = token_losses(adapter.forward(checked.inputs), checked.labels)
            gradient_of(losses.sum(), trained)

    return flops(step)
