"""A grid's results as files: tables in Markdown and CSV, records as JSON, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alphatoken.support.storage import write_json, write_text
from alphatoken_lab.compare.folder import GridFolder
from alphatoken_lab.compare.grid import Cell, Grid
from alphatoken_lab.compare.tables import (
    Line,
    Record,
    ablation_table,
    cost_table,
    lines_of,
    problem_table,
    quality_table,
    records,
    settings_text,
    to_csv,
)

__all__ = ["READ", "collect", "draw", "rounded", "sections", "write_results"]

READ = """\
`mean ± s`, s the sample standard deviation over seeds. **Bold** is the best of a column, underlined
the second best; the model before training (`start`) takes no part. "Tokens trained on" counts
response tokens with a weight other than 0, over all steps; "effective" is (Σw)²/Σw² where weights
are soft. Time is of training: in it are scoring (a value or a weight for each token) and, for
methods by value, the validation and retention gradients of each step ("gradients"). Fitting a
Fisher, static passes and reference models are "before training" or not counted, as in the paper.
In the figures a mark is the mean (filled: native, hollow: budget) and strokes are seeds; dashed
lines are training on all tokens and the model before training; black are controls, red what selects
by token value; arrows are far off the scale.
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
    """``NAME.json``, ``NAME.csv``, ``NAME.md``; where matplotlib is there, figures of each task.

    Returns:
        The Markdown file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}.json", [rounded(record) for record in found])
    write_text(folder / f"{name}.csv", to_csv(found))
    text = [f"# {grid.about or 'Comparison'}\n", READ]
    text += sections(grid, found, variants, draw(grid, found, folder, name))
    write_text(folder / f"{name}.md", "\n".join(text).rstrip() + "\n")
    return folder / f"{name}.md"


def draw(grid: Grid, found: Sequence[Record], folder: Path, name: str) -> dict[str, Path]:
    """Figures by task and kind, "TASK quality" and "TASK cost"; none without matplotlib."""
    if find_spec("matplotlib") is None:
        return {}
    from alphatoken_lab.compare.plots import draw_cost, draw_quality

    paths: dict[str, Path] = {}
    for task in grid.tasks:
        lines = lines_of(found, task.name)
        for kind, drawn in (("quality", draw_quality), ("cost", draw_cost)):
            path = folder / f"{name}-{task.name}-{kind}.svg"
            if drawn(lines, path):
                paths[f"{task.name} {kind}"] = path
    return paths


def sections(
    grid: Grid,
    found: Sequence[Record],
    variants: Mapping[str, Sequence[str]] | None = None,
    figures: Mapping[str, Path] | None = None,
) -> list[str]:
    """Figures and tables of each task, and cells without a result."""

    def figure(title: str, alt: str) -> list[str]:
        path = (figures or {}).get(title)
        return [] if path is None else [f"![{alt}]({path.name})\n"]

    text = []
    for task in grid.tasks:
        lines: list[Line] = lines_of(found, task.name)
        text += [f"## {task.name}\n"]
        text += figure(f"{task.name} quality", f"{task.name}: retention and target by method")
        text += [part for part in (quality_table(lines), settings_text(lines)) if part]
        shown = {name for names in (variants or {}).values() for name in names}
        if variants and sum(line.policy in shown for line in lines) > 1:
            text += [f"### {task.name}: ablation\n", ablation_table(lines, variants)]
        text += [f"### {task.name}: cost\n"]
        text += figure(f"{task.name} cost", f"{task.name}: seconds and memory by method")
        text += [cost_table(lines)]
    problems = problem_table(found)
    if problems:
        text += ["## Cells without a result\n", problems]
    return text


def rounded(record: Mapping[str, Any], first: Sequence[str] = ()) -> dict[str, Any]:
    """The record as a results file holds it: the fields ``first`` lead; floats to 6 digits."""
    ordered = {name: record.get(name) for name in first} | dict(record)
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in ordered.items()}
