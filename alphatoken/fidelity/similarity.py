"""Two clouds of paired points: how far one has moved from the other, and whether it turned only."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from alphatoken.errors import InputError
from alphatoken.fidelity.intervals import Estimate
from alphatoken.fidelity.jackknife import jackknife

__all__ = ["cka", "cka_estimate", "cosine", "frechet", "frechet_dims", "relative_shift", "width"]

Numbers = NDArray[np.float64]
_LEFT_OUT = 64  # groups of probes


def _check(before: Numbers, after: Numbers) -> None:
    if before.shape != after.shape or before.ndim != 2:
        raise InputError(
            "paired states must have one shape (probes, width)",
            got=f"{before.shape} and {after.shape}",
        )


def width(points: Numbers) -> float:
    """Root mean square distance to the centroid: how far probes are from each other."""
    return float(np.sqrt(((points - points.mean(0)) ** 2).sum(1).mean()))


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


def frechet_dims(count: int, size: int) -> int:
    """Dimensions in which ``count`` probes can carry a covariance: four probes each, at most d."""
    return min(size, count // 4)


def frechet(before: Numbers, after: Numbers) -> float:
    r"""Fréchet distance of Gaussian fits, in units of the width of the cloud before.

        d^2 = ||mu_x - mu_y||^2 + tr(S_x + S_y - 2 (S_x^1/2 S_y S_x^1/2)^1/2)

    The means are compared in the whole space, the covariances along the first ``frechet_dims``
    principal components of both clouds together (each about its own mean): a covariance of d
    dimensions needs many more than d probes. Pairs are not used. NaN where the cloud before is a
    point, or has fewer than 4 probes.
    """
    _check(before, after)
    size, dims = width(before), frechet_dims(*before.shape)
    if dims == 0 or size == 0:
        return math.nan
    x, y = before - before.mean(0), after - after.mean(0)
    directions = np.linalg.svd(np.concatenate([x, y]), full_matrices=False)[2][:dims].T
    x, y = x @ directions / math.sqrt(len(x)), y @ directions / math.sqrt(len(y))
    traces = float((x**2).sum() + (y**2).sum())
    # tr (S_x^1/2 S_y S_x^1/2)^1/2 is the nuclear norm of S_x^1/2 S_y^1/2.
    apart = traces - 2 * float(np.linalg.norm(_root(x) @ _root(y), "nuc"))
    if apart < 1e-14 * dims * traces:  # what the difference can resolve
        apart = 0.0
    return math.sqrt(float(((before.mean(0) - after.mean(0)) ** 2).sum()) + apart) / size


def _root(points: Numbers) -> Numbers:
    """``(X^T X)^1/2``, without squaring what is rooted again."""
    _, sizes, directions = np.linalg.svd(points, full_matrices=False)
    root: Numbers = (directions.T * sizes) @ directions
    return root


def cka(before: Numbers, after: Numbers, *, debiased: bool = True) -> float:
    r"""Linear centred kernel alignment: 1 if one cloud is the other turned, scaled or moved.

    With Gram matrices ``K = X X^T``, ``L = Y Y^T`` of n probes,

        CKA = <K~, L~> / (||K~|| ||L~||)

    where ``~`` centres. Biased (``debiased=False``, Kornblith et al. 2019): ``K~ = H K H``, ``H =
    I - 11^T / n``. With fewer probes than dimensions it is far above zero for states that have
    nothing in common. Debiased: the U-centring of Székely and Rizzo (2014), with which
    ``<K~, L~> / (n (n - 3))`` is the unbiased HSIC of Song et al. (2012); independent states have
    an expected numerator of 0. Both lie in [-1, 1].

    NaN for fewer than 4 probes, or if all states of one side are equal.
    """
    _check(before, after)
    return _alignment(_gram(before), _gram(after), debiased)


def _gram(points: Numbers) -> Numbers:
    centred = points - points.mean(0)  # changes nothing but the rounding
    gram: Numbers = centred @ centred.T
    return gram


def _alignment(left: Numbers, right: Numbers, debiased: bool) -> float:
    count = len(left)
    if count < 4:
        return math.nan
    centre = _u_centred if debiased else _centred
    left, right = centre(left), centre(right)
    sizes = float(np.linalg.norm(left) * np.linalg.norm(right))
    return float((left * right).sum()) / sizes if sizes > 0 else math.nan


def _centred(gram: Numbers) -> Numbers:
    means = gram.mean(0)
    centred: Numbers = gram - means - means[:, None] + means.mean()
    return centred


def _u_centred(gram: Numbers) -> Numbers:
    """Zero diagonal, and every row sum zero."""
    count = len(gram)
    gram = gram - np.diag(np.diag(gram))
    sums = gram.sum(0) / (count - 2)
    gram = gram - sums - sums[:, None] + sums.sum() / (count - 1)
    centred: Numbers = gram - np.diag(np.diag(gram))
    return centred


def cka_estimate(before: Numbers, after: Numbers, *, debiased: bool = True) -> Estimate:
    """CKA with a jackknife interval; a probe drawn twice would align with itself.

    Probes are left out one by one, of more than 64 in 64 groups: each costs O(n^2).
    """
    _check(before, after)
    left, right = _gram(before), _gram(after)
    return jackknife(
        lambda kept: _alignment(left[np.ix_(kept, kept)], right[np.ix_(kept, kept)], debiased),
        len(before),
        groups=np.arange(len(before)) % min(len(before), _LEFT_OUT),
        ends=(-1.0, 1.0),
        what="probes",
    )
