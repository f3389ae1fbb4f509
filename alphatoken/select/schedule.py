"""A number that moves from one value to another over the first part of a run."""

from __future__ import annotations

import math
from fractions import Fraction

from alphatoken.errors import InputError

__all__ = ["scheduled"]


def scheduled(start: float, end: float, step: int, total: int, *, share: float) -> float:
    """The value at ``step`` of a schedule from ``start`` to ``end``, in a straight line.

        start + (end - start) min(1, step / (share * total))

    Args:
        start: value at step 0.
        end: value at ``step >= share * total``.
        step: optimizer steps taken so far, from 0.
        total: optimizer steps of the whole run.
        share: share of the run over which the value moves, in (0, 1].

    Returns:
        A number between ``start`` and ``end``, monotone in ``step``. Decimals are computed as
        decimals: half of the way from 1.0 to 0.2 is 0.6, so that a scheduled ratio never keeps one
        token too many for a rounding error.

    Exactness: exact.

    Raises:
        InputError: a negative step, no steps, share outside (0, 1], an end that is not finite.
    """
    _check(start, end, step, total, share)
    # In fractions, since a ratio that is off by a rounding error could keep one token too many.
    way = min(Fraction(1), Fraction(step) / (_decimal(share) * total))
    if way == 1:
        return float(end)
    return float(_decimal(start) + (_decimal(end) - _decimal(start)) * way)


def _decimal(number: float) -> Fraction:
    """The number as it prints: 0.1 is a tenth."""
    return Fraction(str(float(number)))


def _check(start: float, end: float, step: int, total: int, share: float) -> None:
    if step < 0 or total < 1:
        raise InputError(
            "a schedule needs step >= 0 and total >= 1", got=f"step={step}, total={total}"
        )
    if not 0 < share <= 1:
        raise InputError(
            "share must lie in (0, 1]",
            got=repr(share),
            why="it is the part of the run over which the value moves",
        )
    if not all(math.isfinite(x) for x in (start, end)):
        raise InputError("a schedule goes between finite numbers", got=f"{start!r} to {end!r}")
