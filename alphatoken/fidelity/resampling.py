"""Decisions under redrawn rows: bootstrap of what a direction is a mean of.

Pure arithmetic on ``RowColumns``: each resample is a weighted sum of columns, so none is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.certificate.metrics import kept
from alphatoken.fidelity.agreement import agreement_over_draws
from alphatoken.fidelity.intervals import Estimate, bootstrap, over_draws
from alphatoken.fidelity.own_values import FEWEST_ROWS
from alphatoken.fidelity.per_row import RowColumns

__all__ = ["DECISIONS", "NOISE", "classify", "noise_by_size", "resample"]

Numbers = NDArray[np.float64]

_SUBSETS = 20
_INNER = 200


DECISIONS = ("sure keep", "noise", "sure drop")
NOISE = DECISIONS.index("noise")


def classify(keep_share: Numbers, uncertain: float) -> NDArray[np.int64]:
    """Index into ``DECISIONS``: a decision is noise unless one side has all but ``uncertain``.

    Args:
        keep_share: share of the draws in which a token is kept.
        uncertain: most draws that may go the other way.
    """
    sure_keep, sure_drop = keep_share >= 1 - uncertain, keep_share <= uncertain
    return np.where(sure_keep, 0, np.where(sure_drop, 2, NOISE)).astype(np.int64)


def resample(
    columns: RowColumns, rest: Numbers, ratio: float, resamples: int, *, seed: int
) -> tuple[dict[str, Estimate], Numbers]:
    """Draw as many rows as there are, with replacement, again and again.

    Args:
        columns: values against each row.
        rest: (n,) what is added to them, the same in each resample.
        ratio: share to keep, at one threshold for all tokens.
        resamples: how many.
        seed: of the draws.

    Returns:
        Agreement of a resample with all rows, over the resamples; and the share of them in which
        each token is kept.
    """
    rows = len(columns.tokens)
    weights = _weights(rows, rows, resamples, np.random.default_rng(seed))
    whole, totals = columns.whole + rest, columns.at(weights) + rest
    found = agreement_over_draws(np.broadcast_to(whole, totals.shape), totals, ratio)
    return found, kept(totals, ratio).mean(0)


def _weights(
    rows: int, draws: int, resamples: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """(resamples, rows): how often each row comes up in ``draws`` draws with replacement."""
    return generator.multinomial(draws, np.full(rows, 1 / rows), size=resamples)


def noise_by_size(
    columns: RowColumns,
    rest: Numbers,
    ratio: float,
    uncertain: float,
    *,
    groups: NDArray[Any],
    measured: NDArray[np.bool_],
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Share of noise decisions at fewer and at more rows than the V that there are.

    Fewer: subsets of m rows, each bootstrapped as the whole is; the mean over subsets. More: 2V
    and 4V rows drawn with replacement from the V. Whether that may be believed shows at V itself:
    there the same is done with subsets of V / 2, and stands beside what was measured.

    Args:
        columns: values against each row.
        rest: what is added to them.
        ratio: share to keep.
        uncertain: as in ``classify``.
        groups: row of each token, for intervals.
        measured: whether each token's decision is noise at V.
        seed: of the draws.

    Returns:
        Records of "validation rows", "noise" and "how" ("subsets", "measured", "check", "drawn").
    """
    generator = np.random.default_rng((seed, 1))
    rows = len(columns.tokens)

    def of_subsets(size: int, draws: int) -> Estimate:
        found = [
            _noise(_subset(columns, size, generator), rest, ratio, uncertain, draws, generator)
            for _ in range(_SUBSETS)
        ]
        return over_draws(np.array([flags.mean() for flags in found]))

    small = sorted({m for m in (rows // 8, rows // 4, rows // 2) if m >= FEWEST_ROWS})
    records = [_size(m, of_subsets(m, m), "subsets") for m in small]
    records.append(_size(rows, bootstrap(np.mean, measured, groups=groups, seed=seed), "measured"))
    if rows // 2 in small:
        records.append(_size(rows, of_subsets(rows // 2, rows), "check"))
    for more in (2 * rows, 4 * rows):
        flags = _noise(columns, rest, ratio, uncertain, more, generator)
        records.append(_size(more, bootstrap(np.mean, flags, groups=groups, seed=seed), "drawn"))
    return records


def _size(rows: int, noise: Estimate, how: str) -> dict[str, Any]:
    return {"validation rows": rows, "noise": noise, "how": how}


def _subset(columns: RowColumns, size: int, generator: np.random.Generator) -> RowColumns:
    chosen: Sequence[int] = generator.permutation(len(columns.tokens))[:size].tolist()
    return RowColumns(columns.sums[:, chosen], columns.tokens[chosen])


def _noise(
    columns: RowColumns,
    rest: Numbers,
    ratio: float,
    uncertain: float,
    draws: int,
    generator: np.random.Generator,
) -> NDArray[np.bool_]:
    """Whether each decision is noise if ``draws`` rows are drawn from these."""
    weights = _weights(len(columns.tokens), draws, _INNER, generator)
    shares = kept(columns.at(weights) + rest, ratio).mean(0)
    noise: NDArray[np.bool_] = classify(shares, uncertain) == NOISE
    return noise
