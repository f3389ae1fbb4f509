"""Problems that models answer in their own words: how many each solves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scipy.stats import binomtest

from alphatoken_lab.compare.folder import GridFolder
from alphatoken_lab.compare.grid import Grid, all_cells
from alphatoken_lab.compare.tables import markdown
from benchmarks.selection.rows import ANSWERS

__all__ = ["solved", "table"]


def solved(grid: Grid, folder: GridFolder) -> list[dict[str, Any]]:
    """Of each cell that has run: its task and method, problems that it solved, problems asked."""
    found = []
    for cell in all_cells(grid):
        result = folder.of(cell).result()
        if result is not None:
            right = round(result["target"] * ANSWERS / 100)
            found.append({"task": cell.task, "method": cell.policy, "solved": right, "of": ANSWERS})
    return found


def table(found: Sequence[Mapping[str, Any]]) -> str:
    """Their shares, with Wilson's 95 % intervals."""
    rows = []
    for one in found:
        at = binomtest(one["solved"], one["of"]).proportion_ci(method="wilson")
        share = f"{one['solved'] / one['of']:.1%} [{at.low:.1%}, {at.high:.1%}]"
        rows.append([one["task"], f"`{one['method']}`", f"{one['solved']} of {one['of']}", share])
    return markdown(["task", "method", "solved", "share"], rows)
