"""Figures as declarations: which columns of a table are drawn, and in which of six kinds.

    bars      a mark with its interval in each row of the table, beside the row's name
    lines     marks with intervals, joined within a series
    scatter   many small marks
    histogram shares of the rows of each series, by x
    grid      a coloured cell in each row of the table
    cloud     points whose places mean nothing but neighbourhood, each series with its ellipse

One rule serves the first three: a number that is an estimate in the table (``NAME``, ``NAME_low``,
``NAME_high``) has a bar, and an axis whose entries are words has names. Text in coloured boxes is
drawn by ``heatmap``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from alphatoken.diagnose.diagnosis import Drawing, Table
from alphatoken.diagnose.statistics import Numbers
from alphatoken.errors import require_choice
from alphatoken.score.page import COLOURS, DASHES, MARKERS, SEQUENTIAL, canvas, svg_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Record = Mapping[str, Any]

_INK = "#3c3c3c"  # of what belongs to no series
_MOST_NAMES = 48  # along an axis; of more, some have no name
_POINT: dict[str, Any] = {"markersize": 3, "markeredgewidth": 0, "rasterized": True, "alpha": 0.5}
_WAYS: tuple[Any, ...] = ("vertical", "horizontal")


@dataclass(frozen=True)
class Guide:
    """A line that the numbers are compared with.

    Attributes:
        at: where it is.
        of: "x" or "y", whose level it is; "equal": y = x; "product": x y = at.
        label: its name in the legend; "" for none.
    """

    at: float = 0.0
    of: str = "x"
    label: str = ""


@dataclass(frozen=True)
class Figure:
    """One picture over the rows of one table.

    Attributes:
        kind: see the head of this file.
        key: name of its files, without suffix.
        table: what is drawn.
        title: heading.
        caption: what to look for.
        x: column along it.
        y: the same upwards. In a grid ``NAME_from`` and ``NAME_to`` give the cells' edges.
        series: column by whose entries marks have their colour and shape.
        facets: column whose entries have a panel each; in a cloud, several columns that are True
            or False: a panel each, with the points that are False in grey.
        colour: column of the colour of a cell of a grid.
        band: column whose ``_low`` and ``_high`` along x are drawn as a grey band.
        guides: lines to compare with.
        xlabel: of the axis; by default the column's name.
        ylabel: the same.
        scales: of x and y: linear or log.
        limits: of x and y, as (low, high); None where the numbers decide.
        across: most panels in a line.
    """

    kind: str
    key: str
    table: Table
    title: str
    caption: str
    x: str = ""
    y: str = ""
    series: str = ""
    facets: str | tuple[str, ...] = ""
    colour: str = ""
    band: str = ""
    guides: tuple[Guide, ...] = ()
    xlabel: str = ""
    ylabel: str = ""
    scales: tuple[str, str] = ("linear", "linear")
    limits: tuple[Any, Any] = (None, None)
    across: int = 3


def draw(figure: Figure) -> Drawing:
    """The figure as SVG.

    Raises:
        ConfigError: matplotlib is not installed, or there is no such kind.
    """
    require_choice("the kind of a figure", figure.kind, _KINDS)
    panels = list(_panels(figure))
    across = min(figure.across, len(panels)) or 1
    lines = math.ceil(len(panels) / across)
    with canvas(*_size(figure, panels, across, lines)) as picture:
        every = list(picture.subplots(lines, across, squeeze=False).flat)
        for axes, (title, records) in zip(every, panels, strict=False):
            axes.set_title(title, fontsize=9)
            _KINDS[figure.kind](axes, figure, records)
        for axes in every[len(panels) :]:
            axes.set_visible(False)
        names = ", ".join(_legend(picture, every))
        x, y = _axis_labels(figure)
        alt = f"{figure.title}: {y} against {x}" + (f" ({names})" if names else "")
        return Drawing(
            figure.key, figure.title, figure.caption, figure.table, svg_text(picture), alt
        )


# --- panels ---------------------------------------------------------------------------------------


def _panels(figure: Figure) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Title and rows of each panel; rows without a number along y or x are left out."""
    drawn = set[str]() if figure.kind == "grid" else {figure.x, figure.y} - {""}
    records = [one for one in figure.table.records() if None not in map(one.get, drawn)]
    if isinstance(figure.facets, tuple):
        for name in figure.facets:
            yield name, [{**record, "facet": record[name]} for record in records]
    elif figure.facets:
        for entry in dict.fromkeys(record[figure.facets] for record in records):
            yield str(entry), [record for record in records if record[figure.facets] == entry]
    else:
        yield "", records


def _size(
    figure: Figure, panels: Sequence[tuple[str, list[dict[str, Any]]]], across: int, lines: int
) -> tuple[float, float]:
    """Width and height in inches; each name along y has room for a letter."""
    width = 6.4 if across == 1 else 3.2 * across
    names = max(len(_names(records, figure.y)) for _, records in panels)
    height = 1.2 + 0.34 * max(names, 2) if names else 4.0 if lines * across == 1 else 3.1
    return width, height * lines


def _axis_labels(figure: Figure) -> tuple[str, str]:
    x, y = figure.x.replace("_", " "), figure.y.replace("_", " ")
    return figure.xlabel or x, figure.ylabel or y


def _names(records: Sequence[Record], column: str) -> list[str]:
    """The words along an axis, in their order; none where it has numbers only."""
    cells = [record.get(column) for record in records]
    worded = any(isinstance(one, str) for one in cells)
    return list(dict.fromkeys(map(str, cells))) if worded else []


def _legend(picture: Canvas, every: Sequence[Axes]) -> list[str]:
    """Draw each label once, and return them."""
    pairs = [axes.get_legend_handles_labels() for axes in every]
    named = {label: one for ones, labels in pairs for one, label in zip(ones, labels, strict=True)}
    if named:
        # As many columns as the longest label leaves room for.
        columns = int(picture.get_figwidth() / (0.6 + 0.065 * max(map(len, named))))
        picture.legend(
            named.values(), named.keys(), loc="outside lower center", frameon=False, fontsize=8,
            ncols=max(1, min(columns, len(named))),
        )  # fmt: skip
    return list(named)


# --- marks with intervals -------------------------------------------------------------------------


def _series(figure: Figure, records: Sequence[Record]) -> list[tuple[str, int, list[Record]]]:
    """Label, place of colour and shape, and rows of each entry of ``series``, or of all rows."""
    if not figure.series:
        return [("", 0, [*records])]
    series = []
    # Of the whole table: an entry has the same colour in panels that lack others.
    entries = dict.fromkeys(record[figure.series] for record in figure.table.records())
    for place, entry in enumerate(entries):
        own = [record for record in records if record[figure.series] == entry]
        if own:
            label = f"{entry:g}" if isinstance(entry, float) else str(entry)
            series.append((label, place % len(COLOURS), own))
    return series


def _places(
    records: Sequence[Record], column: str, names: Sequence[str]
) -> tuple[Numbers, Numbers | None]:
    """Places (n,) along an axis, and bars (2, n) to both sides where there are intervals."""
    if names:
        return np.array([float(names.index(str(record[column]))) for record in records]), None
    ends = [
        [math.nan if record.get(name) is None else float(record[name]) for record in records]
        for name in (column, f"{column}_low", f"{column}_high")
    ]
    value, low, high = np.array(ends)
    if np.isnan(low).all():
        return value, None
    return value, np.array([value - low, high - value])


def _draw_marks(axes: Axes, figure: Figure, records: Sequence[Record]) -> None:
    names = [_names(records, column) for column in (figure.x, figure.y)]
    _draw_band(axes, figure, records)
    every = _series(figure, records)
    crowded = sum(len(own) for _, _, own in every) > len(names[0] or names[1])
    for place, (label, look, own) in enumerate(every):
        x, x_bars = _places(own, figure.x, names[0])
        y, y_bars = _places(own, figure.y, names[1])
        if figure.kind == "bars" and crowded:
            # Marks of one name stand apart, so that no bar hides another.
            apart = 0.6 * (place - (len(every) - 1) / 2) / len(every)
            x, y = (x, y + apart) if names[1] else (x + apart, y)
        style: dict[str, Any] = {
            "color": COLOURS[look],
            "marker": MARKERS[look],
            "linestyle": DASHES[look] if figure.kind == "lines" else "none",
            **(_POINT if figure.kind == "scatter" and len(x) > 60 else {"markersize": 4}),
        }
        axes.errorbar(x, y, xerr=x_bars, yerr=y_bars, label=label or None, elinewidth=1.0, **style)
    _finish_axes(axes, figure, names, records)


def _draw_band(axes: Axes, figure: Figure, records: Sequence[Record]) -> None:
    if figure.band:
        *_, first = _series(figure, records)[0]
        ends = (figure.x, f"{figure.band}_low", f"{figure.band}_high")
        x, low, high = ([float(record[name]) for record in first] for name in ends)
        axes.fill_between(x, low, high, color=_INK, alpha=0.2, linewidth=0, label=figure.band)


def _finish_axes(
    axes: Axes, figure: Figure, names: Sequence[Sequence[str]], records: Sequence[Record] = ()
) -> None:
    for axis, label, scale, limits, words in zip(
        "xy", _axis_labels(figure), figure.scales, figure.limits, names, strict=True
    ):
        axes.set(**{f"{axis}label": "" if words else label, f"{axis}scale": scale})
        cells = [record.get(getattr(figure, axis)) for record in records]
        # Steps and their like are whole; between two of them there is nothing.
        if scale == "linear" and cells and all(isinstance(cell, int) for cell in cells):
            getattr(axes, f"{axis}axis").get_major_locator().set_params(integer=True, min_n_ticks=1)
        if limits is not None:
            getattr(axes, f"set_{axis}lim")(*limits)
    if names[1]:
        words = [name.replace("_", " ") for name in names[1]]
        axes.set_yticks(range(len(words)), words, fontsize=8)
        axes.set_ylim(len(names[1]) - 0.5, -0.5)
    if names[0]:
        _name_columns(axes, names[0])
    _draw_guides(axes, figure)


def _name_columns(axes: Axes, names: Sequence[str]) -> None:
    turned = sum(len(name) + 2 for name in names) > 36  # letters that fit beside each other
    step = math.ceil(len(names) / _MOST_NAMES)
    axes.set_xticks(
        range(0, len(names), step), names[::step], fontsize=8, rotation=60 if turned else 0,
        ha="right" if turned else "center", rotation_mode="anchor",
    )  # fmt: skip
    axes.set_xlim(-0.5, len(names) - 0.5)


def _draw_guides(axes: Axes, figure: Figure) -> None:
    limits = axes.get_xlim(), axes.get_ylim()
    for guide in figure.guides:
        style: dict[str, Any] = {"color": _INK, "linestyle": "--", "linewidth": 1}
        style["label"] = guide.label or None
        if guide.of in ("x", "y"):
            (axes.axvline if guide.of == "x" else axes.axhline)(guide.at, **style)
        else:
            x = np.geomspace(*limits[0]) if guide.of == "product" else np.array(limits[0])
            axes.plot(x, guide.at / x if guide.of == "product" else x, **style)
            axes.set(xlim=limits[0], ylim=limits[1])


# --- histograms -----------------------------------------------------------------------------------


def edges_of(values: Numbers) -> Numbers:
    """Edges of the bins that all series of a histogram share: about sqrt(n) of them, 8 to 40."""
    bins = min(40, max(8, math.ceil(math.sqrt(len(values)))))
    edges: Numbers = np.histogram_bin_edges(values, bins)
    return edges


def _draw_histogram(axes: Axes, figure: Figure, records: Sequence[Record]) -> None:
    """Shares, not counts, since series differ in their number of rows."""
    whole = [one[figure.x] for one in figure.table.records() if one[figure.x] is not None]
    edges = edges_of(np.array(whole, dtype=float)).tolist()
    for label, look, own in _series(figure, records):
        values = [float(record[figure.x]) for record in own]
        style: dict[str, Any] = {"edgecolor": COLOURS[look], "linestyle": DASHES[look]}
        axes.hist(
            values, edges, weights=np.full(len(values), 1 / len(values)), histtype="stepfilled",
            facecolor=(COLOURS[look], 0.25), linewidth=1.4, label=label or None, **style,
        )  # fmt: skip
    _finish_axes(axes, figure, ([], []))


# --- grids ----------------------------------------------------------------------------------------


def _draw_grid(axes: Axes, figure: Figure, records: Sequence[Record]) -> None:
    """Cells between their edges, on a logarithmic scale of colours, and sums over either side."""
    from matplotlib.colors import LogNorm

    counts = np.array([float(record[figure.colour]) for record in records])
    x, y = ([record[f"{column}_from"] for record in records] for column in (figure.x, figure.y))
    edges = [
        sorted({record[f"{column}_{end}"] for record in records for end in ("from", "to")})
        for column in (figure.x, figure.y)
    ]
    norm = LogNorm(1, max(counts.max(), 2))
    *_, drawn = axes.hist2d(
        x, y, bins=edges, weights=counts, cmin=1, cmap=SEQUENTIAL, norm=norm, rasterized=True
    )
    axes.grid(visible=False)
    axes.figure.colorbar(drawn, ax=axes, label=figure.colour.replace("_", " "), shrink=0.8)
    above = axes.inset_axes((0.0, 1.03, 1.0, 0.2), sharex=axes)
    beside = axes.inset_axes((1.03, 0.0, 0.2, 1.0), sharey=axes)
    for margin, start, bins, way in zip((above, beside), (x, y), edges, _WAYS, strict=True):
        margin.hist(start, bins=bins, weights=counts, orientation=way, color=COLOURS[0], alpha=0.5)
        names = margin is beside, margin is above  # of its own axis: the other is the grid's
        margin.tick_params(which="both", labelsize=7, labelbottom=names[0], labelleft=names[1])
    _finish_axes(axes, figure, ([], []))


# --- clouds ---------------------------------------------------------------------------------------


def _draw_cloud(axes: Axes, figure: Figure, records: Sequence[Record]) -> None:
    """Points by series with their ellipses and densities; or by who keeps them."""
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    if isinstance(figure.facets, tuple):
        _draw_parts(axes, figure, records)
        return
    above = axes.inset_axes((0.0, 1.02, 1.0, 0.16), sharex=axes)
    beside = axes.inset_axes((1.02, 0.0, 0.16, 1.0), sharey=axes)
    axes.set_title(axes.get_title(), fontsize=9, y=-0.1)
    for label, look, own in _series(figure, records):
        points = _points(figure, own)
        axes.plot(*points.T, MARKERS[look], color=COLOURS[look], label=label, **_POINT)
        style: dict[str, Any] = {"color": COLOURS[look], "linestyle": DASHES[look]}
        axes.plot(*ellipse_of(points).T, linewidth=1.2, **style)
        above.plot(*density_of(points[:, 0]), **style)
        beside.plot(*reversed(density_of(points[:, 1])), **style)
    for margin in (above, beside):
        margin.set_axis_off()


def ellipse_of(points: Numbers, share: float = 0.95) -> Numbers:
    """Outline (100, 2) of the ellipse that holds ``share`` of the normal cloud of these moments.

        { x : (x - mean)^T S^-1 (x - mean) = chi^2_2(share) },   S the covariance, by n - 1

    A line where the points lie on one, a point where all are one.
    """
    angles = np.linspace(0.0, 2 * math.pi, 100)
    circle = np.stack([np.cos(angles), np.sin(angles)])
    sizes, directions = np.linalg.eigh(np.cov(points.T))
    # The quantile of chi^2_2 in closed form; rounding makes the smaller size of a line negative.
    radii = np.sqrt(np.maximum(sizes, 0.0) * -2 * math.log(1 - share))
    outline: Numbers = points.mean(0) + (directions @ (radii[:, None] * circle)).T
    return outline


def density_of(values: Numbers, places: int = 200) -> tuple[Numbers, Numbers]:
    """Kernel density (Gaussian, Scott's width) of numbers at evenly spread places around them.

    Nothing where all numbers are equal: a point has no density.
    """
    spread = float(values.std())
    if not spread > 0:
        return np.zeros(0), np.zeros(0)
    at = np.linspace(values.min() - spread, values.max() + spread, places)
    density: Numbers = stats.gaussian_kde(values)(at)
    return at, density


def _draw_parts(axes: Axes, figure: Figure, records: Sequence[Record]) -> None:
    points = _points(figure, records)
    inside = np.array([bool(record["facet"]) for record in records])
    axes.plot(*points[~inside].T, "o", color="#d0d0d0", **_POINT)
    axes.plot(*points[inside].T, "o", color=COLOURS[0], **_POINT)


def _points(figure: Figure, records: Sequence[Record]) -> Numbers:
    places = [[float(record[name]) for name in (figure.x, figure.y)] for record in records]
    return np.array(places).reshape(-1, 2)


_KINDS = {
    "bars": _draw_marks,
    "lines": _draw_marks,
    "scatter": _draw_marks,
    "histogram": _draw_histogram,
    "grid": _draw_grid,
    "cloud": _draw_cloud,
}
