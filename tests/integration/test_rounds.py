"""Rounds of growing size within a time: by a clock of the test's own, and on a real subject."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from alphatoken.fidelity.diagnosis import Answer, Diagnosis
from alphatoken.fidelity.registry import DIAGNOSTICS, find
from alphatoken.fidelity.rounds import cut, diagnosed_within
from alphatoken.fidelity.subject import Subject
from alphatoken.support.progress import Progress
from tests.integration.subjects import subject

NAMES = [entry.name for entry in DIAGNOSTICS]
ANSWER = Answer("It is so.", "", "", "go on.")


@dataclass
class Clock:
    """Seconds, which pass where the test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def found(subject: Subject, options: Any) -> Diagnosis:
    """A diagnosis that holds the sizes it was made with."""
    return Diagnosis("heatmap", "?", ANSWER, settings={"size": subject.tokens, "options": options})


def within(
    seconds: float | None, clock: Clock, per_token: float, *given: str, slow: float = 0.0
) -> tuple[Diagnosis, list[int]]:
    """A diagnosis whose time is its tokens', and the tokens of each round that was begun."""
    begun: list[int] = []

    def one(subject: Subject, options: Any) -> Diagnosis:
        begun.append(subject.tokens)
        tracker = subject.tracker("Values", 2)
        for part in range(2):
            clock.now += per_token * subject.tokens / 2 + slow * (len(begun) > 1)
            tracker.report(part + 1)
        return found(subject, options)

    whole = subject(train_rows=60, tokens=3000)
    options = find("heatmap").load().Options()
    told = diagnosed_within(
        seconds, "heatmap", whole, options, frozenset({"objective_rows", *given}), one,
        said="10s", clock=clock,
    )  # fmt: skip
    return told, begun


def test_a_budget_of_almost_nothing_gives_the_least_and_says_so() -> None:
    told, begun = within(1e-3, Clock(), 1.0)
    assert len(begun) == 1
    assert told.settings["size"] == begun[0] < 3000
    assert told.notes[0] == (f"Read {begun[0]} of 3000 tokens (stopped by the budget of 10s).")
    assert told.settings["read"] == f"{begun[0]} of 3000 tokens"


def test_a_round_that_memory_does_not_hold_leaves_the_one_before_it() -> None:
    whole, most = subject(train_rows=60, tokens=3000), 0

    def one(subject: Subject, options: Any) -> Diagnosis:
        if subject.tokens > most:
            raise torch.OutOfMemoryError("too much")
        return found(subject, options)

    given = frozenset({"objective_rows"})
    options = find("heatmap").load().Options()
    with pytest.raises(torch.OutOfMemoryError):
        diagnosed_within(1e6, "heatmap", whole, options, given, one, said="1h")
    most = 2000
    told = diagnosed_within(1e6, "heatmap", whole, options, given, one, said="1h")
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
    assert len(begun) == 2  # the first says that all of it fits
    assert told.notes == ()
    assert told.settings["size"] == 3000


def test_what_is_given_stays() -> None:
    told, begun = within(1e-3, Clock(), 1.0, "tokens")
    assert begun == [3000]
    assert told.notes == ()


def test_rounds_grow_as_the_time_allows() -> None:
    clock = Clock()
    told, begun = within(2500.0, clock, 1.0)
    assert begun == sorted(set(begun))
    assert len(begun) > 1
    assert told.settings["size"] == begun[-1] < 3000
    assert clock.now <= 2500.0


def test_a_round_that_goes_on_past_the_time_is_dropped() -> None:
    """Its first report after the end is its last; the round before it stands."""
    clock = Clock()
    told, begun = within(2500.0, clock, 1.0, slow=900.0)
    assert len(begun) == 2
    assert told.settings["size"] == begun[0]
    assert clock.now < 2500.0 + 3000.0


def test_progress_is_told_in_every_round() -> None:
    heard: list[Progress] = []
    whole = replace(subject(train_rows=60, tokens=3000), progress=heard.append)

    def one(subject: Subject, options: Any) -> Diagnosis:
        subject.tracker("Values", subject.tokens).report(subject.tokens)
        return found(subject, options)

    options = find("heatmap").load().Options()
    diagnosed_within(60.0, "heatmap", whole, options, frozenset(), one)
    assert len(heard) > 1
    assert heard[-1].done == 3000


# --- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_sizes_grow_with_the_share_to_what_was_asked_for(name: str) -> None:
    whole = subject(train_rows=60, tokens=3000)
    options = find(name).load().Options()
    shares = (0.0, 0.5, 1.0)
    made = [cut(name, whole, options, frozenset(), share) for share in shares]
    assert made[0].read
    for size, (some, asked) in made[0].read.items():
        later = made[1].read.get(size, (asked, asked))[0]
        assert 0 < some <= later <= asked, size
    assert made[-1].read == {}
    assert made[-1].options == options
    assert made[-1].subject.tokens == 3000
    assert made[-1].subject.validation == whole.validation
    kept = cut(name, whole, options, frozenset(made[0].read), 0.0)
    assert kept.read == {}
    assert kept.options == options
