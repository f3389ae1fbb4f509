"""The machine under a computation: its memory, its speed, and the refusal of what cannot fit.

A long command says before it starts how long it will take and how much memory it needs. Whoever
knows the work counts its bytes and its floating-point operations; here they are held against what
there is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from alphatoken.errors import ConfigError

__all__ = ["Free", "free_memory", "require_memory", "resident_memory", "timed", "wait"]

_GIB = 2.0**30


@dataclass(frozen=True)
class Free:
    """Memory that this process may hold in all: what is free, and what it holds already.

    Attributes:
        bytes: how much; infinite where the system does not say.
        where: of what.
    """

    bytes: float
    where: str


def free_memory(device: torch.device) -> Free:
    """What a process may hold on a device, with what it holds there already.

    On a CPU this is what the system counts as available (or what is left of the control group's
    limit, if that is less) and the process's own resident memory. Swap is left out.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device)
        return Free(float(free + own), torch.cuda.get_device_name(device))
    rest = [_number(Path("/proc/meminfo"), "MemAvailable"), _left_of_group()]
    known = [number for number in rest if number is not None]
    if device.type != "cpu" or not known:
        return Free(float("inf"), device.type)
    return Free(min(known) + resident_memory(), "this machine")


def resident_memory() -> float:
    """Bytes that this process holds now; 0 where the system does not say."""
    return _number(Path("/proc/self/status"), "VmRSS") or 0.0


def _number(table: Path, name: str) -> float | None:
    """A number of kilobytes in one of Linux's tables, in bytes."""
    if not table.exists():
        return None
    lines = table.read_text(encoding="utf-8").splitlines()
    return next((1024.0 * int(x.split()[1]) for x in lines if x.startswith(f"{name}:")), None)


def _left_of_group(folder: Path = Path("/sys/fs/cgroup")) -> float | None:
    """What a container's limit leaves, its file cache counted as free; None without a limit."""
    try:
        limit = float((folder / "memory.max").read_text(encoding="utf-8"))  # or the word "max"
        used = float((folder / "memory.current").read_text(encoding="utf-8"))
        words = (folder / "memory.stat").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    cache = sum(float(words[words.index(key) + 1]) for key in ("active_file", "inactive_file"))
    return max(limit - used + cache, 0.0)


def require_memory(needed: float, device: torch.device, *, peak: str, remedy: str) -> None:
    """Refuse what will not fit, before any work is done.

    Args:
        needed: bytes that each process of this machine will hold at most, those that it holds
            already among them; on an accelerator, bytes of its memory.
        device: where it runs.
        peak: when that is.
        remedy: what would make it less.

    Raises:
        ConfigError: it needs more than there is.
    """
    free = free_memory(device)
    several = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1
    if needed * several <= free.bytes:
        return
    times = f"{several} times " if several > 1 else ""
    raise ConfigError(
        "this will not fit into memory",
        got=f"{times}{needed / _GIB:.3g} GiB, when {peak}; {free.where} has "
        f"{free.bytes / _GIB:.3g} GiB for it",
        why="the process would be killed in the middle of its work",
        remedy=f"{remedy}; --no_memory_check goes on all the same",
    )


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
