"""Rounds of growing size before a deadline, by a clock of the test's own."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch

from alphatoken.diagnose.diagnosis import Diagnosis
from alphatoken.diagnose.subject import Subject, cut, diagnosed_before
from alphatoken.support.progress import Tracker
from tests.integration import subjects
from tests.integration.subjects import examples

OTHERS = ("objective_rows", "oracle_tokens", "fisher_samples")
"""Sizes besides the tokens."""


def subject(**changes: Any) -> Subject:
    """Of topics alone, which are read faster than functions."""
    kept = {"topics": examples("topics", 180, 8)}
    sizes = {"train_rows": 60, "tokens": 3000, "length": 64, "retention": kept}
    return subjects.subject("near", **sizes | changes)


class Rounds:
    """Diagnoses of a subject: a second a token on the clock, and the tokens of each round.

    ``once`` are seconds that the first round takes beside; more than ``most`` tokens fill memory.
    """

    def __init__(self, once: float = 0.0, most: float = math.inf) -> None:
        self.now, self.once, self.most = 0.0, once, most
        self.tokens: list[int] = []

    def __call__(self, subject: Subject) -> Diagnosis:
        if subject.tokens > self.most:
            raise torch.OutOfMemoryError("too much")
        self.now += subject.tokens + self.once * (not self.tokens)
        self.tokens.append(subject.tokens)
        subject.tracker("Values", subject.tokens).report(subject.tokens)
        return Diagnosis("heatmap", "?", "It is so.", settings={"size": subject.tokens})

    def within(self, deadline: float | None, *fixed: str, **changes: Any) -> Diagnosis:
        return diagnosed_before(
            deadline,
            subject(**changes),
            frozenset({*OTHERS, *fixed}),
            self,
            budget="10s",
            clock=lambda: self.now,
        )


def test_a_budget_of_almost_nothing_gives_the_least_and_says_so() -> None:
    rounds = Rounds()
    diagnosis = rounds.within(1e-3)
    (least,) = rounds.tokens
    assert diagnosis.settings["size"] == least < 3000
    part = f"{least} of 3000 tokens"
    assert diagnosis.notes == (f"Read {part} in 1 round (stopped by the budget of 10s).",)
    assert (diagnosis.settings["read"], diagnosis.settings["rounds"]) == (part, 1)


def test_a_round_that_memory_does_not_hold_leaves_the_one_before_it() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        Rounds(most=0).within(1e6)
    diagnosis = Rounds(most=2000).within(1e6)
    assert diagnosis.settings["size"] <= 2000
    assert "(stopped by the budget of 10s: a larger round ran out of memory)." in diagnosis.notes[0]
    assert diagnosis.settings["rounds"] == 2


@pytest.mark.parametrize(
    ("deadline", "fixed", "count"),
    [(None, (), None), (1e6, (), 3), (1e-3, ("tokens",), 1)],
    ids=["no budget: all at once", "a budget that suffices", "sizes that stay"],
)
def test_everything_is_read_and_no_note_says_less(
    deadline: float | None, fixed: tuple[str, ...], count: int | None
) -> None:
    """And progress is reported in every round."""
    heard: list[Tracker] = []
    rounds = Rounds()
    diagnosis = rounds.within(deadline, *fixed, progress=heard.append)
    assert rounds.tokens[-1] == diagnosis.settings["size"] == 3000
    assert len(rounds.tokens) == (count or 1)
    assert diagnosis.notes == ()
    assert diagnosis.settings.get("rounds") == count
    assert [tracker.done for tracker in heard][-1] == 3000
    assert len({id(tracker) for tracker in heard}) == len(rounds.tokens)


def test_a_round_begins_only_if_it_should_end_before_the_deadline() -> None:
    """By the time of the round before it and the growth of what is read, to the second."""
    rounds = Rounds()
    rounds.within(1e6)
    sizes = rounds.tokens
    for done, needed in enumerate(accumulate(sizes), 1):
        for seconds, finished in ((needed + 1, done), (needed - 1, max(done - 1, 1))):
            rounds = Rounds()
            diagnosis = rounds.within(seconds)
            assert rounds.tokens == sizes[:finished]
            assert diagnosis.settings["rounds"] == finished
            assert rounds.now <= seconds or finished == 1
    # Work of the first round alone counts as if it grew with the rest.
    rounds = Rounds(once=1e4)
    rounds.within(1e4 + sum(sizes) + 1)
    assert rounds.tokens == sizes[:1]


def test_sizes_grow_with_the_share_to_those_requested() -> None:
    whole = subject(validation_rows=40, fisher_samples=200)
    made = [cut(whole, frozenset(), share) for share in (1 / 16, 1 / 4, 1.0)]
    smaller, sizes = made[0]
    assert sizes.keys() == {"tokens", "objective_rows", "fisher_samples"}
    for size, (some, requested) in sizes.items():
        assert 0 < some <= made[1][1].get(size, (requested,))[0] <= requested, size
    assert (smaller.tokens, len(smaller.validation)) == (sizes["tokens"][0], 8)
    last, none = made[-1]
    assert (last.tokens, last.validation, none) == (3000, whole.validation, {})
    kept, nothing = cut(whole, frozenset(sizes), 1 / 16)
    assert (kept.tokens, nothing) == (3000, {})
