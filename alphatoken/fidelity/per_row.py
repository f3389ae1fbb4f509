"""Values against validation rows one by one: they are linear in the direction.

With M = sum_v w_v G_v the value of a token is sum_v w_v <.., G_v>: scored once against the summed
gradient of every validation row, the tokens have a value for every subset and every resample of
those rows, by a weighted sum; so the decisions under redrawn rows are had without another scoring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.certificate.metrics import kept
from alphatoken.data import Example
from alphatoken.errors import ConfigError, InputError
from alphatoken.estimate.estimators import WALK
from alphatoken.fidelity.subject import Subject
from alphatoken.fidelity.valuing import values_along
from alphatoken.scorer import Scorer

__all__ = [
    "DECISIONS",
    "NOISE",
    "UNCERTAIN",
    "RowColumns",
    "classify",
    "keep_shares",
    "row_columns",
]

Numbers = NDArray[np.float64]

_HELD = 2**28
"""Numbers of per-row gradients held at a time (1 GiB in float32)."""


@dataclass(frozen=True)
class RowColumns:
    """Values of n tokens against each of V validation rows.

    Attributes:
        sums: (n, V) value against the *summed* gradient of a row's response tokens.
        tokens: (V,) response tokens of the rows.
    """

    sums: Numbers
    tokens: NDArray[np.int64]

    def at(self, weights: NDArray[Any]) -> Numbers:
        """Adaptation values if row v is there ``weights[..., v]`` times: (..., V) to (..., n).

            value = sum_v w_v c_v / sum_v w_v n_v

        which is what scoring against those rows gives, because J_tgt is a mean over tokens.
        Exact up to rounding. Oracle: ``Scorer`` with those rows as its validation batches.

        Raises:
            InputError: weights without any response token.
        """
        counts = np.asarray(weights, dtype=np.float64) @ self.tokens
        if not (counts > 0).all():
            raise InputError(
                "a choice of validation rows has no response token",
                got=f"{int((counts <= 0).sum())} of {counts.size} choices",
                remedy="leave out rows without a response",
            )
        values: Numbers = (weights @ self.sums.T) / counts[..., None]
        return values


def row_columns(
    subject: Subject, scorer: Scorer, rows: Sequence[Example], validation: Sequence[Example]
) -> RowColumns:
    """Score ``rows`` against every validation row by itself.

    The scorer's validation batches are put back afterwards. As many per-row gradients are held
    at a time as fit into 1 GiB (float32); for each such chunk the rows are sent through the model
    once more.

    Raises:
        ConfigError: the objective has no validation side, P depends on the batch, or values are
            along a walk, whose optimizer divides gradients by their own size.
    """
    config = scorer.config
    if not config.adapts or config.preconditioner == "full" or config.estimator == WALK:
        raise ConfigError(
            "validation rows can be told apart only where values are linear in their gradients",
            got=f"estimator={config.estimator!r}, objective={config.objective!r}, "
            f"preconditioner={config.preconditioner!r:.40}",
            remedy="an estimator other than 'walk', objective='both' or 'adaptation', "
            "preconditioner=None",
        )
    size = sum(p.numel() for p in scorer.parameters.values())
    chunk = max(1, _HELD // size)
    blocks: list[Numbers] = []
    given = scorer.validation
    try:
        for start in range(0, len(validation), chunk):
            held = [_gradient(subject, scorer, row) for row in validation[start : start + chunk]]
            label = f"Values against {start + len(held)} of {len(validation)} validation rows"
            blocks.append(values_along(subject, scorer, rows, held, label))
    finally:
        scorer.set_validation(given)
    tokens = np.array([row.response_tokens for row in validation], dtype=np.int64)
    return RowColumns(np.concatenate(blocks, axis=1) * tokens, tokens)


def _gradient(subject: Subject, scorer: Scorer, row: Example) -> dict[str, Tensor]:
    """P o G of one validation row, a mean over its tokens."""
    scorer.set_validation(subject.batches([row]))
    return scorer.direction.adaptation


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
