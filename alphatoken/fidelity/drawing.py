"""Figures: one style, a palette for all eyes, SVG and PNG that need nothing from outside."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from alphatoken.errors import ConfigError
from alphatoken.fidelity.diagnosis import Figure, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["COLOURS", "DASHES", "DIVERGING", "MARKERS", "SEQUENTIAL", "canvas", "finish"]

# Okabe and Ito's palette without yellow: told apart under the common colour-vision deficiencies.
COLOURS = ("#0072b2", "#d55e00", "#007a5e", "#a3507f", "#3c3c3c", "#56b4e9", "#e69f00")
# A series never differs by colour alone.
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
SEQUENTIAL = "cividis"
DIVERGING = "PuOr"

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


@contextmanager
def canvas(width: float = 6.4, height: float = 4.0) -> Iterator[Canvas]:
    """A matplotlib figure in the house style; no global state is left changed.

    Sizes in inches. Large meshes and clouds of points should be drawn with ``rasterized=True``.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise ConfigError(
            "figures need matplotlib", remedy="pip install 'alphatoken[diagnose]'"
        ) from None
    style: Any = _STYLE  # matplotlib types the keys one by one
    with mpl.rc_context(style):
        yield Canvas(figsize=(width, height))


def finish(figure: Canvas, key: str, title: str, caption: str, data: Table, *, alt: str) -> Figure:
    """The drawn figure as SVG and PNG; call it inside ``canvas``, whose style still holds."""
    svg, png = io.StringIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(png, format="png", dpi=150)
    text = svg.getvalue()
    return Figure(key, title, caption, data, text[text.index("<svg") :], png.getvalue(), alt)
