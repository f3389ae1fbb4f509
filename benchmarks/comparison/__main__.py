"""``python -m benchmarks.comparison run|report|list``: the published grid, resumed where it was."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from benchmarks.comparison.report import write_report
from benchmarks.comparison.rows import write_rows
from benchmarks.training.tasks import data_folder, model_folder

GRID = Path(__file__).with_name("stories.yaml")


def main() -> None:
    """Parse the command line and go."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description=__doc__)
    parser.add_argument("command", choices=["run", "report", "list"])
    parser.add_argument("--work", type=Path, default=Path("build/comparison"), help="work folder")
    parser.add_argument("--processes", type=int, default=2, help="of one thread each")
    options, more = parser.parse_known_args()
    work = options.work.resolve()
    prepare(work)
    words = ["--config", str(GRID), "--output_dir", str(work / "cells")]
    if options.command == "report":
        write_report(words, work / "cells")
        return
    from alphatoken_lab.commands import main as lab

    run = ["--dry-run"] if options.command == "list" else ["--processes", str(options.processes)]
    raise SystemExit(lab(["compare", *words, *run, *more]))


def prepare(work: Path) -> None:
    """Rows, written once, and the environment that the grid's file reads."""
    os.environ["ALPHATOKEN_DATA"] = str(data_folder())
    os.environ["COMPARISON_ROWS"] = str(work / "rows")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if (work / "rows").is_dir():
        return
    from transformers import AutoTokenizer

    partial = work / "rows.partial"
    shutil.rmtree(partial, ignore_errors=True)
    write_rows(partial, AutoTokenizer.from_pretrained(model_folder()))
    partial.rename(work / "rows")


if __name__ == "__main__":
    main()
