"""Valued text: the content of a heatmap, laid out in lines of equal letters."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alphatoken.report.numbers import number as written

__all__ = [
    "KINDS",
    "Panel",
    "Piece",
    "ValuedText",
    "kind_of",
    "laid_out",
    "normalised",
    "ranged",
]

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Panel:
    """One colouring of a response.

    Attributes:
        title: over the panel.
        values: (n,) one a response token.
        kept: (n,) True where the selection keeps the token.
        relative: whether colours run from the lowest value of the response to its highest, as the
            paper's do, instead of telling signs.
    """

    title: str
    values: Numbers
    kept: NDArray[np.bool_]
    relative: bool = False

    @property
    def colours(self) -> Numbers:
        """The values, normalised within this response: to [-1, 1], or to [0, 1] if relative."""
        return ranged(self.values) if self.relative else normalised(self.values)

    @property
    def scale(self) -> str:
        """Meaning of the colours in numbers, for a heading."""
        low, high = _ends(self.values)
        if self.relative:
            return f"light {written(low)}, dark {written(high)}"
        return f"full colour \u00b1{written(max(abs(low), abs(high)))}"


@dataclass(frozen=True)
class ValuedText:
    """One row of t tokens, n of them in responses.

    Attributes:
        row: number of the training row.
        place: how a person finds it.
        tokens: (t) text that each token adds, made visible.
        response: (t,) True at the valued tokens.
        panels: colourings, the first one the total.
    """

    row: int
    place: str
    tokens: Sequence[str]
    response: NDArray[np.bool_]
    panels: tuple[Panel, ...]

    @property
    def shown(self) -> list[str]:
        """Texts of the response tokens."""
        return [token for token, own in zip(self.tokens, self.response, strict=True) if own]

    @property
    def prompt(self) -> str:
        """The text before the first response token."""
        places = np.flatnonzero(self.response)
        return "".join(self.tokens[: int(places[0])] if len(places) else self.tokens)


def normalised(values: Numbers) -> Numbers:
    """``v / max |v|``: in [-1, 1], sign and zero kept; zeros stay where all are zero."""
    largest = float(np.abs(values).max()) if len(values) else 0.0
    return values / largest if largest > 0 else np.zeros_like(values)


def ranged(values: Numbers) -> Numbers:
    """``(v - min) / (max - min)``: in [0, 1], order kept; zeros where all values are equal."""
    low, high = _ends(values)
    return (values - low) / (high - low) if high > low else np.zeros_like(values)


def _ends(values: Numbers) -> tuple[float, float]:
    return (float(values.min()), float(values.max())) if len(values) else (0.0, 0.0)


KINDS = ("number", "start of a word", "inside a word", "punctuation or sign", "space", "other")
"""Kind of a token, as far as its text says."""


def kind_of(text: str) -> str:
    r"""One of ``KINDS``: by the token's characters that are no space.

    >>> [kind_of(text) for text in (" cat", "ing", "42", ".", "\n")]
    ['start of a word', 'inside a word', 'number', 'punctuation or sign', 'space']
    """
    if text.startswith("<") and text.endswith(">") and len(text) > 2:
        return "other"  # special tokens, and bytes of a character
    core = text.strip()
    if not core:
        return "space" if text else "other"
    if any(character.isdigit() for character in core):
        return "number"
    if any(character.isalpha() for character in core):
        return "start of a word" if text[0].isspace() else "inside a word"
    marks = all(unicodedata.category(character)[0] in "PS" for character in core)
    return "punctuation or sign" if marks else "other"


@dataclass(frozen=True)
class Piece:
    """A part of a token on one line: which token, where it starts, and its letters."""

    token: int
    line: int
    column: int
    text: str


def laid_out(tokens: Sequence[str], columns: int, lines: int) -> tuple[list[Piece], int]:
    """Break tokens into lines of ``columns`` letters; the pieces, and how many tokens were shown.

    Breaks anywhere: every letter takes one place, so that boxes stay in line. A line break in a
    token ends its line. Tokens that would need more than ``lines`` lines are left out, the rest of
    their row too.
    """
    pieces: list[Piece] = []
    line = column = 0
    for number, token in enumerate(tokens):
        own: list[Piece] = []
        for part, text in enumerate(token.split("\n")):
            if part:
                line, column = line + 1, 0
            while text:
                if column == columns:
                    line, column = line + 1, 0
                room = text[: columns - column]
                own.append(Piece(number, line, column, room))
                column += len(room)
                text = text[len(room) :]
        if own and own[-1].line >= lines:
            return pieces, number
        pieces += own
    return pieces, len(tokens)
