"""A diagnosis that keeps to a time: whole rounds of growing size, of which the last one counts.

The first round is of the least that means anything, and always done. From there all sizes grow
together, by equal factors a step, to what was asked for: response tokens, in the order that the
seed draws, validation rows, tokens sent one by one, windows, samples. Where an option begins is in
its metadata (``first``). Time is measured, never forecast from shapes: it grows at most with the
product of the sizes, so the next round is as large as the time left allows, by what the last round
took. A round that goes on past the time all the same is dropped at its next report of progress, or
when memory is full, and the one before it stands.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from alphatoken.fidelity.diagnosis import Diagnosis
from alphatoken.fidelity.intervals import FEWEST
from alphatoken.fidelity.options import grown, thinned
from alphatoken.fidelity.registry import find
from alphatoken.fidelity.subject import Subject
from alphatoken.support.progress import Console, Progress

__all__ = ["Cut", "cut", "diagnosed_within"]

_STEPS = 8
"""Sizes between the least and what was asked for."""
_TUNING = 0.25
"""Share of the time after which the fine-tuning of a copy stops."""
_LEAST = {"objective_rows": 8, "oracle_tokens": 16, "fisher_samples": 24}
"""Of the sizes that all diagnostics share; the least of ``tokens`` is of eight rows."""
_TOKENS = (96, 1000)
"""Between these, however long the rows are."""


@dataclass(frozen=True)
class Cut:
    """What a round reads.

    Attributes:
        subject: with the sizes of this round.
        options: the same.
        read: name of a size -> (of this round, of what was asked for); those that differ.
    """

    subject: Subject
    options: Any
    read: Mapping[str, tuple[int, int]]

    def times(self, other: Cut) -> float:
        """How many times the other's work this is, at most."""
        left_out = [math.prod(some / whole for some, whole in one.read.values())
                    for one in (self, other)]  # fmt: skip
        return left_out[0] / left_out[1]


def cut(name: str, subject: Subject, options: Any, given: frozenset[str], share: float) -> Cut:
    """Subject and options of a round, from the least (share 0) to what was asked for (1).

    Sizes that were ``given`` stay as they are.
    """
    there = {
        "tokens": sum(row.response_tokens for row in subject.train),
        "validation_rows": len(subject.validation),
    }
    read: dict[str, tuple[int, int]] = {}

    def part(size: str, asked: Any, first: int) -> Any:
        if isinstance(asked, tuple):
            some: Any = thinned(asked, first, share)
            counts = len(some), len(asked)
        else:
            whole = min(asked, there.get(size, asked))
            some = grown(whole, first, share)
            counts = some, whole
        if counts[0] == counts[1]:
            return asked
        read[size] = counts
        return some

    asked = {
        "objective_rows": len(subject.validation),
        "tokens": subject.tokens,
        "oracle_tokens": subject.oracle_tokens,
        "fisher_samples": subject.fisher_samples,
    }
    least = {**_LEAST, "tokens": _least_tokens(subject)}
    ours = {
        size: part(size, asked[size], least[size]) for size in find(name).reads if size not in given
    }
    own = {
        one.name: part(one.name, getattr(options, one.name), one.metadata["first"])
        for one in fields(options)
        if "first" in one.metadata and one.name not in given
    }
    return Cut(subject.resized(**ours, share=share), replace(options, **own), read)


def _least_tokens(subject: Subject) -> int:
    """As many as the rows have that intervals are over."""
    lengths = [row.response_tokens for row in subject.train if row.response_tokens]
    return min(max(_TOKENS[0], FEWEST * -(-sum(lengths) // len(lengths))), _TOKENS[1])


class _TimeIsUpError(Exception):
    """A round went on past the time."""


def diagnosed_within(
    seconds: float | None,
    name: str,
    subject: Subject,
    options: Any,
    given: frozenset[str],
    diagnose: Callable[[Subject, Any], Diagnosis],
    *,
    said: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Diagnosis:
    """The largest diagnosis that can be made in the time; its notes say what was left out.

    Args:
        seconds: how long it may take; None for all that was asked for.
        name: of the diagnostic.
        subject: what is diagnosed.
        options: of the diagnostic.
        given: sizes that stay as they are.
        diagnose: one round.
        said: the time, as the user wrote it.
        clock: seconds since some moment.
    """
    if seconds is None:
        return diagnose(subject, options)
    start = clock()
    subject = subject.resized(tuning_seconds=_TUNING * seconds)
    steps = [cut(name, subject, options, given, step / _STEPS) for step in range(_STEPS + 1)]
    now, found, read = steps[0], None, steps[0].read
    while True:
        began = clock()
        late = None if found is None else start + seconds
        try:
            found = diagnose(_until(now.subject, late, clock), now.options)
        except _TimeIsUpError:
            break
        except (torch.OutOfMemoryError, MemoryError):
            if found is None:
                raise
            said = f"{said}: a larger round ran out of memory"
            break
        read, took, left = now.read, clock() - began, start + seconds - clock()
        larger = [one for one in steps if one.times(now) > 1 and took * one.times(now) <= left]
        if not larger:
            break
        now = larger[-1]
    assert found is not None
    return _told(found, read, said)


def _until(subject: Subject, late: float | None, clock: Callable[[], float]) -> Subject:
    """The subject, whose progress says when it is too late."""
    if late is None:
        return subject
    tell = subject.progress
    if isinstance(tell, bool) or tell is None:
        spoken = sys.stderr.isatty() if tell is None else tell
        tell = Console() if spoken else None

    def report(progress: Progress) -> None:
        if clock() > late:
            raise _TimeIsUpError
        if tell is not None:
            tell(progress)

    return subject.resized(progress=report)


def _told(found: Diagnosis, read: Mapping[str, tuple[int, int]], said: str) -> Diagnosis:
    """The diagnosis with a note on what the time left out."""
    parts = ", ".join(
        f"{some} of {whole} {size.replace('_', ' ')}" for size, (some, whole) in read.items()
    )
    settings = {"budget": said, "read": parts or "everything that was asked for"}
    notes = (f"Read {parts} (stopped by the budget of {said}).",) if parts else ()
    return replace(found, notes=(*notes, *found.notes), settings={**found.settings, **settings})
