"""The best share of values that do not fit into memory, exactly, by counting.

The m-th largest of n numbers is found digit by digit: each number has a 64-bit key in the same
order, and a pass counts how often each value of the next 16 bits occurs among the numbers whose
higher bits are those found so far. Four passes over the values leave one key; memory is 65,536
counts. Counts of parts add up, so that the parts may lie anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alphatoken.errors import NumericalError
from alphatoken.select.masks import keep_count

__all__ = ["Threshold", "top_threshold"]

_DIGIT = 16
_BASE = 1 << _DIGIT

Values = NDArray[np.floating]


@dataclass(frozen=True)
class Threshold:
    """Criteria, in order, by which values are among the best.

    Attributes:
        value: all that are larger are kept; None keeps all there are.
        ties: how many equal ones are, the first ones.
        count: values in all.
        kept: of them.
    """

    value: float | None
    ties: int
    count: int
    kept: int

    def keeper(self) -> Callable[[Values], NDArray[np.bool_]]:
        """A function that is handed all values in order, part by part, and says which are kept."""
        left = self.ties

        def keep(values: Values) -> NDArray[np.bool_]:
            nonlocal left
            if self.value is None:
                return np.ones(values.shape, dtype=bool)
            kept: NDArray[np.bool_] = values > self.value
            equal = np.flatnonzero(values == self.value)[:left]
            kept[equal] = True
            left -= len(equal)
            return kept

        return keep


def top_threshold(parts: Callable[[], Iterable[Values]], ratio: float) -> Threshold:
    """Threshold at the end of the best ``m = ceil(ratio n)`` of n values.

    Args:
        parts: called once a pass; gives the same values in the same order each time, part by part.
        ratio: in (0, 1].

    Returns:
        The threshold; ``keeper`` keeps what ``select_top`` keeps of all values at once, earlier
        ones first among equals.

    Raises:
        InputError: ratio out of range.
        NumericalError: a NaN or Inf value.

    Exact. Oracle: ``select_top`` on all values together, in the tests.
    """
    keep_count(ratio, 0)
    found, bits, rank, total, kept = 0, 0, 0, 0, 0
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        counts: NDArray[np.int64] = np.zeros(_BASE, dtype=np.int64)
        for values in parts():
            keys = _keys(values)
            if bits:
                keys = keys[keys >> np.uint64(64 - bits) == np.uint64(found)]
            digits = (keys >> np.uint64(shift)) & np.uint64(_BASE - 1)
            counts += np.bincount(digits.astype(np.int64), minlength=_BASE)
        if not bits:
            total = int(counts.sum())
            rank = kept = keep_count(ratio, total)
            if kept == total:
                return Threshold(None, 0, total, kept)
        # How many have a digit of at least d; the digit sought is the last that reaches the rank.
        above = counts[::-1].cumsum()[::-1]
        digit = int(np.flatnonzero(above >= rank)[-1])
        rank -= int(above[digit] - counts[digit])
        found, bits = (found << _DIGIT) | digit, bits + _DIGIT
    return Threshold(_value(found), rank, total, kept)


def _keys(values: Values) -> NDArray[np.uint64]:
    """64-bit keys in the order of the values; -0.0 and 0.0 have one."""
    wide = values.astype(np.float64) + 0.0
    if not np.isfinite(wide).all():
        raise NumericalError(
            "a token value is not finite",
            got=str(wide[~np.isfinite(wide)][0]),
            why="a NaN has no rank; the selection would be arbitrary",
            remedy="score again; the value files hold what the scorer refuses to return",
        )
    raw = wide.view(np.uint64)
    top = np.uint64(1 << 63)
    # Negative floats grow with their bits turned round; positive ones come after all of them.
    return np.where(raw >= top, ~raw, raw | top)


def _value(key: int) -> float:
    top = 1 << 63
    raw = key ^ top if key >= top else ~key & ((1 << 64) - 1)
    return float(np.array([raw], dtype=np.uint64).view(np.float64)[0])
