"""What has been measured, a line a cell, kept in the repository: a grid goes on on any machine.

A line holds figures alone (losses of rows by number, tokens, seconds), no text of a row. It belongs
to a cell by the digest of everything that the cell's result depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from alphatoken.support.storage import write_json, write_jsonl
from alphatoken_lab.commands.compare import parse
from alphatoken_lab.runner.grid import REFERENCES, Cell, Grid, all_cells
from alphatoken_lab.runner.grid_file import read_grid
from alphatoken_lab.runner.running import GridFolder
from benchmarks.selection.rows import (
    DIRT,
    FLIPPED,
    GENERAL,
    LETTERS,
    LITTLE,
    LITTLE_DIRT,
    SIZES,
    STORIES,
    TARGET,
)

RESULTS = Path(__file__).with_name("results")

PLACES = ("SELECTION_ROWS", "ALPHATOKEN_MODELS", "ALPHATOKEN_DATA")
"""Variables whose folders differ between machines."""

_FIGURES = (
    "steps", "kept_tokens", "response_tokens", "effective_tokens", "kept_share", "time",
    "scoring_time", "direction_time", "setup_time", "peak_memory", "peak_memory_of", "seconds",
    "static_time", "selection_memory", "epoch_steps",
    "target", "retention", "overall", "unit", "retention_unit", "details", "rows",
)  # fmt: skip


def to_read(grid: Grid) -> list[Cell]:
    """The cells of a grid for reading figures: each is done without the model that others load."""
    return [replace(cell, keep_model=False) for cell in all_cells(grid)]


def synchronised(folder: Path, cells_of: Callable[[Grid], Sequence[Cell]] = all_cells) -> Grid:
    """The grid of a folder (GRID or GRID-drawN), once folder and store hold the same results.

    Args:
        folder: of the grid.
        cells_of: ``to_read`` for figures alone; of all cells, what lost its model runs again.
    """
    base, _, draw = folder.name.partition("-")
    config = str(Path(__file__).with_name(f"{base}.yaml"))
    before = os.environ["SELECTION_ROWS"]
    if draw:  # cells of another draw name its rows
        os.environ["SELECTION_ROWS"] = str(folder.with_name(f"rows-{draw}"))
    try:
        grid = read_grid(*parse(["--config", config, "--output_dir", str(folder)]))
        cells, place, path = cells_of(grid), GridFolder(folder), RESULTS / f"{folder.name}.jsonl"
        for one in _on_rows(draw):
            restore(cells, place, one)
        keep(cells, place, path)
    finally:
        os.environ["SELECTION_ROWS"] = before
    return grid


def _on_rows(draw: str) -> list[Path]:
    """Results of all grids on one draw of rows; a cell of the same digest has the same result."""
    files = sorted(RESULTS.glob("*.jsonl"))
    return [file for file in files if file.stem.partition("-")[2] == draw]


def digest_of(cell: Cell, others: Mapping[str, Cell]) -> str:
    """Of all that the result depends on, wherever the rows and models lie.

    Args:
        cell: of the grid.
        others: cells by name, of which those count whose models are loaded.
    """
    parts = [cell, *(others[name] for name in cell.models)]
    specs = [spec_of(part) for part in parts]
    text = json.dumps([specs, LETTERS, SIZES, TARGET, GENERAL, STORIES, DIRT], sort_keys=True)
    for name in PLACES:
        if os.environ.get(name):
            text = text.replace(os.environ[name], f"${name}")
    if "pairs-flipped" in text:
        text += f" pairs-flipped {FLIPPED}"
    if LITTLE in text:
        text += f" {LITTLE} {LITTLE_DIRT}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def spec_of(cell: Cell) -> dict[str, Any]:
    """What of a cell's description is in its digest."""
    return {k: v for k, v in cell.spec().items() if k != "keep_model"}


Digest = Callable[[Cell, Mapping[str, Cell]], str]


def keep(
    cells: Sequence[Cell], folder: GridFolder, path: Path, digest_of: Digest = digest_of
) -> int:
    """Write the lines of all finished cells; those of other cells stay.

    Returns:
        The number of lines.
    """
    lines, others = lines_of(path), {cell.name: cell for cell in cells}
    for cell in cells:
        result = folder.result(cell)
        if result is not None and cell.task != REFERENCES and folder.done(cell):
            figures = {name: _short(result[name]) for name in _FIGURES if name in result}
            digest = digest_of(cell, others)
            lines[digest] = {"cell": cell.name, "digest": digest, **figures}
    order = sorted(lines.values(), key=lambda line: (line["cell"], line["digest"]))
    if order:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, order)
    return len(order)


def restore(
    cells: Sequence[Cell], folder: GridFolder, path: Path, digest_of: Digest = digest_of
) -> int:
    """Results of cells that are kept and not in the folder; the number of them.

    A model is not kept: a cell whose model others need runs again.
    """
    lines, count = lines_of(path), 0
    others = {cell.name: cell for cell in cells}
    for cell in cells:
        line = lines.get(digest_of(cell, others))
        if line is None or cell.keep_model or folder.result(cell) is not None:
            continue
        own = {name: getattr(cell, name) for name in ("task", "policy", "mode", "seed", "kind")}
        figures = {name: value for name, value in line.items() if name in _FIGURES}
        result = {**own, "command": cell.command, "status": "done", **figures, "spec": cell.spec()}
        target = folder.place(cell)
        target.mkdir(parents=True, exist_ok=True)
        write_json(target / "result.json", result)
        count += 1
    return count


def lines_of(path: Path) -> dict[str, dict[str, Any]]:
    """What is kept in a file, by digest."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["digest"]: line for line in lines}


def _short(value: Any) -> Any:
    """Losses to five decimals: far below what seeds differ by."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else round(value, 5)
    if isinstance(value, Mapping):
        return {name: _short(one) for name, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, (list, tuple)) else value
