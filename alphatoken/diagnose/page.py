"""Diagnoses as sections of a page: every number with its interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from alphatoken.diagnose.diagnosis import Diagnosis, Drawing, Table
from alphatoken.score import page
from alphatoken.score.page import cell_text, interval

__all__ = ["LEAD", "MOST_ROWS", "section_of"]

MOST_ROWS = 200
"""Rows of a table that the page shows; its file has all of them."""

LEAD = (
    "Each answers one question about the values on this model and these rows. A number in brackets "
    "is a 95\u00a0% interval over rows drawn again and again; with few rows it is over single "
    "tokens and too narrow, as a note says."
)


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
    anchor, spoken = page.anchor_of(name), name.replace("-", " ").capitalize()
    if diagnosis is None:
        said = f"Could not run: {failure}" if failure else "Not run yet."
        return page.Section(anchor, question, spoken, said)
    shared = shared or {}
    return page.Section(
        anchor,
        question,
        spoken,
        verdict=diagnosis.conclusion,
        pictures=[_picture(name, figure) for figure in diagnosis.figures],
        tables=[_table(name, table) for table in diagnosis.tables],
        notes=diagnosis.notes,
        settings={
            key: value for key, value in diagnosis.settings.items() if shared.get(key) != value
        },
    )


def _picture(name: str, figure: Drawing) -> page.Picture:
    return page.Picture(
        page.anchor_of(f"{name}-{figure.key}-figure"),
        figure.title,
        figure.caption,
        figure.svg,
        alt=figure.alt,
    )


def _table(name: str, table: Table) -> page.ShownTable:
    return page.ShownTable(
        page.anchor_of(f"{name}-{table.key}"),
        table.title,
        list(_columns(table)),
        table.note,
        left_out=max(0, len(table.rows) - MOST_ROWS),
    )


# --- cells ----------------------------------------------------------------------------------------


def _columns(table: Table) -> Iterator[page.Column]:
    """Columns as shown: an estimate's four become one, ``value [low, high]``; its file has all."""
    rows = table.rows[:MOST_ROWS]
    cells = {name: [row[place] for row in rows] for place, name in enumerate(table.columns)}
    # As ``Table.of`` names the columns that belong to an estimate.
    parts = {name: [f"{name}_{part}" for part in ("low", "high", "n")] for name in cells}
    estimates = {name: own for name, own in parts.items() if set(own) <= cells.keys()}
    inside = {part for own in estimates.values() for part in own}
    for name, own in cells.items():
        heading = name.replace("_", " ")
        if name in estimates:
            low, high, _ = (cells[part] for part in estimates[name])
            yield page.Column(heading, [interval(*x) for x in zip(own, low, high, strict=True)])
        elif name not in inside:
            words = any(isinstance(cell, (str, bool)) for cell in own)
            yield page.Column(heading, list(map(cell_text, own)), "words" if words else "number")
