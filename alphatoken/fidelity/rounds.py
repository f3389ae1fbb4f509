"""Diagnoses within a time limit: rounds of growing size, of which the last one counts.

The first round reads a sixteenth of what was asked for, but no less than means anything, and is
always done; the second a quarter; the third all of it. A round that goes on past the time is
dropped at its next report of progress, or when memory is full, and the one before it stands.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from alphatoken.fidelity.diagnosis import Diagnosis
from alphatoken.fidelity.intervals import FEWEST
from alphatoken.fidelity.subject import Subject
from alphatoken.support.progress import Tracker

__all__ = ["cut", "diagnosed_within"]

_SHARES = (1 / 16, 1 / 4, 1.0)
"""Of the sizes that were asked for, round by round."""
_LEAST = {"objective_rows": 8, "oracle_tokens": 16, "fisher_samples": 24}
"""The least of ``tokens`` is of eight rows, so that intervals are over rows."""


def cut(
    subject: Subject, given: frozenset[str], share: float
) -> tuple[Subject, dict[str, tuple[int, int]]]:
    """The subject with a share of its sizes; and what became smaller, as (now, asked for).

    Sizes that were ``given`` stay as they are.
    """
    lengths = [row.response_tokens for row in subject.train if row.response_tokens]
    asked = {
        "tokens": min(subject.tokens, sum(lengths)),
        "objective_rows": len(subject.validation),
        "oracle_tokens": subject.oracle_tokens,
        "fisher_samples": subject.fisher_samples,
    }
    least = {**_LEAST, "tokens": FEWEST * -(-sum(lengths) // len(lengths))}
    read = {}
    for name, whole in asked.items():
        some = min(whole, max(least[name], math.ceil(share * whole)))
        if name not in given and some < whole:
            read[name] = some, whole
    return subject.resized(**{name: some for name, (some, _) in read.items()}), read


class _TimeIsUpError(Exception):
    """A round went on past the time."""


def diagnosed_within(
    seconds: float | None,
    subject: Subject,
    given: frozenset[str],
    diagnose: Callable[[Subject], Diagnosis],
    *,
    said: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Diagnosis:
    """The largest diagnosis that can be made in the time; its notes say what was left out.

    Args:
        seconds: how long it may take; None for all that was asked for.
        subject: what is diagnosed.
        given: sizes that stay as they are.
        diagnose: one round.
        said: the time, as the user wrote it.
        clock: seconds since some moment.
    """
    if seconds is None:
        return diagnose(subject)
    end, found = clock() + seconds, None
    sizes: dict[str, tuple[int, int]] = {}
    for share in _SHARES:
        smaller, read = cut(subject, given, share)
        if found is not None and (clock() > end or read == sizes):
            continue
        try:
            found = diagnose(smaller if found is None else _until(smaller, end, clock))
        except _TimeIsUpError:
            break
        except (torch.OutOfMemoryError, MemoryError):
            if found is None:
                raise
            said = f"{said}: a larger round ran out of memory"
            break
        sizes = read
    assert found is not None
    return _told(found, sizes, said)


def _until(subject: Subject, end: float, clock: Callable[[], float]) -> Subject:
    """The subject, whose progress says when it is too late."""

    def report(tracker: Tracker) -> None:
        if clock() > end:
            raise _TimeIsUpError
        tracker.tell(subject.progress)

    return subject.resized(progress=report)


def _told(found: Diagnosis, read: Mapping[str, tuple[int, int]], said: str) -> Diagnosis:
    """The diagnosis with a note on what the time left out."""
    parts = ", ".join(
        f"{some} of {whole} {size.replace('_', ' ')}" for size, (some, whole) in read.items()
    )
    settings = {"budget": said, "read": parts or "everything that was asked for"}
    notes = (f"Read {parts} (stopped by the budget of {said}).",) if parts else ()
    return replace(found, notes=(*notes, *found.notes), settings={**found.settings, **settings})
