"""A drawn figure, with its data, as a diagnosis keeps it; the style is that of all pages."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.report.drawing import (
    COLOURS,
    DASHES,
    MARKERS,
    SEQUENTIAL,
    canvas,
    svg_text,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["COLOURS", "DASHES", "MARKERS", "SEQUENTIAL", "canvas", "finish"]


def finish(figure: Canvas, key: str, title: str, caption: str, data: Table, *, alt: str) -> Figure:
    """The drawn figure as SVG and PNG; call it inside ``canvas``, whose style still holds."""
    png = io.BytesIO()
    svg = svg_text(figure)
    figure.savefig(png, format="png", dpi=150)
    return Figure(key, title, caption, data, svg, png.getvalue(), alt)
