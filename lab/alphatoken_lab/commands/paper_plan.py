"""Plan of a table or figure of the paper: its cells, and their needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphatoken_lab.commands.compare_grid import GridOptions, read_grid
from alphatoken_lab.commands.paper import PaperOptions
from alphatoken_lab.paper.exhibits import LAPTOP, Exhibit

if TYPE_CHECKING:
    from alphatoken_lab.compare.folder import GridFolder
    from alphatoken_lab.compare.grid import Cell, Grid

__all__ = ["Work", "kinds"]

_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Work:
    """An exhibit at one scale: where its cells are, and which.

    Attributes:
        exhibit: what is made.
        options: of the command.
        more: words that are options of the trainer, for every cell.
    """

    exhibit: Exhibit
    options: PaperOptions
    more: tuple[str, ...] = ()

    @property
    def scale(self) -> str:
        """Either "full" or "laptop"."""
        return self.options.scale

    @property
    def root(self) -> Path:
        """The folder of everything at this scale."""
        return Path(self.options.output_dir).absolute() / self.scale

    @property
    def family(self) -> str:
        """One of "sft", "metamath", "dpo": folder of the grid, and name of its rows."""
        return self.exhibit.grid.removeprefix("paper-")

    @property
    def rows(self) -> Path:
        """The folder of the rows."""
        return self.root / "rows" / self.family

    @cached_property
    def folder(self) -> GridFolder:
        """The folder of the cells."""
        from alphatoken_lab.compare.folder import GridFolder

        return GridFolder(self.root / self.family)

    @cached_property
    def grid(self) -> Grid:
        """The packaged grid with what this exhibit shows of it."""
        wanted = self.exhibit.wanted(self.scale)
        methods = list(dict.fromkeys(name for names in wanted.values() for name in names))
        asked = GridOptions(
            config=self.exhibit.grid_of(self.scale),
            policies=methods,
            tasks=list(wanted),
            seeds=self.options.seeds,
        )
        with self._variables():
            grid = read_grid(asked, self.more)
        tasks = tuple(replace(task, policies=wanted[task.name]) for task in grid.tasks)
        seeds = grid.seeds if self.exhibit.groups else grid.seeds[:1]
        return replace(grid, tasks=tasks, seeds=seeds)

    @cached_property
    def cells(self) -> list[Cell]:
        """Those of the exhibit, what they need before them."""
        from alphatoken_lab.compare.grid import all_cells

        return all_cells(self.grid)

    @contextmanager
    def _variables(self) -> Iterator[None]:
        """Values of ``$NAME`` in the grids' files."""
        options = self.options
        models = Path(os.environ.get("ALPHATOKEN_MODELS", "models")).absolute()
        own = {
            "PAPER_ROWS": str(self.rows),
            "PAPER_MODEL": options.model or str(models / _MODEL),
            "PAPER_EVALUATION": str(Path(options.evaluation_dir).absolute()),
            "PAPER_JUDGE_URL": options.judge_url or "",
            "PAPER_JUDGE_MODEL": options.judge_model or "",
        }
        before = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def backbone_of(self, cell: Cell) -> str:
        """The model that the cell's training goes back to, by the name that a user fetches."""
        name = str(cell.options["model_name_or_path"])
        while name.startswith("@"):
            before = next(c for c in self.cells if c.name == f"references/{name[1:]}")
            name = str(before.options["model_name_or_path"])
        return name

    def conditions(self) -> str:
        """Conditions of its numbers: model, rows and steps of each kind of training."""
        trained = [c for c in self.cells if c.kind == "train" and c.task != "references"]
        said = dict.fromkeys(self._condition(cell) for cell in trained)
        return f"Measured on {'; '.join(said)}." if said else ""

    def _condition(self, cell: Cell) -> str:
        options, model = cell.options, self.backbone_of(cell)
        own = Path(model).is_absolute()
        weights = " with four-bit weights" if (Path(model) / "source.json").is_file() else ""
        rows = options.get("dataset_name") or Path(str(options.get("train_file"))).name
        each = int(options.get("per_device_train_batch_size", 1))
        each *= int(options.get("gradient_accumulation_steps", 1))
        steps = int(options.get("max_steps") or 0)
        long = f"{steps} steps of {each} rows" if steps > 0 else "whole epochs"
        if steps <= 0 and "num_train_epochs" in options:
            long = f"{options['num_train_epochs']:g} epochs in steps of {each} rows a process"
        return f"{Path(model).name if own else model}{weights}, {long} of {rows}"

    # --- what it needs --------------------------------------------------------------------------

    def models(self) -> list[str]:
        """Backbones of the cells, each once."""
        return list(dict.fromkeys(self.backbone_of(cell) for cell in self.cells))

    def datasets(self) -> list[str]:
        """Training sets of the hub, each once."""
        named = [cell.options.get("dataset_name") for cell in self.cells if cell.kind == "train"]
        return [name for name in dict.fromkeys(named) if name]

    def files(self) -> list[str]:
        """Files that cells read, models of other cells left out."""
        found: list[str] = []
        for cell in self.cells:
            for part in (cell.options, cell.measures or {}):
                found += _files_in(part)
        return list(dict.fromkeys(found))

    def retention_files(self) -> list[str]:
        """Files of the evaluation that only the diagnostic reads."""
        asked = self.exhibit.diagnosis
        if asked is None or self.scale == LAPTOP:
            return []
        folder = Path(self.options.evaluation_dir).absolute()
        return [str(folder / f"{name}.jsonl") for name in asked.retention.get(self.scale, ())]


def _files_in(value: Any) -> Iterator[str]:
    """Whatever ends as a file of rows does."""
    if isinstance(value, str) and value.endswith((".jsonl", ".parquet")) and value[0] != "@":
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _files_in(one)


# --- what it trains -----------------------------------------------------------------------------


def kinds(work: Work) -> Iterator[str]:
    """A line for every kind of cell, whatever its seed."""
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in work.cells:
        groups.setdefault((cell.task, cell.policy, cell.mode), []).append(cell)
    for cells in groups.values():
        what = "trained" if cells[0].kind == "train" else "measured only"
        yield f"{cells[0].name.partition('-seed')[0]}: {len(cells)} x {what}"
