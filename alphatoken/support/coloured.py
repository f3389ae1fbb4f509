"""Tokens in the colours of their values: as HTML in a notebook, with ANSI colours in a terminal.

    strength = sign(value) sqrt(min(1, |value| / full)),    full = 0.98 quantile of |value|

the latter to two digits upwards. The rule of every page too, which ``score/page.js`` paints by: one
scale for all rows that are looked at together, with numbers at its ends. A few tokens far out would
leave the others white; therefore the quantile and the root.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import groupby

import numpy as np

from alphatoken.support.terminal import CLOSE, OPEN, has_colour, painted
from alphatoken.support.token_texts import visible

PLUS, MINUS = (76, 154, 222), (240, 150, 55)
"""Blue of positive and orange of negative values, told apart under colour-vision deficiencies."""

OPAQUE = 0.65
"""Opacity of the strongest colour: letters on it stay readable, light ones and dark ones."""

EMPTY = "\u27e8\u27e9"
"""Stands for a token that adds no text."""

_QUANTILE = 0.98
_BEGIN, _END = 16, 80  # characters that are left of a long text without values: questions end it
_DIM, _STRONG, _FAINT = "2", {True: "97;44", False: "30;43"}, {True: "94", False: "33"}
_FIRST, _SECOND = 1 / 2, 3 / 4
"""Strengths from which a terminal colours letters, and from which what lies behind them: of values
of 1/4 and 9/16 of the full size."""


def full_scale(values: Iterable[float]) -> float:
    """Size of a value from which on a colour is full; 0 if all values are 0, and none is coloured.

    >>> full_scale([0.0, 0.512, -0.5]), full_scale([])
    (0.52, 0.0)
    """
    sizes = np.abs(np.fromiter(values, float))
    size = float(np.quantile(sizes, _QUANTILE)) if len(sizes) else 0.0
    if not size:  # nearly all are 0
        return float(sizes.max(initial=0.0))
    step = 10.0 ** (math.floor(math.log10(size)) - 1)
    return float(f"{math.ceil(round(size / step, 6)) * step:.4g}")


@dataclass(frozen=True)
class ShownToken:
    """A token as it is shown.

    Attributes:
        text: that it adds to the text before it.
        value: None where it has none, as in a prompt.
        loss: of the forward that was valued, where it is known.
    """

    text: str
    value: float | None = None
    loss: float | None = None


@dataclass(frozen=True, repr=False)
class ColouredRows:
    """Rows of tokens with their values; print it, or end a notebook's cell with it.

    In a terminal the letters are coloured from a quarter of the scale on, and what lies behind them
    from 9/16 on. Without colours (a pipe, a file, NO_COLOR) tokens from a quarter of the scale on
    stand in brackets with their value.

    Attributes:
        rows: tokens of each row, padding left out.
        unit: of the values, and what it means that one is positive.
        names: of the rows, where they have other ones than "row 1" and so on.
        scale: size of a value that has the full colour, where these rows are some of those that
            :func:`full_scale` was taken of; None: it is taken of them.
    """

    rows: Sequence[Sequence[ShownToken]]
    unit: str
    names: Sequence[str] = ()
    scale: float | None = None

    @cached_property
    def full(self) -> float:
        """Size of a value that has the full colour."""
        if self.scale is not None:
            return self.scale
        return full_scale(one.value for row in self.rows for one in row if one.value is not None)

    def strength(self, value: float) -> float:
        """Between -1 and 1; the sign is that of the value."""
        share = min(1.0, abs(value) / self.full) if self.full else 0.0
        return math.copysign(math.sqrt(share), value)

    def __str__(self) -> str:
        """For stdout as it is now: with ANSI colours in a terminal, otherwise plain."""
        return self.text(colour=has_colour(sys.stdout))

    __repr__ = __str__

    def text(self, *, colour: bool) -> str:
        """The rows as text, one line more for each that tells its number, mean and sum."""
        lines = [self._scale(colour)]
        for name, row in self._named():
            lines += ["", _heading(name, row), "".join(self._pieces(row, colour)).rstrip("\n")]
        return "\n".join(lines)

    def _named(self) -> Iterator[tuple[str, Sequence[ShownToken]]]:
        numbers = [f"row {number}" for number in range(1, len(self.rows) + 1)]
        return zip(self.names or numbers, self.rows, strict=True)

    def _scale(self, colour: bool) -> str:
        least, most = f"{-self.full:+.2g} or less", f"{self.full:+.2g} or more"
        if colour:
            ends = f"{painted(least, _STRONG[False])} to {painted(most, _STRONG[True])}"
        else:
            at = self.full * _FIRST**2
            ends = (
                f"{least} to {most}; {OPEN}token|value{CLOSE} where it is beyond {at:.2g} in size"
            )
        return f"values from {ends}. {self.unit}"

    def _pieces(self, row: Sequence[ShownToken], colour: bool) -> Iterator[str]:
        for valued, tokens in groupby(row, key=lambda one: one.value is not None):
            if valued:
                yield from (self._token(one, colour) for one in tokens)
            else:
                yield painted(_shortened([*tokens]), _DIM if colour else "")

    def _token(self, token: ShownToken, colour: bool) -> str:
        assert token.value is not None
        text, strength = visible(token.text) or EMPTY, self.strength(token.value)
        if abs(strength) < _FIRST:
            return text
        if colour:
            codes = _STRONG if abs(strength) >= _SECOND else _FAINT
            return painted(text, codes[strength > 0])
        # Inside, since a number that follows would be read as a part of the value.
        return f"{OPEN}{text}|{token.value:+.2g}{CLOSE}"

    def _repr_html_(self) -> str:
        """For a notebook: colours behind the letters, and the value in each token's tooltip."""
        least, most = (_marked(self.strength(x), f"{x:+.2g}") for x in (-self.full, self.full))
        scale = f"values from {least} or less to {most} or more. {escape(self.unit)}"
        rows = "".join(
            f"<div style='opacity:.7;margin-top:.8em'>{escape(_heading(name, row))}</div>"
            "<div dir='auto' style='white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.7'>"
            f"{''.join(self._html(row))}</div>"
            for name, row in self._named()
        )
        return f"<div><div>{scale}</div>{rows}</div>"

    def _html(self, row: Sequence[ShownToken]) -> Iterator[str]:
        for valued, tokens in groupby(row, key=lambda one: one.value is not None):
            if not valued:
                yield f"<span style='opacity:.55'>{escape(_shortened([*tokens]))}</span>"
                continue
            for one in tokens:
                assert one.value is not None
                before = "" if one.loss is None else f", loss {one.loss:.3g}"
                text = escape(visible(one.text) or EMPTY)
                yield _marked(self.strength(one.value), text, f"{one.value:+.3g}{before}")


def _heading(name: str, row: Sequence[ShownToken]) -> str:
    values = [one.value for one in row if one.value is not None]
    if not values:
        return f"{name}: no values"
    mean, whole = sum(values) / len(values), sum(values)
    return f"{name}: {len(values)} values, mean {mean:+.3g}, sum {whole:+.3g}"


def _shortened(tokens: Sequence[ShownToken]) -> str:
    """Text without values on one line, its middle left out where it is long."""
    text = visible("".join(one.text for one in tokens)).replace("\n", "")
    if len(text) <= _BEGIN + _END + 3:
        return text
    return f"{text[:_BEGIN]} \u2026 {text[-_END:]}"


def _marked(strength: float, html: str, title: str = "") -> str:
    red, green, blue = PLUS if strength > 0 else MINUS
    name = f" title='{title}'" if title else ""
    look = f"background:rgba({red},{green},{blue},{OPAQUE * abs(strength):.3f})"
    return f"<span{name} style='{look}'>{html}</span>"
