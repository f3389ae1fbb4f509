"""One setting at a time, from values that are at hand: lambda and ratio.

Neither needs another scoring: totals are linear in lambda, and the ratio only cuts the ranking.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.certificate.metrics import kept
from alphatoken.fidelity.agreement import agreement
from alphatoken.fidelity.intervals import bootstrap
from alphatoken.select.masks import keep_count

__all__ = [
    "captured",
    "positive_share",
    "ratio_sweep",
    "reversed_by",
    "weight_for_change",
    "weight_sweep",
]

Numbers = NDArray[np.float64]

_DECADES = 4
_PER_DECADE = 8


# --- lambda ------------------------------------------------------------------------------------


def reversed_by(gain: Numbers, keep: Numbers, weight: float, ratio: float) -> float:
    """Share of the decisions of ``gain`` alone that ``gain + weight * keep`` reverses."""
    return float((kept(gain, ratio) != kept(gain + weight * keep, ratio)).mean())


def weight_for_change(gain: Numbers, keep: Numbers, ratio: float, changed: float) -> float:
    """The smallest lambda at which the stability side reverses ``changed`` of the decisions.

    Looked for on a grid of four decades on either side of the lambda that makes both sides equal
    in mean magnitude, then between its two neighbours there, to 1 %. NaN if no lambda on the grid
    does, or if a side is zero.

    Args:
        gain: adaptation values.
        keep: stability values, before lambda.
        ratio: share to keep.
        changed: share of all decisions.
    """
    ours, theirs = float(np.abs(gain).mean()), float(np.abs(keep).mean())
    if ours == 0 or theirs == 0:
        return math.nan
    steps = np.arange(-_DECADES * _PER_DECADE, _DECADES * _PER_DECADE + 1) / _PER_DECADE
    low = 0.0
    for weight in ours / theirs * 10.0**steps:
        if reversed_by(gain, keep, weight, ratio) >= changed:
            break
        low = float(weight)
    else:
        return math.nan
    high = float(weight)
    while low > 0 and high / low > 1.01:
        middle = math.sqrt(low * high)
        reached = reversed_by(gain, keep, middle, ratio) >= changed
        low, high = (low, middle) if reached else (middle, high)
    return high


def weight_sweep(
    gain: Numbers,
    keep: Numbers,
    weights: Sequence[float],
    default: float,
    ratio: float,
    balance: float,
    groups: NDArray[Any],
    *,
    seed: int,
) -> list[dict[str, Any]]:
    """What each lambda does to the ranking and the decisions, by linearity.

    Args:
        gain: adaptation values.
        keep: stability values, before lambda.
        weights: lambdas.
        default: the lambda that they are compared with.
        ratio: share to keep.
        balance: ``||V|| / ||G||`` over all scored weights.
        groups: row of each token.
        seed: of the intervals.
    """
    base, alone = gain + default * keep, kept(gain, ratio)
    records = []
    for weight in weights:
        total = gain + weight * keep
        away = alone != kept(total, ratio)
        sizes = [np.abs(weight * keep), np.abs(gain) + np.abs(weight * keep)]
        records.append(
            {
                "value": weight,
                "default": weight == default,
                **agreement(base, total, ratio, groups, seed=seed),
                "flips from adaptation alone": bootstrap(np.mean, away, groups=groups, seed=seed),
                "stability's share of the magnitudes": bootstrap(
                    _fraction, *sizes, groups=groups, seed=seed
                ),
                "||lambda V|| / ||G||": abs(weight) * balance,
            }
        )
    return records


def _fraction(part: Numbers, whole: Numbers) -> float:
    below = float(whole.sum())
    return float(part.sum()) / below if below > 0 else math.nan


# --- ratio -------------------------------------------------------------------------------------


def captured(total: Numbers, ratio: float) -> float:
    """Sum of the kept values over the sum of all positive ones; NaN if none is positive.

    1 at the ratio that keeps exactly the positive ones, less on either side of it.
    """
    best = float(total[total > 0].sum())
    return float(total[kept(total, ratio)].sum()) / best if best > 0 else math.nan


def positive_share(total: Numbers) -> float:
    """Share of the tokens with a positive value: the ratio at which the kept total peaks."""
    return float((total > 0).mean())


def ratio_sweep(
    total: Numbers, ratios: Sequence[float], default: float, groups: NDArray[Any], *, seed: int
) -> list[dict[str, Any]]:
    """What each ratio keeps. Kept sets of different ratios are nested, so no overlap is given."""
    return [
        {
            "value": float(ratio),
            "default": ratio == default,
            "tokens kept": keep_count(ratio, len(total)),
            "captured": bootstrap(partial(captured, ratio=ratio), total, groups=groups, seed=seed),
        }
        for ratio in ratios
    ]
