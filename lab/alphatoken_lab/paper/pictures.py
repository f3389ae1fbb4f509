"""Figures of the paper that show the numbers of a grid: bars of methods, lines over a setting."""

from __future__ import annotations

import statistics
from typing import Any

from alphatoken.diagnose.diagnosis import Drawing, Table
from alphatoken.diagnose.figures import Figure, draw
from alphatoken.diagnose.statistics import Estimate
from alphatoken.errors import ConfigError, require_choice
from alphatoken_lab.paper.layout import Filled, Row, caption

__all__ = ["drawn"]


def drawn(table: Filled) -> Drawing:
    """The figure of an exhibit; bars reach from the least to the largest of the seeds.

    Raises:
        ConfigError: the exhibit shows no picture, or nothing was measured yet.
    """
    kind = str(table.exhibit.picture)
    require_choice(f"the picture of {table.exhibit.label}", kind, ("bars", "lines"))
    if not table.measured:
        raise ConfigError(
            "there is nothing to draw yet", got=table.exhibit.label, remedy="run its cells first"
        )
    groups = len(table.groups)
    return draw(
        Figure(
            kind,
            table.exhibit.name,
            _data(table, kind),
            table.exhibit.title,
            caption(table),
            x="row",
            y="value",
            facets="panel",
            xlabel=" ",
            ylabel="mean over the seeds",
            across=len(table.columns) if kind == "bars" else groups,
        )
    )


def _data(table: Filled, kind: str) -> Table:
    """One record a column and row; lines have a panel for each group too, over its numbers."""
    records: list[dict[str, Any]] = []
    for at, column in enumerate(table.columns):
        measure = f"{column.over}: {column.title}" if column.over else column.title
        records += [
            {
                "panel": f"{group.title}\n{measure}" if kind == "lines" else measure,
                "row": float(row.name) if kind == "lines" else row.name,
                "value": _over_seeds(row, at),
            }
            for group, rows in table.groups
            for row in rows
        ]
    return Table.of(table.exhibit.name, table.exhibit.title, records)


def _over_seeds(row: Row, column: int) -> Any:
    """The mean with the range of the seeds; a bare number of one seed, a gap of none."""
    values = row.values[column]
    if len(values) < 2:
        return values[0] if values else None
    return Estimate(statistics.fmean(values), min(values), max(values), len(values))
