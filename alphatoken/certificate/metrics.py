"""Agreement between two sets of values of the same tokens, and detection of marked tokens.

All take tensors with a mask of the tokens that count, or plain columns without one, so that they
can be handed to ``intervals.bootstrap``. ``b`` is the reference where the two are not alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from alphatoken.errors import InputError, NumericalError
from alphatoken.select.masks import keep_count

__all__ = [
    "auc",
    "kept",
    "overlap",
    "relative_error",
    "spearman",
    "top_overlap",
]

Column = Tensor | NDArray[Any] | Sequence[Any]
"""Values of tokens: one number each."""
Numbers = NDArray[np.float64]


def _pair(a: Column, b: Column, mask: Tensor | None) -> tuple[Numbers, Numbers]:
    x, y = _numbers(a), _numbers(b)
    chosen = np.ones(x.shape, dtype=np.bool_) if mask is None else mask.cpu().numpy()
    if x.shape != y.shape or x.shape != chosen.shape:
        raise InputError(
            "both values and the mask must have one shape",
            got=f"{x.shape}, {y.shape}, {chosen.shape}",
        )
    return x[chosen], y[chosen]


def _numbers(column: Column) -> Numbers:
    if isinstance(column, Tensor):
        column = column.detach().to("cpu", torch.float64).numpy()
    return np.asarray(column, dtype=np.float64)


def _constant(x: Numbers) -> bool:
    return len(x) < 3 or bool((x == x[0]).all())


def spearman(a: Column, b: Column, mask: Tensor | None = None) -> float:
    """Spearman rank correlation, ties by their mean rank; NaN below 3 tokens or if constant."""
    x, y = _pair(a, b, mask)
    if _constant(x) or _constant(y):
        return math.nan
    r, q = stats.rankdata(x), stats.rankdata(y)
    r, q = r - r.mean(), q - q.mean()
    return float(r @ q) / math.sqrt(float(r @ r) * float(q @ q))


def top_overlap(a: Column, b: Column, mask: Tensor | None = None, ratio: float = 0.5) -> float:
    """Share of the tokens kept by ``a`` that ``b`` keeps too, both at ``ratio``.

    A random ranking scores ``ratio`` in the mean.
    """
    x, y = _pair(a, b, mask)
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
    a, b = _pair(ours, theirs, None)
    return float((a * b).sum() / a.sum()) if a.sum() else math.nan


def relative_error(found: Numbers, true: Numbers) -> float:
    """``||found - true|| / ||true||``; NaN where all true values are 0."""
    size = float(np.linalg.norm(true))
    return float(np.linalg.norm(found - true)) / size if size else math.nan


def auc(score: Column, marked: Column, mask: Tensor | None = None) -> float:
    """Chance that a marked token has a higher score than an unmarked one, ties counting half.

    The area under the ROC curve. 0.5: the score knows nothing; below: it is the wrong way round.
    NaN without marked, or without unmarked tokens.

    Args:
        score: of each token.
        marked: nonzero at the tokens to be found.
        mask: tokens that count.
    """
    x, y = _pair(score, marked, mask)
    found = y != 0
    positives, negatives = int(found.sum()), int((~found).sum())
    if not positives or not negatives:
        return math.nan
    above = float(stats.rankdata(x)[found].sum()) - positives * (positives + 1) / 2
    return above / (positives * negatives)
