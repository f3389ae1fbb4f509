"""Length-controlled win rates: what they must be where that is known, and a slow way to them.

The slow way does not share a line with what it checks: two nested bisections on the equations that
the two coefficients solve, with Python's floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import strategies as st

from alphatoken_lab.compare.length_control import RIDGE, length_controlled_rate

MANY = 40
"""How often each comparison is made where the ridge must weigh little."""


@dataclass(frozen=True)
class Comparisons:
    """Preferences, and how long both answers of each comparison are."""

    won: tuple[float, ...]
    ours: tuple[int, ...]
    theirs: tuple[int, ...]

    def rate(self) -> float:
        """By the function that is checked."""
        ours, theirs = ([n * "x" for n in side] for side in (self.ours, self.theirs))
        return length_controlled_rate(self.won, ours, theirs)

    def terms(self) -> list[float]:
        """tanh of the difference over its sample standard deviation."""
        d = [a - b for a, b in zip(self.ours, self.theirs, strict=True)]
        mean = math.fsum(d) / len(d)
        spread = math.sqrt(math.fsum((x - mean) ** 2 for x in d) / (len(d) - 1))
        return [math.tanh(x / spread) for x in d]


lengths = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=3, max_size=12
).filter(lambda found: len({a - b for a, b in found}) > 1)


@st.composite
def comparisons(draw: st.DrawFn) -> Comparisons:
    """Of different lengths, neither all won nor all lost."""
    pairs = draw(lengths)
    size = len(pairs)
    steps = st.lists(st.integers(0, 4), min_size=size, max_size=size)
    won = draw(steps.filter(lambda found: 0 < sum(found) < 4 * size))
    ours, theirs = zip(*pairs, strict=True)
    return Comparisons(tuple(x / 4 for x in won), ours, theirs)


def check_against_bisection(given: Comparisons) -> None:
    """The length-controlled rate is the maximum of the penalised likelihood, found by bisection."""
    t = given.terms()

    def theta(phi: float) -> float:
        # sum of (y - p) falls with theta
        return _root(lambda x: math.fsum(
            y - _sigma(x + phi * z) for y, z in zip(given.won, t, strict=True)), 400.0)  # fmt: skip

    def slope(phi: float) -> float:
        x = theta(phi)
        gain = ((y - _sigma(x + phi * z)) * z for y, z in zip(given.won, t, strict=True))
        return math.fsum(gain) - RIDGE * phi

    found = 100 * _sigma(theta(_root(slope, 200.0)))
    assert given.rate() == pytest.approx(found, abs=1e-6)


def check_without_covariance_it_is_plain(
    pairs: Sequence[tuple[int, int]], won: Sequence[float]
) -> None:
    """Where preferences have no covariance with length, the rate is the plain win rate."""
    every = list(product(pairs, won))  # each length with each preference, equally often
    given = Comparisons(
        tuple(y for _, y in every), tuple(a for (a, _), _ in every), tuple(b for (_, b), _ in every)
    )
    assert given.rate() == pytest.approx(100 * math.fsum(won) / len(won), abs=1e-6)


def check_length_alone_is_even(pairs: list[tuple[int, int]], phi: float) -> None:
    """Where length alone decides, the rate is 50, up to what the ridge takes off its coefficient.

    At (0, phi) the gradient is (0, ridge phi). With w the least p (1 - p) and S the sum of squares
    of t around its mean, the minimum's theta is at most ridge |phi| / (w S + ridge) from 0, as |t|
    is at most 1; and |theta| is at most 2 |phi|, or all p would lie on one side of y.
    """
    ours, theirs = (tuple(side) for side in zip(*pairs * MANY, strict=True))
    t = Comparisons((0.5,) * len(ours), ours, theirs).terms()
    given = Comparisons(tuple(_sigma(phi * z) for z in t), ours, theirs)
    p = _sigma(3 * abs(phi))
    mean = math.fsum(t) / len(t)
    spread = math.fsum((z - mean) ** 2 for z in t)
    shift = RIDGE * abs(phi) / (p * (1 - p) * spread + RIDGE)
    assert abs(given.rate() - 50) <= 25 * shift + 1e-6


def check_exchange_of_models(given: Comparisons) -> None:
    """Exchanging the two models gives 100 minus the rate."""
    turned = Comparisons(tuple(1 - y for y in given.won), given.theirs, given.ours)
    assert given.rate() + turned.rate() == pytest.approx(100, abs=1e-6)


def _sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _root(falling: Callable[[float], float], far: float) -> float:
    """Where a falling function is zero, within [-far, far]."""
    low, high = -far, far
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
