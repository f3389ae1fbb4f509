"""Which arm of a race wins: differences of losses by row, with intervals that hold together.

    d_r  = n_r (l_arm,r - l_all,r)                     row r of q, which has n_r response tokens
    D    = sum_r d_r / sum_r n_r                       nats a token, or a pair; below 0 it is better
    D_-r = the same without row r
    s^2  = (q - 1) / q  sum_r (D_-r - mean D_-r)^2     squared standard error of D, by the jackknife
    D -+ t s,      t = the 1 - level / (2 C) quantile of Student's t with q - 1 degrees of freedom

Rows that share their prompt vary together, so they count as one row r: n_r is then the sum of
their tokens, and l_r the mean over these. s is the standard error of a ratio: numerator and
denominator vary over rows together. For rows of one length it is that of a mean. C counts all
intervals of a race: looks x arms, twice as many with retention rows (Bonferroni). Of pairs n_r is 1
before rows are joined, and a loss is that of the pair.

At a look, an arm whose interval lies above 0 leaves. At the last look the arm with the lowest D
among those whose interval lies below 0 wins; if there is none, ``all`` does.

**Promise**: where no arm differs from ``all``, ``all`` is left with probability at most ``level``.
An arm can win at the last look alone, on one side, so the bound there is level / (2 looks); and all
intervals of a race hold 0 together with probability at least 1 - level. Both rest on Student's t:
exact where rows are independent, n_r all equal and d_r normal with mean 0; approximate elsewhere.
Where d_r is symmetric with heavier tails, t is on the safe side. Where a few rows have most of the
tokens, q - 1 degrees of freedom are too many, and the intervals too narrow; the jackknife makes up
for a part of it, which the linearised error would not. The promise is about the losses at the
looks. That a better arm stays better until the end of the run is no part of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from alphatoken.errors import AlphaTokenWarning, InputError, NumericalError, warn_caller
from alphatoken.race.arms import ALL

FEWEST, FEW = 2, 8
"""Rows below which there is no standard error, and below which there is a warning."""

Losses = Mapping[str, Sequence[float]]
"""Arm -> loss of each row, in nats a token; of pairs the loss of each pair."""


@dataclass(frozen=True)
class Difference:
    """An arm's loss minus that of ``all``, in nats a token (of pairs, a pair), with its interval.

    Attributes:
        value: D.
        error: standard error of D over rows.
        low: lower end of the interval.
        high: upper end.
    """

    value: float
    error: float
    low: float
    high: float


@dataclass(frozen=True)
class Column:
    """Rows on which arms are compared, and what was measured on them so far.

    Attributes:
        tokens: response tokens of each row; 1 for each pair.
        looks: losses of the arms that ran, look by look.
        groups: a number for each row, the same for rows that count as one; None for rows that
            each count.
    """

    tokens: Sequence[float]
    looks: Sequence[Losses]
    groups: Sequence[int] | None = None


@dataclass(frozen=True)
class Outcome:
    """What the looks so far come to.

    Attributes:
        differences: arm -> difference on the choosing rows, look by look.
        retention: the same on the retention rows; empty without them.
        left_at: arm -> number of the look, from 0, at which it left.
        winner: name; None as long as another look is due.
    """

    differences: list[dict[str, Difference]] = field(default_factory=list)
    retention: list[dict[str, Difference]] = field(default_factory=list)
    left_at: dict[str, int] = field(default_factory=dict)
    winner: str | None = None


def check_rows(count: int, what: str) -> None:
    """Refuse fewer than two rows, and warn of fewer than eight.

    Raises:
        InputError: fewer than two.
    """
    if count < FEWEST:
        raise InputError(
            f"a race needs at least {FEWEST} {what}",
            got=f"{count} with a response",
            why="the standard error of a difference is over rows",
            remedy=f"give {FEW} or more",
        )
    if count < FEW:
        warn_caller(
            f"{count} {what}: Student's t has {count - 1} degrees of freedom, its intervals are "
            f"wide, and how often they hold depends on the shape of the differences; give {FEW} or "
            "more",
            AlphaTokenWarning,
        )


def difference(
    arm: Sequence[float],
    base: Sequence[float],
    tokens: Sequence[float],
    *,
    level: float,
    intervals: int,
    groups: Sequence[int] | None = None,
) -> Difference:
    """The loss of an arm minus that of ``all``; see the module's text for the formula.

    Args:
        arm: (q,) loss of each row.
        base: (q,) the same of ``all``.
        tokens: (q,) response tokens of each row.
        level: probability with which any of the intervals may miss, in (0, 1).
        intervals: how many are to hold together.
        groups: (q,) a number for each row, the same for rows that count as one; None for none.

    Raises:
        InputError: lengths that differ, fewer than two rows, a row without tokens, a level out of
            range. NumericalError: a loss that is not finite.

    Exactness: exact for this t. Oracle: loops, with t by bisection, in
    ``tests/property/test_race_decision.py``.
    """
    ours, theirs, counts = _columns(arm, base, tokens)
    if not 0 < level < 1 or intervals < 1:
        raise InputError(
            "level must lie in (0, 1), for at least one interval",
            got=f"{level!r}, {intervals!r}",
        )
    summed = counts * (ours - theirs)
    if groups is not None:
        counts, summed = (np.bincount(groups, weights=one) for one in (counts, summed))
        _require_rows(len(counts))
    rows, whole = len(counts), counts.sum()
    value = summed.sum() / whole
    without = (summed.sum() - summed) / (whole - counts)
    error = np.sqrt((rows - 1) / rows * ((without - without.mean()) ** 2).sum())
    reach = _quantile(1 - level / (2 * intervals), rows - 1) * error
    return Difference(float(value), float(error), float(value - reach), float(value + reach))


@cache
def _quantile(probability: float, degrees: int) -> float:
    """Of Student's t."""
    return float(stats.t.ppf(probability, degrees))


def _columns(
    arm: Sequence[float], base: Sequence[float], tokens: Sequence[float]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    columns = [np.asarray(one, dtype=np.float64) for one in (arm, base, tokens)]
    lengths = [one.shape for one in columns]
    if len({*lengths}) > 1 or len(lengths[0]) != 1:
        raise InputError(
            "losses of two arms and tokens must be of the same rows",
            got=" and ".join(map(str, lengths)),
        )
    _require_rows(len(columns[0]))
    if not (columns[2] > 0).all() or not np.isfinite(columns[2]).all():
        raise InputError(
            "a choosing row has no response token",
            got=f"row {int(np.argmin(columns[2] > 0))}",
            why="it has no loss",
            remedy="leave it out",
        )
    for losses in columns[:2]:
        if not np.isfinite(losses).all():
            row = int(np.argmin(np.isfinite(losses)))
            raise NumericalError("a loss is not finite", got=f"{losses[row]} at row {row}")
    return columns[0], columns[1], columns[2]


def _require_rows(count: int) -> None:
    if count < FEWEST:
        raise InputError(
            f"a difference needs at least {FEWEST} rows of different prompts",
            got=str(count),
            why="its standard error is over rows",
        )


def decide(
    choosing: Column,
    retention: Column | None = None,
    *,
    arms: Collection[str],
    looks: int,
    level: float = 0.05,
    keep_retention: bool = False,
) -> Outcome:
    """Who has left, and who has won, after the looks so far.

    Args:
        choosing: rows that decide. At each look it has ``all`` and the arms that had not left; one
            that is missing, because its training failed, leaves there.
        retention: rows of what the model knew before, or None.
        arms: names of all arms but ``all``.
        looks: how many the race has.
        level: probability with which any interval of the race may miss.
        keep_retention: an arm whose interval on the retention rows lies above 0 at the last look
            cannot win.

    Raises:
        InputError, NumericalError: as of :func:`difference`.
    """
    columns = 1 if retention is None else 2
    count = max(1, looks * len(arms) * columns)
    outcome = Outcome()
    for index in range(len(choosing.looks)):
        running = [name for name in arms if name not in outcome.left_at]
        differences = _differences(choosing, index, running, level, count)
        outcome.differences.append(differences)
        if retention is not None:
            outcome.retention.append(_differences(retention, index, running, level, count))
        for name in running:
            if name not in differences or differences[name].low > 0:
                outcome.left_at[name] = index
    over = len(choosing.looks) == looks or len(outcome.left_at) == len(arms)
    if not over:
        return outcome
    return Outcome(outcome.differences, outcome.retention, outcome.left_at, _winner(
        outcome, looks, keep_retention
    ))  # fmt: skip


def _differences(
    column: Column, look: int, arms: Sequence[str], level: float, intervals: int
) -> dict[str, Difference]:
    losses = column.looks[look]
    measured = partial(
        difference,
        base=losses[ALL],
        tokens=column.tokens,
        level=level,
        intervals=intervals,
        groups=column.groups,
    )
    return {name: measured(losses[name]) for name in arms if name in losses}


def _winner(outcome: Outcome, looks: int, keep_retention: bool) -> str:
    """The lowest D whose interval lies below 0 at the last look; ``all`` if there is none."""
    if len(outcome.differences) < looks:
        return ALL  # every arm has left before
    last = outcome.differences[-1]
    better = {name: one.value for name, one in last.items() if one.high < 0}
    if keep_retention and outcome.retention:
        column = outcome.retention[-1]
        better = {name: value for name, value in better.items() if column[name].low <= 0}
    return min(better, key=better.__getitem__, default=ALL)
