"""Token heatmaps as a figure: letters of equal width in coloured boxes, written as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from alphatoken.fidelity.diagnosis import Drawing, Table
from alphatoken.fidelity.token_text import Panel, Piece, ValuedText, laid_out
from alphatoken.report.drawing import colour_of

__all__ = ["heatmap_figure"]

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


def heatmap_figure(text: ValuedText, data: Table) -> Drawing:
    """Every panel of one row, two beside each other.

    Args:
        text: the row.
        data: what is drawn.
    """
    tokens, prompt = text.shown, _end_of(text.prompt)
    pieces, shown = laid_out(tokens, _COLUMNS, _LINES)
    cut = "" if shown == len(tokens) else f"; first {shown} of {len(tokens)} tokens"
    lines = pieces[-1].line + 1 if pieces else 1
    drawn, top = [_written(_GAP, _LINE, text.place)], 2 * _LINE
    for number, panel in enumerate(text.panels):
        left = _GAP + number % 2 * (_COLUMNS * _LETTER + _GAP)
        if number and not number % 2:
            top += _HEAD + _LINE * lines
            lines, prompt = lines - len(_folded(prompt)), ""  # the first two panels show it
        elif not number:
            lines += len(_folded(prompt))
        drawn += _panel(panel, pieces, prompt, left, top, cut)
    width, height = 2 * _COLUMNS * _LETTER + 3 * _GAP, top + _HEAD + _LINE * lines
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="monospace" font-size="10">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(drawn)}</svg>\n'
    )
    return Drawing(
        data.key,
        f"Values over the text of {text.place}",
        (_RELATIVE if any(panel.relative for panel in text.panels) else _SIGNED)
        + " Underlined tokens are kept.",
        data,
        svg,
        f"Text of {text.place} with each response token coloured by its value, in panels: "
        f"{', '.join(panel.title for panel in text.panels)}.",
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
    panel: Panel, pieces: Sequence[Piece], prompt: str, left: float, top: float, cut: str
) -> Iterator[str]:
    """Title, prompt in grey, and every piece of a token in its box."""
    yield _written(left, top + 0.7 * _LINE, f"{panel.title}   ({panel.scale}{cut})")
    top += _HEAD
    for part in _folded(prompt):
        yield _written(left, top + 0.7 * _LINE, part, "#6b7280")
        top += _LINE
    colours = panel.colours
    for piece in pieces:
        x, y = left + _LETTER * piece.column, top + _LINE * piece.line
        fill = "".join(f"{round(255 * channel):02x}" for channel in colour_of(colours[piece.token]))
        box = f'x="{x:g}" y="{y:g}" width="{_LETTER * len(piece.text):g}"'
        yield f'<rect {box} height="{_LINE - 2:g}" fill="#{fill}"/>'
        if panel.kept[piece.token]:
            line = f'x="{x:g}" y="{y + _LINE - 3:g}" width="{_LETTER * len(piece.text):g}"'
            yield f'<rect {line} height="1" fill="#222"/>'
        if not piece.text.isspace():
            yield _written(x, y + 0.7 * _LINE, piece.text)
