"""results.json: rows read, finished, merged and written whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alphatoken.support.storage import replacing
from benchmarks.measure import Ceiling
from benchmarks.targets import judged

__all__ = ["Places", "finished", "load", "merged", "write_text"]

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Places:
    """Where the outcome goes."""

    results: Path = ROOT / "benchmarks" / "results.json"
    precision: Path = ROOT / "benchmarks" / "precision.json"
    notes: Path = ROOT / "benchmarks" / "notes.md"
    page: Path = ROOT / "docs" / "benchmarks.md"

    @property
    def figures(self) -> Path:
        """Folder beside the page."""
        return self.page.with_suffix("")

    @classmethod
    def under(cls, folder: Path) -> Places:
        """Everything in one folder, nothing of the repository touched."""
        return cls(
            folder / "results.json",
            folder / "precision.json",
            folder / "notes.md",
            folder / "benchmarks.md",
        )


def load(path: Path) -> list[Row]:
    """The rows of a file, none if there is none."""
    if not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))
    return rows


def finished(
    row: Row, machine: Mapping[str, str], best: Ceiling | None = None, *, device: str = "cpu"
) -> Row:
    """The row with target, machine, speeds, and the share of the measured ceiling reached."""
    row = {**judged(row), "machine": dict(machine), "device": device}
    if row.get("unit", "s") != "s":
        return row
    if "tokens" in row:
        row["tokens_per_s"] = row["tokens"] / row["ours"]
    if best is not None:
        row["ceiling"] = asdict(best)
        for side, counted in (("ours", "flops"), ("other", "flops_other")):
            if counted in row:
                row[f"share_of_ceiling_{side}"] = row[counted] / row[side] / best.flops_per_s
    return row


def key(row: Row) -> tuple[str, str]:
    """What a new row stands in for: the rows of its name on its kind of device."""
    return row["name"], row.get("device", "cpu")


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """The old rows with those of a newly measured name replaced."""
    measured = {key(row) for row in new}
    return [row for row in old if key(row) not in measured] + new


def write_text(path: Path, text: str) -> None:
    """The whole file or the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write(path: Path, rows: list[Row]) -> None:
    """The rows as JSON."""
    write_text(path, json.dumps(rows, indent=1) + "\n")
