"""The decision of a race: differences and intervals against loops, and how often it errs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken.errors import AlphaTokenWarning, ConfigError, InputError, NumericalError
from alphatoken.race import decision
from alphatoken.race.arms import ALL, Arm, looks_of, read_arms
from alphatoken.race.decision import Column
from alphatoken.race.options import RaceConfig
from alphatoken.race.rows import choosing_numbers, rows_of_arm
from tests.property.profiles import budget
from tests.property.test_confidence import student

quantile = cache(student)

# --- by hand --------------------------------------------------------------------------------------


def by_hand(
    arm: Sequence[float], base: Sequence[float], tokens: Sequence[float], level: float, k: int
) -> tuple[float, float, float, float]:
    """Difference, standard error by the jackknife, and interval, row by row."""
    rows, numerator, whole = len(tokens), 0.0, 0.0
    for ours, theirs, count in zip(arm, base, tokens, strict=True):
        numerator += count * (ours - theirs)
        whole += count
    value, others = numerator / whole, []
    for left_out in range(rows):
        part = total = 0.0
        for row in range(rows):
            if row != left_out:
                part += tokens[row] * (arm[row] - base[row])
                total += tokens[row]
        others.append(part / total)
    squares = 0.0
    for other in others:
        squares += (other - sum(others) / rows) ** 2
    error = math.sqrt((rows - 1) / rows * squares)
    reach = quantile(1 - level / (2 * k), rows - 1) * error
    return value, error, value - reach, value + reach


@dataclass(frozen=True)
class RaceCase:
    """A race on made-up losses; ``repr`` rebuilds it."""

    seed: int
    rows: int
    shifts: tuple[tuple[float, ...], ...]
    """Mean difference of each arm at each look: looks, then arms."""
    looks: int
    level: float
    retention: bool = False
    keep_retention: bool = False

    @property
    def arms(self) -> list[str]:
        return [f"arm-{number}" for number in range(len(self.shifts[0]))]

    def columns(self) -> list[Column]:
        """Choosing rows, and retention rows if there are any."""
        generator = np.random.default_rng(self.seed)
        made = []
        for _ in range(1 + self.retention):
            tokens = generator.integers(1, 40, self.rows).astype(float).tolist()
            looks = []
            for shifts in self.shifts:
                base = generator.uniform(1, 3, self.rows)
                noise = generator.normal(0, 0.05, (len(shifts), self.rows))
                losses = {ALL: base.tolist()}
                for name, shift, own in zip(self.arms, shifts, noise, strict=True):
                    losses[name] = (base + shift + own).tolist()
                looks.append(losses)
            made.append(Column(tokens, looks))
        return made


def decided(case: RaceCase) -> tuple[dict[str, int], str | None]:
    """Who left at which look, and who won, by loops over arms and looks."""
    choosing, *rest = case.columns()
    k = case.looks * len(case.arms) * (1 + case.retention)
    left: dict[str, int] = {}
    for look, losses in enumerate(choosing.looks):
        for name in case.arms:
            if name in left:
                continue
            _, _, low, _ = by_hand(losses[name], losses[ALL], choosing.tokens, case.level, k)
            if low > 0:
                left[name] = look
    if len(left) == len(case.arms):
        return left, ALL
    if len(choosing.looks) < case.looks:
        return left, None
    winner, lowest = ALL, math.inf
    for name in case.arms:
        if name in left:
            continue
        last = choosing.looks[-1]
        value, _, _, high = by_hand(last[name], last[ALL], choosing.tokens, case.level, k)
        if case.keep_retention and rest:
            known = rest[0].looks[-1]
            _, _, low, _ = by_hand(known[name], known[ALL], rest[0].tokens, case.level, k)
            if low > 0:
                continue
        if high < 0 and value < lowest:
            winner, lowest = name, value
    return left, winner


@st.composite
def races(draw: st.DrawFn) -> RaceCase:
    """Up to three looks and arms; arms that are better, worse, or neither."""
    arms, looks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    taken = draw(st.integers(1, looks))
    shift = st.sampled_from([-0.3, -0.1, -0.02, 0.0, 0.02, 0.1])
    shifts = draw(
        st.lists(
            st.lists(shift, min_size=arms, max_size=arms).map(tuple),
            min_size=taken,
            max_size=taken,
        )
    )
    return RaceCase(
        seed=draw(st.integers(0, 99)),
        rows=draw(st.integers(2, 12)),
        shifts=tuple(shifts),
        looks=looks,
        level=draw(st.sampled_from([0.01, 0.05, 0.3])),
        retention=(retention := draw(st.booleans())),
        keep_retention=retention and draw(st.booleans()),
    )


EARLY = RaceCase(0, 10, ((-0.3, 0.0),), looks=2, level=0.05)
"""An arm that is far ahead at the first of two looks."""
LATE = RaceCase(1, 10, ((-0.3, 0.1), (0.0, 0.1)), looks=2, level=0.05)
"""It is ahead no more at the last; another left at the first."""
TWO = RaceCase(2, 10, ((-0.2, -0.3),), looks=1, level=0.05)
"""Two that are better, of which one is better still."""
NARROW = RaceCase(3, 8, ((-0.01, 0.0, 0.0),), looks=1, level=0.05)
"""None that is better beyond its interval."""
FORGETS = RaceCase(4, 10, ((-0.3, 0.1),), looks=1, level=0.05, retention=True)
"""With retention rows, on which losses are drawn anew."""


@given(races())
@example(EARLY)
@example(LATE)
@example(TWO)
@example(NARROW)
@example(FORGETS)
@budget(1.0)
def test_race_against_loops(case: RaceCase) -> None:
    """Differences, errors and intervals of every look, who left, and who won.

    Proves: the decision of a race (exact), against loops, quantile by bisection.
    """
    choosing, *rest = case.columns()
    outcome = decision.decide(
        choosing,
        rest[0] if rest else None,
        arms=case.arms,
        looks=case.looks,
        level=case.level,
        keep_retention=case.keep_retention,
    )
    k = case.looks * len(case.arms) * (1 + case.retention)
    left, winner = decided(case)
    assert (outcome.left_at, outcome.winner) == (left, winner)
    shown = [outcome.differences, *([outcome.retention] if rest else [])]
    for column, looks in zip([choosing, *rest], shown, strict=True):
        for losses, differences in zip(column.looks, looks, strict=True):
            for name, one in differences.items():
                wanted = by_hand(losses[name], losses[ALL], column.tokens, case.level, k)
                assert (one.value, one.error, one.low, one.high) == pytest.approx(wanted, rel=1e-6)


@given(st.integers(0, 99), st.lists(st.integers(0, 4), min_size=4, max_size=12))
@example(0, [0, 1, 2, 3])
@example(1, [0, 0, 0, 1, 2])
def test_rows_of_one_prompt_are_one_row(seed: int, groups: list[int]) -> None:
    """Their joint mean over tokens, left out together; and a copied row adds no certainty.

    Proves: the standard error of a race over prompts (exact), against loops over joined rows.
    """
    generator, count = np.random.default_rng(seed), len(groups)
    tokens = generator.integers(1, 40, count).astype(float)
    base = generator.uniform(1, 3, count)
    arm = base + generator.normal(0, 0.05, count)
    numbers = [sorted(set(groups)).index(one) for one in groups]
    if len(set(numbers)) < 2:
        with pytest.raises(InputError, match="rows of different prompts"):
            decision.difference(arm, base, tokens, level=0.05, intervals=2, groups=numbers)
        return
    joined: list[list[float]] = [[], [], []]
    for number in sorted(set(numbers)):
        mine = [place for place, own in enumerate(numbers) if own == number]
        whole = sum(tokens[place] for place in mine)
        for into, losses in zip(joined, (arm, base), strict=False):
            into.append(sum(tokens[place] * losses[place] for place in mine) / whole)
        joined[2].append(whole)
    wanted = by_hand(joined[0], joined[1], joined[2], 0.05, 2)
    found = decision.difference(arm, base, tokens, level=0.05, intervals=2, groups=numbers)
    assert (found.value, found.error, found.low, found.high) == pytest.approx(wanted, rel=1e-6)
    columns = [np.repeat(one, 3) for one in (arm, base, tokens, np.asarray(numbers))]
    copied = decision.difference(*columns[:3], level=0.05, intervals=2, groups=columns[3])
    assert (copied.value, copied.error) == pytest.approx((found.value, found.error), rel=1e-6)


def test_what_the_examples_are_for() -> None:
    """Each of the cases above does what is said of it."""
    assert decided(EARLY) == ({}, None)
    assert decided(LATE) == ({"arm-1": 0}, ALL)
    assert decided(TWO) == ({}, "arm-1")
    assert decided(NARROW) == ({}, ALL)


def test_an_arm_that_forgets_wins_only_where_nobody_asks() -> None:
    """The retention rows are a second column, and a condition if it is asked for.

    Proves: the retention column of a race (exact), against losses made up by hand.
    """
    rows = [10.0] * 8
    base = [2.0 + 0.1 * row for row in range(8)]
    jitter = [0.001 * (-1) ** row for row in range(8)]
    better = [loss - 0.2 + own for loss, own in zip(base, jitter, strict=True)]
    worse = [loss + 0.2 + own for loss, own in zip(base, jitter, strict=True)]
    choosing = Column(rows, [{ALL: base, "arm": better}])
    forgets = Column(rows, [{ALL: base, "arm": worse}])
    keeps = Column(rows, [{ALL: base, "arm": better}])
    for retention, asked, winner in (
        (forgets, False, "arm"),
        (forgets, True, ALL),
        (keeps, True, "arm"),
        (None, True, "arm"),
    ):
        outcome = decision.decide(choosing, retention, arms=["arm"], looks=1, keep_retention=asked)
        assert outcome.winner == winner


# --- how often it errs ----------------------------------------------------------------------------

Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]
"""(generator, rows) -> differences of loss, symmetric about 0, and tokens of each row."""

ROWS = 16


def _equal(generator: np.random.Generator, rows: int) -> np.ndarray:
    return np.full(rows, 30.0)


def _unequal(generator: np.random.Generator, rows: int) -> np.ndarray:
    return np.ceil(30 * np.exp(0.8 * generator.standard_normal(rows)))


SHAPES: dict[str, Draw] = {
    "normal": lambda g, n: (g.standard_normal(n), _equal(g, n)),
    "heavy tails": lambda g, n: (g.standard_t(2, n), _equal(g, n)),
    "heavier tails": lambda g, n: (g.standard_cauchy(n), _equal(g, n)),
    "signs": lambda g, n: (g.choice([-1.0, 1.0], n), _equal(g, n)),
    "unequal rows": lambda g, n: (g.standard_normal(n), _unequal(g, n)),
    "unequal rows, heavy tails": lambda g, n: (g.standard_t(3, n), _unequal(g, n)),
    "long rows differ less": lambda g, n: (
        g.standard_normal(n) / np.sqrt(tokens := _unequal(g, n)),
        tokens,
    ),
}


def errors(shape: str, draws: int, arms: int, looks: int, level: float) -> tuple[float, float]:
    """Share of races in which ``all`` is left, and in which any interval misses 0."""
    generator = np.random.default_rng(7)
    names = [f"arm-{number}" for number in range(arms)]
    left = missed = 0
    for _ in range(draws):
        tokens: Any = None
        history = []
        for _look in range(looks):
            base = generator.uniform(1, 3, ROWS)
            losses = {ALL: base.tolist()}
            for name in names:
                noise, own = SHAPES[shape](generator, ROWS)
                tokens = own.tolist() if tokens is None else tokens
                losses[name] = (base + 0.1 * noise).tolist()
            history.append(losses)
        outcome = decision.decide(Column(tokens, history), arms=names, looks=looks, level=level)
        left += outcome.winner not in (ALL, None)
        every = [one for look in outcome.differences for one in look.values()]
        missed += any(one.low > 0 or one.high < 0 for one in every)
    return left / draws, missed / draws


def at_most(level: float, draws: int) -> float:
    """The level and three standard errors of a share of that many draws."""
    return level + 3 * math.sqrt(level * (1 - level) / draws)


@pytest.mark.parametrize("shape", SHAPES)
def test_all_is_left_no_more_often_than_said(shape: str) -> None:
    """Where differences are symmetric about 0: of 300 races of eight arms.

    Proves: the level of a race (approximate), against made-up losses of arms that do not differ.
    """
    left, _ = errors(shape, draws=300, arms=8, looks=1, level=0.05)
    assert left <= at_most(0.05, 300)


def test_all_intervals_hold_together() -> None:
    """Differences that are normal, rows of one length: there Student's t is exact.

    Proves: intervals of a race that hold together (exact), against made-up losses of arms that do
    not differ.
    """
    _, missed = errors("normal", draws=400, arms=3, looks=3, level=0.2)
    assert missed <= at_most(0.2, 400)
    assert missed > 0.05  # not by being as wide as the world


@pytest.mark.slow
@pytest.mark.parametrize("arms", [1, 8])
@pytest.mark.parametrize("looks", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_all_is_left_no_more_often_than_said_in_many_races(
    shape: str, looks: int, arms: int
) -> None:
    draws = 10_000 if (arms, looks) == (1, 1) else 1_000
    left, missed = errors(shape, draws=draws, arms=arms, looks=looks, level=0.05)
    assert left <= at_most(0.05, draws)
    if shape in ("normal", "heavy tails", "heavier tails"):
        assert missed <= at_most(0.05, draws)


@given(st.integers(0, 99), st.integers(2, 20), st.integers(1, 3))
@budget(0.5)
def test_all_against_itself_never_leaves(seed: int, rows: int, looks: int) -> None:
    """An arm with the very losses of ``all`` differs by 0, and nobody wins or leaves.

    Proves: a race of equal arms (exact), against 0.
    """
    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, 50, rows).astype(float).tolist()
    history = []
    for _ in range(looks):
        losses = generator.uniform(0, 5, rows).tolist()
        history.append({ALL: losses, "same": losses})
    outcome = decision.decide(Column(tokens, history), arms=["same"], looks=looks, level=0.9)
    assert outcome.winner == ALL
    assert not outcome.left_at
    for look in outcome.differences:
        one = look["same"]
        assert (one.value, one.error, one.low, one.high) == (0.0, 0.0, 0.0, 0.0)


def test_an_arm_that_failed_leaves() -> None:
    """One without losses at a look leaves there.

    Proves: an arm that failed (exact), against losses made up by hand.
    """
    base = [1.0, 2.0, 3.0]
    column = Column([4.0, 5.0, 6.0], [{ALL: base}])
    outcome = decision.decide(column, arms=["broken"], looks=2)
    assert (outcome.left_at, outcome.winner) == ({"broken": 0}, ALL)


# --- bad input ------------------------------------------------------------------------------------


def test_bad_input_of_a_difference() -> None:
    two = [1.0, 2.0]
    good: dict[str, Any] = {"level": 0.05, "intervals": 1}
    with pytest.raises(InputError, match="of the same rows"):
        decision.difference([1.0], two, two, **good)
    with pytest.raises(InputError, match="at least 2 rows"):
        decision.difference([1.0], [1.0], [1.0], **good)
    with pytest.raises(InputError, match="no response token"):
        decision.difference(two, two, [3.0, 0.0], **good)
    with pytest.raises(NumericalError, match="at row 1"):
        decision.difference([1.0, math.nan], two, two, **good)
    with pytest.raises(NumericalError, match="inf at row 0"):
        decision.difference(two, [math.inf, 1.0], two, **good)
    for level in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(InputError, match="level must lie in"):
            decision.difference(two, two, two, level=level, intervals=1)


def test_few_rows_are_warned_of_and_one_is_refused() -> None:
    with pytest.raises(InputError, match="at least 2 choosing rows"):
        decision.check_rows(1, "choosing rows")
    with pytest.warns(AlphaTokenWarning, match="7 choosing rows: Student's t has 6 degrees"):
        decision.check_rows(7, "choosing rows")
    decision.check_rows(8, "choosing rows")


# --- arms, looks and rows -------------------------------------------------------------------------


def test_arms_as_they_are_written() -> None:
    """Words and mappings of one dialect; ``all`` is in every race, and first."""
    walk = {"policy": "top", "estimator": "walk", "keep_ratio": 0.8}
    default = read_arms(None)
    assert [arm.name for arm in default] == [ALL, "walk-80"]
    assert walk.items() <= default[1].options.items()
    words = read_arms(["random", "half:policy=random,keep_ratio=0.5", "all", "a.b:Class"])
    assert [arm.name for arm in words] == [ALL, "random", "half", "Class"]
    assert words[1].options == {"policy": "random"}
    assert words[2].options == {"policy": "random", "keep_ratio": 0.5}
    assert words[3].options == {"policy": "a.b:Class"}
    (_, without) = read_arms(["without:source=web"])
    assert (without.name, without.folder) == ("without:source=web", "without-source-web")
    assert without.without == ("source", "web")
    assert without.options == {"policy": "standard"}
    (_, own) = read_arms({"own": {**walk, "without": ["source", "web"]}})
    assert (dict(own.options), own.without) == (walk, ("source", "web"))
    (_, word) = read_arms(["rest:without_rows=4,13,15-18"])
    (_, mapping) = read_arms({"rest": {"without_rows": [4, 13, "15-18"]}})
    assert word == mapping
    assert (word.without_rows, word.options) == ("4,13,15-18", {"policy": "standard"})
    (_, named) = read_arms(["without:without_rows=4,13"])
    assert (named.name, named.without, named.without_rows) == ("without", None, "4,13")
    assert read_arms(["rest:policy=random,without_rows=4"])[1].as_dict() == {
        "policy": "random",
        "without_rows": "4",
    }


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        ([], "an arm beside 'all'"),
        (["all"], "an arm beside 'all'"),
        (["random", "random"], "two arms have one name"),
        (["own:keep_ration=0.5"], "keep_ration"),
        ({"own": {"learning_rate": 1.0}}, "learning_rate"),
        ({"own": 3}, "a mapping of options"),
        ({"../up": {"policy": "random"}}, "an arm's name"),
        ({"all": {"policy": "random"}}, "training on every token"),
        (["without:source"], "a column and a value"),
        (["rest:without_rows=4,x"], "no number of a row.*'x' in the arm 'rest'"),
        ({"all": {"policy": "standard", "without_rows": 4}}, "training on every token"),
        ([3], "written as a word"),
    ],
)
def test_arms_that_cannot_be_read(arms: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_arms(arms)


def test_looks_by_default_and_by_hand() -> None:
    """2.5, 5 and 10 % of the steps, none before step 20.

    Proves: the looks of a race (exact), against steps written by hand.
    """
    assert looks_of(4000, None) == (100, 200, 400)
    assert looks_of(400, None) == (20, 40)
    assert looks_of(20, None) == (20,)
    assert looks_of(10, [3, 6]) == (3, 6)
    with pytest.raises(InputError, match="over before the last look"):
        looks_of(19, None)
    with pytest.raises(InputError, match="over before the last look"):
        looks_of(5, [3, 6])
    for looks in ([], [3, 2], [3, 3], [0], [True]):
        with pytest.raises(ConfigError, match="ascending steps"):
            RaceConfig(looks=looks)
    with pytest.raises(ConfigError, match="level must be"):
        RaceConfig(level=1.0)


@given(st.integers(9, 60), st.integers(0, 9))
@budget(0.5)
def test_choosing_rows_are_set_aside_by_the_seed(rows: int, seed: int) -> None:
    numbers, others = choosing_numbers(rows, None, seed)
    assert len(numbers) == max(8, rows // 2) < rows
    assert (numbers, others) == choosing_numbers(rows, None, seed)
    assert numbers == sorted({*numbers})
    assert {*numbers} <= {*range(rows)}
    assert others == [number for number in range(rows) if number not in numbers]


def test_choosing_rows_leave_some_for_the_arms() -> None:
    assert len(choosing_numbers(5, 2, 0)[0]) == 2
    assert choosing_numbers(40, None, 0) != choosing_numbers(40, None, 1)
    for rows, wanted in ((8, None), (5, 5)):
        with pytest.raises(ConfigError, match="too few trusted rows"):
            choosing_numbers(rows, wanted, 0)


def test_rows_that_an_arm_leaves_out() -> None:
    """By a column, by numbers as messages name them, or by both; some, never all.

    Proves: the rows of an arm (exact), against places written by hand.
    """
    sources, numbers = ["web", "book", "web"], [1, 2, 4]

    def rows(word: str) -> list[int]:
        return rows_of_arm(read_arms([word])[1], sources, numbers)

    assert rows("without:source=web") == [1]
    assert rows("rest:without_rows=2") == [0, 2]
    assert rows("rest:without_rows=2-3,4") == [0]
    assert rows("rest:without_rows=1,3") == [1, 2]  # the third line is no row
    both = Arm("both", {}, ("source", "book"), "4")
    assert rows_of_arm(both, sources, numbers) == [0]
    for word, message in (
        ("without:source=film", "leaves out no row"),
        ("rest:without_rows=3", "leaves out no row. Got: without_rows=3, of 3 rows"),
        (f"rest:without_rows=1-{10**17}", "leaves out every row"),
    ):
        with pytest.raises(ConfigError, match=message):
            rows(word)
