"""How the values of each component are distributed, as a section of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alphatoken.report.drawing import canvas, colour_of, svg_text
from alphatoken.report.examples import Component
from alphatoken.report.numbers import number
from alphatoken.report.page import Picture, Section, anchor_of
from alphatoken.report.statistics import ComponentSummary, ValueSummary

__all__ = ["Histogram", "distributions", "histogram"]

_BINS = 40


@dataclass(frozen=True)
class Histogram:
    """Counts between neighbouring edges, and of the values beyond all edges."""

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    beyond: int


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
    return Histogram(edges, counts, int(values.size - inside.size))


def distributions(summary: ValueSummary, present: Sequence[Component]) -> Section:
    """A section with one picture a component, of those that are not zero everywhere."""
    statistics = {one.key: one for one in summary.components}
    pictures = [
        _distribution(component, found, statistics[component.key])
        for component in present
        if (found := histogram(summary.columns[component.key])) is not None
    ]
    flat = [one.name for one in present if not summary.columns[one.key].any()]
    zero = [f"Zero for every token: {'; '.join(flat)}."] if flat else []
    drawn = len(next(iter(summary.columns.values()), ()))
    which = "All" if drawn == summary.response_tokens else f"A sample of {number(drawn)} of the"
    remark = (
        f"{which} {number(summary.response_tokens)} response tokens. Bars span the central 98 % of "
        "the values; zero is the dashed line."
    )
    return Section(
        "distributions",
        "Distributions",
        remarks=[remark, *zero],
        pictures=pictures,
    )


def _distribution(component: Component, found: Histogram, said: ComponentSummary) -> Picture:
    colours = [colour_of(1.0 if edge >= 0 else -1.0) for edge in found.edges[:-1]]
    with canvas(3.75, 1.7) as figure:
        axes = figure.subplots()
        widths = np.diff(found.edges)
        axes.bar(found.edges[:-1], found.counts, 0.92 * widths, align="edge", color=colours)
        axes.axvline(0, color="#57606a", linestyle="--", linewidth=0.8)
        axes.grid(visible=False)
        axes.set_ylabel("tokens")
        axes.locator_params(nbins=5)
        svg = svg_text(figure)
    beyond = f"; {number(found.beyond)} values lie beyond the axis" if found.beyond else ""
    positive = f"{100 * said.positive:.0f} % positive; mean {number(said.mean, signed=True)}"
    return Picture(
        anchor_of(f"distribution-{component.key}"),
        component.name,
        f"{positive}; from {number(said.minimum, signed=True)} to "
        f"{number(said.maximum, signed=True)}{beyond}.",
        svg,
        alt=f"Histogram of {component.name}: {positive}",
    )
