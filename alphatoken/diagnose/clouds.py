"""Spread and evenness of a cloud of points, and a picture of it in the plane."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from alphatoken.errors import ConfigError, InputError

__all__ = [
    "clusters_of",
    "density_of",
    "ellipse_of",
    "entropy",
    "picture_of",
    "require_sklearn",
]

Numbers = NDArray[np.float64]
_WIDEST = 50  # principal components that t-SNE is given: the usual number, and quick at any width


def require_sklearn() -> Any:
    """Import scikit-learn, or refuse.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import sklearn
    except ImportError:
        raise ConfigError(
            "this diagnostic needs scikit-learn", remedy="pip install 'alphatoken[diagnose]'"
        ) from None
    return sklearn


def components_of(points: Numbers) -> Numbers:
    """Directions (columns) of a cloud's principal components, the widest first.

    The largest entry of a direction is positive, so that pictures do not flip between machines.
    """
    directions: Numbers = np.linalg.svd(points - points.mean(0), full_matrices=False)[2]
    largest = np.abs(directions).argmax(1)
    signs = np.sign(directions[np.arange(len(directions)), largest])
    found: Numbers = (signs[:, None] * directions).T
    return found


def clusters_of(points: Numbers, clusters: int, seed: int) -> NDArray[np.int64]:
    """Number of the k-means cluster of each point (scikit-learn, 4 starts, fixed seed)."""
    require_sklearn()
    from sklearn.cluster import KMeans

    distinct = len(np.unique(points, axis=0))
    found = KMeans(min(clusters, distinct), n_init=4, random_state=seed).fit_predict(points)
    return np.asarray(found, dtype=np.int64)


def entropy(labels: NDArray[Any], clusters: int) -> float:
    """Entropy of the histogram over ``log clusters``: 1 even, 0 all in one; NaN if undefined."""
    if not len(labels) or clusters < 2:
        return math.nan
    counts = np.unique(labels, return_counts=True)[1]
    shares = counts / counts.sum()
    return abs(float(-(shares * np.log(shares)).sum() / math.log(clusters)))  # no minus zero


def ellipse_of(points: Numbers, share: float = 0.95) -> Numbers:
    """Outline (100, 2) of the ellipse that holds ``share`` of the normal cloud of these moments.

        { x : (x - mean)^T S^-1 (x - mean) = chi^2_2(share) },   S the covariance, by n - 1

    A line where the points lie on one, a point where all are one.
    """
    angles = np.linspace(0.0, 2 * math.pi, 100)
    circle = np.stack([np.cos(angles), np.sin(angles)])
    sizes, directions = np.linalg.eigh(np.cov(points.T))
    radii = np.sqrt(np.maximum(sizes, 0.0) * -2 * math.log(1 - share))  # quantile of chi^2_2
    outline: Numbers = points.mean(0) + (directions @ (radii[:, None] * circle)).T
    return outline


def density_of(values: Numbers, places: int = 200) -> tuple[Numbers, Numbers]:
    """Kernel density (Gaussian, Scott's width) of numbers at evenly spread places around them.

    Nothing where all numbers are equal: a point has no density.
    """
    spread = float(values.std())
    if not spread > 0:
        return np.zeros(0), np.zeros(0)
    at = np.linspace(values.min() - spread, values.max() + spread, places)
    found: Numbers = stats.gaussian_kde(values)(at)
    return at, found


def picture_of(points: Numbers, *, seed: int) -> Numbers:
    """t-SNE of a cloud, (n, 2): scikit-learn, PCA start, fixed seed.

    The perplexity is 30, and at most a third of the other points. Distances between far groups,
    sizes of groups and their density mean nothing in such a picture; neighbourhood does.

    Raises:
        InputError: fewer than 4 points, or a number that is not finite.
    """
    if len(points) < 4 or not np.isfinite(points).all():
        raise InputError(
            "t-SNE needs at least 4 points, all of them finite",
            got=f"{len(points)} points, {int((~np.isfinite(points)).sum())} numbers not finite",
            remedy="give more rows, or look at the model's states",
        )
    require_sklearn()
    from sklearn.manifold import TSNE

    points = _comparable(points)
    if not points.any():
        return np.zeros((len(points), 2))  # all points are one
    tsne = TSNE(
        perplexity=min(30.0, (len(points) - 1) / 3),
        init=(1e-4 * points[:, :2] / points[:, 0].std()).astype(np.float32),
        random_state=seed,
        n_jobs=1,
    )
    return np.asarray(tsne.fit_transform(points), dtype=np.float64)


def _comparable(points: Numbers) -> Numbers:
    """The first components of the cloud, in units of its width: at least 2, at most 50."""
    directions = components_of(points)
    reduced: Numbers = (points - points.mean(0)) @ directions[:, :_WIDEST]
    if reduced.shape[1] < 2:
        reduced = np.pad(reduced, ((0, 0), (0, 2 - reduced.shape[1])))
    width = float(reduced.std())
    return reduced / width if width > 0 else reduced
