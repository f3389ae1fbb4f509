"""One self-contained HTML page about all diagnoses of a run; it needs no script and no network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from alphatoken.errors import ConfigError
from alphatoken.fidelity.diagnosis import Cell, Diagnosis, Drawing, Table
from alphatoken.report import page
from alphatoken.report.numbers import cell_text, interval

__all__ = ["MOST_ROWS", "Section", "render_page"]


def _spoken(name: str) -> str:
    """A diagnostic's name as words: "value-propagation" is "Value propagation"."""
    return name.replace("-", " ").replace("_", " ").capitalize()


MOST_ROWS = 200
"""Rows of a table that the page shows; its file has all of them."""

_LEAD = (
    "Each answers one question about the values on this model and these rows. A number in brackets "
    "is a 95\u00a0% interval over rows drawn again and again; with few rows it is over single "
    "tokens and too narrow, as a note says."
)


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


def render_page(
    sections: Sequence[Section | Diagnosis],
    *,
    title: str = "How far to trust the values",
    settings: Mapping[str, object] | None = None,
    notes: Sequence[str] = (),
    command: str = "",
) -> str:
    """The page as text.

    Args:
        sections: diagnoses in the order of the page.
        title: heading of the page.
        settings: what all of them depend on, shown as a table.
        notes: sentences about the rows.
        command: what made them, to be run again.

    Raises:
        ConfigError: jinja2 is not installed (matplotlib is asked for by whoever draws).
        DataError: a figure is no SVG.
    """
    shown = [Section.of(one) if isinstance(one, Diagnosis) else one for one in sections]
    names = [section.name for section in shown]
    if len(set(names)) < len(names):
        raise ConfigError("a diagnostic stands twice on the page", got=", ".join(names))
    settings = dict(settings or {})
    finished = sum(section.diagnosis is not None for section in shown)
    return page.render_page(
        title,
        f"{finished} of {len(shown)} {'diagnosis' if len(shown) == 1 else 'diagnoses'}. {_LEAD}",
        [_section(section, settings) for section in shown],
        contents=True,
        rows=notes,
        settings=settings,
        command=command,
    )


def _section(section: Section, shared: Mapping[str, object]) -> page.Section:
    """As the page shows it; settings that all share are left to the end of the page."""
    anchor, found = page.anchor_of(section.name), section.diagnosis
    if found is None:
        failure = f"Could not run: {section.failure}" if section.failure else "Not run yet."
        return page.Section(anchor, section.question, _spoken(section.name), failure)
    return page.Section(
        anchor,
        section.question,
        _spoken(section.name),
        verdict=found.conclusion,
        pictures=[_picture(section.name, figure) for figure in found.figures],
        tables=[_table(section.name, table) for table in found.tables],
        notes=found.notes,
        settings={key: value for key, value in found.settings.items() if shared.get(key) != value},
    )


def _picture(name: str, figure: Drawing) -> page.Picture:
    return page.Picture(
        page.anchor_of(f"{name}-{figure.key}-figure"),
        figure.title,
        figure.caption,
        figure.svg,
        alt=figure.alt,
        csv=figure.data.csv(),
    )


def _table(name: str, table: Table) -> page.ShownTable:
    return page.ShownTable(
        page.anchor_of(f"{name}-{table.key}"),
        table.title,
        list(_columns(table)),
        table.note,
        csv=table.csv(),
        left_out=max(0, len(table.rows) - MOST_ROWS),
    )


# --- cells ----------------------------------------------------------------------------------------


def _columns(table: Table) -> Iterator[page.Column]:
    """Columns as shown: an estimate's four become one, ``value [low, high]``.

    Its count stands in the heading where all rows have the same; otherwise in a column of its
    own, which estimates with the same counts share.
    """
    rows = table.rows[:MOST_ROWS]
    cells = {name: [row[place] for row in rows] for place, name in enumerate(table.columns)}
    # As ``Table.of`` names the columns that belong to an estimate.
    parts = {name: [f"{name}_low", f"{name}_high", f"{name}_n"] for name in cells}
    estimates = {
        name: [cells.pop(part) for part in own]
        for name, own in parts.items()
        if all(part in cells for part in own)
    }
    differing = [counts for *_, counts in estimates.values() if len({*counts} - {None}) > 1]
    said: list[list[Cell]] = []
    for name, own in cells.items():
        heading = name.replace("_", " ")
        if name not in estimates:
            words = any(isinstance(cell, (str, bool)) for cell in own)
            yield page.Column(heading, list(map(cell_text, own)), "words" if words else "number")
            continue
        low, high, counts = estimates[name]
        shown = [interval(*three) for three in zip(own, low, high, strict=True)]
        if counts not in differing:
            more = "".join(f", n\u00a0=\u00a0{cell_text(count)}" for count in {*counts} - {None})
            yield page.Column(heading + more, shown)
            continue
        yield page.Column(heading, shown)
        if counts not in said:
            said.append(counts)
            shared = all(counts == others for others in differing)
            yield page.Column("n" if shared else f"{heading}, n", list(map(cell_text, counts)))
