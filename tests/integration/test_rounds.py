"""Rounds of growing size before a deadline: by a clock of the test's own, and on a real subject."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from alphatoken.diagnose.diagnosis import Diagnosis
from alphatoken.diagnose.rounds import cut, diagnosed_before
from alphatoken.diagnose.subject import Subject
from alphatoken.support.progress import Tracker
from tests.integration import subjects
from tests.integration.subjects import examples


def subject(**changes: Any) -> Subject:
    """Of topics alone, which are read faster than functions."""
    kept = {"topics": examples("topics", 180, 8)}
    return subjects.subject("near", **{"retention": kept, "length": 64} | changes)


SMALL = ("oracle_tokens", "fisher_samples")
"""Sizes that stay."""


@dataclass
class Clock:
    """Seconds, which pass where the test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def diagnosis_of(subject: Subject) -> Diagnosis:
    """A diagnosis that holds the size it was made with."""
    return Diagnosis("heatmap", "?", "It is so.", settings={"size": subject.tokens})


def within(
    seconds: float | None, clock: Clock, per_token: float, *fixed: str, once: float = 0.0
) -> tuple[Diagnosis, list[int]]:
    """A diagnosis whose time is its tokens', and the tokens of each round.

    ``once``: seconds that the first round takes beside.
    """
    begun: list[int] = []

    def one(subject: Subject) -> Diagnosis:
        clock.now += per_token * subject.tokens + once * (not begun)
        begun.append(subject.tokens)
        return diagnosis_of(subject)

    whole = subject(train_rows=60, tokens=3000)
    deadline = None if seconds is None else clock.now + seconds
    fixed_sizes = frozenset({"objective_rows", *SMALL, *fixed})
    return diagnosed_before(deadline, whole, fixed_sizes, one, budget="10s", clock=clock), begun


@pytest.mark.slow
def test_a_budget_of_almost_nothing_gives_the_least_and_says_so() -> None:
    diagnosis, begun = within(1e-3, Clock(), 1.0)
    assert len(begun) == 1
    assert diagnosis.settings["size"] == begun[0] < 3000
    part = f"{begun[0]} of 3000 tokens"
    assert diagnosis.notes[0] == f"Read {part} in 1 round (stopped by the budget of 10s)."
    assert (diagnosis.settings["read"], diagnosis.settings["rounds"]) == (part, 1)


def test_a_round_that_memory_does_not_hold_leaves_the_one_before_it() -> None:
    whole, most = subject(train_rows=60, tokens=3000), 0

    def one(subject: Subject) -> Diagnosis:
        if subject.tokens > most:
            raise torch.OutOfMemoryError("too much")
        return diagnosis_of(subject)

    fixed, deadline = frozenset({"objective_rows", *SMALL}), time.monotonic() + 1e6
    with pytest.raises(torch.OutOfMemoryError):
        diagnosed_before(deadline, whole, fixed, one, budget="1h")
    most = 2000
    diagnosis = diagnosed_before(deadline, whole, fixed, one, budget="1h")
    assert diagnosis.settings["size"] <= most
    assert "(stopped by the budget of 1h: a larger round ran out of memory)." in diagnosis.notes[0]
    assert diagnosis.settings["rounds"] == 2


def test_without_a_budget_everything_is_read_at_once() -> None:
    diagnosis, begun = within(None, Clock(), 1.0)
    assert begun == [3000]
    assert diagnosis.notes == ()
    assert "read" not in diagnosis.settings


def test_a_budget_that_suffices_gives_what_no_budget_gives() -> None:
    diagnosis, begun = within(1e6, Clock(), 1e-3)
    assert begun[-1] == 3000
    assert len(begun) == diagnosis.settings["rounds"] == 3
    assert diagnosis.notes == ()
    assert diagnosis.settings["size"] == 3000


def test_fixed_sizes_stay() -> None:
    diagnosis, begun = within(1e-3, Clock(), 1.0, "tokens")
    assert begun == [3000]
    assert diagnosis.notes == ()
    assert diagnosis.settings["rounds"] == 1


def test_a_round_begins_only_if_it_should_end_before_the_deadline() -> None:
    """By the time of the round before it and the growth of what is read, to the second."""
    _, sizes = within(1e6, Clock(), 1.0)
    first, second, whole = sizes
    for rounds, needed in ((2, first + second), (3, first + second + whole)):
        for seconds, done in ((needed + 1, rounds), (needed - 1, rounds - 1)):
            clock = Clock()
            diagnosis, begun = within(seconds, clock, 1.0)
            assert begun == sizes[:done]
            assert diagnosis.settings["size"] == begun[-1]
            assert diagnosis.settings["rounds"] == done
            assert clock.now <= seconds
    # Work of the first round alone counts as if it grew with the rest.
    _, begun = within(1e4 + first + second + whole + 1, Clock(), 1.0, once=1e4)
    assert begun == sizes[:1]


def test_progress_is_reported_in_every_round() -> None:
    heard: list[Tracker] = []
    whole = replace(subject(train_rows=60, tokens=3000), progress=heard.append)

    def one(subject: Subject) -> Diagnosis:
        subject.tracker("Values", subject.tokens).report(subject.tokens)
        return diagnosis_of(subject)

    diagnosed_before(time.monotonic() + 60.0, whole, frozenset(), one)
    assert len(heard) > 1
    assert heard[-1].done == 3000


# --- sizes ----------------------------------------------------------------------------------------


def test_sizes_grow_with_the_share_to_those_requested() -> None:
    whole = subject(train_rows=60, validation_rows=40, tokens=3000, fisher_samples=200)
    made = [cut(whole, frozenset(), share) for share in (1 / 16, 1 / 4, 1.0)]
    assert made[0][1].keys() == {"tokens", "objective_rows", "fisher_samples"}
    for size, (some, asked) in made[0][1].items():
        assert 0 < some <= made[1][1].get(size, (asked, asked))[0] <= asked, size
    smaller, read = made[0]
    assert (smaller.tokens, len(smaller.validation)) == (read["tokens"][0], 8)
    assert made[-1][1] == {}
    assert made[-1][0].tokens == 3000
    assert made[-1][0].validation == whole.validation
    kept, nothing = cut(whole, frozenset(read), 1 / 16)
    assert nothing == {}
    assert kept.tokens == 3000
