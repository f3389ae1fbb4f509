"""Records of cells: what each measured, flat; and those of a method, seed by seed."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from alphatoken_lab.measure.measuring import with_scores
from alphatoken_lab.runner.grid import REFERENCES, Cell
from alphatoken_lab.runner.running import GridFolder, Status

Record = dict[str, Any]

_FIGURES = (
    "kept_tokens", "response_tokens", "effective_tokens", "target", "retention", "overall", "unit",
    "time", "scoring_time", "direction_time", "setup_time", "peak_memory", "peak_memory_of",
    "steps", "static_time", "selection_memory", "epoch_steps",
)  # fmt: skip
_BASE = "alphatoken"
"""The method whose step times others are relative to."""


def collect(cells: Sequence[Cell], folder: GridFolder) -> list[Record]:
    """Records of all cells, as they are now, with the scores that other programs left.

    Raises:
        AlphaTokenError: a score that is not of the answers beside it.
    """
    status = folder.status(cells)
    results: dict[str, Mapping[str, Any] | None] = {}
    for cell in cells:
        result = folder.result(cell) if status[cell.name].state == "done" else None
        if result is not None and result.get("settings"):
            result = with_scores(result, folder.place(cell))
        results[cell.name] = result
    return records(cells, results, status)


def records(
    cells: Sequence[Cell],
    results: Mapping[str, Mapping[str, Any] | None],
    status: Mapping[str, Status],
) -> list[Record]:
    """One flat record a cell, failed and missing ones included; None where nothing was measured.

    Args:
        cells: of the grid; references are left out.
        results: by the cell's name.
        status: likewise.
    """
    measured = [cell for cell in cells if cell.task != REFERENCES]
    chosen = _chosen_tries(measured, results, status)
    every = []
    for cell in measured:
        result, state = results.get(cell.name) or {}, status[cell.name]
        own = {"task": cell.task, "policy": cell.policy, "mode": cell.mode, "seed": cell.seed}
        figures = {name: result.get(name) for name in _FIGURES}
        record: Record = {**own, "status": state.state, **figures}
        if state.error:
            record["error"] = state.error
        if cell.tried:
            record |= {"tried": dict(cell.tried), "chosen": cell.name in chosen}
        if result.get("settings"):
            record["settings"] = result["settings"]
        every.append(record | result.get("details", {}))
    return every


def _chosen_tries(
    cells: Sequence[Cell],
    results: Mapping[str, Mapping[str, Any] | None],
    status: Mapping[str, Status],
) -> set[str]:
    """Best try of each method among the cells that try something, or the first still to run."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if cell.tried:
            groups.setdefault((cell.task, cell.policy, cell.mode), []).append(cell.name)

    def loss(name: str) -> float:
        result = results.get(name)
        if result:
            return float(result["details"]["choosing_loss"])
        # A learning rate at which the loss diverged is worse than any other.
        return -math.inf if status[name].state == "missing" else math.inf

    return {min(names, key=loss) for names in groups.values()}


def with_costs(every: Sequence[Record]) -> list[Record]:
    """The records with figures that tables derive from what cells measured.

    ``share``: of response tokens, those with a weight other than 0; ``effective``: (sum w)^2 /
    sum w^2, where weights are soft; ``hours_per_epoch``: training of one epoch, scoring and masks
    included, from the steps that were measured; a static pass over the rows is in it whole, of the
    seed that did it (the others read it from the cache). ``selection_gb``: the selection's peak,
    ``peak_mb``: the whole's. ``relative_time``: of a step, over AlphaToken's of the same task and
    seed.
    """
    static: dict[tuple[str, str, str], float] = {}
    base: dict[tuple[str, int], float] = {}
    for one in every:
        key = (one["task"], one["policy"], one["mode"])
        static[key] = max(static.get(key, 0.0), float(one.get("static_time") or 0.0))
        if one["policy"] == _BASE and one.get("steps") and one.get("time"):
            base[one["task"], one["seed"]] = one["time"] / one["steps"]
    costly = []
    for one in every:
        costs: dict[str, float] = {}
        kept, tokens = one.get("kept_tokens"), one.get("response_tokens")
        if kept is not None and tokens:
            costs["share"] = kept / tokens
            effective = one.get("effective_tokens")
            if effective is not None and effective < 0.99 * kept:
                costs["effective"] = effective
        if one.get("peak_memory"):
            costs["peak_mb"] = one["peak_memory"] / 1e6
        if one.get("selection_memory"):
            costs["selection_gb"] = one["selection_memory"] / 1e9
        if one.get("steps") and one.get("time"):
            step = one["time"] / one["steps"]
            if one.get("epoch_steps"):
                before = static[one["task"], one["policy"], one["mode"]]
                costs["hours_per_epoch"] = (step * one["epoch_steps"] + before) / 3600
            if (one["task"], one["seed"]) in base:
                costs["relative_time"] = step / base[one["task"], one["seed"]]
        costly.append({**one, **costs})
    return costly


@dataclass(frozen=True)
class Row:
    """One method in one mode, as a table shows it.

    Attributes:
        name: in the first column.
        policy: of the grid.
        mode: "native" or "budget".
        records: seed by seed.
        printed: numbers of the paper, by column; empty where it prints none.
    """

    name: str
    policy: str
    mode: str = ""
    records: tuple[Record, ...] = ()
    printed: tuple[str, ...] = ()

    @property
    def done(self) -> int:
        """Number of seeds that have a result."""
        return sum(record["status"] == "done" for record in self.records)

    def values(self, key: str) -> list[float]:
        """Values of the cells that are done."""
        values = [record.get(key) for record in self.records if record["status"] == "done"]
        return [float(value) for value in values if value is not None]

    def mean(self, key: str) -> float | None:
        """Mean over the seeds that are done."""
        values = self.values(key)
        return statistics.fmean(values) if values else None


@dataclass(frozen=True)
class Group:
    """Rows under one head.

    Attributes:
        title: head; empty where the table has no other group.
        rows: of one task.
        task: of the grid.
    """

    title: str
    rows: tuple[Row, ...]
    task: str = ""

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods of its rows."""
        return tuple(row.policy for row in self.rows)


def rows_of(every: Sequence[Record], task: str) -> list[Row]:
    """A task's methods in the grid's order; of what was tried the best."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in every:
        if record["task"] == task and record.get("chosen", True):
            groups.setdefault((record["policy"], record["mode"]), []).append(record)
    by_seed = itemgetter("seed")
    return [
        Row(f"`{policy}`", policy, mode, tuple(sorted(part, key=by_seed)))
        for (policy, mode), part in groups.items()
    ]


def records_csv(every: Sequence[Record]) -> str:
    """Every record, one a line; first the columns that all have."""
    names = [n for n in dict.fromkeys(n for record in every for n in record) if n != "settings"]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(every)
    return text.getvalue()
