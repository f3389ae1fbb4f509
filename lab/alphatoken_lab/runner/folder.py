"""The output folder of a grid: finished cells, and the process at work on each.

    FOLDER/lock                            held by the one process that runs the grid
    FOLDER/setup.lock                      held by a cell while it fills the cache that cells share
    FOLDER/TASK/CELL/cell.json             what the cell is
    FOLDER/TASK/CELL/recipe.yaml           its training options, fit for ``alphatoken sft --config``
    FOLDER/TASK/CELL/result.json           what was measured; written whole, last, and never again
    FOLDER/TASK/CELL/failed.json           why there is no result
    FOLDER/TASK/CELL/log.txt               what the process said
    FOLDER/TASK/CELL/model                 the model, where another cell needs it
    FOLDER/TASK/CELL/answers-NAME.json     exported answers; FOLDER/TASK/CELL/scores: what is said
                                           of them

A lock goes with its process, however that ends.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken.support.storage import read_json, write_json
from alphatoken_lab.runner.grid import REFERENCES, Cell, resolve_models

__all__ = ["COLLECTED", "GridFolder", "Status"]

COLLECTED = "value-propagation.safetensors"
"""File of a cell with collect_value_propagation."""


_RERUN = ("failed.json", "log.txt", "recipe.yaml", "cell.json", "building")


@dataclass(frozen=True)
class Status:
    """Status of one cell: "done", "failed", "blocked" (a need of it failed) or "missing"."""

    state: str
    error: str = ""


@dataclass(frozen=True)
class GridFolder:
    """All cells of a grid in one folder; a cell is asked for by itself or by its name."""

    path: Path

    def place(self, cell: Cell | str) -> Path:
        """The folder of a cell."""
        return self.path / (cell if isinstance(cell, str) else cell.name)

    def result(self, cell: Cell | str) -> dict[str, Any] | None:
        """Measurements of a cell, if it is finished."""
        return read_json(self.place(cell) / "result.json")

    def error(self, cell: Cell | str) -> str | None:
        """Reason for a missing result, if a process wrote one."""
        content = read_json(self.place(cell) / "failed.json")
        return None if content is None else str(content["error"])

    def prepare(self, cell: Cell) -> Path:
        """Ready a cell's folder for a process: an earlier try goes, its checkpoints stay."""
        place = self.place(cell)
        place.mkdir(parents=True, exist_ok=True)
        for path in (*(place / name for name in _RERUN), *place.glob(".*.tmp")):
            path.unlink(missing_ok=True)
        shutil.rmtree(place / "model", ignore_errors=True)
        write_json(place / "cell.json", {**cell.spec(), "resolved": self.resolved_options(cell)})
        return place

    def resolved_options(self, cell: Cell) -> dict[str, Any]:
        """The cell's options with the folders of the models that it needs, and what was tuned."""
        models = {name: str((self.place(name) / "model").resolve()) for name in cell.models}
        named = {name.removeprefix(f"{REFERENCES}/"): folder for name, folder in models.items()}
        options: dict[str, Any] = resolve_models(dict(cell.options), named)
        best = self.best(cell.tries) if cell.tries else None
        if cell.kind == "merge":
            options["merged"] = models[best or cell.needs[0]]
        elif best is not None:
            options |= cell.tries[best]
        return options

    def best(self, tries: Iterable[str]) -> str:
        """Name of the finished cell with the lowest loss on the rows for choosing."""
        results = {name: self.result(name) for name in tries}
        losses = {n: float(r["details"]["choosing_loss"]) for n, r in results.items() if r}
        return min(losses, key=lambda name: losses[name])

    def done(self, cell: Cell) -> bool:
        """True if its result is there, and its model where others need that.

        Raises:
            ConfigError: the result is of a cell with other options.
        """
        result = self.result(cell)
        if result is None:
            return False
        before, now = _settings(result["spec"]), _settings(cell.spec())
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                raise ConfigError(
                    "a finished cell of this folder had other settings",
                    got=f"{cell.name}: {name} was {before.get(name)!r}, is {now.get(name)!r}",
                    why="cells of two different grids would stand in one table",
                    remedy="another --output_dir, or remove the cell's folder to run it again",
                )
        needs_model = cell.keep_model and cell.kind == "train"
        return not needs_model or (self.place(cell) / "model").is_dir()

    def status(self, cells: Iterable[Cell]) -> dict[str, Status]:
        """Status of every cell by name; cells come after those that they need."""
        status: dict[str, Status] = {}
        for cell in cells:
            error = self.error(cell)
            lost = cell.hopeless({n for n, s in status.items() if s.state in ("failed", "blocked")})
            if self.done(cell):
                status[cell.name] = Status("done")
            elif lost:
                status[cell.name] = Status("blocked", f"needs {lost[0]}")
            elif error is not None:
                status[cell.name] = Status("failed", error)
            else:
                status[cell.name] = Status("missing")
        return status


def _settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """All that a result depends on, by name."""
    apart = ("keep_model", "options", "measures")
    settings = {name: value for name, value in spec.items() if name not in apart}
    for part in ("options", "measures"):
        settings |= {f"{part}.{name}": value for name, value in (spec[part] or {}).items()}
    return settings
