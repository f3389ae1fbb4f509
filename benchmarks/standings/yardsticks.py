"""The yardsticks: linear datamodeling score, dropping tokens, bringing up good rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.certificate.metrics import spearman
from benchmarks.standings.runs import Numbers, Setting

__all__ = ["DROPS", "ENDS", "UNITS", "drop", "lds", "precision", "rivals", "subset"]

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
    sums = np.array([float(values @ kept) for kept in subsets])
    return _interval(sums, -np.asarray(losses))


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
    draw = np.random.default_rng(0)
    count = len(first)
    found = [
        spearman(first[places], second[places])
        for places in (draw.integers(0, count, count) for _ in range(1000))
    ]
    low, high = np.nanquantile(found, [0.025, 0.975])
    return [spearman(first, second), float(low), float(high)]
