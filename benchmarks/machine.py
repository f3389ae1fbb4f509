"""The clock of a computation, which on an accelerator waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call; on an accelerator the clock waits for it."""
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    """Until the accelerator has done what it was given."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
