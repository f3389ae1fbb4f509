"""First order against what happens: predictions of a step, and where they break.

With values a_k of n tokens, s of them left out of the step, and the training loss a mean over

    nothing (sum)        u_S = eta sum_S a_k
    all response tokens  u_S = eta sum_S a_k / n
    the tokens kept      u_S = eta (sum_S a_k - s mean a) / (n - s)

is J(step without S) - J(step with all) to first order in eta. Oracle: ``oracle.utility``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Prediction", "breakdown", "first_order", "relative_error", "slope"]

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """Values of all tokens of the batch.

    Attributes:
        name: how it is shown.
        values: in (row, position) order.
        calibrated: it is in units of the validation loss; otherwise only its ranks mean something.
        own: it is what the user's run computes.
    """

    name: str
    values: Numbers
    calibrated: bool
    own: bool = False


def first_order(values: Numbers, dropped: Sequence[int], eta: float, normalization: str) -> float:
    """Predicted ``u_S`` from the values of all tokens of the batch; see ``prediction``."""
    count, gone = len(values), len(dropped)
    part = float(values[list(dropped)].sum())
    if normalization == "sum":
        return eta * part
    if normalization == "response":
        return eta * part / count
    if gone == count:
        return eta * part / count  # nothing is left: the step's gradient is 0
    return eta * (part - gone * float(values.mean())) / (count - gone)


def slope(predicted: Numbers, actual: Numbers) -> float:
    """Least-squares slope of actual on predicted through 0: 1 where the scale is right."""
    square = float(predicted @ predicted)
    return float(predicted @ actual) / square if square else math.nan


def relative_error(predicted: Numbers, actual: Numbers) -> float:
    """``||predicted - actual|| / ||actual||``."""
    size = float(np.linalg.norm(actual))
    return float(np.linalg.norm(predicted - actual)) / size if size else math.nan


def breakdown(etas: Sequence[float], errors: Sequence[float], limit: float) -> float | None:
    """Step size from which the error stays above ``limit``, by interpolation between the sizes.

    Looked for upwards of the size with the least error: towards the small end an error is rounding.
    None if it never does; 0 if the least error is above the limit already.
    """
    usable = [(e, x) for e, x in sorted(zip(etas, errors, strict=True)) if not math.isnan(x)]
    if not usable:
        return None
    least = min(range(len(usable)), key=lambda i: usable[i][1])
    if usable[least][1] > limit:
        return 0.0
    inside = max(i for i in range(least, len(usable)) if usable[i][1] <= limit)
    if inside == len(usable) - 1:
        return None
    (low, below), (high, above) = usable[inside], usable[inside + 1]
    share = math.log(limit / below) / math.log(above / below) if below > 0 else 1.0
    return float(low * (high / low) ** share)
