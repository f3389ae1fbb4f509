"""An exhibit filled with what cells measured: Markdown, HTML, CSV; the paper's numbers beside.

``mean ± s``: s is the sample standard deviation over seeds (n - 1), as in the paper. The best of a
column is bold, the second best underlined, as in the paper red and blue; what is printed alike is
not marked, and the model before training takes no part.
"""

from __future__ import annotations

import csv
import html
import io
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from alphatoken_lab.compare.methods import START
from alphatoken_lab.compare.tables import Line as Cells
from alphatoken_lab.compare.tables import Record, best_two, lines_of, markdown, marked
from alphatoken_lab.paper.exhibits import Column, Exhibit, Group, Line

__all__ = [
    "Filled",
    "Row",
    "caption",
    "filled",
    "printed",
    "shown",
    "to_csv",
    "to_html",
    "to_markdown",
    "with_costs",
]

_BASE = "alphatoken"
"""The row whose step times are relative to."""


@dataclass(frozen=True)
class Row:
    """One row as shown.

    Attributes:
        name: of the row.
        method: of the grid.
        values: by column, of the seeds that are done.
        printed: by column, what the paper prints; empty where it prints nothing.
        seeds: done, and asked for.
    """

    name: str
    method: str
    values: tuple[tuple[float, ...], ...]
    printed: tuple[str, ...]
    seeds: tuple[int, int]

    def mean(self, column: int) -> float | None:
        """Mean over the seeds."""
        return statistics.fmean(self.values[column]) if self.values[column] else None


@dataclass(frozen=True)
class Filled:
    """An exhibit at one scale with its numbers: columns, rows by group, what it is measured on."""

    exhibit: Exhibit
    scale: str
    columns: tuple[Column, ...]
    groups: tuple[tuple[Group, tuple[Row, ...]], ...]
    on: str = ""

    @property
    def measured(self) -> int:
        """Rows that have a number."""
        return sum(any(row.values) for _, rows in self.groups for row in rows)


# --- numbers ------------------------------------------------------------------------------------


def with_costs(found: Sequence[Record]) -> list[Record]:
    """The records with what the runtime tables show.

    ``hours_per_epoch``: training of one epoch, scoring and masks included, from the steps that were
    measured; a static pass over the rows is in it whole, taken from the seed that did it (the
    others found it in the cache). ``selection_gb``: the selection's peak. ``relative_time``: of a
    step, over AlphaToken's of the same task and seed.
    """
    static: dict[tuple[str, str, str], float] = {}
    for one in found:
        key = (one["task"], one["policy"], one["mode"])
        static[key] = max(static.get(key, 0.0), float(one.get("static_time") or 0.0))
    base = {
        (one["task"], one["seed"]): one["time"] / one["steps"]
        for one in found
        if one["policy"] == _BASE and one.get("steps") and one.get("time")
    }
    return [{**one, **_costs(one, static, base.get((one["task"], one["seed"])))} for one in found]


def _costs(
    one: Record, static: Mapping[tuple[str, str, str], float], base: float | None
) -> dict[str, float]:
    costs: dict[str, float] = {}
    if one.get("selection_memory"):
        costs["selection_gb"] = one["selection_memory"] / 1e9
    if one.get("steps") and one.get("time"):
        step = one["time"] / one["steps"]
        if one.get("epoch_steps"):
            before = static[one["task"], one["policy"], one["mode"]]
            costs["hours_per_epoch"] = (step * one["epoch_steps"] + before) / 3600
        if base:
            costs["relative_time"] = step / base
    return costs


def filled(exhibit: Exhibit, scale: str, found: Sequence[Record], on: str = "") -> Filled:
    """The exhibit with the numbers of these records, whichever of them there are.

    Args:
        exhibit: with columns and groups.
        scale: "full" or "laptop".
        found: records of the grid's cells, as ``alphatoken_lab.compare.page.collect`` gives them.
        on: model, rows and steps, in a sentence for the caption.
    """
    columns, records = exhibit.columns[scale], with_costs(found)
    groups = []
    for group in exhibit.groups_of(scale):
        lines = {line.policy: line for line in lines_of(records, group.task)}
        rows = tuple(_row(one, lines.get(one.method), columns) for one in group.lines)
        groups.append((group, rows))
    return Filled(exhibit, scale, columns, tuple(groups), on)


def _row(line: Line, cells: Cells | None, columns: Sequence[Column]) -> Row:
    if cells is None:
        return Row(line.name, line.method, tuple(() for _ in columns), line.printed, (0, 0))
    done = sum(record["status"] == "done" for record in cells.records)
    values = tuple(tuple(cells.values(column.key)) for column in columns)
    return Row(line.name, line.method, values, line.printed, (done, len(cells.records)))


def shown(values: Sequence[float], column: Column) -> str:
    """Mean ± standard deviation, the mean alone of one seed, a dash of none."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):{column.form}}{column.unit}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values):{column.form}}"


def _places(rows: Sequence[Row], at: int, column: Column) -> dict[int, int]:
    """Row -> 0 for the best of the column, 1 for the second best."""
    if column.best == "none":
        return {}
    means = {i: row.mean(at) for i, row in enumerate(rows) if row.method != START}
    known = {i: mean for i, mean in means.items() if mean is not None}
    order = sorted(known, key=lambda i: known[i], reverse=column.best == "high")
    return best_two(order, {i: f"{mean:{column.form}}" for i, mean in known.items()})


def _cells(table: Filled) -> Iterator[tuple[Group, list[tuple[Row, list[tuple[str, int | None]]]]]]:
    """Group by group each row with its texts, and the place of each in its column."""
    # Of several groups of few rows, such as the axes of an ablation, the best is of all of them.
    together = [row for _, rows in table.groups for row in rows]
    apart = len(table.groups) > 1 and all(
        any(row.method == START for row in rows) or len(rows) > 3 for _, rows in table.groups
    )
    for group, rows in table.groups:
        among = list(rows) if apart else together
        places = [_places(among, i, column) for i, column in enumerate(table.columns)]
        at = 0 if apart else together.index(rows[0])
        yield (
            group,
            [
                (
                    row,
                    [
                        (shown(row.values[i], column), places[i].get(at + number))
                        for i, column in enumerate(table.columns)
                    ],
                )
                for number, row in enumerate(rows)
            ],
        )


def caption(table: Filled) -> str:
    """Title, what it is of, and what a reader has to know."""
    exhibit = table.exhibit
    parts = [
        f"{exhibit.title}.",
        table.on,
        exhibit.note,
        exhibit.small if table.scale != "full" else "",
    ]
    counts = {row.seeds[0] for _, rows in table.groups for row in rows if row.seeds[0]}
    if counts:
        few = "" if len(counts) == 1 else f" to {max(counts)}"
        plural = "" if counts == {1} else "s"
        parts.append(f"Mean ± sample standard deviation over {min(counts)}{few} seed{plural}.")
    return " ".join(part.strip() for part in parts if part)


# --- texts --------------------------------------------------------------------------------------


def to_markdown(table: Filled) -> str:
    """The table; the paper's own numbers below it where there are some."""
    text = [f"# {table.exhibit.label}\n", f"{caption(table)}\n"]
    heads = [table.exhibit.first, *(_head(column) for column in table.columns)]
    rows = []
    for group, lines in _cells(table):
        rows.append([f"**{group.title}**", *("" for _ in table.columns)])
        rows += [[_name(row), *(marked(*one) for one in cells)] for row, cells in lines]
    text.append(markdown(heads, rows))
    if any(line.printed for group in table.exhibit.groups for line in group.lines):
        text.append("As the paper prints them:\n")
        text.append(printed(table.exhibit))
    return "\n".join(text)


def printed(exhibit: Exhibit) -> str:
    """The paper's numbers, laid out the same."""
    columns = exhibit.columns["full"]
    rows = []
    for group in exhibit.groups:
        rows.append([f"**{group.title}**", *("" for _ in columns)])
        rows += [[line.name, *(line.printed or ["–"] * len(columns))] for line in group.lines]
    return markdown([exhibit.first, *(_head(column) for column in columns)], rows)


def _head(column: Column) -> str:
    return f"{column.over}: {column.title}" if column.over else column.title


def _name(row: Row) -> str:
    done, asked = row.seeds
    return row.name if done == asked else f"{row.name} ({done} of {asked} seeds)"


_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}
th,td{padding:.25rem .7rem;text-align:right;font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left}
thead th{border-bottom:1px solid #444} thead tr:first-child th{border-top:2px solid #444}
.over{text-align:center;border-bottom:1px solid #999}
.group td{background:#f0f0f0;font-weight:600;text-align:left}
tbody tr:last-child td{border-bottom:2px solid #444}
.best{color:#b3261e;font-weight:600} .second{color:#1f4fb3} tr.own td{background:#e6e6fa}
figure{margin:1rem 0} img{max-width:100%}
"""


def to_html(table: Filled, picture: str | None = None) -> str:
    """A page of its own, with heads over columns and colours as in the paper.

    Args:
        table: to be shown.
        picture: SVG document of the figure, if it is one.
    """
    title = html.escape(f"{table.exhibit.label}: {table.exhibit.title}")
    parts = [
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
        f"<style>{_STYLE}</style><h1>{title}</h1><p>{html.escape(caption(table))}</p>",
    ]
    if picture is not None:
        parts.append(f"<figure>{picture[picture.index('<svg') :]}</figure>")
    parts.append(_html_table(table))
    return "\n".join([*parts, "</html>\n"])


def _html_table(table: Filled) -> str:
    spans = [(over, len(list(part))) for over, part in groupby(c.over for c in table.columns)]
    over = "".join(
        f'<th colspan="{width}" class="{"over" if name else ""}">{html.escape(name)}</th>'
        for name, width in spans
    )
    heads = "".join(f"<th>{html.escape(column.title)}</th>" for column in table.columns)
    lines = [f"<table><thead><tr><th></th>{over}</tr>"]
    lines.append(f"<tr><th>{html.escape(table.exhibit.first)}</th>{heads}</tr></thead><tbody>")
    width = len(table.columns) + 1
    for group, rows in _cells(table):
        lines.append(
            f'<tr class="group"><td colspan="{width}">{html.escape(group.title)}</td></tr>'
        )
        for row, cells in rows:
            own = ' class="own"' if row.method == _BASE else ""
            shown = "".join(_html_cell(*cell) for cell in cells)
            lines.append(f"<tr{own}><td>{html.escape(_name(row))}</td>{shown}</tr>")
    return "\n".join([*lines, "</tbody></table>"])


def _html_cell(text: str, place: int | None) -> str:
    kind = {0: ' class="best"', 1: ' class="second"'}.get(-1 if place is None else place, "")
    return f"<td{kind}>{html.escape(text)}</td>"


def to_csv(table: Filled) -> str:
    """A line for each row and column: ours by seed, and the paper's."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["group", "row", "method", "column", "mean", "deviation", "values"])
    for group, rows in table.groups:
        for row in rows:
            for column, values in zip(table.columns, row.values, strict=True):
                mean = statistics.fmean(values) if values else ""
                deviation: Any = statistics.stdev(values) if len(values) > 1 else ""
                numbers = " ".join(f"{value:.6g}" for value in values)
                writer.writerow(
                    [group.title, row.name, row.method, _head(column), mean, deviation, numbers]
                )
    return text.getvalue()
