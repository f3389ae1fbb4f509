"""What a computation costs, in floating-point operations and seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

__all__ = ["Cost", "measure"]


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
    taken = []
    for _ in range(repeats):
        _wait()
        start = time.perf_counter()
        work()
        _wait()
        taken.append(time.perf_counter() - start)
    middle = sorted(taken)[len(taken) // 2] if taken else math.nan
    return Cost(float(counter.get_total_flops()), middle)


def _wait() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
