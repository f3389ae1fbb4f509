"""Otsu's thresholds for several classes: the most variance between the parts of a histogram.

With bins of mass ``m_i`` and centre ``c_i``, classes are runs of bins; the partition maximises

    sum over classes  (sum m_i c_i)^2 / sum m_i

which is the variance between classes up to constants.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.errors import InputError

__all__ = ["multi_otsu"]

Array = NDArray[Any]


def multi_otsu(values: Array, classes: int = 3, bins: int = 256) -> Array | None:
    """Thresholds between ``classes`` classes of ``values``; exact over the histogram.

    Args:
        values: (n,) finite numbers.
        classes: at least 2.
        bins: of equal width, from the smallest to the largest value.

    Returns:
        (classes - 1,) ascending: the class of a value is the number of thresholds at or below it
        (``np.searchsorted(thresholds, values, side="right")``). Among equal partitions the one
        with the lowest thresholds. None where fewer than ``classes`` bins are filled.

    Raises:
        InputError: fewer than two classes, or more classes than bins.

    Cost: O(classes bins^2). Source: Otsu 1979; Liao et al. 2001. scikit-image's
    ``threshold_multiotsu`` maximises the same over the same histogram and returns bin centres,
    which cuts the boundary bin in two; here a bin stays whole. Oracle: all
    partitions, in the tests.
    """
    if not 2 <= classes <= bins:
        raise InputError(
            "multi-Otsu needs at least 2 classes, and as many bins",
            got=f"{classes} classes, {bins} bins",
        )
    mass, edges = np.histogram(values, bins=bins)
    if np.count_nonzero(mass) < classes:
        return None
    weight = np.concatenate([[0.0], np.cumsum(mass)])
    moment = np.concatenate([[0.0], np.cumsum(mass * (edges[:-1] + edges[1:]) / 2)])
    # gain[i, j]: of one class over bins i .. j - 1; impossible where it holds nothing.
    inside = weight[None, :] - weight[:, None]
    gain = np.full((bins + 1, bins + 1), -np.inf)
    np.divide((moment[None, :] - moment[:, None]) ** 2, inside, out=gain, where=inside > 0)
    best, cuts = gain[0], []
    for _ in range(classes - 1):
        total = best[:, None] + gain
        cuts.append(total.argmax(0))
        best = total.max(0)
    ends = [bins]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    return np.asarray(edges[sorted(ends[1:])])
