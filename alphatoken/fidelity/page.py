"""One self-contained HTML page about all diagnoses of a run; it needs no script and no network."""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken.fidelity.diagnosis import Cell, Diagnosis, Figure, Table
from alphatoken.fidelity.inline import inlined
from alphatoken.report.build import environment
from alphatoken.support.storage import replacing

__all__ = ["MOST_ROWS", "Section", "render_page", "write_page"]

MOST_ROWS = 200
"""Rows of a table that the page shows; its file has all of them."""

_HALF = 660
"""Pixels: a wider picture has the page to itself, two others share its width."""

_DASH, _MINUS = "\u2013", "\u2212"


@dataclass(frozen=True)
class Section:
    """One diagnostic of the page: its diagnosis, or why there is none.

    Attributes:
        name: of the diagnostic; also its anchor.
        question: what it answers.
        diagnosis: what it found, if it has run.
        failure: why it could not run, or "".
    """

    name: str
    question: str
    diagnosis: Diagnosis | None = None
    failure: str = ""

    @classmethod
    def of(cls, diagnosis: Diagnosis) -> Section:
        """A finished one."""
        return cls(diagnosis.name, diagnosis.question, diagnosis)

    @property
    def first(self) -> str:
        """One sentence for the contents."""
        if self.diagnosis is None:
            return f"Could not run: {self.failure}" if self.failure else "Not run yet."
        return self.diagnosis.answer[0] if self.diagnosis.answer else ""


def write_page(
    path: str | Path,
    sections: Sequence[Section | Diagnosis],
    *,
    title: str = "How far to trust the values",
    settings: Mapping[str, object] | None = None,
    notes: Sequence[str] = (),
    command: str = "",
) -> Path:
    """Write the page, whole or not at all, and return its path.

    Args:
        path: the HTML file.
        sections: diagnoses in the order of the page.
        title: heading of the page.
        settings: what all of them depend on, shown as a table.
        notes: sentences about the rows.
        command: what made them, to be run again.

    Raises:
        ConfigError: jinja2 is not installed.
        DataError: the file could not be written, and an old one is intact; or a figure is no SVG.
    """
    html = render_page(sections, title=title, settings=settings, notes=notes, command=command)
    with replacing(path) as temporary:
        temporary.write_text(html, encoding="utf-8")
    return Path(path)


def render_page(
    sections: Sequence[Section | Diagnosis],
    *,
    title: str = "How far to trust the values",
    settings: Mapping[str, object] | None = None,
    notes: Sequence[str] = (),
    command: str = "",
) -> str:
    """The page as text; see :func:`write_page`."""
    shown = [Section.of(one) if isinstance(one, Diagnosis) else one for one in sections]
    names = [section.name for section in shown]
    if len(set(names)) < len(names):
        raise ConfigError("a diagnostic stands twice on the page", got=", ".join(names))
    rendered: str = (
        environment("alphatoken.fidelity")
        .get_template("page.html.j2")
        .render(
            title=title,
            sections=[_variables(section) for section in shown],
            finished=sum(section.diagnosis is not None for section in shown),
            settings=dict(settings or {}),
            notes=list(notes),
            command=command,
            own_settings=_own_settings,
        )
    )
    return rendered


def _own_settings(of_one: Mapping[str, object], shared: Mapping[str, object]) -> dict[str, object]:
    """What a diagnosis depends on beyond what all of them do."""
    return {key: value for key, value in of_one.items() if shared.get(key) != value}


def _variables(section: Section) -> dict[str, Any]:
    """What the template shows of one section."""
    shared = {"anchor": _anchor(section.name), "section": section, "diagnosis": section.diagnosis}
    if section.diagnosis is None:
        return shared
    return shared | {
        "figures": [_figure(section.name, figure) for figure in section.diagnosis.figures],
        "tables": [_table(section.name, table) for table in section.diagnosis.tables],
    }


def _figure(name: str, figure: Figure) -> dict[str, Any]:
    anchor = _anchor(f"{name}-{figure.key}")
    picture = inlined(figure.svg, anchor, figure.alt)
    return {
        "anchor": anchor,
        "title": figure.title,
        "caption": figure.caption,
        "svg": picture.html,
        "width": picture.width,
        "wide": picture.width > _HALF,
        "csv": _link(figure.data),
        "file": f"{anchor}.csv",
    }


def _table(name: str, table: Table) -> dict[str, Any]:
    anchor = _anchor(f"{name}-{table.key}")
    columns = list(_columns(table))
    return {
        "anchor": anchor,
        "title": table.title,
        "note": table.note,
        "columns": columns,
        "rows": [
            [column.cells[index] for column in columns]
            for index in range(min(len(table.rows), MOST_ROWS))
        ],
        "left_out": max(0, len(table.rows) - MOST_ROWS),
        "csv": _link(table),
        "file": f"{anchor}.csv",
    }


def _anchor(text: str) -> str:
    """A name for the address line: letters, digits, hyphens."""
    return re.sub(r"[^0-9A-Za-z]+", "-", text).strip("-")


def _link(table: Table) -> str:
    """The whole table as the address of a download, without any script."""
    coded = base64.b64encode(table.csv().encode()).decode()
    return f"data:text/csv;charset=utf-8;base64,{coded}"


# --- cells ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    name: str
    numeric: bool
    cells: list[str]


def _columns(table: Table) -> Iterator[_Column]:
    """Columns as shown: an estimate's four become one, ``value [low, high]``.

    Its count stands in the heading where all rows have the same; otherwise in a column of its
    own, which estimates with the same counts share.
    """
    rows = table.rows[:MOST_ROWS]
    cells = {name: [row[place] for row in rows] for place, name in enumerate(table.columns)}
    estimates = [name for name in cells if all(part in cells for part in _parts(name))]
    inside = {part for name in estimates for part in _parts(name)}
    differing = [cells[_parts(name)[2]] for name in estimates if _several(cells[_parts(name)[2]])]
    alone = all(counts == differing[0] for counts in differing)
    said: list[list[Cell]] = []
    for name in table.columns:
        if name in inside:
            continue
        if name not in estimates:
            numeric = all(_is_number(cell) or cell is None for cell in cells[name])
            yield _Column(_heading(name), numeric, [_shown(cell) for cell in cells[name]])
            continue
        low, high, count = (cells[part] for part in _parts(name))
        shown = [_interval(*three) for three in zip(cells[name], low, high, strict=True)]
        if not _several(count):
            known = [cell for cell in count if cell is not None][:1]
            more = "".join(f", n\u00a0=\u00a0{_shown(cell)}" for cell in known)
            yield _Column(_heading(name) + more, True, shown)
            continue
        yield _Column(_heading(name), True, shown)
        if count not in said:
            said.append(count)
            heading = "n" if alone else f"{_heading(name)}, n"
            yield _Column(heading, True, [_shown(cell) for cell in count])


def _parts(name: str) -> list[str]:
    """The columns that belong to an estimate, as ``Table.of`` names them."""
    return [f"{name}_low", f"{name}_high", f"{name}_n"]


def _several(counts: Sequence[Cell]) -> bool:
    return len({count for count in counts if count is not None}) > 1


def _is_number(cell: Cell) -> bool:
    return isinstance(cell, (int, float)) and not isinstance(cell, bool)


def _heading(name: str) -> str:
    return name.replace("_", " ")


def _interval(value: Cell, low: Cell, high: Cell) -> str:
    if _missing(value):
        return "not defined"
    if not all(isinstance(cell, (int, float)) for cell in (value, low, high)):
        return f"{_shown(value)} [{_shown(low)}, {_shown(high)}]"
    numbers = [float(cell) for cell in (value, low, high) if cell is not None]
    largest = max(map(abs, numbers))
    if not all(map(math.isfinite, numbers)) or not 1e-3 <= largest < 1e5:
        return f"{_shown(value)} [{_shown(low)}, {_shown(high)}]"
    # As many decimals as the interval's width makes meaningful, the same for all three.
    width = numbers[2] - numbers[1] or 0.1 * largest
    decimals = min(6, max(0, 1 - math.floor(math.log10(width))))
    texts = [f"{number:.{decimals}f}".replace("-", _MINUS) for number in numbers]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"


def _missing(cell: Cell) -> bool:
    return cell is None or (isinstance(cell, float) and math.isnan(cell))


def _shown(cell: Cell) -> str:
    """A short text.

    >>> [_shown(cell) for cell in (None, True, 12345, 0.123456, -1.2e-7, 3.0, "x")]
    ['–', 'yes', '12,345', '0.123', '−1.2e-07', '3', 'x']
    """
    if _missing(cell) or cell is None:
        return _DASH
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return cell if cell.strip(" ") else "\u2423" * len(cell)  # a token may be a space
    if isinstance(cell, float) and math.isinf(cell):
        return "∞" if cell > 0 else f"{_MINUS}∞"
    if float(cell).is_integer() and abs(cell) < 1e15:
        text = f"{int(cell):,}"
    else:
        text = f"{cell:.3g}" if 1e-3 <= abs(cell) < 1e5 else f"{cell:.2g}"
    return text.replace("-", _MINUS, 1) if text.startswith("-") else text
