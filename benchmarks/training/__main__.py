"""``python -m benchmarks.training run|report|list``."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from benchmarks.training.folder import WorkFolder
from benchmarks.training.grid import Cell, every_cell, main_grid


def main() -> None:
    """Parse the command line and go."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("command", choices=["run", "work", "report", "list"])
    parser.add_argument("--work", type=Path, default=Path("build/training"), help="work folder")
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--main", action="store_true", help="the main grid without variants")
    options = parser.parse_args()
    cells = [c for c in (main_grid() if options.main else every_cell()) if options.only in c.name]
    folder = WorkFolder(options.work)
    if options.command == "list":
        done = {cell["name"] for cell in folder.measured()}
        for cell in cells:
            print("done   " if cell.name in done else "missing", cell.name)
    elif options.command == "run":
        run(options, cells, folder)
    elif options.command == "work":
        work(folder, cells)
    else:
        from benchmarks.training.report import write_report

        write_report(folder.measured())


def run(options: argparse.Namespace, cells: list[Cell], folder: WorkFolder) -> None:
    """What all cells share, then the cells in several processes."""
    folder.drop_dead_claims()
    prepare(cells, options.work)
    command = [sys.executable, "-m", "benchmarks.training", "work", "--work", str(options.work)]
    command += ["--only", options.only] + ["--main"] * options.main
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [subprocess.Popen(command, env=environment) for _ in range(options.processes)]
    codes = [child.wait() for child in children]
    left = [cell.name for cell in folder.missing(cells)]
    print(f"{len(cells) - len(left)} of {len(cells)} cells measured")
    if left or any(codes):
        raise SystemExit(f"not measured: {', '.join(left)}")


def prepare(cells: list[Cell], path: Path) -> None:
    """Start models and Fishers, once, before two processes could both make them."""
    from benchmarks.training.cell import fisher_of, start_of
    from benchmarks.training.starts import STARTS, make_start

    for start in sorted({start_of(cell) for cell in cells} & set(STARTS)):
        make_start(start, path)
    valued = {(cell.task, start_of(cell)) for cell in cells if cell.policy in ("top", "bottom")}
    for task, start in sorted(valued):
        fisher_of(task, start, path)


def work(folder: WorkFolder, cells: list[Cell]) -> None:
    """Measure cells one after the other in this process."""
    import torch
    from transformers.utils import logging

    from benchmarks.training.cell import measure

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    os.environ["TQDM_DISABLE"] = "1"

    def timed(cell: Cell) -> dict[str, object]:
        started = time.perf_counter()
        found = measure(cell, folder.path)
        print(
            f"{cell.name}: target {found['target_loss']:.3f}, retention "
            f"{found['retention_loss']:.3f}, {time.perf_counter() - started:.0f} s",
            flush=True,
        )
        return {"name": cell.name, **found}

    folder.work(cells, partial(timed))


if __name__ == "__main__":
    main()
