"""The planner of the diagnostics: what it promises of every plan, on work that is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken.errors import ConfigError
from alphatoken.fidelity.budget import (
    Plan,
    Size,
    Stage,
    Work,
    clock,
    fit,
    parse_budget,
    same_ahead,
)
from alphatoken.fidelity.tokenwise import draw_short

UNITS = ("forward", "backward", "draw")


@dataclass(frozen=True)
class Part:
    """Sizes as (name, asked, least, factor or 0 for a list of values), and the cost of each.

    The library is called by the tests alone: its run-time type checks draw numbers at random, which
    a strategy must not.
    """

    sizes: tuple[tuple[str, int, int, float], ...]
    weights: tuple[tuple[str, float], ...]
    base: float

    def work(self, ahead: Work | None = None) -> Work:
        def stages(size: Mapping[str, Any]) -> list[Stage]:
            found = [Stage("base", {"forward": self.base})]
            for (name, *_), (unit, weight) in zip(self.sizes, self.weights, strict=True):
                count = measure(size[name])
                found.append(Stage(f"of {name}", {unit: weight * count}, memory=float(count)))
            return found

        return Work(tuple(size_of(*one) for one in self.sizes), stages, ahead)


def size_of(name: str, asked: int, least: int, by: float) -> Size:
    if by:
        return Size.number(name, asked, least, "things", by=by, interval=True)
    many = tuple(range(2 + asked % 8))
    levels = tuple(dict.fromkeys([many, many[: (len(many) + 1) // 2], many[:1]]))
    return Size(name, levels, "values")


@st.composite
def parts(draw: st.DrawFn, prefix: str = "") -> Part:
    """Up to four sizes, numbers and lists, and a stage whose cost grows with each."""
    sizes, weights = [], []
    for place in range(draw(st.integers(1, 4))):
        least = draw(st.integers(1, 20))
        asked = least + draw(st.integers(0, 300))
        by = draw(st.sampled_from([2.0, 2**0.25, 4.0, 0.0]))
        sizes.append((f"{prefix}{place}", asked, least, by))
        weights.append((draw(st.sampled_from(UNITS)), draw(st.floats(0.001, 3))))
    return Part(tuple(sizes), tuple(weights), draw(st.floats(0, 50)))


@dataclass(frozen=True)
class Drawn:
    """Work, what comes ahead of it, prices, and which sizes were said."""

    part: Part
    ahead: Part | None
    prices: dict[str, float]
    fixed: frozenset[str]

    @property
    def work(self) -> Work:
        return self.part.work(None if self.ahead is None else self.ahead.work())


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    part = draw(parts())
    ahead = draw(st.none() | parts("ahead "))
    prices = {unit: draw(st.floats(1e-4, 10)) for unit in UNITS}
    names = [name for name, *_ in part.sizes]
    fixed = frozenset(draw(st.lists(st.sampled_from(names), unique=True)))
    return Drawn(part, ahead, prices, fixed)


def measure(value: object) -> int:
    return len(value) if isinstance(value, tuple) else int(str(value))


def least_of(case: Drawn) -> dict[str, int]:
    """How much of each size there must be: the least that was declared, or what was said."""
    found = {}
    for part in (case.part, case.ahead):
        for name, asked, least, by in () if part is None else part.sizes:
            many = 2 + asked % 8  # of a list, of which the least is one value
            whole, end = (asked, least) if by else (many, 1)
            found[name] = whole if name in case.fixed else end
    return found


def planned(case: Drawn, budget: float | None) -> Plan:
    return fit(case.work, case.prices, budget, case.fixed)


def budgets(case: Drawn) -> list[float]:
    """From far too little to more than enough."""
    whole = planned(case, None).seconds
    return [whole * 1.6**step for step in range(-12, 5)]


@given(drawn())
def test_a_plan_keeps_to_its_budget_or_is_the_least(case: Drawn) -> None:
    """By its own prices; and what does not fit is named with the time that it will take."""
    for budget in budgets(case):
        plan = planned(case, budget)
        if plan.seconds > budget:
            assert {name: measure(x) for name, x in plan.sizes.items()} == least_of(case)
            assert not plan.fits
            assert f"takes about {clock(plan.seconds)}" in " ".join(plan.notes())
        else:
            assert plan.fits
        seconds = [stage.seconds(case.prices) for stage, _ in plan.stages]
        assert plan.seconds == pytest.approx(sum(seconds), rel=1e-12)


@given(drawn())
def test_a_larger_budget_makes_no_size_smaller(case: Drawn) -> None:
    plans = [*(planned(case, budget) for budget in budgets(case)), planned(case, None)]
    for less, more in pairwise(plans):
        for name in less.sizes:
            assert measure(less.sizes[name]) <= measure(more.sizes[name])


@given(drawn())
def test_sizes_lie_between_the_least_and_what_was_asked(case: Drawn) -> None:
    least, whole = least_of(case), planned(case, None)
    for budget in budgets(case)[::3]:
        plan = planned(case, budget)
        assert plan.asked == whole.sizes
        for name, value in plan.sizes.items():
            assert least[name] <= measure(value) <= measure(plan.asked[name])
        for name in case.fixed & set(plan.sizes):
            assert plan.sizes[name] == plan.asked[name]
        assert set(plan.cut) == {n for n in plan.sizes if plan.sizes[n] != plan.asked[n]}
        assert planned(case, budget) == plan  # a function of its arguments


@given(drawn())
def test_without_a_budget_nothing_is_left_out(case: Drawn) -> None:
    plan = planned(case, None)
    assert plan.cut == {}
    assert plan.notes() == []
    assert plan.seconds == pytest.approx(plan.asked_seconds)
    assert planned(case, plan.asked_seconds * 4.1 + 1).cut == {}


def test_what_comes_ahead_takes_nothing_away_by_growing() -> None:
    """Steps of 10 s each come ahead of tokens of 1 s: no second more of budget costs a token."""
    steps = Part((("steps", 40, 2, 2.0),), (("s", 10.0),), 0.0)
    tokens = Part((("tokens", 400, 4, 2**0.25),), (("s", 1.0),), 0.0)
    work = tokens.work(steps.work())
    prices = {"s": 1.0, "forward": 1.0}
    plans = [fit(work, prices, float(budget)) for budget in range(10, 1700, 5)]
    for less, more in pairwise(plans):
        assert less.sizes["tokens"] <= more.sizes["tokens"]
        assert less.sizes["steps"] <= more.sizes["steps"]
    assert plans[-1].cut == {}
    assert {plan.sizes["steps"] for plan in plans} == {2, 5, 10, 20, 40}


@given(st.lists(parts(), min_size=1, max_size=4), parts("ahead "), st.floats(0.01, 2.0))
@example(  # the second leaves nothing for what comes first, the first a quarter of the budget
    [
        Part((("tokens", 40, 4, 2.0),), (("forward", 1.0),), 0.0),
        Part((("tokens", 400, 400, 2.0),), (("forward", 1.0),), 0.0),
    ],
    Part((("ahead steps", 40, 2, 2.0),), (("forward", 1.0),), 0.0),
    0.5,
)
def test_what_several_do_first_is_planned_once_and_paid_in_parts(
    own: list[Part], first: Part, share: float
) -> None:
    """All have its largest sizes, and together they are charged what doing it once costs."""
    prices = {"forward": 1.0, "backward": 0.5, "draw": 0.1}
    works = {str(i): part.work(first.work()) for i, part in enumerate(own)}
    alone = work_seconds(first.work(), prices)
    budget = share * (alone + max(work_seconds(part.work(), prices) for part in own))
    plans = {name: fit(w, prices, budget, sharers=len(own)) for name, w in works.items()}
    shared = same_ahead(plans)
    ahead = [{n: x for n, x in p.sizes.items() if n.startswith("ahead ")} for p in shared.values()]
    assert all(sizes == ahead[0] for sizes in ahead)
    for name, size in ahead[0].items():
        assert measure(size) == max(measure(plan.sizes[name]) for plan in plans.values())
    once = sum(stage.seconds(prices) for stage in first.work().stages(ahead[0]))
    rest = sum(
        stage.seconds(prices)
        for name, plan in shared.items()
        for stage in own[int(name)].work().stages(plan.sizes)
    )
    assert sum(plan.seconds for plan in shared.values()) == pytest.approx(once + rest)


def work_seconds(work: Work, prices: Mapping[str, float]) -> float:
    """Of what was asked for."""
    return fit(work, prices, None).seconds


def test_a_plan_says_what_it_left_out() -> None:
    """100 tokens at a second each, 30 seconds: 25, which quadruples nothing but the width by 2."""
    sizes = (Size.number("tokens", 100, 10, "tokens valued", interval=True),)
    work = Work(sizes, lambda size: [Stage("Values", {"s": float(size["tokens"])}, memory=2.0**30)])
    plan = fit(work, {"s": 1.0}, 30.0)
    assert plan.sizes == {"tokens": 25}
    text = "\n".join(plan.lines())
    assert "Values: 25 s, 1.0 GiB" in text
    assert "asked for would take about 1 min 40 s" in text
    assert "25 instead of 100 tokens valued" in text
    assert "about 2.0 times as wide" in text
    assert "Forecast" in text
    assert plan.record()["notes"] == plan.notes()


@pytest.mark.parametrize("text", ["", "0", "-3m", "ten", "1d", "nan", "inf", "m"])
def test_a_budget_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a time"):
        parse_budget(text)


# --- the oracle's tokens --------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(2, 60), st.integers(1, 9)), min_size=1, max_size=12),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_oracle_tokens_come_from_the_shorter_rows(
    rows: list[tuple[int, int]], most: int, seed: int
) -> None:
    """From the shorter half, and from more only while that has too few tokens."""
    lengths = [length for length, _ in rows]
    belongs = np.repeat(np.arange(len(rows)), [tokens for _, tokens in rows])
    chosen, longest = draw_short(lengths, belongs, most, seed)
    assert len(chosen) == len(set(chosen.tolist())) == min(most, len(belongs))
    assert (np.diff(chosen) > 0).all()
    used = [lengths[row] for row in belongs[chosen]]
    assert max(used) <= longest
    half = sorted(range(len(rows)), key=lambda row: lengths[row])[: -(-len(rows) // 2)]
    if sum(rows[row][1] for row in half) >= most:
        assert set(belongs[chosen].tolist()) <= set(half)


def test_every_token_of_the_shorter_rows_is_as_likely() -> None:
    """4,000 fixed seeds: each of 10 tokens is in 3 of 10 draws; z below 4.5."""
    belongs = np.repeat([0, 1, 2, 3], [4, 6, 50, 50])
    counts = np.zeros(10)
    draws = 4000
    for seed in range(draws):
        chosen, longest = draw_short([5, 9, 80, 90], belongs, 3, seed)
        assert longest == 9
        counts[chosen] += 1
    away = (counts - 0.3 * draws) / np.sqrt(draws * 0.3 * 0.7)
    assert np.abs(away).max() < 4.5
