"""The output folder of a grid: finished cells, and the process at work on each.

    FOLDER/lock                            held by the one process that runs the grid
    FOLDER/setup.lock                      held by a cell while it fills the cache that cells share
    FOLDER/TASK/CELL/cell.json             what the cell is
    FOLDER/TASK/CELL/recipe.yaml           its training options, fit for ``alphatoken sft --config``
    FOLDER/TASK/CELL/result.json           what was measured; written whole, last, and never again
    FOLDER/TASK/CELL/failed.json           why there is no result
    FOLDER/TASK/CELL/log.txt               what the process said
    FOLDER/TASK/CELL/model                 the model, where another cell needs it

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
from alphatoken_lab.compare.grid import Cell, resolved

__all__ = ["CellFolder", "GridFolder", "Status"]

_RERUN = ("failed.json", "log.txt", "recipe.yaml", "cell.json", "building")


@dataclass(frozen=True)
class Status:
    """Status of one cell: "done", "failed", "blocked" (a need of it failed) or "missing"."""

    state: str
    error: str = ""


@dataclass(frozen=True)
class CellFolder:
    """Folder of one cell."""

    path: Path

    @property
    def model(self) -> Path:
        """Its model, if it was kept."""
        return self.path / "model"

    def spec(self) -> dict[str, Any]:
        """Specification of the cell.

        Raises:
            ConfigError: there is no cell here.
        """
        found = read_json(self.path / "cell.json")
        if found is None:
            raise ConfigError("there is no cell in this folder", got=str(self.path))
        return found

    def result(self) -> dict[str, Any] | None:
        """Measurements of the cell."""
        return read_json(self.path / "result.json")

    def error(self) -> str | None:
        """Reason for a missing result, if a process wrote one."""
        found = read_json(self.path / "failed.json")
        return None if found is None else str(found["error"])

    def prepare(self, cell: Cell, options: Mapping[str, Any]) -> None:
        """Ready for a process: traces of an earlier try go, its checkpoints stay.

        Args:
            cell: what is to be run here.
            options: its options, with the folders of the models that they name.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for name in _RERUN:
            (self.path / name).unlink(missing_ok=True)
        for left in self.path.glob(".*.tmp"):  # of a process that was killed while it wrote
            left.unlink(missing_ok=True)
        shutil.rmtree(self.model, ignore_errors=True)
        write_json(self.path / "cell.json", {**cell.spec(), "resolved": dict(options)})


class GridFolder:
    """All cells of a grid in one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def of(self, cell: Cell | str) -> CellFolder:
        """The folder of a cell, by itself or its name."""
        name = cell if isinstance(cell, str) else cell.name
        return CellFolder(self.path / name)

    def resolved(self, cell: Cell) -> dict[str, Any]:
        """The cell's options with the folders of the models that it needs, and what was tuned."""
        models = {name: str(self.of(name).model.resolve()) for name in cell.models}
        named = {name.removeprefix("references/"): folder for name, folder in models.items()}
        options: dict[str, Any] = resolved(dict(cell.options), named)
        best = self.best(cell.tries) if cell.tries else None
        if cell.kind == "merge":
            options["merged"] = models[best or cell.needs[0]]
        elif best is not None:
            options |= cell.tries[best]
        return options

    def best(self, tries: Iterable[str]) -> str:
        """Name of the finished cell with the lowest loss on the rows for choosing."""
        results = {name: self.of(name).result() for name in tries}
        losses = {n: float(r["details"]["choosing_loss"]) for n, r in results.items() if r}
        return min(losses, key=lambda name: losses[name])

    def done(self, cell: Cell) -> bool:
        """True if its result is there, and its model where others need that.

        Raises:
            ConfigError: the result is of a cell with other options.
        """
        result = self.of(cell).result()
        if result is None:
            return False
        self._require_same(cell, result["spec"])
        return not cell.keep_model or cell.kind != "train" or self.of(cell).model.is_dir()

    def _require_same(self, cell: Cell, earlier: Mapping[str, Any]) -> None:
        left, right = _settings(earlier), _settings(cell.spec())
        names = [k for k in sorted({*left, *right}) if left.get(k) != right.get(k)]
        if names:
            first = names[0]
            raise ConfigError(
                "a finished cell of this folder had other settings",
                got=f"{cell.name}: {first} was {left.get(first)!r}, is {right.get(first)!r}",
                why="cells of two different grids would stand in one table",
                remedy="another --output_dir, or remove the cell's folder to run it again",
            )

    def status(self, cells: Iterable[Cell]) -> dict[str, Status]:
        """Status of every cell by name; cells come after those that they need."""
        found: dict[str, Status] = {}
        for cell in cells:
            error = self.of(cell).error()
            lost = cell.hopeless({n for n, s in found.items() if s.state in ("failed", "blocked")})
            if self.done(cell):
                found[cell.name] = Status("done")
            elif lost:
                found[cell.name] = Status("blocked", f"needs {lost[0]}")
            elif error is not None:
                found[cell.name] = Status("failed", error)
            else:
                found[cell.name] = Status("missing")
        return found


def _settings(spec: Mapping[str, Any]) -> dict[str, Any]:
    """All that a result depends on, by name."""
    free = ("keep_model", "options", "measures")
    plain = {name: value for name, value in spec.items() if name not in free}
    for part in ("options", "measures"):
        plain |= {f"{part}.{name}": value for name, value in (spec[part] or {}).items()}
    return plain
