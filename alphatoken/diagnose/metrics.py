"""Agreement between two sets of values of the same tokens, one number each; ``b`` is the reference.

Equally long columns, as ``intervals.bootstrap`` hands them over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from alphatoken.errors import NumericalError
from alphatoken.select.masks import keep_count

__all__ = ["kept", "overlap", "relative_error", "spearman", "top_overlap"]

Column = Tensor | NDArray[Any] | Sequence[Any]
Numbers = NDArray[np.float64]


def _numbers(column: Column) -> Numbers:
    if isinstance(column, Tensor):
        column = column.detach().double().cpu().numpy()
    return np.asarray(column, dtype=np.float64)


def spearman(a: Column, b: Column) -> float:
    """Spearman rank correlation, ties by their mean rank; NaN below 3 tokens or if constant."""
    x, y = _numbers(a), _numbers(b)
    if len(x) < 3 or (x == x[0]).all() or (y == y[0]).all():
        return math.nan
    r, q = stats.rankdata(x), stats.rankdata(y)
    r, q = r - r.mean(), q - q.mean()
    return float(r @ q) / math.sqrt(float(r @ r) * float(q @ q))


def top_overlap(a: Column, b: Column, ratio: float = 0.5) -> float:
    """Share of the tokens kept by ``a`` that ``b`` keeps too, both at ``ratio``.

    A random ranking scores ``ratio`` in the mean.
    """
    x, y = _numbers(a), _numbers(b)
    return overlap(kept(x, ratio), kept(y, ratio)) if len(x) else 0.0


def kept(values: Numbers, ratio: float) -> NDArray[np.bool_]:
    """The first ``ceil(ratio n)`` by value of the last axis, ties by index; of each row by itself.

    The same sets as ``masks.select_top`` with everything in one pool, for many rankings at a
    time.

    Raises:
        NumericalError: a NaN or Inf value.
        InputError: ratio outside (0, 1].
    """
    if not np.isfinite(values).all():
        raise NumericalError(
            "a token value is not finite",
            got=f"{int((~np.isfinite(values)).sum())} of {values.size}",
            why="a NaN has no rank; what is kept would be arbitrary",
            remedy="look at the weights, and at the precision",
        )
    order = np.argsort(-values, axis=-1, kind="stable")
    chosen = np.zeros(values.shape, dtype=bool)
    count = keep_count(ratio, values.shape[-1])
    np.put_along_axis(chosen, order[..., :count], True, axis=-1)
    return chosen


def overlap(ours: Column, theirs: Column) -> float:
    """Share of the tokens marked in ``ours`` that ``theirs`` marks too; NaN without any."""
    a, b = _numbers(ours), _numbers(theirs)
    return float((a * b).sum() / a.sum()) if a.sum() else math.nan


def relative_error(found: Numbers, true: Numbers) -> float:
    """``||found - true|| / ||true||``; NaN where all true values are 0."""
    size = float(np.linalg.norm(true))
    return float(np.linalg.norm(found - true)) / size if size else math.nan
