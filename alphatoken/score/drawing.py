"""Figures: one style, a palette for all eyes, SVG that needs nothing from outside."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphatoken.errors import ConfigError
from alphatoken.support.storage import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = [
    "COLOURS",
    "DASHES",
    "MARKERS",
    "MINUS",
    "PLUS",
    "SEQUENTIAL",
    "canvas",
    "colour_of",
    "save",
    "svg_text",
]

# Okabe and Ito's palette without yellow: told apart under the common colour-vision deficiencies.
COLOURS = ("#0072b2", "#d55e00", "#007a5e", "#a3507f", "#3c3c3c", "#56b4e9", "#e69f00")
# A series never differs by colour alone.
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SEQUENTIAL = "cividis"

PLUS, MINUS = (76, 154, 222), (240, 150, 55)
"""Blue and orange of positive and negative values, likewise told apart by all."""

_STYLE = {
    "svg.fonttype": "path",  # no font of the reader's machine takes part
    "svg.hashsalt": "alphatoken",  # the same picture is the same file
    "font.size": 9.0,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
}


def colour_of(strength: float) -> tuple[float, float, float]:
    """Red, green and blue in [0, 1] for a normalised value in [-1, 1]: white is 0."""
    end = PLUS if strength > 0 else MINUS
    red, green, blue = (1 + (channel / 255 - 1) * min(abs(strength), 1.0) for channel in end)
    return red, green, blue


@contextmanager
def canvas(width: float = 6.4, height: float = 4.0) -> Iterator[Canvas]:
    """A matplotlib figure in the house style; no global state is left changed.

    Sizes in inches. Large meshes and clouds of points should be drawn with ``rasterized=True``.
    Write the figure inside this context, since the style ends with it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ConfigError(
            "figures need matplotlib", remedy="pip install 'alphatoken[report]'"
        ) from None
    style: Any = _STYLE  # matplotlib types the keys one by one
    with mpl.rc_context(style):
        yield Canvas(figsize=(width, height))


def svg_text(figure: Canvas) -> str:
    """The figure as one SVG element; the same figure gives the same text."""
    text = _document(figure)
    return text[text.index("<svg") :]


def save(figure: Canvas, path: Path) -> None:
    """Write the figure as an SVG file, whole or not at all, without spaces at the ends of lines."""
    lines = _document(figure).splitlines()
    write_text(path, "\n".join(map(str.rstrip, lines)) + "\n")


def _document(figure: Canvas) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue()
