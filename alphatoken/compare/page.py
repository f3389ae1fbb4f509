"""A grid's results as files: tables in Markdown and CSV, records as JSON, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alphatoken.compare.folder import GridFolder, write_json
from alphatoken.compare.grid import Cell, Grid
from alphatoken.compare.tables import (
    Line,
    Record,
    ablation_table,
    cost_table,
    lines_of,
    problem_table,
    quality_table,
    records,
    to_csv,
)
from alphatoken.storage import replacing

__all__ = ["READ", "collect", "draw", "sections", "write_results"]

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


def write_results(
    grid: Grid,
    found: Sequence[Record],
    folder: Path,
    *,
    name: str = "comparison",
    variants: Mapping[str, Sequence[str]] | None = None,
) -> Path:
    """``NAME.json``, ``NAME.csv``, ``NAME.md`` and, where matplotlib is there, two figures.

    Returns:
        The Markdown file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", [_rounded(record) for record in found])
    with replacing(folder / f"{name}.csv") as temporary:
        temporary.write_text(to_csv(found), encoding="utf-8")
    drawn = draw(grid, found, folder, name)
    text = [f"# {grid.about or 'Comparison'}\n", READ]
    text += [f"![{path.stem}]({path.name})\n" for path in drawn]
    text += sections(grid, found, variants)
    with replacing(folder / f"{name}.md") as temporary:
        temporary.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    return folder / f"{name}.md"


def draw(grid: Grid, found: Sequence[Record], folder: Path, name: str) -> list[Path]:
    """The figures; none where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        return []
    from alphatoken.compare.plots import draw_quality, draw_time

    lines = {task.name: lines_of(found, task.name) for task in grid.tasks}
    paths = [folder / f"{name}-quality.svg", folder / f"{name}-time.svg"]
    draw_quality(lines, paths[0])
    draw_time(lines, paths[1])
    return paths


def sections(
    grid: Grid, found: Sequence[Record], variants: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """Tables of each task, and cells without a result."""
    text = []
    for task in grid.tasks:
        lines: list[Line] = lines_of(found, task.name)
        text += [f"## {task.name}\n", quality_table(lines)]
        shown = {name for names in (variants or {}).values() for name in names}
        if variants and sum(line.policy in shown for line in lines) > 1:
            text += [f"### {task.name}: ablation\n", ablation_table(lines, variants)]
        text += [f"### {task.name}: cost\n", cost_table(lines)]
    problems = problem_table(found)
    if problems:
        text += ["## Cells without a result\n", problems]
    return text


def _rounded(record: Mapping[str, Any]) -> dict[str, Any]:
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in record.items()}
