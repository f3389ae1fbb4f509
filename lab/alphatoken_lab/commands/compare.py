"""``alphatoken-lab compare``: a grid of methods, modes and seeds, run cell by cell, tabulated."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from alphatoken.cli.program import CommandParser, add_options
from alphatoken.errors import ConfigError
from alphatoken_lab.runner.grid_file import CompareOptions, read_grid

if TYPE_CHECKING:
    from alphatoken_lab.measure.measures import Measures
    from alphatoken_lab.runner.grid import Cell
    from alphatoken_lab.runner.records import Record
    from alphatoken_lab.runner.running import GridFolder

_ABOUT = """\
Train one model with many methods, measure every one on the same held-out rows, and tabulate. Each
cell of the grid (method, mode, seed) is a process of its own; a cell that fails is a line in the
table. The same command again goes on with what is missing.

usage: alphatoken-lab compare (--config GRID.yaml | --recipe NAME) [options] [trainer's options]"""

_MORE = """\
output
  OUT/comparison.md, .csv, .json   tables and records
  OUT/TASK/CELL/                   recipe.yaml (for alphatoken sft --config), result.json, log.txt

a grid without a file
  alphatoken-lab compare --recipe laptop-sft --policies standard random alphatoken --seeds 0 1 2 \\
      --model_name_or_path ./model --train_file train.jsonl --validation_file dev.jsonl \\
      --target_file held_out.jsonl --retention_file old.jsonl --output_dir runs/compare

Any other option of the trainer is passed on to every cell: --max_steps 100. docs/compare.md
explains the grid's file, docs/evaluate.md lm-eval, exported answers and executed code."""


def parse(words: Sequence[str]) -> tuple[CompareOptions, list[str]]:
    """Options of the command, and the words that are options of the trainer."""
    parser = CommandParser(
        "compare", "alphatoken-lab", description=_ABOUT, epilog=_MORE, allow_abbrev=False
    )
    add_options(parser, CompareOptions)
    options, more = parser.parse_known_args(list(words))
    return CompareOptions(**vars(options)), more


def run(words: Sequence[str]) -> int:
    """Run what ``words``, the arguments after ``alphatoken-lab compare``, ask for; the exit status.

    1 where cells have no result, and the table says which.

    Raises:
        AlphaTokenError: wrong arguments or input, with what and where.
    """
    options, more = parse(words)
    if options.cell is not None:
        return _run_cell(Path(options.cell))
    from alphatoken.support.resume import require_writable
    from alphatoken_lab.runner.grid import all_cells
    from alphatoken_lab.runner.records import collect
    from alphatoken_lab.runner.running import GridFolder, run_cells
    from alphatoken_lab.runner.tables import write_results

    grid = read_grid(options, more)
    cells, folder = all_cells(grid), GridFolder(Path(options.output_dir))
    if options.dry_run:
        for cell, status in zip(cells, folder.status(cells).values(), strict=True):
            needs = f"  after {', '.join(cell.needs)}" if cell.needs else ""
            print(f"{status.state:8} {cell.name}{needs}")
        look_up_tasks(cells)
        return 0
    if not options.only_report:
        require_writable(folder.path)
        check_measures(cells)
        run_cells(options, _choose_cells(cells, options.only), folder)
    every = collect(cells, folder)
    return print_results(every, cells, folder, write_results(grid, every, folder.path))


def _run_cell(path: Path) -> int:
    from alphatoken_lab.runner.launchers import end_with_parent

    end_with_parent()
    os.environ["TQDM_DISABLE"] = "1"
    from alphatoken.cli.training import require_libraries

    require_libraries()
    from transformers.utils import logging

    from alphatoken_lab.runner.cell import run_cell

    logging.disable_progress_bar()
    return run_cell(path)


# --- before any cell ----------------------------------------------------------------------------


def look_up_tasks(cells: Sequence[Cell]) -> None:
    """Look up what lm-eval is to run, for a dry run; say so where it is not installed.

    Raises:
        ConfigError: there are no such tasks.
    """
    from alphatoken_lab.measure.tasks import check_tasks

    left = check_tasks((one for _, one in _measures(cells).values()), required=False)
    if left:
        names = ", ".join(left)
        print(
            f"not looked up: tasks {names}: lm-eval is missing: pip install 'alphatoken-lab[eval]'"
        )


def check_measures(cells: Sequence[Cell]) -> None:
    """Check, before any cell runs, the files that are named, the rows, questions and tasks.

    Raises:
        AlphaTokenError: what is not there or cannot be read.
    """
    from alphatoken_lab.measure.losses import read_files
    from alphatoken_lab.measure.measures import require_files
    from alphatoken_lab.measure.measuring import read_questions
    from alphatoken_lab.measure.tasks import check_tasks

    for cell in cells:
        for name, value in cell.options.items():
            named = isinstance(value, str) and (
                name.endswith("_file") or (name.endswith("_data") and value.endswith(".jsonl"))
            )
            if named and not value.startswith("@") and not Path(value).is_file():
                raise ConfigError(f"{name} does not exist", got=f"{value} ({cell.task})")
    by_task = _measures(cells)
    for task, (_, measures) in by_task.items():
        require_files(measures, task)
    check_tasks(measures for _, measures in by_task.values())
    for command, measures in by_task.values():
        read_files(measures, command)
        for path in measures.questions.values():
            read_questions(path, measures.task_limit)


def _measures(cells: Sequence[Cell]) -> dict[str, tuple[str, Measures]]:
    # Cells of one task are measured alike: what is wrong is said once.
    from alphatoken_lab.measure.measures import Measures

    return {c.task: (c.command, Measures(**c.measures)) for c in cells if c.measures is not None}


def _choose_cells(cells: Sequence[Cell], text: str) -> list[Cell]:
    """Cells whose name contains the text, and those that they need."""
    by_name = {cell.name: cell for cell in cells}
    chosen: set[str] = set()
    waiting = [cell.name for cell in cells if text in cell.name]
    while waiting:
        name = waiting.pop()
        if name not in chosen:
            chosen.add(name)
            waiting += by_name[name].needs
    if not chosen:
        raise ConfigError("no cell has such a name", got=text, remedy="--dry_run lists them")
    return [cell for cell in cells if cell.name in chosen]


def print_results(
    every: Sequence[Record], cells: Sequence[Cell], folder: GridFolder, page: Path
) -> int:
    """Print how many cells have a result, why others have none, what is awaited; exit status."""
    done = sum(record["status"] == "done" for record in every)
    print(f"{done} of {len(every)} cells have a result: {page}")
    for name, status in folder.status(cells).items():
        if status.state in ("failed", "blocked"):
            print(f"{status.state}: {name}: {status.error}", file=sys.stderr)
    awaited = {
        f"{name.split('/')[1]} by {how['scored_by']}"
        for record in every
        for name, how in record.get("settings", {}).items()
        if name not in record
    }
    if awaited:
        print(
            f"awaited: {', '.join(sorted(awaited))}, of the answers beside each result.json "
            f"(docs/evaluate.md); the same command then fills the table"
        )
    return 0 if done == len(every) else 1
