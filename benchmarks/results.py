"""Measured rows: finished, merged, written whole, and the history of runs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alphatoken.support.storage import write_text
from benchmarks.targets import judged

Row = dict[str, Any]
HERE = Path(__file__).resolve().parent


def load(path: Path) -> list[Row]:
    """The rows of a file, none if there is none."""
    if not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def finished(row: Row, machine: Mapping[str, str], *, device: str = "cpu") -> Row:
    """The row with target and machine."""
    return {**judged(row), "machine": dict(machine), "device": device}


def key(row: Row) -> tuple[str, str]:
    """What a new row stands in for: the rows of its name on its kind of device."""
    return row["name"], row["device"]


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """The old rows with those of a newly measured name replaced."""
    measured = {key(row) for row in new}
    return [row for row in old if key(row) not in measured] + new


def write(path: Path, rows: list[Row]) -> None:
    """The rows as JSON, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(rows, indent=1) + "\n")


def remember(path: Path, machine: Mapping[str, str], quiet: bool, rows: Sequence[Row]) -> None:
    """Add one run to the history: commit, machine, whether it was quiet, and the ratios."""
    git = ["git", "-C", str(HERE), "describe", "--always", "--dirty"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    line = {
        "commit": found.stdout.strip() or None,
        "machine": dict(machine),
        "quiet": quiet,
        "ratios": {f"{row['name']}: {row['size']}": round(row["ratio"], 4) for row in rows},
    }
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
