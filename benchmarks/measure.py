"""Measuring: alternate the two sides, take medians, give the ratio with its spread."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            models = [line.split(":", 1)[1].strip() for line in file if "model name" in line]
        name = models[0] if models else name
    return {
        "cpu": name,
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def alternate(
    ours: Callable[[], Any], other: Callable[[], Any], *, repeats: int = 7
) -> dict[str, float]:
    """Median seconds of both sides run in turn, and the median of the pairwise ratios.

    The ratio of each pair is taken before the median, so a machine that slows down in the middle
    of a run does not tilt it. ``low`` and ``high`` are the quartiles of the ratios.
    """
    ours(), other()  # warm-up
    pairs = []
    for _ in range(repeats):
        start = time.perf_counter()
        ours()
        middle = time.perf_counter()
        other()
        pairs.append((middle - start, time.perf_counter() - middle))
    ratios = sorted(a / b for a, b in pairs)
    quartiles = statistics.quantiles(ratios, n=4)
    return {
        "ours": statistics.median(a for a, _ in pairs),
        "other": statistics.median(b for _, b in pairs),
        "ratio": statistics.median(ratios),
        "low": quartiles[0],
        "high": quartiles[2],
    }
