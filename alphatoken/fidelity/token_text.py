"""Valued text as a figure: letters of equal width in coloured boxes, written as SVG."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from alphatoken.fidelity.diagnosis import Drawing, Table
from alphatoken.score.drawing import colour_of
from alphatoken.score.page import number as written

__all__ = [
    "KINDS",
    "Piece",
    "heatmap_figure",
    "kind_of",
    "laid_out",
    "normalised",
    "ranged",
]

Numbers = NDArray[np.float64]


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


_LETTER, _LINE, _GAP, _HEAD = 6.0, 16.0, 24.0, 28.0  # pixels
_COLUMNS = 72
_PROMPT = 2 * _COLUMNS  # letters of the prompt that are shown
_LINES = 16  # of text in a panel; more is cut, and the title says so

_SIGNED = (
    "Blue: training on the token lowers the objective; orange: it does harm; full colour is the "
    "largest absolute value of the response in that panel. Look for which words carry a component, "
    "and where two panels disagree in sign."
)
_RELATIVE = (
    "Values are normalised within the response, panel by panel: white is its lowest, full blue its "
    "highest value, so that darker is higher. Look for which words carry a component."
)


def heatmap_figure(
    place: str,
    prompt: str,
    tokens: Sequence[str],
    panels: Mapping[str, Numbers],
    kept: NDArray[np.bool_],
    data: Table,
    *,
    relative: bool = False,
) -> Drawing:
    """Every panel of one row, two beside each other.

    Args:
        place: how a person finds the row.
        prompt: the text before the response.
        tokens: (n) text that each response token adds, made visible.
        panels: title -> (n,) values, normalised within this response; the first is the total.
        kept: (n,) True where the selection keeps the token.
        data: what is drawn.
        relative: whether colours run from the lowest value of the response to its highest, as the
            paper's do, instead of telling signs.
    """
    prompt = _end_of(prompt)
    pieces, shown = laid_out(tokens, _COLUMNS, _LINES)
    cut = "" if shown == len(tokens) else f"; first {shown} of {len(tokens)} tokens"
    lines = pieces[-1].line + 1 if pieces else 1
    drawn, top = [_written(_GAP, _LINE, place)], 2 * _LINE
    for number, (title, values) in enumerate(panels.items()):
        left = _GAP + number % 2 * (_COLUMNS * _LETTER + _GAP)
        if number and not number % 2:
            top += _HEAD + _LINE * lines
            lines, prompt = lines - len(_folded(prompt)), ""  # the first two panels show it
        elif not number:
            lines += len(_folded(prompt))
        low, high = _ends(values)
        scale = f"full colour \u00b1{written(max(abs(low), abs(high)))}"
        scale = f"light {written(low)}, dark {written(high)}" if relative else scale
        drawn.append(_written(left, top + 0.7 * _LINE, f"{title}   ({scale}{cut})"))
        colours = ranged(values) if relative else normalised(values)
        drawn += _panel(pieces, colours, kept, prompt, left, top + _HEAD)
    width, height = 2 * _COLUMNS * _LETTER + 3 * _GAP, top + _HEAD + _LINE * lines
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="monospace" font-size="10">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(drawn)}</svg>\n'
    )
    return Drawing(
        data.key,
        f"Values over the text of {place}",
        f"{_RELATIVE if relative else _SIGNED} Underlined tokens are kept.",
        data,
        svg,
        f"Text of {place} with each response token coloured by its value, in panels: "
        f"{', '.join(panels)}.",
    )


def _end_of(prompt: str) -> str:
    """The end of a prompt on one or two lines."""
    flat = prompt.replace("\n", " ")
    return flat if len(flat) <= _PROMPT else "\u2026" + flat[1 - _PROMPT :]


def _folded(prompt: str) -> list[str]:
    """Lines of a text, folded to a width."""
    count = math.ceil(len(prompt) / _COLUMNS)
    return [prompt[line * _COLUMNS : (line + 1) * _COLUMNS] for line in range(count)]


def _written(x: float, y: float, text: str, colour: str = "#111") -> str:
    """Letters of equal width, whichever font there is; spaces count."""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" xml:space="preserve" '
        f'textLength="{_LETTER * len(text):g}" lengthAdjust="spacingAndGlyphs">'
        f"{escape(text)}</text>"
    )


def _panel(
    pieces: Sequence[Piece],
    colours: Numbers,
    kept: NDArray[np.bool_],
    prompt: str,
    left: float,
    top: float,
) -> Iterator[str]:
    """Prompt in grey, and every piece of a token in its box."""
    for part in _folded(prompt):
        yield _written(left, top + 0.7 * _LINE, part, "#6b7280")
        top += _LINE
    for piece in pieces:
        x, y = left + _LETTER * piece.column, top + _LINE * piece.line
        fill = "".join(f"{round(255 * channel):02x}" for channel in colour_of(colours[piece.token]))
        box = f'x="{x:g}" y="{y:g}" width="{_LETTER * len(piece.text):g}"'
        yield f'<rect {box} height="{_LINE - 2:g}" fill="#{fill}"/>'
        if kept[piece.token]:
            line = f'x="{x:g}" y="{y + _LINE - 3:g}" width="{_LETTER * len(piece.text):g}"'
            yield f'<rect {line} height="1" fill="#222"/>'
        if not piece.text.isspace():
            yield _written(x, y + 0.7 * _LINE, piece.text)
