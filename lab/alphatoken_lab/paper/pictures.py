"""Figures of the paper that show the numbers of a grid: bars of methods, lines over a setting."""

from __future__ import annotations

import statistics
from typing import Any

from alphatoken.diagnose.diagnosis import Drawing
from alphatoken.diagnose.diagnosis import Table as Data
from alphatoken.diagnose.figures import Figure, draw
from alphatoken.diagnose.statistics import Estimate
from alphatoken.errors import ConfigError, require_choice
from alphatoken_lab.paper.exhibits import Exhibit
from alphatoken_lab.runner.tables import Table

__all__ = ["draw_table"]


def draw_table(exhibit: Exhibit, table: Table) -> Drawing:
    """The figure of an exhibit; bars reach from the least to the largest of the seeds.

    Raises:
        ConfigError: the exhibit shows no picture, or nothing was measured yet.
    """
    kind = str(exhibit.picture)
    require_choice(f"the picture of {exhibit.label}", kind, ("bars", "lines"))
    if not table.measured:
        raise ConfigError(
            "there is nothing to draw yet", got=exhibit.label, remedy="run its cells first"
        )
    # One record a column and row; lines have a panel for each group too, over its numbers.
    points: list[dict[str, Any]] = []
    for column in table.columns:
        for title, rows in table.groups:
            for row in rows:
                values = row.values(column.key)
                value: Any = values[0] if values else None
                if len(values) > 1:
                    value = Estimate(
                        statistics.fmean(values), min(values), max(values), len(values)
                    )
                panel = f"{title}\n{column.head}" if kind == "lines" else column.head
                name = float(row.name) if kind == "lines" else row.name
                points.append({"panel": panel, "row": name, "value": value})
    figure = Figure(
        kind,
        exhibit.name,
        Data.of(exhibit.name, exhibit.title, points),
        exhibit.title,
        table.caption,
        x="row",
        y="value",
        facets="panel",
        xlabel=" ",
        ylabel="mean over the seeds",
        across=len(table.columns) if kind == "bars" else len(table.groups),
    )
    return draw(figure)
