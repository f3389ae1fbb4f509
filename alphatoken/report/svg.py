"""Histograms as inline SVG."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Histogram", "histogram"]

WIDTH, HEIGHT = 320, 120
_BINS = 40


@dataclass(frozen=True)
class Bar:
    """One bar in the drawing's own units, with what it stands for."""

    x: float
    y: float
    width: float
    height: float
    side: str
    title: str


@dataclass(frozen=True)
class Histogram:
    """A drawing: bars, where zero lies, and the ends of the axis."""

    bars: list[Bar]
    zero: float
    low: float
    high: float
    beyond: int
    width: int = WIDTH
    height: int = HEIGHT


def histogram(values: NDArray[np.float64]) -> Histogram | None:
    """Counts over the central 98 % of the values and zero; what lies beyond is counted apart.

    Zero is always an edge between two bars, so that no bar mixes signs. None if all values are 0.
    """
    if not values.size or not np.any(values):
        return None
    low, high = (float(q) for q in np.quantile(values, [0.01, 0.99]))
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    step = (high - low) / _BINS
    below = int(np.ceil(-low / step - 1e-9))
    above = int(np.ceil(high / step - 1e-9))
    edges: NDArray[np.float64] = step * np.arange(-below, above + 1, dtype=np.float64)
    inside = values[(values >= edges[0]) & (values <= edges[-1])]
    counts, _ = np.histogram(inside, edges)
    return Histogram(
        bars=_bars(counts, edges),
        zero=WIDTH * below / len(counts),
        low=float(edges[0]),
        high=float(edges[-1]),
        beyond=int(values.size - inside.size),
    )


def _bars(counts: NDArray[np.int64], edges: NDArray[np.float64]) -> list[Bar]:
    width, tallest = WIDTH / len(counts), max(int(counts.max()), 1)
    bars = []
    for index, count in enumerate(counts.tolist()):
        height = (HEIGHT - 4) * count / tallest
        bars.append(
            Bar(
                x=round(index * width, 2),
                y=round(HEIGHT - height, 2),
                width=round(width - 0.6, 2),
                height=round(height, 2),
                side="plus" if edges[index] >= 0 else "minus",
                title=f"{edges[index]:.3g} to {edges[index + 1]:.3g}: {count}",
            )
        )
    return bars
