"""``python -m benchmarks.comparison run|report|list``: the published grid, resumed where it was."""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from alphatoken.support.storage import write_json
from alphatoken_lab.commands.compare import parse
from alphatoken_lab.commands.compare_grid import read_grid
from alphatoken_lab.compare.folder import GridFolder
from alphatoken_lab.compare.grid import all_cells
from alphatoken_lab.compare.page import collect, rounded
from benchmarks.comparison.rows import write_rows
from benchmarks.data import data_folder
from benchmarks.pages import DOCS

GRID = Path(__file__).with_name("stories.yaml")
FIRST = (
    "task", "policy", "mode", "seed", "kept_tokens", "target", "retention", "overall", "time",
    "peak_memory", "status",
)  # fmt: skip
"""Fields that lead a record."""
MODEL = "stories260K/transformers"


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
        cells = all_cells(read_grid(*parse(words)))
        found = collect(cells, GridFolder(work / "cells"))
        write_json(DOCS / "comparison.json", [rounded(record, FIRST) for record in found])
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
    write_rows(partial, AutoTokenizer.from_pretrained(data_folder() / MODEL))
    partial.rename(work / "rows")


if __name__ == "__main__":
    main()
