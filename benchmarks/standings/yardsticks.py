"""The yardsticks: linear datamodeling score, dropping tokens, bringing up good rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.diagnose.statistics import spearman
from benchmarks.standings.runs import Numbers, Setting

UNITS = ("tokens", "rows")
DROPS = (0.01, 0.05, 0.2)
"""Shares of the tokens that are left out."""
ENDS = ("best", "worst")
"""Whether those of highest value or of lowest."""


def subset(setting: Setting, unit: str, number: int) -> Numbers:
    """Weights 0 and 1: half of the tokens, or all tokens of half of the rows."""
    draw = np.random.default_rng([UNITS.index(unit), number, 2])
    count = setting.tokens if unit == "tokens" else len(setting.rows)
    kept = np.zeros(count)
    kept[draw.permutation(count)[: count // 2]] = 1.0
    return kept if unit == "tokens" else kept[setting.row_of]


def drop(setting: Setting, values: Numbers, share: float, *, best: bool) -> Numbers:
    """Weights without the share of the tokens of highest (else lowest) value."""
    order = np.argsort(-values if best else values, kind="stable")
    kept = np.ones(setting.tokens)
    kept[order[: round(share * setting.tokens)]] = 0.0
    return kept


def lds(values: Numbers, subsets: Sequence[Numbers], losses: Sequence[float]) -> list[float]:
    """Spearman of the summed values of each subset with -J after training on it.

    Returns:
        The correlation, and a 95 % interval that draws subsets anew.
    """
    return _interval(_sums(values, subsets), -np.asarray(losses))


def above(
    values: Numbers, others: Sequence[Numbers], subsets: Sequence[Numbers], losses: Sequence[float]
) -> bool:
    """Whether the LDS is above that of each of the others: paired 95 % intervals leave 0 out."""
    wanted = -np.asarray(losses)
    own = _redrawn(_sums(values, subsets), wanted)
    gaps = [own - _redrawn(_sums(other, subsets), wanted) for other in others]
    return all(float(np.nanquantile(gap, 0.025)) > 0 for gap in gaps)


def _sums(values: Numbers, subsets: Sequence[Numbers]) -> Numbers:
    return np.array([float(values @ kept) for kept in subsets])


def precision(setting: Setting, values: Numbers) -> float | None:
    """Average precision with which rows by their mean value bring up the good ones (AUPRC).

    Chance is the share of good rows; None where all rows are alike.
    """
    good = setting.good
    if good is None or good.all() or not good.any():
        return None
    sums = np.bincount(setting.row_of, values) / np.bincount(setting.row_of)
    hits = good[np.argsort(-sums, kind="stable")]
    return float((np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits].mean())


def rivals(losses: Sequence[float], others: Sequence[float]) -> list[float]:
    """Spearman of J after the same subsets in runs of two seeds: nothing is expected to pass it."""
    return _interval(np.asarray(losses), np.asarray(others))


def _interval(first: NDArray[Any], second: NDArray[Any]) -> list[float]:
    low, high = np.nanquantile(_redrawn(first, second), [0.025, 0.975])
    return [spearman(first, second), float(low), float(high)]


def _redrawn(first: NDArray[Any], second: NDArray[Any]) -> Numbers:
    """Spearman of 1,000 draws with repetition, the same ones whatever is asked."""
    draw, count = np.random.default_rng(0), len(first)
    drawn = (draw.integers(0, count, count) for _ in range(1000))
    return np.array([spearman(first[places], second[places]) for places in drawn])
