"""Decisions under redrawn rows: bootstrap of what a direction is a mean of.

Pure arithmetic on ``RowColumns``: each resample is a weighted sum of columns, so none is scored.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alphatoken.certificate.metrics import kept
from alphatoken.fidelity.per_row import RowColumns

__all__ = ["DECISIONS", "NOISE", "UNCERTAIN", "classify", "keep_shares"]

Numbers = NDArray[np.float64]

UNCERTAIN = 0.05
"""A decision is noise if more than this share of the draws reverses it."""

DECISIONS = ("sure keep", "noise", "sure drop")
NOISE = DECISIONS.index("noise")


def classify(keep_share: Numbers) -> NDArray[np.int64]:
    """Index into ``DECISIONS``: a decision is noise unless one side has all but ``UNCERTAIN``.

    Args:
        keep_share: share of the draws in which a token is kept.
    """
    sure_keep, sure_drop = keep_share >= 1 - UNCERTAIN, keep_share <= UNCERTAIN
    return np.where(sure_keep, 0, np.where(sure_drop, 2, NOISE)).astype(np.int64)


def keep_shares(
    columns: RowColumns, rest: Numbers, ratio: float, resamples: int, *, seed: int
) -> Numbers:
    """(n,) share of the resamples in which each token is kept.

    Args:
        columns: values against each of V rows.
        rest: (n,) what is added to them, the same in each resample.
        ratio: share to keep, at one threshold for all tokens.
        resamples: how many, each of V rows drawn from the V with replacement.
        seed: of the draws.
    """
    rows = len(columns.tokens)
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(rows, np.full(rows, 1 / rows), size=resamples)
    share: Numbers = kept(columns.at(weights) + rest, ratio).mean(0)
    return share
