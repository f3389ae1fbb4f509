"""One option more at a time: what each does beside the method that it was added to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.selection.paired import Difference, Each, difference


@dataclass(frozen=True)
class Hypothesis:
    """That an option helps.

    Attributes:
        what: is added or changed.
        task: on which it was tried.
        method: with the option.
        base: without it.
    """

    what: str
    task: str
    method: str
    base: str


_WORDS, _MIXED = "noisy-words", "mixed"

HYPOTHESES = (
    Hypothesis("the best 4 of 8 rows, equal tokens", _MIXED, "rows-of-two", "standard"),
    Hypothesis("Adam's own step in the value", _WORDS, "full-step", "label"),
    Hypothesis("the same over all parameters", _WORDS, "full-step-all", "label"),
    Hypothesis("retention by the paper's lambda, Fisher", _WORDS, "alphatoken", "adaptation"),
    Hypothesis("clean rows first, then Adam's own step", _WORDS, "after-validation-full-step",
               "after-validation"),
)  # fmt: skip
"""In the order of the page."""


@dataclass(frozen=True)
class Effect:
    """What came of a hypothesis.

    Attributes:
        hypothesis: that was tried.
        target: target loss with the option minus without it.
        retention: likewise.
    """

    hypothesis: Hypothesis
    target: Difference
    retention: Difference | None


def effects(
    losses: Mapping[str, Mapping[str, Mapping[str, Mapping[int, Each]]]],
) -> list[Effect]:
    """Of the hypotheses whose two methods have run with a seed in common.

    Args:
        losses: by task, method, "target" or "retention", and seed.
    """
    found = []
    for one in HYPOTHESES:
        own, base = (losses.get(one.task, {}).get(name, {}) for name in (one.method, one.base))
        target, retention = (
            difference(own.get(kind, {}), base.get(kind, {})) for kind in ("target", "retention")
        )
        if target is not None:
            found.append(Effect(one, target, retention))
    return found
