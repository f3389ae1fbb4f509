"""Diagnoses by a deadline: rounds of growing size, of which the last one counts.

The first round reads a sixteenth of what was requested, but no less than means anything, and is
always done; the second a quarter; the third all of it. A further round begins if it should end
before the deadline, by the time that the round before it took and by how much more it reads. A
round that was begun ends, unless memory is full; then the one before it stands.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from alphatoken.diagnose.diagnosis import Diagnosis
from alphatoken.diagnose.statistics import FEWEST
from alphatoken.diagnose.subject import Subject

__all__ = ["cut", "diagnosed_before"]

_SHARES = (1 / 16, 1 / 4, 1.0)
"""Of the requested sizes, round by round."""
_LEAST = {"objective_rows": 8, "oracle_tokens": 16, "fisher_samples": 24}
"""The least of ``tokens`` is of eight rows, so that intervals are over rows."""

Sizes = Mapping[str, tuple[int, int]]
"""Sizes that are smaller than requested, by name: (now, requested)."""


def cut(subject: Subject, fixed: frozenset[str], share: float) -> tuple[Subject, Sizes]:
    """The subject with a share of its sizes, and the sizes that became smaller.

    Args:
        subject: with the requested sizes.
        fixed: names of sizes that stay as they are.
        share: of each size, in (0, 1].
    """
    lengths = [row.response_tokens for row in subject.train if row.response_tokens]
    requested = {
        "tokens": min(subject.tokens, sum(lengths)),
        "objective_rows": len(subject.validation),
        "oracle_tokens": subject.oracle_tokens,
        "fisher_samples": subject.fisher_samples,
    }
    least = {**_LEAST, "tokens": FEWEST * -(-sum(lengths) // len(lengths))}
    sizes = {}
    for name, whole in requested.items():
        some = min(whole, max(least[name], math.ceil(share * whole)))
        if name not in fixed and some < whole:
            sizes[name] = some, whole
    return subject.resized(**{name: some for name, (some, _) in sizes.items()}), sizes


def diagnosed_before(
    deadline: float | None,
    subject: Subject,
    fixed: frozenset[str],
    diagnose: Callable[[Subject], Diagnosis],
    *,
    budget: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Diagnosis:
    """The largest diagnosis that should be there by the deadline; it says what it was made from.

    Args:
        deadline: by ``clock``; None for everything that was requested, in one round.
        subject: what is diagnosed.
        fixed: names of sizes that stay as they are.
        diagnose: one round.
        budget: the time until the deadline, as the user wrote it, for the note.
        clock: seconds since some moment.
    """
    if deadline is None:
        return diagnose(subject)
    diagnosis, rounds, seconds = None, 0, 0.0
    sizes: Sizes = {}
    for share in _SHARES:
        smaller, larger_sizes = cut(subject, fixed, share)
        begun = clock()
        if diagnosis is not None:
            growth = _growth(sizes, larger_sizes)
            if growth == 1:  # nothing more would be read
                continue
            if begun + growth * seconds > deadline:
                break
        try:
            diagnosis = diagnose(smaller)
        except (torch.OutOfMemoryError, MemoryError):
            if diagnosis is None:
                raise
            budget = f"{budget}: a larger round ran out of memory"
            break
        rounds, sizes, seconds = rounds + 1, larger_sizes, clock() - begun
    assert diagnosis is not None
    return _with_sizes(diagnosis, sizes, rounds, budget)


def _growth(sizes: Sizes, larger: Sizes) -> float:
    """The largest factor by which a size grows; what is not in ``larger`` is as requested."""
    factors = (larger.get(name, (whole,))[0] / some for name, (some, whole) in sizes.items())
    return max(factors, default=1)


def _with_sizes(diagnosis: Diagnosis, sizes: Sizes, rounds: int, budget: str) -> Diagnosis:
    """The diagnosis with its rounds, and with a note on what the budget left out."""
    parts = ", ".join(
        f"{some} of {whole} {name.replace('_', ' ')}" for name, (some, whole) in sizes.items()
    )
    settings = {
        "budget": budget,
        "rounds": rounds,
        "read": parts or "everything that was asked for",
    }
    in_rounds = f"in {rounds} round{'s' * (rounds > 1)}"
    notes = (f"Read {parts} {in_rounds} (stopped by the budget of {budget}).",) if parts else ()
    return replace(
        diagnosis,
        notes=(*notes, *diagnosis.notes),
        settings={**diagnosis.settings, **settings},
    )
