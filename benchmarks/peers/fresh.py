"""Starting ``benchmarks.peers.child``, and reading what it found."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.peak import fresh_environment

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 600.0
"""Seconds after which a child is taken to hang."""


class ChildError(RuntimeError):
    """A child process failed; the message ends with its own last line."""


def call(*arguments: str, timeout: float = PATIENCE) -> tuple[list[dict[str, Any]], str]:
    """The JSON lines of a child, and why it ended early ("" if it did not)."""
    command = [sys.executable, "-m", "benchmarks.peers.child", *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=fresh_environment(HF_HUB_OFFLINE="1"),
            cwd=ROOT,
        )
        output, code, errors = done.stdout, done.returncode, done.stderr
    except subprocess.TimeoutExpired as late:
        found = late.stdout or b""
        output = found.decode() if isinstance(found, bytes) else found
        code, errors = -1, f"no answer within {timeout:.0f} s"
    lines = [json.loads(x) for x in output.splitlines() if x.startswith("{") and x.endswith("}")]
    last = errors.strip().splitlines()[-1] if errors.strip() else "no message"
    return lines, "" if code == 0 else f"exit code {code}: {last}"


@cache
def memory(name: str) -> float:
    """Peak MiB of one side; see ``child.memory``."""
    lines, failed = call("memory", name, str(torch.get_num_threads()))
    if failed:
        raise ChildError(f"{name}: {failed}")
    return float(lines[-1]["mib"])


@dataclass(frozen=True)
class Limit:
    """The largest size that fits on one axis (0: none did), and what stopped the next one."""

    size: int
    stopped: str

    def __str__(self) -> str:
        return f"{self.size} (then {self.stopped})"


def limit_of(lines: Sequence[dict[str, Any]], axis: str, failed: str) -> Limit:
    """Read one axis from a child's lines; a child that died counts as stopped there."""
    tried = [line for line in lines if line["axis"] == axis]
    fitting = [int(line["size"]) for line in tried if line["outcome"] == "fits"]
    stopped = [str(line["outcome"]) for line in tried if line["outcome"] != "fits"]
    reason = stopped[0] if stopped else failed or "the last size of the series"
    return Limit(max(fitting, default=0), reason)


@cache
def limits(name: str, mib: float, seconds: float) -> dict[str, Limit]:
    """Axis -> limit; see ``child.limits``."""
    threads = str(torch.get_num_threads())
    lines, failed = call("limits", name, threads, str(mib), str(seconds))
    return {axis: limit_of(lines, axis, failed) for axis in ("T", "N_v")}
