"""What a diagnostic will take, and sizes that fit a budget: one planner for all of them.

A diagnostic says what it does as *stages*, each a count of priced *units* (passes of the model and
positions sent through it, draws of a statistic, ...), as a function of its *sizes* (tokens, rows,
layers, ...). Prices are seconds a unit, measured before (``prices``). The planner knows nothing
else: it goes down one path of sizes, from what was asked for to the least that means anything, and
takes the first place on it that fits. So a plan follows from prices and budget alone, and no size
is smaller under a larger budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from alphatoken.errors import ConfigError

__all__ = [
    "Plan",
    "Size",
    "Stage",
    "Work",
    "clock",
    "fit",
    "parse_budget",
    "same_ahead",
    "together",
]

AHEAD = 0.25
"""Share of the budget of what comes first and is shared by several diagnostics (a fine-tuning)."""

Units = Mapping[str, float]


@dataclass(frozen=True)
class Stage:
    """One piece of work.

    Attributes:
        name: as its progress is called.
        units: how many of each priced unit.
        memory: bytes at its peak, beyond the model itself.
    """

    name: str
    units: Units
    memory: float = 0.0

    def seconds(self, prices: Mapping[str, float]) -> float:
        """``sum_unit count * price``; a unit without a price is a KeyError."""
        return sum((count * prices[unit] for unit, count in self.units.items() if count), 0.0)


@dataclass(frozen=True)
class Size:
    """A size that a plan may shrink.

    Attributes:
        name: of the field of ``Subject``, or of the diagnostic's options, that holds it.
        levels: values of that field, from what was asked for down to the least that means
            anything.
        what: the things that are fewer, for a sentence.
        interval: whether intervals are over these things, so that fewer make them wider.
    """

    name: str
    levels: tuple[Any, ...]
    what: str
    interval: bool = False

    @classmethod
    def number(
        cls,
        name: str,
        asked: int,
        least: int,
        what: str,
        *,
        by: float = 2.0,
        interval: bool = False,
    ) -> Size:
        """A number that shrinks by the factor ``by`` at a time; important ones by a small one.

        >>> Size.number("tokens", 100, 20, "tokens").levels
        (100, 50, 25, 20)
        """
        levels = [asked]
        while levels[-1] > least:
            levels.append(max(least, min(round(levels[-1] / by), levels[-1] - 1)))
        return cls(name, tuple(levels), what, interval)


@dataclass(frozen=True)
class Work:
    """What a diagnostic does.

    Attributes:
        sizes: what may shrink, what matters least first.
        stages: sizes by name -> the stages.
        ahead: work that comes first, the same for several diagnostics; it may take a quarter of
            the budget, whatever the others do.
        measured: units of this diagnostic alone -> what measures their price when it is needed.
    """

    sizes: tuple[Size, ...]
    stages: Callable[[Mapping[str, Any]], Sequence[Stage]]
    ahead: Work | None = None
    measured: Mapping[str, Callable[[], float]] = field(default_factory=dict)

    def path(self, fixed: frozenset[str] = frozenset()) -> Iterator[dict[str, Any]]:
        """Sizes from what was asked for to the least: in rounds, each size one level a round."""
        moving = [size for size in self.sizes if size.name not in fixed]
        place = dict.fromkeys((size.name for size in self.sizes), 0)
        levels = {size.name: size.levels for size in self.sizes}
        yield {name: levels[name][index] for name, index in place.items()}
        while any(place[size.name] + 1 < len(size.levels) for size in moving):
            for size in moving:
                if place[size.name] + 1 < len(size.levels):
                    place[size.name] += 1
                    yield {name: levels[name][index] for name, index in place.items()}


@dataclass(frozen=True)
class Plan:
    """Sizes, and what they take.

    Attributes:
        sizes: by name, those of what comes ahead among them.
        asked: the same as they were asked for.
        stages: (stage, seconds) at these sizes.
        asked_seconds: forecast at the sizes that were asked for.
        budget: seconds, or None for none.
        words: name of a size -> what there are fewer of.
        intervals: names of the sizes that intervals are over.
        ahead: the part of all this that comes first; None where nothing does.
    """

    sizes: dict[str, Any]
    asked: dict[str, Any]
    stages: tuple[tuple[Stage, float], ...]
    asked_seconds: float
    budget: float | None
    words: dict[str, str] = field(default_factory=dict)
    intervals: frozenset[str] = frozenset()
    ahead: Plan | None = None

    @property
    def seconds(self) -> float:
        """Forecast."""
        return sum((seconds for _, seconds in self.stages), 0.0)

    @property
    def memory(self) -> float:
        """Bytes at the peak of the largest stage, beyond the model."""
        return max((stage.memory for stage, _ in self.stages), default=0.0)

    @property
    def fits(self) -> bool:
        """Whether the forecast keeps to the budget."""
        return self.budget is None or self.seconds <= self.budget

    @property
    def cut(self) -> dict[str, tuple[Any, Any]]:
        """Sizes that are not what was asked for: name -> (asked, planned)."""
        return {
            name: (asked, self.sizes[name])
            for name, asked in self.asked.items()
            if asked != self.sizes[name]
        }

    def lines(self) -> list[str]:
        """One line a stage: time and memory; then what was left out."""
        found = [
            f"  {stage.name}: {clock(seconds)}, {_bytes(stage.memory)}"
            for stage, seconds in self.stages
        ]
        found.append(
            f"  together about {clock(self.seconds)}, at most {_bytes(self.memory)} beyond the "
            "model (a forecast)"
        )
        return found + [f"  {sentence}" for sentence in self.notes()]

    def notes(self) -> list[str]:
        """What the budget left out, and what it does to the intervals; nothing if nothing."""
        if self.budget is None or (not self.cut and self.fits):
            return []
        said = []
        if self.cut:
            parts = [
                f"{_shown(now)} instead of {_shown(asked)} {self.words.get(name, name)}"
                for name, (asked, now) in self.cut.items()
            ]
            said.append(
                f"The sizes asked for would take about {clock(self.asked_seconds)}; to keep to the "
                f"budget of {clock(self.budget)} there are {'; '.join(parts)}."
            )
            said += [
                f"Forecast: with {now} instead of {asked} {self.words[name]}, intervals over them "
                f"are about {math.sqrt(asked / now):.1f} times as wide (as 1 / sqrt(n))."
                for name, (asked, now) in self.cut.items()
                if name in self.intervals and now < asked
            ]
        if not self.fits:
            said.append(
                f"No size that is left to the budget can be smaller: this takes about "
                f"{clock(self.seconds)}, more than the budget of {clock(self.budget)}; it is done "
                "all the same."
            )
        return said

    def record(self) -> dict[str, Any]:
        """For ``run.json``: what a resumed run goes on with."""
        return {
            "sizes": dict(self.sizes),
            "asked": dict(self.asked),
            "seconds": round(self.seconds, 1),
            "asked_seconds": round(self.asked_seconds, 1),
            "budget": self.budget,
            "stages": {stage.name: round(seconds, 1) for stage, seconds in self.stages},
            "memory": int(self.memory),
            "notes": self.notes(),
        }


def fit(
    work: Work,
    prices: Mapping[str, float],
    budget: float | None,
    fixed: frozenset[str] = frozenset(),
    sharers: int = 1,
) -> Plan:
    """The largest sizes on the path whose forecast keeps to the budget; else the least ones.

    What comes ahead is settled by a quarter of the budget, and the rest has what that leaves, in
    such a way that a larger budget never makes any size smaller.

    Args:
        work: what there is to do.
        prices: seconds a unit.
        budget: seconds; None takes what was asked for.
        fixed: sizes that stay as asked for.
        sharers: diagnostics that do what comes ahead together, once; each is charged its part.
    """
    ahead: Plan | None = None
    left = budget
    if work.ahead is not None:
        share, part = None, {unit: price / sharers for unit, price in prices.items()}
        if budget is not None:
            # It leaves what the rest needs at the least.
            *_, least = work.path(fixed)
            share = min(AHEAD * budget, budget - _seconds(work, least, prices))
            left = budget - _held_back(work.ahead, part, share, fixed)
        ahead = fit(work.ahead, part, share, fixed)
    found: dict[str, Any] = {}
    for found in work.path(fixed):
        if left is None or _seconds(work, found, prices) <= left:
            break
    asked = next(work.path(fixed))
    stages = tuple((stage, stage.seconds(prices)) for stage in work.stages(found))
    words = {size.name: size.what for size in work.sizes}
    intervals = frozenset(size.name for size in work.sizes if size.interval)
    whole = _seconds(work, asked, prices)
    if ahead is None:
        return Plan(found, asked, stages, whole, budget, words, intervals)
    return Plan(
        {**ahead.sizes, **found},
        {**ahead.asked, **asked},
        (*ahead.stages, *stages),
        ahead.asked_seconds + whole,
        budget,
        ahead.words | words,
        ahead.intervals | intervals,
        ahead,
    )


def same_ahead(plans: Mapping[str, Plan]) -> dict[str, Plan]:
    """Plans that share what comes ahead: done once, at the largest of their sizes for it."""
    parts = [plan.ahead for plan in plans.values() if plan.ahead is not None]
    if not parts:
        return dict(plans)
    largest = max(parts, key=lambda ahead: ahead.seconds)
    return {
        name: plan
        if plan.ahead is None
        else replace(
            plan,
            sizes={**plan.sizes, **largest.sizes},
            stages=(*largest.stages, *plan.stages[len(plan.ahead.stages) :]),
            ahead=largest,
        )
        for name, plan in plans.items()
    }


def _held_back(
    ahead: Work, prices: Mapping[str, float], share: float, fixed: frozenset[str]
) -> float:
    """Seconds that the rest must leave: the share, between the least and the most it may take.

    Not what ``ahead`` takes at its planned sizes, which jumps: the rest would lose a size where
    the budget grows by a second.
    """
    path = [_seconds(ahead, sizes, prices) for sizes in ahead.path(fixed)]
    return min(max(share, path[-1]), max(path))


def _seconds(work: Work, sizes: Mapping[str, Any], prices: Mapping[str, float]) -> float:
    return sum((stage.seconds(prices) for stage in work.stages(sizes)), 0.0)


def together(*parts: Units) -> dict[str, float]:
    """The sum of several counts, unit by unit.

    >>> together({"a": 1.0, "b": 2.0}, {"b": 3.0})
    {'a': 1.0, 'b': 5.0}
    """
    total: dict[str, float] = {}
    for part in parts:
        for unit, count in part.items():
            total[unit] = total.get(unit, 0) + count
    return total


def parse_budget(text: str) -> float | None:
    """Seconds of a budget as a user writes it; None for "none".

    >>> parse_budget("15m"), parse_budget("90s"), parse_budget("1.5h"), parse_budget("none")
    (900.0, 90.0, 5400.0, None)

    Raises:
        ConfigError: it is no such time.
    """
    if text.strip().lower() == "none":
        return None
    scale = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = text.strip().lower()[:-1], text.strip().lower()[-1:]
    try:
        seconds = float(number) * scale[unit]
    except (ValueError, KeyError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(
            "the budget is not a time",
            got=repr(text),
            remedy="a number with its unit, such as 15m, 90s or 1.5h, or none for no limit",
        )
    return seconds


def clock(seconds: float) -> str:
    """A time as a reader would say it.

    >>> clock(0.4), clock(75.0), clock(8130.0)
    ('1 s', '1 min 15 s', '2 h 16 min')
    """
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(whole / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def _bytes(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 / 10 else f"{count / 2**20:.0f} MiB"


def _shown(value: Any) -> str:
    """A number as it is; of several values, how many."""
    return str(len(value)) if isinstance(value, tuple) else str(value)
