"""Keep or drop decisions: which are noise, and how far from the threshold."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.certificate.metrics import kept
from alphatoken.fidelity.intervals import Estimate, bootstrap

__all__ = [
    "DECISIONS",
    "classify",
    "margins",
    "noise_margin",
    "percent",
    "threshold",
]

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]

DECISIONS = ("sure keep", "noise", "sure drop")


def threshold(values: Numbers, ratio: float) -> float:
    """Halfway between the lowest kept value and the highest dropped one; NaN if all are kept."""
    chosen = kept(values, ratio)
    if chosen.all():
        return math.nan
    return float(values[chosen].min() + values[~chosen].max()) / 2


def classify(keep_share: Numbers, uncertain: float) -> NDArray[np.int64]:
    """Index into ``DECISIONS``: a decision is noise unless one side has all but ``uncertain``.

    Args:
        keep_share: share of the draws in which a token is kept.
        uncertain: most draws that may go the other way.
    """
    sure_keep, sure_drop = keep_share >= 1 - uncertain, keep_share <= uncertain
    return np.where(sure_keep, 0, np.where(sure_drop, 2, 1)).astype(np.int64)


def margins(values: Numbers, ratio: float) -> Numbers:
    """Distance of each value from the threshold, in interquartile ranges of the values.

    Positive above it. The unit is free of the values' scale, and of outliers; NaN if more than
    half of the values are equal.
    """
    spread = float(np.subtract(*np.quantile(values, [0.75, 0.25])))
    if spread <= 0:
        return np.full(len(values), math.nan)
    return (values - threshold(values, ratio)) / spread


def noise_margin(
    distance: Numbers, noise: Flags, groups: NDArray[Any], *, holding: float = 0.95, seed: int = 0
) -> Estimate:
    """Distance from the threshold within which ``holding`` of the noise lies.

    Args:
        distance: of each token's value from the threshold, not negative.
        noise: whether its decision is noise.
        groups: row of each token.
        holding: share of the noise.
        seed: of the bootstrap.
    """
    return bootstrap(
        lambda near: float(np.quantile(near, holding)),
        distance[noise],
        groups=groups[noise],
        seed=seed,
        what="noise decisions",
    )


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
