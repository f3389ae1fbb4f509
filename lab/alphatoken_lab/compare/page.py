"""A grid's results as files: tables in Markdown and CSV, records as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alphatoken.support.storage import write_json, write_text
from alphatoken_lab.compare.folder import GridFolder
from alphatoken_lab.compare.grid import Cell, Grid
from alphatoken_lab.compare.tables import (
    Line,
    Record,
    cost_table,
    lines_of,
    problem_table,
    quality_table,
    records,
    settings_text,
    to_csv,
)

__all__ = ["READ", "collect", "rounded", "sections", "write_results"]

READ = """\
`mean ± s`, s the sample standard deviation over seeds. **Bold** is the best of a column, underlined
the second best; the model before training (`start`) takes no part. "Tokens trained on" counts
response tokens with a weight other than 0, over all steps; "effective" is (Σw)²/Σw² where weights
are soft. Time is of training: in it are scoring (a value or a weight for each token) and, for
methods by value, the validation and retention gradients of each step ("gradients"). Fitting a
Fisher, static passes and reference models are "before training" or not counted, as in the paper.
"""


def collect(cells: Sequence[Cell], folder: GridFolder) -> list[Record]:
    """Records of all cells, as they are now."""
    status = folder.status(cells)
    results = {cell.name: folder.of(cell).result() for cell in cells}
    done = {name: found for name, found in results.items() if status[name].state == "done"}
    return records(cells, done, status)


def write_results(grid: Grid, found: Sequence[Record], folder: Path) -> Path:
    """Write ``comparison.json``, ``comparison.csv``, ``comparison.md``.

    Returns:
        The Markdown file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "comparison.json", [rounded(record) for record in found])
    write_text(folder / "comparison.csv", to_csv(found))
    text = [f"# {grid.about or 'Comparison'}\n", READ]
    text += sections(grid, found)
    page = folder / "comparison.md"
    write_text(page, "\n".join(text).rstrip() + "\n")
    return page


def sections(grid: Grid, found: Sequence[Record]) -> list[str]:
    """Tables of each task, and cells without a result."""
    text = []
    for task in grid.tasks:
        lines: list[Line] = lines_of(found, task.name)
        text += [f"## {task.name}\n"]
        text += [part for part in (quality_table(lines), settings_text(lines)) if part]
        text += [f"### {task.name}: cost\n", cost_table(lines)]
    problems = problem_table(found)
    if problems:
        text += ["## Cells without a result\n", problems]
    return text


def rounded(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record as a results file holds it: floats to 6 digits."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in record.items()}
