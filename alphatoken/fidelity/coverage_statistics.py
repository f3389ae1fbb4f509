"""Coverage in numbers: how wide, even and varied the kept tokens are among the candidates."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alphatoken.fidelity.clouds import (
    clusters_of,
    entropy,
    mean_distance,
)
from alphatoken.fidelity.intervals import Estimate, jackknife
from alphatoken.fidelity.states import TokenStates

__all__ = [
    "STATISTICS",
    "Band",
    "Indices",
    "Mask",
    "Numbers",
    "Pool",
    "against",
    "band_of",
    "measured",
]

Numbers = NDArray[np.float64]
Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]
Band = tuple[float, float]
"""Lower and upper end of what random selections give."""


@dataclass(frozen=True)
class Pool:
    """The candidates: n response tokens.

    Attributes:
        points: (n, d) contextual embeddings.
        labels: (n,) cluster.
        clusters: how many clusters there are.
        ids: (n,) token id.
        losses: (n,) loss of the token.
        rows: (n,) which row it belongs to.
    """

    points: Numbers
    labels: Indices
    clusters: int
    ids: Indices
    losses: Numbers
    rows: Indices

    @classmethod
    def of(cls, states: TokenStates, rows: Indices, *, clusters: int, seed: int) -> Pool:
        """With the candidates clustered."""
        labels = clusters_of(states.states, clusters, seed)
        count = int(labels.max()) + 1
        return cls(states.states, labels, count, states.ids, states.losses, rows)


def _spread(pool: Pool, kept: Indices, among: Indices) -> float:
    whole = mean_distance(pool.points[among])
    return mean_distance(pool.points[kept]) / whole if whole > 0 else math.nan


def _evenness(pool: Pool, kept: Indices, among: Indices) -> float:
    return entropy(pool.labels[kept], pool.clusters)


def _types(pool: Pool, kept: Indices, among: Indices) -> float:
    return len(np.unique(pool.ids[kept])) / max(len(np.unique(pool.ids[among])), 1)


def _loss(pool: Pool, kept: Indices, among: Indices) -> float:
    return float(pool.losses[kept].mean()) if len(kept) else math.nan


Statistic = Callable[[Pool, Indices, Indices], float]

STATISTICS: dict[str, tuple[str, str, Statistic]] = {
    "entropy": ("Cluster entropy", "1: even over the clusters, 0: all in one", _evenness),
    "spread": ("Spread", "mean distance to the centroid, all candidates = 1", _spread),
    "types": ("Distinct token ids", "share of those among the candidates", _types),
    "loss": ("Mean loss", "of the kept tokens, nats", _loss),
}
"""Key -> name, what it is in, and the statistic of (pool, kept indices, candidate indices)."""


def measured(pool: Pool, kept: Mask, key: str) -> Estimate:
    """One statistic of the kept tokens; the jackknife leaves out rows of candidates."""
    statistic = STATISTICS[key][2]

    def of(among: Indices) -> float:
        return statistic(pool, among[kept[among]], among)

    return jackknife(of, len(kept), groups=pool.rows)


def band_of(pool: Pool, count: int, draws: int, seed: int) -> dict[str, Band]:
    """Where 95 % of ``draws`` random selections of ``count`` tokens lie, for each statistic."""
    generator = np.random.default_rng(seed)
    every = np.arange(len(pool.ids))
    found: dict[str, list[float]] = {key: [] for key in STATISTICS}
    for _ in range(draws):
        kept = np.sort(generator.permutation(every)[:count])
        for key, (_, _, statistic) in STATISTICS.items():
            found[key].append(statistic(pool, kept, every))
    bands = {}
    for key, values in found.items():
        low, high = np.nanquantile(values, [0.025, 0.975]) if values else (math.nan, math.nan)
        bands[key] = (float(low), float(high))
    return bands


def against(estimate: Estimate, band: Band) -> str:
    """Where an estimate's value lies: "below", "within" or "above" the band; "" if undefined."""
    if not estimate.defined or math.isnan(band[0]):
        return ""
    if estimate.value < band[0]:
        return "below"
    return "above" if estimate.value > band[1] else "within"
