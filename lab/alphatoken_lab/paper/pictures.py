"""Figures of the paper that show the numbers of a grid: bars of methods, lines over a setting."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from alphatoken.errors import ConfigError, require_choice
from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.intervals import Estimate
from alphatoken.fidelity.plots import Panel, Series, picture
from alphatoken_lab.paper.layout import Filled, Row, caption

__all__ = ["drawn"]


def drawn(table: Filled) -> Figure:
    """The figure of an exhibit; bars reach from the least to the largest of the seeds.

    Raises:
        ConfigError: the exhibit shows no picture, or nothing was measured yet.
    """
    kind = table.exhibit.picture
    require_choice(f"the picture of {table.exhibit.label}", kind, _KINDS)
    if not table.measured:
        raise ConfigError(
            "there is nothing to draw yet", got=table.exhibit.label, remedy="run its cells first"
        )
    panels, across = _KINDS[str(kind)](table)
    title = table.exhibit.title
    lines = -(-len(panels) // across)
    size = (2.6 * across, 2.4 * lines + 0.6)
    text = caption(table)
    return picture(table.exhibit.name, title, text, _data(table), *panels, size=size, across=across)


def _bars(table: Filled) -> tuple[list[Panel], int]:
    """One panel a column: the methods beside each other."""
    rows = [row for _, group in table.groups for row in group]
    names = [row.name for row in rows]
    return [
        Panel(
            [Series("", names, [_over_seeds(row, at) for row in rows])],
            columns=names,
            title=column.title,
            ylabel=column.over or column.title,
        )
        for at, column in enumerate(table.columns)
    ], len(table.columns)


def _lines(table: Filled) -> tuple[list[Panel], int]:
    """One panel a column and a group: the measure over the setting's values."""
    panels = []
    for at, column in enumerate(table.columns):
        for group, rows in table.groups:
            x = [float(row.name) for row in rows]
            y = [_over_seeds(row, at) for row in rows]
            title = group.title if at == 0 else ""
            label = f"{column.over}: {column.title}" if column.over else column.title
            panels.append(Panel([Series("", x, y, joined=True)], title=title, ylabel=label))
    return panels, len(table.groups)


_KINDS: dict[str, Callable[[Filled], tuple[list[Panel], int]]] = {"bars": _bars, "lines": _lines}


def _over_seeds(row: Row, column: int) -> Any:
    """The mean with the range of the seeds; a bare number of one seed, a gap of none."""
    values = row.values[column]
    if len(values) < 2:
        return values[0] if values else None
    return Estimate(statistics.fmean(values), min(values), max(values), len(values))


def _data(table: Filled) -> Table:
    records: Sequence[dict[str, Any]] = [
        {
            "group": group.title,
            "row": row.name,
            **{f"{c.over} {c.title}".strip(): row.mean(i) for i, c in enumerate(table.columns)},
        }
        for group, rows in table.groups
        for row in rows
    ]
    return Table.of(table.exhibit.name, table.exhibit.title, records)
