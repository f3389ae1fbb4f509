"""``alphatoken-lab compare``: a grid of methods, modes and seeds, run cell by cell, tabulated."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphatoken.cli.options import CommandParser, add_options, option
from alphatoken.errors import AlphaTokenError, ConfigError
from alphatoken_lab.commands.compare_grid import CellOptions, GridOptions, read_grid

if TYPE_CHECKING:
    from alphatoken_lab.compare.folder import Status
    from alphatoken_lab.compare.grid import Cell, Grid
    from alphatoken_lab.compare.measures import Measures

__all__ = ["CompareOptions", "check_named_files", "look_up_tasks", "parse", "run", "run_cells"]

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
explains the grid's file, evaluation by lm-eval, executed code and judges."""


@dataclass(kw_only=True)
class _Running(CellOptions):
    """Options for running the grid."""

    output_dir: str = option("runs/compare", "folder for cells and tables")
    only: str = option("", "cells whose name contains it, and their needs")
    dry_run: bool = option(False, "list the cells, look up their tasks, and stop")
    only_report: bool = option(False, "write the tables of finished cells, run nothing")
    code_container: str | None = option(
        None, "image in which lm-eval executes generated code (humaneval, mbpp)"
    )
    quiet: bool = option(False, "show no progress")
    traceback: bool = option(False, "show the whole traceback of an error")
    cell: str | None = option(None, argparse.SUPPRESS)


@dataclass(kw_only=True)
class CompareOptions(GridOptions, _Running):
    """Everything that ``alphatoken-lab compare`` itself is told."""


def run(words: Sequence[str]) -> int:
    """Run what ``words``, the arguments after ``alphatoken-lab compare``, ask for; the exit status.

    1 where cells have no result, and the table says which.

    Raises:
        AlphaTokenError: wrong arguments or input, with what and where.
    """
    options, more = parse(words)
    if options.cell is not None:
        return _cell(Path(options.cell), options.code_container)
    from alphatoken.support.resume import require_writable
    from alphatoken_lab.compare.folder import GridFolder
    from alphatoken_lab.compare.grid import all_cells

    grid = read_grid(options, more)
    cells = all_cells(grid)
    folder = GridFolder(Path(options.output_dir))
    if options.dry_run:
        return _show(cells, folder)
    if not options.only_report:
        require_writable(folder.path)
        check_named_files(cells, options.code_container)
        run_cells(options, cells, folder)
    return _report(grid, cells, folder)


def parse(words: Sequence[str]) -> tuple[CompareOptions, list[str]]:
    """Options of the command, and the words that are options of the trainer."""
    parser = CommandParser(
        "compare", "alphatoken-lab", description=_ABOUT, epilog=_MORE, allow_abbrev=False
    )
    add_options(parser, CompareOptions)
    known, more = parser.parse_known_args(list(words))
    return CompareOptions(**vars(known)), more


# --- the grid -----------------------------------------------------------------------------------


def _show(cells: Sequence[Cell], folder: Any) -> int:
    status = folder.status(cells)
    for cell in cells:
        needs = f"  after {', '.join(cell.needs)}" if cell.needs else ""
        print(f"{status[cell.name].state:8} {cell.name}{needs}")
    look_up_tasks(cells)
    return 0


def look_up_tasks(cells: Sequence[Cell]) -> None:
    """Look up what lm-eval is to run, for a dry run; say so where it is not installed.

    Raises:
        ConfigError: there are no such tasks.
    """
    from alphatoken_lab.compare.harness import check_tasks

    left = check_tasks(_measures(cells).values(), required=False)
    if left:
        names = ", ".join(left)
        print(
            f"not looked up: tasks {names}: lm-eval is missing: pip install 'alphatoken-lab[eval]'"
        )


def _measures(cells: Sequence[Cell]) -> dict[str, Measures]:
    """Measures of the cells of each task, if there are any."""
    from alphatoken_lab.compare.measures import Measures

    return {c.task: Measures(**c.measures) for c in cells if c.measures is not None}


def check_named_files(cells: Sequence[Cell], code_container: str | None) -> None:
    """Check that whatever is named by a path is there, before any cell runs.

    Rows that are measured are read, and what judges are asked; tasks are looked up.
    """
    from alphatoken_lab.compare.evaluate import read_files
    from alphatoken_lab.compare.harness import check_tasks
    from alphatoken_lab.compare.scores import read_sets

    for cell in cells:
        named = {**cell.options, **(cell.measures or {})}
        for name, value in named.items():
            path = isinstance(value, str) and (
                name.endswith("_file") or (name.endswith("_data") and value.endswith(".jsonl"))
            )
            if path and not value.startswith("@") and not Path(value).is_file():
                raise ConfigError(f"{name} does not exist", got=f"{value} ({cell.task})")
    measured, commands = _measures(cells), {cell.task: cell.command for cell in cells}
    check_tasks(measured.values(), code_container=code_container)
    for task, measures in measured.items():
        read_files(measures, commands[task])
        read_sets(measures)


def run_cells(options: CompareOptions, cells: Sequence[Cell], folder: Any) -> dict[str, Status]:
    """Run the missing cells, as the options say, and return the status of each.

    Raises:
        ConfigError: options that cannot be met, or another run is at work in the folder.
    """
    from alphatoken_lab.compare.running import run_grid

    wanted = _only(cells, options.only)
    for cell in wanted:
        if cell.kind == "train":  # refused now, not when it is the cell's turn
            _for_processes(cell.options, options.devices_per_cell)
    return run_grid(
        wanted,
        folder,
        partial(_command, options),
        launcher=_launcher(options, folder.path),
        progress=not options.quiet,
    )


def _command(options: CompareOptions, path: Path) -> list[str]:
    """Command of a cell's folder: a process, or a launcher's if the cell has devices."""
    from alphatoken.cli.recipes import accelerate_config
    from alphatoken_lab.compare.folder import CellFolder
    from alphatoken_lab.compare.launchers import PORT
    from alphatoken_lab.compare.running import ATTACHED

    image = options.code_container
    allow = [] if image is None else ["--code_container", image]
    own = ["-m", "alphatoken_lab.commands", "compare", "--cell", str(path), *allow]
    spec, count = CellFolder(path).spec(), str(options.devices_per_cell)
    if count == "1" or spec["kind"] != "train":
        return [sys.executable, *own]
    layout = spec["resolved"].get("accelerate_config")
    if layout in (None, "none"):
        start = ["torch.distributed.run", "--nproc-per-node", count, "--master-port", PORT]
    else:
        start = ["accelerate.commands.launch", "--config_file", str(accelerate_config(layout)[0]),
                 "--num_processes", count, "--main_process_port", PORT]  # fmt: skip
    attached = ["-c", ATTACHED] if sys.platform == "linux" else []
    return [sys.executable, *attached, "-m", *start, *own]


def _launcher(options: CompareOptions, folder: Path) -> Any:
    from alphatoken_lab.compare.launchers import LocalLauncher, SubmititLauncher

    devices = [] if options.devices is None else options.devices.split(",")
    if options.launcher == "local":
        if options.queue is not None:
            raise ConfigError("--queue needs --launcher slurm", got=options.queue)
        if options.devices_per_cell > 1 and not devices:
            raise ConfigError(
                "--devices_per_cell needs the devices", got="no --devices", remedy="--devices 0,1"
            )
        return LocalLauncher(options.processes, devices, options.devices_per_cell)
    if devices:
        raise ConfigError(
            "a queue assigns devices itself", got=f"--devices {options.devices}",
            remedy="--devices_per_cell, or --queue gpus_per_node=N",
        )  # fmt: skip
    cluster = options.launcher.removeprefix("submitit-")
    given = _parameters(options.queue or "")
    if options.devices_per_cell > 1:
        given = {"gpus_per_node": options.devices_per_cell, **given}
    return SubmititLauncher(folder / "queue", cluster, options.processes, given)


def _parameters(text: str) -> dict[str, Any]:
    """``a=1,b=x`` as {a: 1, b: x}."""
    import yaml

    found = {}
    for part in filter(None, text.split(",")):
        name, given, value = part.partition("=")
        if not given:
            raise ConfigError("--queue is NAME=VALUE,NAME=VALUE", got=part)
        found[name.strip()] = yaml.safe_load(value)
    return found


def _for_processes(options: Mapping[str, Any], world: int) -> dict[str, Any]:
    """Options for so many processes, with the global batch that the recipe means.

    A recipe with a layout of P processes trains on P micro-batches at a time. Another number of
    them takes more or fewer accumulation steps, or else smaller micro-batches.

    Raises:
        ConfigError: the global batch cannot be kept.
    """
    from alphatoken.cli.recipes import accelerate_config

    name = options.get("accelerate_config")
    layout = {} if name in (None, "none") else accelerate_config(str(name))[1]
    meant = int(layout.get("num_processes", 1))
    if meant == world:
        return dict(options)
    rows = int(options.get("per_device_train_batch_size", 8))
    steps = int(options.get("gradient_accumulation_steps", 1)) * meant
    shared = math.gcd(steps, world)
    parts = world // shared
    if rows % parts:
        raise ConfigError(
            "the global batch of the recipe cannot be kept",
            got=f"{rows * steps} rows a step, on {world} processes a cell",
            why="cells would train on another batch than the recipe says",
            remedy="another --devices_per_cell, or a batch that they divide",
        )
    kept = {"per_device_train_batch_size": rows // parts}
    return {**options, **kept, "gradient_accumulation_steps": steps // shared}


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
    from alphatoken_lab.compare.page import collect, write_results

    found = collect(cells, folder)
    page = write_results(grid, found, folder.path)
    return say_results(found, cells, folder, page)


def say_results(
    found: Sequence[Mapping[str, Any]], cells: Sequence[Cell], folder: Any, page: Path
) -> int:
    """Print how many cells have a result, and why others have none; the exit status."""
    done = sum(record["status"] == "done" for record in found)
    print(f"{done} of {len(found)} cells have a result: {page}")
    for name, status in folder.status(cells).items():
        if status.state in ("failed", "blocked"):
            print(f"{status.state}: {name}: {status.error}", file=sys.stderr)
    return 0 if done == len(found) else 1


# --- one cell, in its own process ---------------------------------------------------------------


def _cell(path: Path, code_container: str | None) -> int:
    from alphatoken_lab.compare.running import end_with_parent

    end_with_parent()
    os.environ["TQDM_DISABLE"] = "1"
    from alphatoken.cli.training import require_libraries

    require_libraries()
    from transformers.utils import logging

    from alphatoken.support.locks import try_lock
    from alphatoken_lab.compare.cell import run_cell
    from alphatoken_lab.compare.folder import CellFolder

    logging.disable_progress_bar()
    first = os.environ.get("RANK", "0") == "0"
    place = CellFolder(path)
    whole = not place.spec()["keep_model"] or place.model.is_dir()
    if place.result() is not None and whole:  # it was queued twice
        return 0
    if first and try_lock(path / "lock") is None:
        raise ConfigError("another process is at work on this cell", got=str(path))
    try:
        run_cell(path, _trainer, _load, code_container=code_container)
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
    from alphatoken.cli.training import build_trainer, trainer_of
    from alphatoken_lab.commands.paper_figures import COLLECTED
    from alphatoken_lab.compare.pair_watch import OPTION, watch_pairs

    arguments = _arguments(path, command, options)
    trainer, notes = build_trainer(arguments, trainer_of(command)[1])
    for note in notes:
        print(f"note: {note}")
    if options.get(OPTION):
        trainer.add_callback(watch_pairs(trainer, path / COLLECTED, int(options[OPTION])))
    return trainer


def _load(
    path: Path, command: str, options: Mapping[str, Any], folder: str | None = None
) -> tuple[Any, Any]:
    """A model that is not trained here, as that trainer would load it, and its tokenizer.

    ``folder`` is of another model with the same options, such as a trained one.
    """
    from trl.trainer.utils import get_quantization_config

    from alphatoken.cli.training import load_tokenizer, model_options
    from alphatoken.model.loading import load_for_training

    arguments = _arguments(path, command, options)
    own = model_options(arguments)
    quantization = get_quantization_config(arguments.model)
    if quantization is not None and folder is None:
        own["quantization_config"] = quantization
    if folder is not None:
        own.pop("revision")
    model: Any = load_for_training(folder or arguments.model.model_name_or_path, **own)
    if quantization is None:
        model = model.to(arguments.training.device)
    return model.eval(), load_tokenizer(arguments)


def _arguments(path: Path, command: str, options: Mapping[str, Any]) -> Any:
    """Those of a cell, which its recipe holds."""
    import yaml

    from alphatoken.cli.arguments import read_arguments
    from alphatoken.cli.training import trainer_of
    from alphatoken.support.storage import write_text
    from alphatoken_lab.compare.pair_watch import OPTION

    shared = path.parent.parent
    own = {
        "fisher_cache": str(shared / "fishers"),
        "policy_cache": str(shared / "policies"),
        **_for_processes(options, int(os.environ.get("WORLD_SIZE", "1"))),
        "output_dir": str(path / "run"),
    }
    own.pop(OPTION, None)  # a callback's, none of the trainer's
    recipe = path / "recipe.yaml"
    write_text(recipe, yaml.safe_dump(own, sort_keys=False))  # by each process, the same
    return read_arguments(command, ["--config", str(recipe)], trainer_of(command)[0])
