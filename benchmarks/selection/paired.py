"""Differences between two methods on the same held-out rows and seeds, with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Each = Mapping[str, Sequence[float]]
"""Of each held-out row: ``loss``, its mean over the response, and its ``tokens``."""

_DRAWS = 4000


@dataclass(frozen=True)
class Difference:
    """Mean loss of one method minus that of another, over the seeds that both have.

    Attributes:
        mean: in nats a token.
        low: end of the 95 % interval; rows and seeds are both drawn anew.
        high: its other end.
        seeds: how many both have.
    """

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def apart(self) -> bool:
        """Whether the interval leaves 0 out, over at least three seeds."""
        return self.seeds >= 3 and not self.low <= 0 <= self.high


def difference(one: Mapping[int, Each], other: Mapping[int, Each]) -> Difference | None:
    """Paired by seed and by row; None without a seed that both have.

        d_s = sum_r n_r (l_rs - l'_rs) / sum_r n_r,     d = mean_s d_s

    with n_r the tokens of row r. Rows are drawn for all seeds together, since a hard row is hard
    under each.
    """
    seeds = sorted(set(one) & set(other))
    if not seeds:
        return None
    tokens = np.asarray(one[seeds[0]]["tokens"], float)
    gaps = np.asarray([np.subtract(one[s]["loss"], other[s]["loss"]) for s in seeds])
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(_DRAWS):
        rows = generator.integers(len(tokens), size=len(tokens))
        of_seeds = generator.integers(len(seeds), size=len(seeds))
        weights = tokens[rows] / tokens[rows].sum()
        drawn.append(float((gaps[of_seeds][:, rows] @ weights).mean()))
    low, high = np.quantile(drawn, [0.025, 0.975])
    mean = float((gaps @ (tokens / tokens.sum())).mean())
    return Difference(mean, float(low), float(high), len(seeds))
