"""Last step of all ten diagnostics: findings become a diagnosis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from alphatoken.data import Example
from alphatoken.diagnose.diagnosis import Diagnosis, Drawing, Table
from alphatoken.diagnose.figures import Figure, draw
from alphatoken.diagnose.intervals import few_rows
from alphatoken.diagnose.registry import find
from alphatoken.diagnose.subject import Subject

__all__ = ["conclude"]


def conclude(
    name: str,
    subject: Subject,
    conclusion: str,
    tables: Iterable[Table],
    figures: Iterable[Figure | Drawing],
    *,
    valued: Sequence[Example] = (),
    notes: Iterable[str] = (),
    settings: Mapping[str, Any] | None = None,
) -> Diagnosis:
    """The diagnosis ``name`` of ``subject``; tables without rows and their figures are left out.

    Args:
        name: of the diagnostic.
        subject: whose settings are part of the result.
        conclusion: a sentence.
        tables: every number.
        figures: declared over tables, or drawn already; drawn here.
        valued: the rows that were valued, which a note counts.
        notes: what else was sampled or left out, and warnings.
        settings: of the diagnostic, beside those of the subject.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    counted = [f"{subject.counted(valued)} were valued.", *few_rows(len(valued))] if valued else []
    shown = [f for f in figures if isinstance(f, Drawing) or f.table.rows]
    return Diagnosis(
        name,
        find(name).question,
        conclusion,
        tuple(table for table in tables if table.rows),
        tuple(f if isinstance(f, Drawing) else draw(f) for f in shown),
        (*counted, *notes),
        {**subject.settings(), **(settings or {})},
    )
