"""Numbers as every page writes them: short, with a real minus sign, a dash where there is none."""

from __future__ import annotations

import math

__all__ = ["Cell", "cell_text", "interval", "number"]

Cell = str | int | float | bool | None

_DASH, _MINUS = "\u2013", "\u2212"


def number(value: int | float | None, digits: int = 3, *, signed: bool = False) -> str:
    """A short number; whole ones are written out.

    >>> [number(x) for x in (-0.00012345, 0.123456, 12345, 12345.6, 2.0, 1.5e7, None)]
    ['−1.23e-04', '0.123', '12,345', '12,346', '2', '15,000,000', '–']
    >>> number(0.5, signed=True), number(0.0, signed=True), number(float("-inf"))
    ('+0.5', '0', '−∞')
    """
    if value is None or math.isnan(value):
        return _DASH
    size = abs(value)
    sign = _MINUS if value < 0 else "+" if signed and value else ""
    if math.isinf(size):
        return f"{sign}∞"
    if 10**digits <= size < 1e6 or (size < 1e15 and size == int(size)):
        return f"{sign}{size:,.0f}"
    return sign + (f"{size:.{digits}g}" if 1e-3 <= size < 1e6 else f"{size:.{digits - 1}e}")


def cell_text(cell: Cell) -> str:
    """Text of a table's cell.

    >>> [cell_text(cell) for cell in (None, True, 0.123456, "x", " ")]
    ['–', 'yes', '0.123', 'x', '␣']
    """
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, str):
        return cell if cell.strip(" ") else "\u2423" * len(cell)  # a token may be a space
    return number(cell)


def interval(value: Cell, low: Cell, high: Cell) -> str:
    """``value [low, high]``, all three with the decimals that the interval's width gives meaning.

    >>> interval(0.914, 0.871, 0.95), interval(3e-9, 1e-9, 5e-9), interval(None, None, None)
    ('0.914 [0.871, 0.950]', '3.00e-09 [1.00e-09, 5.00e-09]', 'not defined')
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "not defined"
    known = [one for one in (value, low, high) if isinstance(one, (int, float))]
    known = [float(one) for one in known if math.isfinite(one)]
    largest = max(map(abs, known), default=0.0)
    if len(known) < 3 or not 1e-3 <= largest < 1e5:
        return f"{cell_text(value)} [{cell_text(low)}, {cell_text(high)}]"
    width = known[2] - known[1] or 0.1 * largest
    decimals = min(6, max(0, 1 - math.floor(math.log10(width))))
    texts = [f"{one:.{decimals}f}".replace("-", _MINUS) for one in known]
    return f"{texts[0]} [{texts[1]}, {texts[2]}]"
