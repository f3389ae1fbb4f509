"""Statistics with intervals of 95 %, refused below a size; agreement between two sets of values.

Measures of agreement take equally long columns, of which the second is the reference. Two groups of
rows are compared by a permutation test, and by an interval of the difference of their means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from alphatoken.errors import InputError, NumericalError
from alphatoken.select.masks import keep_count

FEWEST = 8
"""Fewest items a statistic is computed of: below it, an interval would be wider than its range."""

Numbers = NDArray[np.float64]
"""Values of tokens, and other columns of numbers."""


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval.

    Attributes:
        value: on all items; NaN where it is not defined.
        low: lower end of the interval.
        high: upper end.
        count: items.
        reason: why there is no number, or "".
    """

    value: float
    low: float
    high: float
    count: int
    reason: str = ""

    @classmethod
    def undefined(cls, count: int, reason: str) -> Estimate:
        """No number, and why."""
        return cls(math.nan, math.nan, math.nan, count, reason)

    @property
    def defined(self) -> bool:
        """True if there is a number."""
        return not math.isnan(self.value)

    def __str__(self) -> str:
        """The number and its interval.

        >>> str(Estimate(0.51, 0.402, 0.61, 90))
        '0.51 [0.40, 0.61]'
        >>> str(Estimate.undefined(3, "3 tokens, 8 needed"))
        'not defined (3 tokens, 8 needed)'
        """
        return format(self, ".2f")

    def __format__(self, spec: str) -> str:
        """Number and interval, each as ``spec`` says; "" is ".2f".

        >>> f"{Estimate(0.51, -0.402, 0.61, 90):+.1f}"
        '+0.5 [-0.4, +0.6]'
        """
        if not self.defined:
            return f"not defined ({self.reason})"
        value, low, high = (format(x, spec or ".2f") for x in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}]"


def bootstrap(
    statistic: Callable[..., float],
    *columns: Sequence[float] | NDArray[Any],
    groups: Sequence[int] | NDArray[np.int64] | None = None,
    draws: int = 200,
    seed: int = 0,
    what: str = "tokens",
) -> Estimate:
    """``statistic(*columns)`` with a percentile bootstrap interval (95 %).

    Whole groups are drawn where there are at least ``FEWEST`` of them; otherwise single items, and
    the interval is then too narrow. Draws on which the statistic is not defined are left out.

    Args:
        statistic: of equally long columns; NaN where not defined.
        columns: one number an item each.
        groups: which row an item belongs to.
        draws: bootstrap samples.
        seed: of the draws.
        what: the items, for messages.

    Raises:
        InputError: columns of different lengths.
    """
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    count = len(arrays[0])
    if any(len(array) != count for array in arrays):
        raise InputError(
            "columns of a statistic must be equally long",
            got=", ".join(str(len(array)) for array in arrays),
        )
    if count < FEWEST:
        return Estimate.undefined(count, f"{count} {what}, {FEWEST} needed")
    value = float(statistic(*arrays))
    if math.isnan(value):
        return Estimate.undefined(count, "all values are equal")
    generator = np.random.default_rng(seed)
    places = _resamples(count, groups, draws, generator)
    results = np.array([statistic(*(array[index] for array in arrays)) for index in places])
    results = results[~np.isnan(results)]
    if not len(results):
        return Estimate.undefined(count, "not defined on any resample")
    low, high = np.quantile(results, [0.025, 0.975])
    # Percentiles of the resamples need not lie on both sides of the value itself.
    return Estimate(value, float(min(low, value)), float(max(high, value)), count)


def _resamples(
    count: int,
    groups: Sequence[int] | NDArray[np.int64] | None,
    draws: int,
    generator: np.random.Generator,
) -> list[NDArray[np.int64]]:
    # Tokens of one row are not independent: drawn one by one they would look like more data.
    labels = np.asarray([] if groups is None else groups)
    members = [np.flatnonzero(labels == group) for group in np.unique(labels)]
    if len(members) < FEWEST:
        return [generator.integers(0, count, count) for _ in range(draws)]
    return [
        np.concatenate([members[i] for i in generator.integers(0, len(members), len(members))])
        for _ in range(draws)
    ]


def agreement(
    values: Numbers, truth: Numbers, ratio: float, rows: NDArray[Any], *, seed: int = 0
) -> dict[str, Estimate]:
    """Agreement of ``values`` with ``truth``, with intervals over rows.

        spearman   rank correlation of the values
        overlap    share of the tokens kept by the one that the other keeps too; by chance the ratio

    Kept are the first ``ceil(ratio n)`` of all tokens in one pool.
    """
    estimate = partial(bootstrap, groups=rows, seed=seed)
    return {
        "spearman": estimate(spearman, values, truth),
        "overlap": estimate(overlap, kept(values, ratio), kept(truth, ratio)),
    }


# --- two groups of rows ---------------------------------------------------------------------------

MOST_ARRANGEMENTS = 20_000
"""Most arrangements that a permutation test goes through one by one; of more it draws some."""

DRAWN_ARRANGEMENTS = 9_999
"""Arrangements that are drawn: the smallest p-value is then 1 / 10,000."""

_AT_ONCE = 2**22  # numbers drawn at a time
_ROUNDING = 1e-12  # of a sum, relative to the sum of absolute terms


@dataclass(frozen=True)
class PermutationTest:
    """The result of :func:`permutation_test`.

    Attributes:
        p_value: chance of a difference of means at least as large, if the rows are exchangeable.
        arrangements: splits of the rows into two groups that the difference was computed on.
        exact: True if these are all that there are; False if they were drawn.
    """

    p_value: float
    arrangements: int
    exact: bool

    def __str__(self) -> str:
        """The p-value, and where it comes from.

        >>> str(PermutationTest(0.0476, 126, True)), str(PermutationTest(1e-4, 9999, False))
        ('p = 0.048 (all 126 arrangements)', 'p = 0.0001 (9,999 arrangements drawn)')
        """
        count = f"{self.arrangements:,} arrangements"
        return f"p = {self.p_value:.2g} ({f'all {count}' if self.exact else f'{count} drawn'})"


def permutation_test(
    judged: Sequence[float] | Numbers,
    reference: Sequence[float] | Numbers,
    *,
    most: int = MOST_ARRANGEMENTS,
    draws: int = DRAWN_ARRANGEMENTS,
    seed: int = 0,
) -> PermutationTest:
    """Permutation test of two groups of rows by the difference of their means, two-sided.

        D(A)  =  mean of x over A  -  mean of x over the others,        A any n of the n + m rows
        p     =  #{A : |D(A)| >= |D(judged)|} / C(n + m, n)             every A, of at most ``most``
        p     =  (1 + #{drawn A : |D(A)| >= |D(judged)|}) / (1 + draws)   otherwise

    Two-sided: rows differ from the others in either direction. If the rows are exchangeable,
    ``P(p <= a) <= a`` for each a, whatever the distribution of x and however few the rows.

    Args:
        judged: (n,) one number a row.
        reference: (m,) the same of the rows to compare with.
        most: arrangements that are enumerated.
        draws: arrangements that are drawn (uniformly, with replacement) where there are more.
        seed: of the draws.

    Raises:
        InputError: a group without rows.
        NumericalError: a number that is not finite.

    Exactness: of all arrangements exact; differences within rounding of the observed one count as
    ties, so that p is never too small. Source: Fisher, Pitman; the drawn form with its 1 is that of
    Phipson and Smyth (2010). Oracle: every ordering of the rows, in the tests.
    """
    groups = [_numbers(group) for group in (judged, reference)]
    values, few = np.concatenate(groups), min(map(len, groups))
    if not few:
        sizes = " and ".join(str(len(group)) for group in groups)
        raise InputError("a permutation test needs rows in both groups", got=f"{sizes} rows")
    if not np.isfinite(values).all():
        raise NumericalError(
            "a number of a row is not finite",
            got=f"{int((~np.isfinite(values)).sum())} of {len(values)} rows",
            remedy="look at the weights, and at the precision",
        )
    # Centred, the sum over one group is minus that over the other, and D a multiple of either: the
    # smaller group is summed.
    centred = values - values.mean()
    own = centred[: len(groups[0])] if len(groups[0]) == few else centred[len(groups[0]) :]
    observed = abs(float(own.sum())) - _ROUNDING * float(np.abs(values).sum())
    count = math.comb(len(values), few)
    exact = count <= most
    sums = _every_sum(centred, few) if exact else _drawn_sums(centred, few, draws, seed)
    hits = sum(int((np.abs(part) >= observed).sum()) for part in sums)
    if exact:
        return PermutationTest(hits / count, count, exact)
    return PermutationTest((1 + hits) / (1 + draws), draws, exact)


def _every_sum(values: Numbers, few: int) -> Iterator[Numbers]:
    """The sum over each set of ``few`` of the values."""
    places = chain.from_iterable(combinations(range(len(values)), few))
    yield values[np.fromiter(places, dtype=np.int64).reshape(-1, few)].sum(1)


def _drawn_sums(values: Numbers, few: int, draws: int, seed: int) -> Iterator[Numbers]:
    """The sums over ``draws`` sets of ``few`` of the values, each drawn uniformly."""
    generator = np.random.default_rng(seed)
    at_once = max(1, _AT_ONCE // len(values))
    for start in range(0, draws, at_once):
        noise = generator.random((min(at_once, draws - start), len(values)))
        yield values[np.argpartition(noise, few - 1, axis=1)[:, :few]].sum(1)


def difference_of_means(
    judged: Sequence[float] | Numbers, reference: Sequence[float] | Numbers
) -> Estimate:
    """Difference of the means of two groups with Welch's interval (95 %); ``count``: all rows.

        d  =  mean(x) - mean(y),    v_x = s_x^2 / n,    v_y = s_y^2 / m
        d  +-  t_{0.975, f} sqrt(v_x + v_y)
        f  =  (v_x + v_y)^2 / (v_x^2 / (n - 1) + v_y^2 / (m - 1))

    Not defined where a group has fewer than two rows.

    Exactness: approximate; of normal numbers close to 95 %, of others for many rows. Source:
    Welch (1947). Oracle: ``scipy.stats.ttest_ind``, in the tests.
    """
    x, y = _numbers(judged), _numbers(reference)
    if min(len(x), len(y)) < 2:
        return Estimate.undefined(len(x) + len(y), "2 rows needed on each side")
    value = float(x.mean() - y.mean())
    of_x, of_y = float(x.var(ddof=1)) / len(x), float(y.var(ddof=1)) / len(y)
    variance = of_x + of_y
    if not variance > 0:
        return Estimate(value, value, value, len(x) + len(y))
    freedom = variance**2 / (of_x**2 / (len(x) - 1) + of_y**2 / (len(y) - 1))
    half = float(stats.t.ppf(0.975, freedom)) * math.sqrt(variance)
    return Estimate(value, value - half, value + half, len(x) + len(y))


# --- shares, and agreement of two sets of values --------------------------------------------------


def percent(share: Estimate) -> str:
    """A share and its interval in percent.

    >>> percent(Estimate(0.234, 0.18, 0.291, 90))
    '23 % [18, 29]'
    >>> percent(Estimate(0.0042, 0.001, 0.0091, 90))
    '0.42 % [0.10, 0.91]'
    """
    if not share.defined:
        return str(share)
    fine = 0 < share.value < 0.0995
    digits = 0 if not fine else 1 if share.value >= 0.01 else 2
    value, low, high = (f"{100 * x:.{digits}f}" for x in (share.value, share.low, share.high))
    return f"{value} % [{low}, {high}]"


Column = Tensor | NDArray[Any] | Sequence[Any]


def _numbers(column: Column) -> Numbers:
    if isinstance(column, Tensor):
        column = column.detach().double().cpu().numpy()
    return np.asarray(column, dtype=np.float64)


def spearman(a: Column, b: Column) -> float:
    """Spearman rank correlation, ties by their mean rank; NaN below 3 tokens or if constant."""
    x, y = _numbers(a), _numbers(b)
    if len(x) < 3 or (x == x[0]).all() or (y == y[0]).all():
        return math.nan
    r, q = stats.rankdata(x), stats.rankdata(y)
    r, q = r - r.mean(), q - q.mean()
    return float(r @ q) / math.sqrt(float(r @ r) * float(q @ q))


def top_overlap(a: Column, b: Column, ratio: float = 0.5) -> float:
    """Share of the tokens kept by ``a`` that ``b`` keeps too, both at ``ratio``.

    A random ranking scores ``ratio`` in the mean.
    """
    x, y = _numbers(a), _numbers(b)
    return overlap(kept(x, ratio), kept(y, ratio)) if len(x) else 0.0


def kept(values: Numbers, ratio: float) -> NDArray[np.bool_]:
    """The first ``ceil(ratio n)`` by value of the last axis, ties by index; of each row by itself.

    The same sets as ``masks.select_top`` with everything in one pool, for many rankings at a
    time.

    Raises:
        NumericalError: a NaN or Inf value.
        InputError: ratio outside (0, 1].
    """
    if not np.isfinite(values).all():
        raise NumericalError(
            "a token value is not finite",
            got=f"{int((~np.isfinite(values)).sum())} of {values.size}",
            why="a NaN has no rank; what is kept would be arbitrary",
            remedy="look at the weights, and at the precision",
        )
    order = np.argsort(-values, axis=-1, kind="stable")
    chosen = np.zeros(values.shape, dtype=bool)
    count = keep_count(ratio, values.shape[-1])
    np.put_along_axis(chosen, order[..., :count], True, axis=-1)
    return chosen


def overlap(ours: Column, theirs: Column) -> float:
    """Share of the tokens marked in ``ours`` that ``theirs`` marks too; NaN without any."""
    a, b = _numbers(ours), _numbers(theirs)
    return float((a * b).sum() / a.sum()) if a.sum() else math.nan


def relative_error(values: Numbers, truth: Numbers) -> float:
    """``||values - truth|| / ||truth||``; NaN where ``truth`` is 0."""
    size = float(np.linalg.norm(truth))
    return float(np.linalg.norm(values - truth)) / size if size else math.nan
