"""Rounds of growing size within a time: by a clock of the test's own, and on a real subject."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from alphatoken.fidelity.diagnosis import Diagnosis
from alphatoken.fidelity.rounds import cut, diagnosed_within
from alphatoken.fidelity.subject import Subject
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


def found(subject: Subject) -> Diagnosis:
    """A diagnosis that holds the sizes it was made with."""
    return Diagnosis("heatmap", "?", "It is so.", settings={"size": subject.tokens})


def within(
    seconds: float | None, clock: Clock, per_token: float, *given: str
) -> tuple[Diagnosis, list[int]]:
    """A diagnosis whose time is its tokens', and the tokens of each round that was begun."""
    begun: list[int] = []

    def one(subject: Subject) -> Diagnosis:
        begun.append(subject.tokens)
        tracker = subject.tracker("Values", 2)
        for part in range(2):
            clock.now += per_token * subject.tokens / 2
            tracker.report(part + 1)
        return found(subject)

    whole = subject(train_rows=60, tokens=3000)
    told = diagnosed_within(
        seconds, whole, frozenset({"objective_rows", *SMALL, *given}), one,
        said="10s", clock=clock,
    )  # fmt: skip
    return told, begun


@pytest.mark.slow
def test_a_budget_of_almost_nothing_gives_the_least_and_says_so() -> None:
    told, begun = within(1e-3, Clock(), 1.0)
    assert len(begun) == 1
    assert told.settings["size"] == begun[0] < 3000
    assert told.notes[0] == (f"Read {begun[0]} of 3000 tokens (stopped by the budget of 10s).")
    assert told.settings["read"] == f"{begun[0]} of 3000 tokens"


def test_a_round_that_memory_does_not_hold_leaves_the_one_before_it() -> None:
    whole, most = subject(train_rows=60, tokens=3000), 0

    def one(subject: Subject) -> Diagnosis:
        if subject.tokens > most:
            raise torch.OutOfMemoryError("too much")
        return found(subject)

    given = frozenset({"objective_rows", *SMALL})
    with pytest.raises(torch.OutOfMemoryError):
        diagnosed_within(1e6, whole, given, one, said="1h")
    most = 2000
    told = diagnosed_within(1e6, whole, given, one, said="1h")
    assert told.settings["size"] <= most
    assert "(stopped by the budget of 1h: a larger round ran out of memory)." in told.notes[0]


def test_without_a_budget_everything_is_read_at_once() -> None:
    told, begun = within(None, Clock(), 1.0)
    assert begun == [3000]
    assert told.notes == ()
    assert "read" not in told.settings


def test_a_budget_that_suffices_gives_what_no_budget_gives() -> None:
    told, begun = within(1e6, Clock(), 1e-3)
    assert begun[-1] == 3000
    assert len(begun) == 3
    assert told.notes == ()
    assert told.settings["size"] == 3000


def test_what_is_given_stays() -> None:
    told, begun = within(1e-3, Clock(), 1.0, "tokens")
    assert begun == [3000]
    assert told.notes == ()


def test_a_round_that_goes_on_past_the_time_is_dropped() -> None:
    """Its first report after the end is its last; the round before it stands."""
    clock = Clock()
    told, begun = within(2500.0, clock, 1.0)
    assert begun == sorted(set(begun))
    assert len(begun) == 3
    assert told.settings["size"] == begun[1] < 3000
    assert 2500.0 < clock.now < 2500.0 + 3000.0


def test_progress_is_told_in_every_round() -> None:
    heard: list[Tracker] = []
    whole = replace(subject(train_rows=60, tokens=3000), progress=heard.append)

    def one(subject: Subject) -> Diagnosis:
        subject.tracker("Values", subject.tokens).report(subject.tokens)
        return found(subject)

    diagnosed_within(60.0, whole, frozenset(), one)
    assert len(heard) > 1
    assert heard[-1].done == 3000


# --- sizes ----------------------------------------------------------------------------------------


def test_sizes_grow_with_the_share_to_what_was_asked_for() -> None:
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
