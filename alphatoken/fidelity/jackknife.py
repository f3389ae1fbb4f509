"""Intervals for statistics that the bootstrap distorts: those that count or pair items."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from alphatoken.fidelity.intervals import FEWEST, Estimate

__all__ = ["jackknife"]

_GROUPS = 20  # groups of single items where there are too few real ones

Indices = NDArray[np.int64]


def jackknife(
    statistic: Callable[[Indices], float],
    count: int,
    *,
    groups: NDArray[np.int64] | None = None,
    ends: tuple[float, float] = (-math.inf, math.inf),
    what: str = "tokens",
) -> Estimate:
    """``statistic(indices of the items)`` with a delete-a-group jackknife interval (95 %, normal).

        value +- 1.96 sqrt((G - 1) / G  sum_g (statistic without group g - their mean)^2)

    A bootstrap sample holds items twice: it has fewer distinct tokens, less entropy and smaller
    covariances than the items themselves, and pairs of equal items that align with anything. Its
    interval then lies beside the number. Leaving groups out does none of this.

    Args:
        statistic: of the indices that are left; NaN where not defined.
        count: items.
        groups: which row an item belongs to. With fewer than ``FEWEST`` rows 20 groups are made
            of single items, and the interval is a lower limit of the truth. None: each item is its
            own group.
        ends: the statistic's range; the interval is cut there.
        what: the items, for messages.
    """
    if count < FEWEST:
        return Estimate.undefined(count, f"{count} {what}, {FEWEST} needed")
    every = np.arange(count)
    value = statistic(every)
    labels = every if groups is None else np.asarray(groups)
    names = np.unique(labels)
    if len(names) < FEWEST:
        labels = every % _GROUPS  # neighbours apart: a row is in every group
        names = np.unique(labels)
    found = np.array([statistic(every[labels != name]) for name in names])
    if math.isnan(value) or np.isnan(found).any():
        return Estimate.undefined(count, "not defined, or not with some of them left out")
    size = len(names)
    error = math.sqrt((size - 1) / size * float(((found - found.mean()) ** 2).sum()))
    low, high = max(value - 1.96 * error, ends[0]), min(value + 1.96 * error, ends[1])
    return Estimate(value, min(low, value), max(high, value), count)
