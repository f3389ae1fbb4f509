"""``alphatoken-lab paper --list``: every table and figure, its cells, and what they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from alphatoken_lab.commands.paper import PaperOptions
from alphatoken_lab.commands.paper_plan import Work
from alphatoken_lab.paper.exhibits import LAPTOP, SCALES, every

__all__ = ["lines"]

_HEAD = """\
Each by its label: alphatoken-lab paper NAME [--scale full|laptop]; --dry_run says what each of its
cells trains. Several tables share cells; a cell is trained once."""


def lines() -> Iterator[str]:
    """Lines of the printed list."""
    yield _HEAD
    for exhibit in every():
        yield f"\n{exhibit.label}  {exhibit.kind}, {exhibit.place}: {exhibit.title}"
        if exhibit.kind == "none":
            yield f"  {' '.join(exhibit.note.split())}"
            continue
        for scale in SCALES:
            work = Work(exhibit, PaperOptions(scale=scale))  # type: ignore[arg-type]
            yield f"  {scale:<7} {_cells(work)} of {', '.join(_needs(work))}"


def _cells(work: Work) -> str:
    cells = f"{len(work.cells)} cell{'s'[: len(work.cells) != 1]}"
    if work.exhibit.diagnosis is None:
        return cells
    diagnoses = len(work.grid.tasks)
    return f"{cells} and {diagnoses} diagnos{'i' if diagnoses == 1 else 'e'}s"


def _needs(work: Work) -> list[str]:
    """Models, rows, and at full scale the files of benchmarks and judges, by name."""
    small = work.scale == LAPTOP
    models = [Path(name).name if small else name for name in work.models()]
    files = [] if small else [Path(name).name for name in (*work.files(), *work.retention_files())]
    return [*models, *(work.datasets() or ["rows of the standard library"]), *files]
