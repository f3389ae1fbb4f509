"""What a table or figure of the paper consists of: its cells, and what they need."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphatoken.cli.recipes import Recipe, find_recipe
from alphatoken.errors import ConfigError
from alphatoken_lab.commands.compare_grid import GridOptions, grid_content, read_grid
from alphatoken_lab.commands.paper import PaperOptions
from alphatoken_lab.paper.exhibits import LAPTOP, Exhibit

if TYPE_CHECKING:
    from alphatoken.train.plan import Plan
    from alphatoken_lab.compare.folder import GridFolder
    from alphatoken_lab.compare.grid import Cell, Grid

__all__ = ["Planned", "Work", "planned", "require_names"]

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
        """What the grids' files call by ``$NAME``."""
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

    # --- what a cell's recipe says beside its options -------------------------------------------

    @cached_property
    def _content(self) -> Mapping[str, Any]:
        return grid_content(self.exhibit.grid_of(self.scale))[0]

    def recipe_of(self, cell: Cell) -> Recipe | None:
        """The packaged recipe that a cell's options come from."""
        part, name = (
            ("references", cell.policy) if cell.task == "references" else ("tasks", cell.task)
        )
        named = self._content.get(part, {}).get(name, {}).get("recipe")
        return None if named is None else find_recipe(str(named))

    def backbone_of(self, cell: Cell) -> str:
        """The model that the cell's training goes back to, by the name that a user fetches."""
        name = str(cell.options["model_name_or_path"])
        while name.startswith("@"):
            before = next(c for c in self.cells if c.name == f"references/{name[1:]}")
            name = str(before.options["model_name_or_path"])
        return name

    def conditions(self) -> str:
        """What its numbers are measured on: model, rows and steps of each kind of training."""
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
        """Backbones, each once."""
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


@dataclass(frozen=True)
class Planned:
    """One kind of cell, whatever its seed: how many there are, and what each trains.

    Attributes:
        name: task and method.
        cells: how many, one a seed.
        backbone: model that it goes back to.
        steps: of one, None where unknown.
        processes: of one cell.
        refused: why it could not run, or "".
    """

    name: str
    cells: int
    backbone: str
    steps: int | None = None
    processes: int = 1
    refused: str = ""


def planned(work: Work) -> list[Planned]:
    """Every kind of cell with its plan, as ``alphatoken sft --dry_run`` would make it; offline."""
    groups: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in work.cells:
        groups.setdefault((cell.task, cell.policy, cell.mode), []).append(cell)
    found = []
    for cells in groups.values():
        first = cells[0]
        name = first.name.partition("-seed")[0]
        one = Planned(name, len(cells), work.backbone_of(first))
        found.append(one if first.kind != "train" else _with_plan(one, work, first))
    return found


def _with_plan(one: Planned, work: Work, cell: Cell) -> Planned:
    from alphatoken.errors import AlphaTokenError

    try:
        plan = _plan(work, cell)
    except AlphaTokenError as error:
        return replace(one, refused=" ".join(str(error).split()))
    return replace(one, steps=plan.steps["steps"], processes=plan.layout["processes"])


def _plan(work: Work, cell: Cell) -> Plan:
    """The plan of one cell, with the shape and rows that its recipe knows.

    Raises:
        AlphaTokenError: what the run itself would refuse.
    """
    recipe = work.recipe_of(cell)
    own = {**cell.options, "model_name_or_path": work.backbone_of(cell), "command": cell.command}
    own.pop("collect_value_propagation", None)  # a callback's, none of the trainer's
    if recipe is not None:
        own |= {"model_shape": recipe.model_shape, "expected_rows": recipe.expected_rows}
    return _plan_of(cell.command, json.dumps(own))


@cache
def _plan_of(command: str, options: str) -> Plan:
    """Tables share cells, so that a list of all of them asks for the same plan again."""
    from alphatoken.cli.arguments import read_arguments
    from alphatoken.cli.launching import layout_of
    from alphatoken.cli.planning import plan_run
    from alphatoken.cli.training import trainer_of

    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "recipe.yaml"  # of which JSON is a part
        file.write_text(options, encoding="utf-8")
        words = ["--config", str(file), "--output_dir", place, "--dry_run"]
        arguments = read_arguments(command, words, trainer_of(command)[0])
    return plan_run(arguments, layout_of(arguments))


def require_names(work: Work, plans: Sequence[Planned]) -> None:
    """Refuse an exhibit of which cells could not run.

    Raises:
        ConfigError: names the first one and the reason.
    """
    refused = [one for one in plans if one.refused]
    if refused:
        raise ConfigError(
            f"{len(refused)} of {len(plans)} kinds of cells of {work.exhibit.label} cannot run",
            got=f"{refused[0].name}: {refused[0].refused}",
        )
