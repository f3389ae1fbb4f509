"""The result of a diagnostic: conclusion, tables and figures, its files, and its part of a page."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from alphatoken.diagnose.statistics import Estimate
from alphatoken.errors import DataError
from alphatoken.score import page
from alphatoken.support.storage import write_text

Cell = str | int | float | bool | None
_FILE = "diagnosis.json"
_ENDS = ("low", "high", "n")
"""After the name of an estimate: the columns of its interval and its count."""

GOOD, DOUBTFUL, BAD = MARKS = ("good", "doubtful", "bad")
"""How a diagnosis came out; "" of one that only describes."""

_CLEAR, _POOR = 0.8, 0.5

MOST_ROWS = 200
"""Rows of a table that the page shows; its file has all of them."""


def graded(estimate: Estimate) -> str:
    """The mark of a share or a rank correlation that is 1 at best.

    Good where its whole interval lies at 0.8 or above, bad where all of it lies below 0.5, and
    doubtful otherwise; no mark where it is not defined.

    >>> [graded(Estimate(x, x - 0.1, x + 0.1, 48)) for x in (0.95, 0.85, 0.45, 0.2)]
    ['good', 'doubtful', 'doubtful', 'bad']
    >>> graded(Estimate.undefined(3, "3 tokens, 8 needed"))
    ''
    """
    if not estimate.defined:
        return ""
    if estimate.low >= _CLEAR:
        return GOOD
    return BAD if estimate.high < _POOR else DOUBTFUL


LEAD = (
    "Each answers one question about the values on this model and these rows. A number in brackets "
    "is a 95\u00a0% interval over rows drawn again and again; with few rows it is over single "
    "tokens and too narrow, as a note says."
)


@dataclass(frozen=True)
class Table:
    """A table of columns and rows.

    Attributes:
        key: name of its CSV file, without suffix.
        title: heading.
        columns: names, unique.
        rows: one cell a column; NaN and None are shown as a dash.
        note: what a reader must know of it.
    """

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""

    @classmethod
    def of(
        cls, key: str, title: str, records: Sequence[Mapping[str, Any]], note: str = ""
    ) -> Table:
        """Make a table of records of one kind; an ``Estimate`` becomes four columns.

        Value, low, high and count are then in ``NAME``, ``NAME_low``, ``NAME_high``, ``NAME_n``,
        so that no number stands without its interval.
        """
        flat = [_flat(record) for record in records]
        columns = tuple(dict.fromkeys(name for record in flat for name in record))
        rows = tuple(tuple(record.get(name) for name in columns) for record in flat)
        return cls(key, title, columns, rows, note)

    def csv(self) -> str:
        """RFC 4180 text with a header; None and NaN are empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_plain(cell) for cell in row] for row in self.rows)
        return text.getvalue()

    def estimate(self, row: int, name: str) -> Estimate:
        """The estimate in column ``NAME`` and the three columns that belong to it."""
        record: dict[str, Any] = self.records()[row]
        *numbers, count = (record[part] for part in (name, *_parts(name)))
        value, low, high = (math.nan if cell is None else float(cell) for cell in numbers)
        return Estimate(value, low, high, int(count))

    def records(self) -> list[dict[str, Cell]]:
        """One mapping a row."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def _parts(name: str) -> tuple[str, ...]:
    return tuple(f"{name}_{end}" for end in _ENDS)


def _flat(record: Mapping[str, Any]) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for name, cell in record.items():
        if isinstance(cell, Estimate):
            cells[name] = cell.value
            cells |= zip(_parts(name), (cell.low, cell.high, cell.count), strict=True)
        else:
            cells[name] = cell
    return cells


def _plain(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):
        return ""
    return f"{cell:.10g}" if isinstance(cell, float) else str(cell)


@dataclass(frozen=True)
class Drawing:
    """One picture with its data.

    Attributes:
        key: name of its files, without suffix.
        title: heading.
        caption: what to look for, in a sentence or two.
        data: what was drawn; downloadable from the page, and a CSV file.
        svg: the picture; refers to nothing outside itself.
        alt: what it shows, for those who do not see it.
    """

    key: str
    title: str
    caption: str
    data: Table
    svg: str
    alt: str


@dataclass(frozen=True)
class Diagnosis:
    """The result of one diagnostic.

    Attributes:
        name: of the diagnostic, as on the command line.
        question: what it answers.
        conclusion: what it comes to, in a sentence with its number.
        tables: numbers.
        figures: pictures.
        notes: what was sampled or left out, and warnings.
        settings: what the numbers depend on.
        next_command: what to run next, or "".
        next_time: how long that takes here, by what this took; "" where it is not known.
        mark: one of ``MARKS``, or "".
        lists: title -> rows in colours, by ``value_page.row_list``; shown before all figures.
    """

    name: str
    question: str
    conclusion: str
    tables: tuple[Table, ...] = ()
    figures: tuple[Drawing, ...] = ()
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    next_command: str = ""
    next_time: str = ""
    mark: str = ""
    lists: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def table(self, key: str) -> Table:
        """The table named ``key``; KeyError if there is none."""
        return {table.key: table for table in self.tables}[key]

    def figure(self, key: str) -> Drawing:
        """The figure named ``key``; KeyError if there is none."""
        return {figure.key: figure for figure in self.figures}[key]

    def save(self, folder: str | Path) -> None:
        """Write tables (CSV), figures (SVG, CSV), and ``diagnosis.json`` last.

        Each file is whole or not there; a folder with ``diagnosis.json`` is finished.

        Raises:
            DataError: a file could not be written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for table in (*self.tables, *(figure.data for figure in self.figures)):
            write_text(folder / f"{table.key}.csv", table.csv())
        for figure in self.figures:
            write_text(folder / f"{figure.key}.svg", figure.svg)
        # Last: a folder that has this file is whole, also after a killed process.
        write_text(folder / _FILE, self._json())

    def _json(self) -> str:
        record = asdict(self)
        for figure in record["figures"]:
            del figure["svg"]  # has a file of its own
        for table in (*record["tables"], *(figure["data"] for figure in record["figures"])):
            # JSON has no NaN; what is not finite is shown and read as a missing number.
            table["rows"] = [[_finite(cell) for cell in row] for row in table["rows"]]
        return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False, default=str)

    @staticmethod
    def finished(folder: str | Path) -> bool:
        """True if ``save`` came to its end in this folder."""
        return (Path(folder) / _FILE).is_file()

    @classmethod
    def load(cls, folder: str | Path) -> Diagnosis:
        """Read what ``save`` wrote.

        Raises:
            DataError: it is missing, cut, or something else.
        """
        folder = Path(folder)
        try:
            record = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            for figure in record["figures"]:
                figure["data"] = _read_table(figure["data"])
                figure["svg"] = (folder / f"{figure['key']}.svg").read_text(encoding="utf-8")
            record["figures"] = tuple(Drawing(**figure) for figure in record["figures"])
            record["tables"] = tuple(map(_read_table, record["tables"]))
            return cls(**{**record, "notes": tuple(record["notes"])})
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise DataError(
                "a finished diagnosis cannot be read",
                got=f"{folder}: {type(problem).__name__}: {problem}",
                remedy="remove the folder and run it again",
            ) from problem


def _finite(cell: Cell) -> Cell:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell


def _read_table(record: Mapping[str, Any]) -> Table:
    rows = tuple(map(tuple, record["rows"]))
    return Table(**{**record, "columns": tuple(record["columns"]), "rows": rows})


def overall(diagnoses: Sequence[Diagnosis]) -> str:
    """One sentence on the marks of all; "" where there is none.

    >>> marks = {"data": "good", "utility": "bad", "drift": ""}
    >>> overall([Diagnosis(name, "?", "!", mark=mark) for name, mark in marks.items()])
    'Bad: utility. Good: data.'
    """
    by_mark = {
        mark: [_spoken(one.name) for one in diagnoses if one.mark == mark] for mark in MARKS[::-1]
    }
    return " ".join(
        f"{mark.capitalize()}: {', '.join(names)}." for mark, names in by_mark.items() if names
    )


def _spoken(name: str) -> str:
    return name.replace("-", " ")


# --- on a page -----------------------------------------------------------------------------------


def section_of(
    name: str,
    question: str,
    diagnosis: Diagnosis | None,
    *,
    failure: str = "",
    shared: Mapping[str, object] | None = None,
) -> page.Section:
    """A diagnostic as a page shows it.

    Args:
        name: of the diagnostic; also its anchor.
        question: what it answers.
        diagnosis: if it has run; None otherwise.
        failure: why it could not run, or "".
        shared: settings that stand at the end of the page, and are left out here.
    """
    anchor, spoken = page.anchor_of(name), _spoken(name).capitalize()
    if diagnosis is None:
        state = f"Could not run: {failure}" if failure else "Not run yet."
        return page.Section(anchor, question, spoken, state)
    pictures = {
        page.anchor_of(f"{name}-{one.key}-figure"): (one.title, one.caption, one.svg, one.alt)
        for one in diagnosis.figures
    }
    tables = (_table_html(table, question) for table in diagnosis.tables)
    return page.Section(
        anchor,
        question,
        spoken,
        verdict=diagnosis.conclusion,
        html="".join(
            [
                _rows_html(diagnosis.lists, f"{anchor}-next" if diagnosis.next_command else ""),
                _next_html(diagnosis, f"{anchor}-next"),
                page.pictures_html(pictures),
                *tables,
            ]
        ),
        notes=diagnosis.notes,
        settings={k: v for k, v in diagnosis.settings.items() if (shared or {}).get(k) != v},
        mark=diagnosis.mark,
        lists=[*diagnosis.lists.values()],
    )


def _rows_html(lists: Mapping[str, Mapping[str, Any]], below: str) -> str:
    """What their colours say, the one scale, and where the page's script draws them.

    A link leads to the command ``below``, which would push the first row off the first screen.
    """
    if not lists:
        return ""
    first, *_ = lists.values()
    sides = {one["anchor"]: title for title, one in lists.items()}
    link = f' <a href="#{below}">What to run next</a>' if below else ""
    return (
        f'<p class="aside">{escape(first["lead"])}{link}</p>'
        f"{page.parts().scale(page.number(first['full']), first['unit'])}"
        f"{page.parts().ends_of(sides)}"
    )


def _next_html(diagnosis: Diagnosis, anchor: str) -> str:
    command = escape(diagnosis.next_command)
    if not command:
        return ""
    takes = f" ({escape(diagnosis.next_time)} here)" if diagnosis.next_time else ""
    return f'<p id="{anchor}">Next{takes}:</p><code class="command">{command}</code>'


def _table_html(table: Table, question: str) -> str:
    heading = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    return heading + page.table_html(
        list(_columns(table)),
        table.title or question,
        note=table.note,
        left_out=max(0, len(table.rows) - MOST_ROWS),
    )


def _columns(table: Table) -> Iterator[page.Column]:
    rows = table.rows[:MOST_ROWS]
    cells = {name: [row[place] for row in rows] for place, name in enumerate(table.columns)}
    estimates = [name for name in cells if cells.keys() >= {*_parts(name)}]
    # The four columns of an estimate are shown as one, ``value [low, high]``.
    inside = {part for name in estimates for part in _parts(name)}
    for name, own in cells.items():
        heading = name.replace("_", " ")
        if name in estimates:
            ends = (cells[part] for part in _parts(name)[:2])
            shown = [page.interval(*cell) for cell in zip(own, *ends, strict=True)]
            yield heading, "number", shown
        elif name not in inside:
            words = any(isinstance(cell, (str, bool)) for cell in own)
            shown = [page.cell_text(cell) for cell in own]
            yield heading, "words" if words else "number", shown
