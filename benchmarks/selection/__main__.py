"""``python -m benchmarks.selection run|find|list|races|report [GRID]``: resumed where it was."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from alphatoken.demo.models import GEMMA3, SMOLLM2, models_folder
from benchmarks.data import data_folder
from benchmarks.pages import DOCS
from benchmarks.selection import races
from benchmarks.selection.report import MODELS, write_report
from benchmarks.selection.rows import write_later, write_rows
from benchmarks.selection.store import RESULTS, synchronised

HERE = Path(__file__).parent
FOLDERS = {name: GEMMA3.name if "gemma3" in name else SMOLLM2.name for name in MODELS}


def main() -> None:
    """Parse the command line and go."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.selection", description=__doc__)
    parser.add_argument("command", choices=["run", "find", "list", "races", "report"])
    parser.add_argument("grid", choices=[*MODELS], nargs="?", help="smollm2; races: rivals")
    parser.add_argument("--work", type=Path, default=Path("build/selection"), help="work folder")
    parser.add_argument(
        "--draw", type=int, default=0, help="of rows and dirt; others than 0 confirm the first"
    )
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    parser.add_argument("--seeds", type=int, nargs="*", help="those of the grid; races: 0")
    parser.add_argument("--tasks", nargs="*", help="those of the grid; races: all kinds of rows")
    options, more = parser.parse_known_args()
    options.grid = options.grid or ("rivals" if options.command == "races" else "smollm2")
    if options.command == "races" and options.grid not in races.SETTINGS:
        parser.error(f"races are of {', '.join(races.SETTINGS)}, not {options.grid}")
    work = options.work.resolve()
    # The report is of all draws; each names its own rows.
    prepare(work, 0 if options.command == "report" else options.draw)
    folder = f"{options.grid}{_suffix(options.draw)}"
    if options.command == "report":
        print(write_report(work))
        return
    model, rows = str(models_folder() / FOLDERS[options.grid]), Path(os.environ["SELECTION_ROWS"])
    if options.command == "races":
        asked = [
            races.Race(options.grid, task, options.draw, seed)
            for seed in options.seeds or [0]
            for task in options.tasks or [*races.KINDS]
        ]
        races.run(work, model, rows, asked)
        races.report(DOCS / "races.json")
        return
    more += ["--seeds", *map(str, options.seeds)] if options.seeds else []
    more += ["--tasks", *options.tasks] if options.tasks else []
    if options.command == "find":
        from benchmarks.selection.finding import main as find

        find(model, rows, RESULTS / f"finding-{folder}.json")
        return
    from alphatoken_lab.commands import main as lab

    config = str(HERE / f"{options.grid}.yaml")
    words = ["compare", "--config", config, "--output_dir", str(work / folder)]
    words += ["--dry_run"] if options.command == "list" else [f"--processes={options.processes}"]
    synchronised(work / folder)
    try:
        raise SystemExit(lab([*words, *more]))
    finally:
        synchronised(work / folder)


def _suffix(draw: int) -> str:
    return f"-draw{draw}" if draw else ""


def prepare(work: Path, draw: int = 0) -> None:
    """Rows, written once, and the environment that the grids' files read."""
    os.environ["ALPHATOKEN_DATA"] = str(data_folder())
    os.environ["ALPHATOKEN_MODELS"] = str(models_folder())
    rows = Path(os.environ.setdefault("SELECTION_ROWS", str(work / f"rows{_suffix(draw)}")))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not rows.is_dir():
        partial = rows.with_name("rows.partial")
        shutil.rmtree(partial, ignore_errors=True)
        write_rows(partial, draw)
        partial.rename(rows)
    if (rows / "long-clean.jsonl").exists():
        write_later(rows, draw)


if __name__ == "__main__":
    main()
