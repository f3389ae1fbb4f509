"""What the laptop scale has measured, kept in ``results/``: figures alone, so that it goes on
on any machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alphatoken.demo.models import models_folder
from alphatoken_lab.paper.exhibits import LAPTOP, Exhibit, every
from alphatoken_lab.paper.options import PaperOptions
from alphatoken_lab.paper.rows import LETTERS, OTHER, SIZES
from alphatoken_lab.paper.work import Work
from alphatoken_lab.runner.grid import Cell
from alphatoken_lab.runner.records import Record, records
from alphatoken_lab.runner.running import Status
from benchmarks.paper.sources import GENERAL, STORIES
from benchmarks.selection.store import keep, lines_of, restore, spec_of

RESULTS = Path(__file__).with_name("results")


def work_of(exhibit: Exhibit, folder: Path) -> Work:
    """The exhibit in small, its cells below a folder."""
    return Work(exhibit, PaperOptions(scale=LAPTOP, output_dir=str(folder)))


def _digest(work: Work) -> Any:
    """Of all that a cell's result depends on, wherever rows and models lie."""
    models = str(models_folder().absolute())

    def digest_of(cell: Cell, others: Mapping[str, Cell]) -> str:
        parts = [cell, *(others[name] for name in cell.models)]
        specs = [spec_of(part) for part in parts]
        sizes = [SIZES[work.family], OTHER, LETTERS, GENERAL, STORIES]
        text = json.dumps([specs, sizes], sort_keys=True)
        text = text.replace(str(work.rows), "$PAPER_ROWS").replace(models, "$ALPHATOKEN_MODELS")
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    return digest_of


def _path(work: Work) -> Path:
    return RESULTS / f"{work.family}.jsonl"


def synchronise(folder: Path) -> None:
    """Let the folder of cells and the store hold the same results, of all exhibits."""
    for exhibit in every():
        if exhibit.kind != "none":
            work = work_of(exhibit, folder)
            restore(work.cells, work.folder, _path(work), _digest(work))
            if work.folder.path.is_dir():
                keep(work.cells, work.folder, _path(work), _digest(work))


def kept_records(work: Work) -> list[Record]:
    """Records of the exhibit's cells from the store alone."""
    lines, digest = lines_of(_path(work)), _digest(work)
    others = {cell.name: cell for cell in work.cells}
    kept = {cell.name: lines.get(digest(cell, others)) for cell in work.cells}
    status = {name: Status("missing" if line is None else "done") for name, line in kept.items()}
    return records(work.cells, kept, status)
