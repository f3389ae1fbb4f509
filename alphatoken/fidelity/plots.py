"""Pictures told as data: panels of series and of levels to compare with, drawn in one style.

One rule draws every plot: a series is marks at (x, y), and where a number is an ``Estimate`` its
interval is a bar. That makes three kinds, which serve all diagnostics:

    lines    y with intervals over numbers x, joined
    rows     x with intervals over named rows, the first on top; or y over named columns
    clouds   many small marks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import COLOURS, DASHES, MARKERS, canvas, finish
from alphatoken.fidelity.intervals import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["CLOUD", "INK", "LINE", "Guide", "Panel", "Series", "grouped", "pairwise", "picture"]

Numbers = NDArray[np.float64]

INK = "#3c3c3c"
"""Colour of what belongs to no series."""

CLOUD: dict[str, Any] = {"markersize": 3, "markeredgewidth": 0, "rasterized": True}
"""Style of a series of many marks."""

LINE: dict[str, Any] = {"marker": "", "linestyle": "-"}
"""Style of a joined series whose places are no measurements."""

_MOST_NAMES = 48  # of columns; of more, some have no name


class Series:
    """Marks of one colour and one shape.

    Args:
        label: its name in the legend; "" for none.
        x: numbers, estimates, or names of the panel's columns.
        y: numbers, estimates, or names of its rows.
        look: number of its colour, shape and dashes; by default its place in the panel.
        joined: whether a line joins the marks.
        band: whether the intervals of y are drawn as one band, instead of bars.
        style: what matplotlib's ``errorbar`` is told besides.
    """

    def __init__(
        self,
        label: str,
        x: Iterable[Any],
        y: Iterable[Any],
        *,
        look: int | None = None,
        joined: bool = False,
        band: bool = False,
        **style: Any,
    ) -> None:
        self.label, self.x, self.y, self.look = label, list(x), list(y), look
        self.joined, self.band, self.style = joined, band, style


def grouped(
    records: Sequence[Mapping[str, Any]],
    by: str,
    x: str,
    y: str,
    labels: Mapping[Any, str] | None = None,
    **style: Any,
) -> list[Series]:
    """One joined series for each entry of the column ``by``, with the columns ``x`` and ``y``.

    ``labels`` gives entries their order, which decides on colours, and their names.
    """
    found = []
    for look, (name, label) in enumerate((labels or {r[by]: r[by] for r in records}).items()):
        own = [record for record in records if record[by] == name]
        columns = ([record[column] for record in own] for column in (x, y))
        if own:
            found.append(Series(str(label), *columns, look=look, **{"joined": True} | style))
    return found


def pairwise(first: Iterable[Any], second: Iterable[Any]) -> list[float]:
    """One axis of a joined series that links each first number to its second one only."""
    ends = zip(first, second, strict=True)
    return [float(number) for pair in ends for number in (*pair, math.nan)]  # a NaN ends a line


@dataclass(frozen=True)
class Guide:
    """A level that the series are compared with.

    Attributes:
        at: a number, or both ends of a band.
        across: whether it is a level of y; otherwise of x.
        label: its name in the legend; "" for none.
        dashes: of the line.
    """

    at: float | tuple[float, float]
    across: bool = False
    label: str = ""
    dashes: str = "--"

    def draw(self, axes: Axes) -> None:
        """A line or a band from end to end."""
        label = self.label or None
        if isinstance(self.at, tuple):
            span = axes.axhspan if self.across else axes.axvspan
            span(*self.at, color=INK, alpha=0.2, linewidth=0, label=label)
        else:
            line = axes.axhline if self.across else axes.axvline
            line(self.at, color=INK, linestyle=self.dashes, linewidth=1, label=label)


class Panel:
    """One pair of axes with what is on them.

    Args:
        series: in the order of the legend.
        guides: drawn behind the series.
        rows: names along y, from above; none where y is a number.
        columns: names along x; none where x is a number.
        apart: distance between neighbouring series, so that their bars do not hide each other. It
            is taken along the axis without intervals, in its units, or as a share on a
            logarithmic axis.
        bare: whether scales and grid are left out, because places mean nothing.
        also: draws what is no series, last.
        axes: properties of the axes, as ``Axes.set`` takes them (title, xlabel, yscale, ylim).
    """

    def __init__(
        self,
        series: Sequence[Series] = (),
        guides: Sequence[Guide] = (),
        *,
        rows: Sequence[str] = (),
        columns: Sequence[str] = (),
        apart: float = 0.0,
        bare: bool = False,
        also: Callable[[Axes], None] | None = None,
        **axes: Any,
    ) -> None:
        self.series, self.guides, self.rows, self.columns = series, guides, rows, columns
        self.apart, self.bare, self.also, self.axes = apart, bare, also, axes

    def __str__(self) -> str:
        """What is drawn over what, and the names of the series.

        >>> str(Panel([Series("a", (), ())], rows=("b", "c"), xlabel="share kept"))
        'share kept for each of b, c: a'
        """
        x, y = self.axes.get("xlabel", ""), self.axes.get("ylabel", "")
        text = f"{x} for each of {', '.join(self.rows)}" if self.rows else f"{y} against {x}"
        labels = dict.fromkeys(series.label for series in self.series if series.label)
        names = ": " + ", ".join(labels) if labels else ""
        return text.replace("\n", " ") + names

    def draw(self, axes: Axes) -> None:
        """Guides, series, names and scales, in this order."""
        for guide in self.guides:
            guide.draw(axes)
        for place, series in enumerate(self.series):
            self._draw_series(series, place, axes)
        if self.rows:
            axes.set_yticks(range(len(self.rows)), self.rows, fontsize=8)
            axes.set_ylim(len(self.rows) - 0.5, -0.5)
        if self.columns:
            _name_columns(self.columns, axes)
        axes.set(**self.axes)
        axes.title.set_fontsize(9)
        if "xticks" in self.axes:
            axes.minorticks_off()
        if self.bare:
            axes.set(xticks=[], yticks=[])
            axes.grid(visible=False)
            axes.spines[["left", "bottom"]].set_visible(False)
        if self.also is not None:
            self.also(axes)

    def _draw_series(self, series: Series, place: int, axes: Axes) -> None:
        look = place if series.look is None else series.look
        x, x_bars = _places(series.x, self.columns)
        y, y_bars = _places(series.y, self.rows)
        shift = 0.0 if series.band else self.apart * (place - (len(self.series) - 1) / 2)
        if x_bars is not None:
            y = y + shift
        else:
            x = x * (1 + shift) if self.axes.get("xscale") == "log" else x + shift
        style: dict[str, Any] = {
            "color": COLOURS[look % len(COLOURS)],
            "marker": MARKERS[look % len(MARKERS)],
            "linestyle": DASHES[look % len(DASHES)] if series.joined else "none",
            "markersize": 4,
            "linewidth": 1.2,
            "elinewidth": 1.0,
            **series.style,
        }
        if series.band and y_bars is not None:
            low, high = y - y_bars[0], y + y_bars[1]
            axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
            y_bars = None
        axes.errorbar(x, y, xerr=x_bars, yerr=y_bars, label=series.label or None, **style)


def _places(values: Sequence[Any], names: Sequence[str]) -> tuple[Numbers, Numbers | None]:
    """Places (n,) along an axis, and bars (2, n) to both sides; None where there are none."""

    def ends(value: Any) -> tuple[float, float, float]:
        if isinstance(value, Estimate):
            return value.value, value.low, value.high
        place = names.index(value) if isinstance(value, str) else value
        return math.nan if place is None else float(place), math.nan, math.nan

    places, low, high = np.array([ends(value) for value in values]).reshape(-1, 3).T
    if not any(isinstance(value, Estimate) for value in values):
        return places, None
    # A mean over draws may lie beyond their quantiles; the bar then ends at it.
    return places, np.maximum([places - low, high - places], 0.0)


def _name_columns(names: Sequence[str], axes: Axes) -> None:
    turned = sum(len(name) + 2 for name in names) > 36  # letters that fit beside each other
    step = math.ceil(len(names) / _MOST_NAMES)
    axes.set_xticks(
        range(0, len(names), step), names[::step], fontsize=8, rotation=60 if turned else 0,
        ha="right" if turned else "center", rotation_mode="anchor",
    )  # fmt: skip
    axes.set_xlim(-0.5, len(names) - 0.5)


def picture(
    key: str,
    title: str,
    caption: str,
    data: Table,
    *panels: Panel,
    alt: str = "",
    size: tuple[float, float] = (6.4, 4.0),
    across: int = 0,
    **grid: Any,
) -> Figure:
    """The panels beside each other, and one legend for all of them below.

    Args:
        key: name of the figure's files, without suffix.
        title: heading.
        caption: what to look for.
        data: what is drawn.
        panels: line by line.
        alt: what it shows, for those who do not see it; by default what the axes and series are.
        size: width and height in inches.
        across: panels in a line; all of them by default.
        grid: as ``Figure.subplots`` takes it (sharey, width_ratios).
    """
    across = across or len(panels)
    with canvas(*size) as figure:
        lines = math.ceil(len(panels) / across)
        every = list(figure.subplots(lines, across, squeeze=False, **grid).flat)
        for axes, panel in zip(every, panels, strict=False):
            panel.draw(axes)
        for axes in every[len(panels) :]:
            axes.set_visible(False)
        _legend(figure, every)
        return finish(
            figure, key, title, caption, data, alt=alt or f"{title}. {'; '.join(map(str, panels))}."
        )


def _legend(figure: Canvas, every: Sequence[Axes]) -> None:
    """Each label once; as many columns as its longest entry leaves room for."""
    pairs = [axes.get_legend_handles_labels() for axes in every]
    named = {label: one for ones, labels in pairs for one, label in zip(ones, labels, strict=True)}
    if named:
        columns = int(figure.get_figwidth() / (0.6 + 0.065 * max(map(len, named))))
        figure.legend(
            named.values(), named.keys(), loc="outside lower center", frameon=False, fontsize=8,
            ncols=max(1, min(columns, len(named))),
        )  # fmt: skip
