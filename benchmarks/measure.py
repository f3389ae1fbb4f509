"""Measuring: alternate the two sides, take medians, give the ratio with its spread."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Run:
    """How a case is measured.

    Attributes:
        device: where models live.
        quick: tiny sizes, one pair: shows that everything runs, measures nothing.
    """

    device: torch.device
    quick: bool = False

    def pairs(self, own: int) -> int:
        """How many pairs to measure where a case asks for ``own``."""
        return 1 if self.quick else own


def machine(device: torch.device | None = None) -> dict[str, str]:
    """What the figures were measured on."""
    name = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            models = [line.split(":", 1)[1].strip() for line in file if "model name" in line]
        name = models[0] if models else name
    accelerator = {}
    if device is not None and device.type == "cuda":
        accelerator = {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return {
        "cpu": name,
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        **accelerator,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def quiet() -> bool:
    """Whether hardly anything else ran in the last minute: less than a third of one core."""
    return os.getloadavg()[0] < 1 / 3


def alternate(
    ours: Callable[[], Any], other: Callable[[], Any], *, repeats: int = 7, warm: bool = True
) -> dict[str, float]:
    """Median seconds of both sides run in turn, and the median of the pairwise ratios.

    The ratio of each pair is taken before the median, so a machine that slows down in the middle
    of a run does not tilt it; every other pair runs in the opposite order, so that neither side
    always follows the other. ``low`` and ``high`` are the quartiles of the ratios.

    Args:
        ours: one side.
        other: the other.
        repeats: pairs.
        warm: run both once before; False where that has been done (counting FLOPs).
    """
    if warm:
        ours(), other()
    seconds = in_turn({"ours": ours, "other": other}, repeats=repeats)
    return compared(seconds["ours"], seconds["other"])


def in_turn(sides: Mapping[str, Callable[[], Any]], *, repeats: int) -> dict[str, list[float]]:
    """Seconds of each side, round by round: one after the other, every other round backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(repeats):
        names = list(sides) if index % 2 == 0 else list(sides)[::-1]
        for name in names:
            seconds[name].append(timed(sides[name]))
    return seconds


def compared(ours: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """Medians of both sides and of their ratios, round by round, with its quartiles."""
    ratios = sorted(a / b for a, b in zip(ours, other, strict=True))
    return {
        "ours": statistics.median(ours),
        "other": statistics.median(other),
        "ratio": statistics.median(ratios),
        **spread(ratios),
        "pairs": len(ratios),
    }


def spread(values: list[float]) -> dict[str, float]:
    """Quartiles; of one value, that value."""
    if len(values) == 1:
        return {"low": values[0], "high": values[0]}
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return {"low": quartiles[0], "high": quartiles[2]}


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
