"""An exhibit at one scale: its cells, and the models, rows and files that these need."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alphatoken.demo.models import models_folder
from alphatoken.errors import ConfigError
from alphatoken_lab.paper.exhibits import LAPTOP, Exhibit
from alphatoken_lab.paper.options import PaperOptions
from alphatoken_lab.runner.grid import REFERENCES, Cell, Grid, all_cells
from alphatoken_lab.runner.grid_file import CompareOptions, read_grid
from alphatoken_lab.runner.running import GridFolder

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

    @property
    def folder(self) -> GridFolder:
        """The folder of the cells."""
        return GridFolder(self.root / self.family)

    @cached_property
    def grid(self) -> Grid:
        """The packaged grid with what this exhibit shows of it."""
        wanted = self.exhibit.wanted(self.scale)
        methods = list(dict.fromkeys(name for names in wanted.values() for name in names))
        name = f"{self.exhibit.grid}-{LAPTOP}" if self.scale == LAPTOP else self.exhibit.grid
        models = models_folder().absolute()
        variables = {
            "PAPER_ROWS": str(self.rows),
            "PAPER_MODEL": self.options.model or str(models / _MODEL),
            "PAPER_EVALUATION": str(Path(self.options.evaluation_dir).absolute()),
        }
        grid = read_grid(
            CompareOptions(
                config=name, policies=methods, tasks=list(wanted), seeds=self.options.seeds
            ),
            self.more,
            variables,
        )
        tasks = tuple(replace(task, policies=wanted[task.name]) for task in grid.tasks)
        seeds = grid.seeds if self.exhibit.groups else grid.seeds[:1]
        return replace(grid, tasks=tasks, seeds=seeds)

    @cached_property
    def cells(self) -> list[Cell]:
        """Those of the exhibit, what they need before them."""
        return all_cells(self.grid)

    def backbone_of(self, cell: Cell) -> str:
        """The model that the cell's training goes back to, by the name that a user fetches."""
        name = str(cell.options["model_name_or_path"])
        while name.startswith("@"):
            before = next(c for c in self.cells if c.name == f"{REFERENCES}/{name[1:]}")
            name = str(before.options["model_name_or_path"])
        return name

    def conditions(self) -> str:
        """Conditions of its numbers: model, rows and steps of each kind of training."""
        trained = [c for c in self.cells if c.kind == "train" and c.task != REFERENCES]
        each = dict.fromkeys(self._condition(cell) for cell in trained)
        return f"Measured on {'; '.join(each)}." if each else ""

    def _condition(self, cell: Cell) -> str:
        options, model = cell.options, Path(self.backbone_of(cell))
        weights = " with four-bit weights" if (model / "source.json").is_file() else ""
        rows = options.get("dataset_name") or Path(str(options.get("train_file"))).name
        each = int(options.get("per_device_train_batch_size", 1))
        each *= int(options.get("gradient_accumulation_steps", 1))
        steps = int(options.get("max_steps") or 0)
        long = f"{steps} steps of {each} rows" if steps > 0 else "whole epochs"
        if steps <= 0 and "num_train_epochs" in options:
            long = f"{options['num_train_epochs']:g} epochs in steps of {each} rows a process"
        return f"{model.name if model.is_absolute() else model}{weights}, {long} of {rows}"

    # --- what it needs --------------------------------------------------------------------------

    def models(self) -> list[str]:
        """Backbones of the cells, each once."""
        return list(dict.fromkeys(self.backbone_of(cell) for cell in self.cells))

    def datasets(self) -> list[str]:
        """Training sets of the hub, each once."""
        named = [cell.options.get("dataset_name") for cell in self.cells if cell.kind == "train"]
        return [name for name in dict.fromkeys(named) if name]

    def files(self) -> list[str]:
        """Files of rows that cells and the diagnostic read, each once."""
        parts = [part for cell in self.cells for part in (cell.options, cell.measures)]
        files = [name for part in parts for name in _files_in(part)]
        if self.exhibit.diagnosis is not None and self.scale != LAPTOP:
            folder = Path(self.options.evaluation_dir).absolute()
            names = self.exhibit.diagnosis.retention.get(self.scale, ())
            files += [str(folder / f"{name}.jsonl") for name in names]
        return list(dict.fromkeys(files))

    def missing(self) -> list[str]:
        """Models, data sets and files that the exhibit needs and that are not here."""
        absent = [f"model {name}" for name in self.models() if not _is_here(name, "model")]
        absent += [f"data set {name}" for name in self.datasets() if not _is_here(name, "dataset")]
        # Rows of the laptop scale are written before anything is trained.
        small = self.rows if self.scale == LAPTOP else None
        absent += [
            f"file {name}"
            for name in self.files()
            if not Path(name).is_file() and small not in Path(name).parents
        ]
        tasks = any(task.measures and task.measures.tasks for task in self.grid.tasks)
        if tasks and find_spec("lm_eval") is None:
            absent.append("lm-eval, which runs the tasks: pip install 'alphatoken-lab[eval]'")
        return absent

    def require_all(self) -> None:
        """Refuse to start where something is missing.

        Raises:
            ConfigError: names all of it.
        """
        if absent := self.missing():
            small = self.scale == LAPTOP
            raise ConfigError(
                f"what {self.exhibit.label} needs is not here",
                got="; ".join(absent),
                why="cells would fail one after the other",
                remedy="`make models` fetches SmolLM2"
                if small
                else "fetch it (docs/paper.md says from where), or --scale laptop",
            )


def _files_in(value: Any) -> Iterator[str]:
    if isinstance(value, str) and value.endswith((".jsonl", ".parquet")) and value[0] != "@":
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _files_in(part)


def _is_here(name: str, kind: str) -> bool:
    """True if a model or data set is a local folder, in the hub's cache, or on the hub."""
    if Path(name).expanduser().exists():
        return True
    if "/" not in name or name.startswith(("/", ".")):
        return False
    from huggingface_hub import HfApi, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = {(repo.repo_id, repo.repo_type) for repo in scan_cache_dir().repos}
    except CacheNotFound:
        cached = set()
    if (name, kind) in cached:
        return True
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    try:
        HfApi().auth_check(name, repo_type=kind)
    except Exception:  # not there, not allowed, or no network: for the table the same
        return False
    return True
