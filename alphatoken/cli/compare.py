"""``alphatoken compare``: a grid of methods, modes and seeds, run cell by cell and tabulated."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphatoken.cli.compare_grid import GridOptions, read_grid
from alphatoken.cli.options import CommandParser, add_options, option
from alphatoken.errors import AlphaTokenError, ConfigError

if TYPE_CHECKING:
    from alphatoken.compare.folder import Status
    from alphatoken.compare.grid import Cell, Grid

__all__ = ["CompareOptions", "parse", "run"]

_ABOUT = """\
Train one model with many methods, measure every one on the same held-out rows, and tabulate. Each
cell of the grid (method, mode, seed) is a process of its own; a cell that fails is a line in the
table. The same command again goes on with what is missing.

usage: alphatoken compare (--config GRID.yaml | --recipe NAME) [options] [options of the trainer]"""

_MORE = """\
output
  OUT/comparison.md, .csv, .json   tables and records; OUT/comparison-*.svg figures
  OUT/TASK/CELL/                   recipe.yaml (for alphatoken sft --config), result.json, log.txt

a grid without a file
  alphatoken compare --recipe laptop-sft --policies standard random alphatoken --seeds 0 1 2 \\
      --model_name_or_path ./model --train_file train.jsonl --validation_file dev.jsonl \\
      --target_file held_out.jsonl --retention_file old.jsonl --output_dir runs/compare

Any other option of the trainer is passed on to every cell: --max_steps 100. docs/compare.md
explains the grid's file, evaluation by lm-eval, executed code and judges."""


@dataclass(frozen=True, kw_only=True)
class _Running:
    """How to run."""

    output_dir: str = option("runs/compare", "folder for cells and tables")
    processes: int = option(1, "cells at a time")
    only: str = option("", "cells whose name contains it, and their needs")
    dry_run: bool = option(False, "list the cells and stop")
    report: bool = option(False, "write the tables of what is there, run nothing")
    allow_code_execution: bool = option(False, "execute generated code, sandboxed")
    quiet: bool = option(False, "no progress")
    traceback: bool = option(False, "show the whole traceback of an error")
    cell: str | None = option(None, argparse.SUPPRESS)


@dataclass(frozen=True, kw_only=True)
class CompareOptions(GridOptions, _Running):
    """Everything that ``alphatoken compare`` itself is told."""


def run(words: Sequence[str]) -> int:
    """Run what ``words``, the arguments after ``alphatoken compare``, ask for; the exit status.

    1 where cells have no result, and the table says which.

    Raises:
        AlphaTokenError: wrong arguments or input, with what and where.
    """
    options, more = parse(words)
    if options.cell is not None:
        return _cell(Path(options.cell), allow_code=options.allow_code_execution)
    from alphatoken.compare.folder import GridFolder
    from alphatoken.compare.grid import all_cells

    grid = read_grid(options, more)
    cells = all_cells(grid)
    folder = GridFolder(Path(options.output_dir))
    if options.dry_run:
        return _show(cells, folder)
    if not options.report:
        _check_files(cells)
        _run(options, cells, folder)
    return _report(grid, cells, folder)


def parse(words: Sequence[str]) -> tuple[CompareOptions, list[str]]:
    """Options of the command, and the words that are options of the trainer."""
    parser = CommandParser("compare", description=_ABOUT, epilog=_MORE, allow_abbrev=False)
    add_options(parser, CompareOptions)
    known, more = parser.parse_known_args(list(words))
    return CompareOptions(**vars(known)), more


# --- the grid -----------------------------------------------------------------------------------


def _show(cells: Sequence[Cell], folder: Any) -> int:
    status = folder.status(cells)
    for cell in cells:
        needs = f"  after {', '.join(cell.needs)}" if cell.needs else ""
        print(f"{status[cell.name].state:8} {cell.name}{needs}")
    return 0


def _check_files(cells: Sequence[Cell]) -> None:
    """See that whatever is named by a path is there, before any cell runs."""
    for cell in cells:
        named = {**cell.options, **(cell.measures or {})}
        for name, value in named.items():
            path = isinstance(value, str) and (
                name.endswith("_file") or (name.endswith("_data") and value.endswith(".jsonl"))
            )
            if path and not value.startswith("@") and not Path(value).is_file():
                raise ConfigError(f"{name} is not there", got=f"{value} ({cell.task})")


def _run(options: CompareOptions, cells: Sequence[Cell], folder: Any) -> dict[str, Status]:
    from alphatoken.compare.running import run_grid

    if options.processes < 1:
        raise ConfigError("--processes must be at least 1", got=str(options.processes))
    wanted = _only(cells, options.only)

    def command(path: Path) -> list[str]:
        allow = ["--allow_code_execution"] if options.allow_code_execution else []
        return [sys.executable, "-m", "alphatoken.cli", "compare", "--cell", str(path), *allow]

    return run_grid(
        wanted,
        folder,
        command,
        processes=options.processes,
        progress=not options.quiet,
    )


def _only(cells: Sequence[Cell], text: str) -> list[Cell]:
    """Cells whose name contains the text, and those that they need."""
    by_name = {cell.name: cell for cell in cells}
    wanted: set[str] = set()
    waiting = [cell.name for cell in cells if text in cell.name]
    while waiting:
        name = waiting.pop()
        if name not in wanted:
            wanted.add(name)
            waiting += by_name[name].needs
    if not wanted:
        raise ConfigError("no cell has such a name", got=text, remedy="--dry_run lists them")
    return [cell for cell in cells if cell.name in wanted]


def _report(grid: Grid, cells: Sequence[Cell], folder: Any) -> int:
    from alphatoken.compare.page import collect, write_results

    found = collect(cells, folder)
    page = write_results(grid, found, folder.path, variants=grid.variants)
    done = sum(record["status"] == "done" for record in found)
    print(f"{done} of {len(found)} cells have a result: {page}")
    for name, status in folder.status(cells).items():
        if status.state in ("failed", "blocked"):
            print(f"{status.state}: {name}: {status.error}", file=sys.stderr)
    return 0 if done == len(found) else 1


# --- one cell, in its own process ---------------------------------------------------------------


def _cell(path: Path, *, allow_code: bool) -> int:
    from alphatoken.compare.running import end_with_parent

    end_with_parent()
    os.environ["TQDM_DISABLE"] = "1"
    from alphatoken.cli.training import require_libraries

    require_libraries()
    from transformers.utils import logging

    from alphatoken.compare.cell import run_cell
    from alphatoken.compare.folder import try_lock

    logging.disable_progress_bar()
    if try_lock(path / "lock") is None:
        raise ConfigError("another process is at work on this cell", got=str(path))
    try:
        run_cell(
            path, lambda command, options: _trainer(path, command, options), allow_code=allow_code
        )
    except AlphaTokenError:
        raise
    except Exception as error:  # the whole of it is in the log; its last line is in the table
        import traceback

        traceback.print_exc()
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:400]}", file=sys.stderr)
        return 3
    return 0


def _trainer(path: Path, command: str, options: Mapping[str, Any]) -> Any:
    """The trainer that ``alphatoken sft --config CELL/recipe.yaml`` would make."""
    import yaml  # type: ignore[import-untyped]

    from alphatoken.cli.arguments import read_arguments
    from alphatoken.cli.training import build_trainer, check_files, trainer_of

    shared = path.parent.parent
    own = {
        "fisher_cache": str(shared / "fishers"),
        "policy_cache": str(shared / "policies"),
        **options,
        "output_dir": str(path / "run"),
    }
    recipe = path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(own, sort_keys=False), encoding="utf-8")
    configuration, kind = trainer_of(command)
    arguments = read_arguments(command, ["--config", str(recipe)], configuration)
    check_files(arguments)
    trainer, notes = build_trainer(arguments, kind)
    for note in notes:
        print(f"note: {note}")
    return trainer
