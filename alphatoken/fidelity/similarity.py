"""Two clouds of paired points: how far one has moved from the other, and whether it turned only."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from alphatoken.errors import InputError
from alphatoken.fidelity.intervals import Estimate, jackknife

__all__ = ["cka", "cka_estimate", "cosine", "relative_shift"]

Numbers = NDArray[np.float64]
_LEFT_OUT = 64  # groups of probes


def _check(before: Numbers, after: Numbers) -> None:
    if before.shape != after.shape or before.ndim != 2:
        raise InputError(
            "paired states must have one shape (probes, width)",
            got=f"{before.shape} and {after.shape}",
        )


def relative_shift(before: Numbers, after: Numbers) -> Numbers:
    """``||y_i - x_i|| / ||x_i||`` of each probe; NaN where the state before is zero."""
    _check(before, after)
    sizes = np.linalg.norm(before, axis=1)
    moved = np.linalg.norm(after - before, axis=1)
    return _ratio(moved, sizes)


def cosine(before: Numbers, after: Numbers) -> Numbers:
    """Cosine of the angle between a probe's states before and after."""
    _check(before, after)
    sizes = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    inner = (before * after).sum(1)
    return _ratio(inner, sizes)


def _ratio(above: Numbers, below: Numbers) -> Numbers:
    found = np.full(len(below), math.nan)
    np.divide(above, below, out=found, where=below > 0)
    return found


def cka(before: Numbers, after: Numbers) -> float:
    r"""Linear centred kernel alignment: 1 if one cloud is the other turned, scaled or moved.

    With Gram matrices ``K = X X^T``, ``L = Y Y^T`` of n probes,

        CKA = <K~, L~> / (||K~|| ||L~||)

    where ``~`` is the U-centring of Székely and Rizzo (2014), with which ``<K~, L~> / (n (n - 3))``
    is the unbiased HSIC of Song et al. (2012): independent states have an expected numerator of 0,
    also where probes are fewer than dimensions. In [-1, 1]; NaN for fewer than 4 probes, or if all
    states of one side are equal.
    """
    _check(before, after)
    return _alignment(_gram(before), _gram(after))


def _gram(points: Numbers) -> Numbers:
    centred = points - points.mean(0)  # changes nothing but the rounding
    gram: Numbers = centred @ centred.T
    return gram


def _alignment(left: Numbers, right: Numbers) -> float:
    count = len(left)
    if count < 4:
        return math.nan
    left, right = _u_centred(left), _u_centred(right)
    sizes = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float((left * right).sum()) / sizes if sizes > 0 else math.nan


def _u_centred(gram: Numbers) -> Numbers:
    """Zero diagonal, and every row sum zero."""
    count = len(gram)
    gram = gram - np.diag(np.diag(gram))
    sums = gram.sum(0) / (count - 2)
    gram = gram - sums - sums[:, None] + sums.sum() / (count - 1)
    centred: Numbers = gram - np.diag(np.diag(gram))
    return centred


def cka_estimate(before: Numbers, after: Numbers) -> Estimate:
    """CKA with a jackknife interval; a probe drawn twice would align with itself.

    Probes are left out one by one, of more than 64 in 64 groups: each costs O(n^2).
    """
    _check(before, after)
    left, right = _gram(before), _gram(after)
    return jackknife(
        lambda kept: _alignment(left[np.ix_(kept, kept)], right[np.ix_(kept, kept)]),
        len(before),
        groups=np.arange(len(before)) % min(len(before), _LEFT_OUT),
        ends=(-1.0, 1.0),
        what="probes",
    )
