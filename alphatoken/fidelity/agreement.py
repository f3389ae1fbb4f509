"""Agreement of two rankings of the same tokens, and of the tokens that both keep.

    spearman   rank correlation of the values
    overlap    share of the tokens kept by the one that the other keeps too; by chance the ratio

Kept are the first ``ceil(ratio n)`` of all tokens in one pool.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.certificate.metrics import kept, overlap, spearman
from alphatoken.fidelity.intervals import Estimate, bootstrap

__all__ = ["agreement"]

Numbers = NDArray[np.float64]


def agreement(
    values: Numbers,
    truth: Numbers,
    ratio: float,
    rows: NDArray[Any],
    *,
    seed: int = 0,
) -> dict[str, Estimate]:
    """Agreement of ``values`` with ``truth`` in ranks and kept tokens, with intervals over rows."""
    estimate = partial(bootstrap, groups=rows, seed=seed)
    return {
        "spearman": estimate(spearman, values, truth),
        "overlap": estimate(overlap, kept(values, ratio), kept(truth, ratio)),
    }
