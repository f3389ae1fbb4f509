"""Token heatmaps as a figure: letters of equal width in coloured boxes."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from alphatoken.fidelity.diagnosis import Drawing, Table
from alphatoken.fidelity.figures import drawing
from alphatoken.fidelity.token_text import Panel, ValuedText, laid_out, printable
from alphatoken.report.drawing import canvas, colour_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["heatmap_figure"]

_FONT = "DejaVu Sans Mono"  # comes with matplotlib
_SIZE = 7.0  # points
_LETTER = 0.602 * _SIZE / 72  # width of every letter, inches
_LINE = 1.6 * _SIZE / 72
_COLUMNS, _GAP, _HEAD = 72, 0.25, 0.32
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
    prompt, tokens = _end_of(text.prompt), text.shown
    panels = list(text.panels)
    rows = [panels[start : start + 2] for start in range(0, len(panels), 2)]
    heights = [
        _HEAD + _LINE * max(_lines_of(tokens, prompt if row == 0 else ""), 1)
        for row in range(len(rows))
    ]
    size = (2 * _COLUMNS * _LETTER + 3 * _GAP, sum(heights) + 0.35)
    with canvas(*size) as fig:
        fig.set_layout_engine("none")  # every box has its place
        known = _known_letters()
        prompt, tokens = printable(prompt, known), [printable(token, known) for token in tokens]
        top = size[1] - 0.22
        title = printable(text.place, known)
        fig.text(
            _GAP / size[0], 1 - 0.15 / size[1], title, fontsize=9, va="center", parse_math=False
        )
        for row, (own, height) in enumerate(zip(rows, heights, strict=True)):
            for column, panel in enumerate(own):
                left = _GAP + column * (_COLUMNS * _LETTER + _GAP)
                box = (left, top - height, _COLUMNS * _LETTER, height - _HEAD)
                axes = _axes(fig, box, size, round(box[3] / _LINE))
                _draw(axes, panel, tokens, prompt if row == 0 else "")
            top -= height
        return drawing(
            fig,
            data.key,
            f"Values over the text of {text.place}",
            (_RELATIVE if any(panel.relative for panel in panels) else _SIGNED)
            + " Underlined tokens are kept.",
            data,
            alt=f"Text of {text.place} with each response token coloured by its value, in panels: "
            f"{', '.join(panel.title for panel in panels)}.",
        )


def _known_letters() -> Container[int]:
    from matplotlib import font_manager

    found: Container[int] = font_manager.get_font(font_manager.findfont(_FONT)).get_charmap()
    return found


def _end_of(prompt: str) -> str:
    """The end of a prompt on one or two lines."""
    flat = prompt.replace("\n", " ")
    return flat if len(flat) <= _PROMPT else "\u2026" + flat[1 - _PROMPT :]


def _lines_of(tokens: Sequence[str], prompt: str) -> int:
    pieces, _ = laid_out(tokens, _COLUMNS, _LINES)
    used = pieces[-1].line + 1 if pieces else 0
    return used + math.ceil(len(prompt) / _COLUMNS)


def _axes(fig: Canvas, box: tuple[float, ...], size: tuple[float, float], lines: int) -> Axes:
    left, bottom, width, height = box
    axes = fig.add_axes(
        (left / size[0], bottom / size[1], width / size[0], height / size[1]), frameon=False
    )
    axes.set_xlim(0, _COLUMNS)
    axes.set_ylim(lines, 0)
    axes.set_axis_off()
    return axes


def _draw(axes: Axes, panel: Panel, tokens: Sequence[str], prompt: str) -> None:
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.patches import Rectangle

    written: dict[str, Any] = {
        "family": _FONT,
        "fontsize": _SIZE,
        "va": "center_baseline",
        "parse_math": False,
    }
    first = math.ceil(len(prompt) / _COLUMNS)
    for line in range(first):
        part = prompt[line * _COLUMNS : (line + 1) * _COLUMNS]
        axes.text(0, line + 0.5, part, color="#6b7280", **written)
    pieces, shown = laid_out(tokens, _COLUMNS, _LINES)
    colours = panel.colours
    boxes = [
        Rectangle((piece.column, first + piece.line + 0.06), len(piece.text), 0.88)
        for piece in pieces
    ]
    fills = [colour_of(colours[piece.token]) for piece in pieces]
    axes.add_collection(PatchCollection(boxes, facecolors=fills, linewidths=0))
    under = [
        [(start + 0.08, line + 0.94), (start + len(piece.text) - 0.08, line + 0.94)]
        for piece in pieces
        if panel.kept[piece.token]
        for start, line in [(piece.column, first + piece.line)]
    ]
    axes.add_collection(LineCollection(under, colors="#222222", linewidths=0.8))
    for piece in pieces:
        if not piece.text.isspace():
            place = piece.column, first + piece.line + 0.5
            axes.text(*place, piece.text, color="#111111", **written)
    cut = "" if shown == len(tokens) else f"; first {shown} of {len(tokens)} tokens"
    heading = f"{panel.title}   ({panel.scale}{cut})"
    axes.set_title(heading, fontsize=8, loc="left", pad=3, parse_math=False)
