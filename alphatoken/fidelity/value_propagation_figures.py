"""Figures of ``value-propagation``: joint density, residual beside its bound, shares by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.fidelity.causal_parts import PARTS
from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import COLOURS, DASHES, MARKERS, SEQUENTIAL, canvas, finish
from alphatoken.fidelity.intervals import FEWEST
from alphatoken.fidelity.pairs import PairValues

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable

__all__ = ["density", "density_figure", "quantile", "residual_figure", "shares_figure"]

Numbers = NDArray[Any]
_MOST_BARS = 48


def density(pairs: Sequence[PairValues], bins: int) -> tuple[Numbers, Numbers, Numbers]:
    """Counts (alpha, deviation) over all layers and heads, and both edges, in powers of ten.

    Weights below 1e-8 and deviations below 1e-6 of the largest are counted in the lowest cells;
    pairs that a head's mask hides (weight exactly 0) are left out.
    """
    alpha = np.concatenate([one.alpha.ravel() for one in pairs]).astype(np.float64)
    deviation = np.concatenate([one.deviation.ravel() for one in pairs]).astype(np.float64)
    seen = alpha > 0
    alpha, deviation = np.maximum(alpha[seen], 1e-8), deviation[seen]
    top = float(deviation.max()) if len(deviation) and deviation.max() > 0 else 1.0
    deviation = np.maximum(deviation, 1e-6 * top)
    low = math.floor(math.log10(alpha.min())) if len(alpha) else -1
    bottom = math.floor(4 * math.log10(np.quantile(deviation, 0.001))) / 4 if len(alpha) else -1
    edges_a = np.linspace(min(low, -1), 0.0, bins + 1)
    edges_d = np.linspace(bottom, math.log10(top) + 1e-6, bins + 1)
    counts, _, _ = np.histogram2d(
        np.minimum(np.log10(alpha), 0.0),
        np.clip(np.log10(deviation), edges_d[0], edges_d[-1]),
        bins=(edges_a, edges_d),
    )
    return counts, edges_a, edges_d


def density_figure(pairs: Sequence[PairValues], bins: int, levels: Sequence[float]) -> Figure:
    """Joint density of weight and deviation, with margins and contours of equal product."""
    counts, edges_a, edges_d = density(pairs, bins)
    cells = [
        {
            "alpha_from": 10.0 ** edges_a[i],
            "alpha_to": 10.0 ** edges_a[i + 1],
            "deviation_from": 10.0 ** edges_d[j],
            "deviation_to": 10.0 ** edges_d[j + 1],
            "pairs": int(counts[i, j]),
        }
        for i, j in zip(*np.nonzero(counts), strict=True)
    ]
    with canvas(6.4, 5.2) as figure:
        grid = figure.add_gridspec(2, 2, width_ratios=(4, 1), height_ratios=(1, 4))
        axes = figure.add_subplot(grid[1, 0])
        cells_drawn = _draw_density(axes, counts, 10.0**edges_a, 10.0**edges_d, levels)
        corner = figure.add_subplot(grid[0, 1])
        corner.axis("off")
        figure.colorbar(cells_drawn, cax=corner.inset_axes((0.2, 0.0, 0.2, 1.0)), label="pairs")
        above = figure.add_subplot(grid[0, 0], sharex=axes)
        above.stairs(counts.sum(1), 10.0**edges_a, color=COLOURS[0], fill=True, alpha=0.5)
        above.tick_params(labelbottom=False)
        above.set_ylabel("pairs")
        beside = figure.add_subplot(grid[1, 1], sharey=axes)
        beside.stairs(
            counts.sum(0), 10.0**edges_d, orientation="horizontal", color=COLOURS[0], fill=True,
            alpha=0.5,
        )  # fmt: skip
        beside.tick_params(labelleft=False)
        beside.tick_params(axis="x", labelrotation=45)
        beside.set_xlabel("pairs")
        return finish(
            figure,
            "density",
            "Attention weight and value-output deviation",
            "Each causal-window pair of each scored layer and head, counted on a logarithmic "
            "scale; the leftmost column holds all weights below it. Dashed lines join pairs of "
            "equal risk (weight times deviation). The approximation is safest where the mass lies "
            "far to the lower left of the lines; pairs to the upper right are those whose score "
            "path is left out at a cost.",
            Table.of("density", "Joint density of the pairs", cells),
            alt="Two-dimensional histogram of attention weight against normalised value-output "
            "deviation, both on logarithmic axes, with both margins and lines of equal product",
        )


def _draw_density(
    axes: Axes, counts: Numbers, alpha: Numbers, deviation: Numbers, levels: Sequence[float]
) -> ScalarMappable:
    from matplotlib.colors import LogNorm

    shown = np.ma.masked_equal(counts.T, 0)
    drawn = axes.pcolormesh(
        alpha, deviation, shown, norm=LogNorm(1, max(counts.max(), 2)), cmap=SEQUENTIAL,
        rasterized=True,
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    for number, level in enumerate(sorted(levels)):
        axes.plot(
            alpha, level / alpha, color=COLOURS[1], linestyle=DASHES[1 + number % 5], linewidth=1.2,
            label=f"risk {level:g}",
        )  # fmt: skip
    axes.set_xlim(alpha[0], alpha[-1])
    axes.set_ylim(deviation[0], deviation[-1])
    axes.legend(loc="lower left", framealpha=0.9)
    axes.set_xlabel("attention weight")
    axes.set_ylabel("||v_t - o_k|| / sqrt(d_v)")
    return drawn


def residual_figure(pairs: Sequence[PairValues]) -> Figure:
    """Residual, bound and value path of the pairs, by head."""
    bars = _bars(pairs)
    with canvas(max(6.4, 0.16 * len(bars) + 2.0), 3.8) as figure:
        axes = figure.add_subplot()
        for number, (what, title) in enumerate(
            (("bound", "bound"), ("residual", "residual"), ("value", "value path"))
        ):
            middle = np.array([bar[f"{what}_median"] for bar in bars])
            ends = np.array([[bar[f"{what}_q05"], bar[f"{what}_q95"]] for bar in bars]).T
            place = np.arange(len(bars)) + 0.22 * (number - 1)
            axes.errorbar(
                place, middle, yerr=np.abs(ends - middle), color=COLOURS[number],
                marker=MARKERS[number], linestyle="none", markersize=4, linewidth=1, label=title,
            )  # fmt: skip
        if any(bar["residual_median"] > 0 or bar["bound_median"] > 0 for bar in bars):
            axes.set_yscale("log")
            top = axes.get_ylim()[1]
            axes.set_ylim(max(axes.get_ylim()[0], 1e-8 * top), top)
        axes.set_xticks(np.arange(len(bars)), [bar["place"] for bar in bars], rotation=90)
        axes.set_xlabel("layer.head" if "." in str(bars[0]["place"]) else "layer, all heads")
        axes.set_ylabel("operator norm of a pair")
        figure.legend(loc="outside upper center", ncols=3)
        return finish(
            figure,
            "residual",
            "What is left out, its bound, and what is kept",
            "Median and 5 % to 95 % of the pairs. The residual (score path) never lies above its "
            "bound; how far below it says how loose the bound is. Where the residual is as high "
            "as the value path, Value-Propagation drops as much as it keeps. The axis ends eight "
            "powers of ten below its top: less than that is nothing.",
            Table.of("residual_quantiles", "Quantiles of the drawn norms", bars),
            alt="Medians and ranges of residual, bound and value path for each layer and head, on "
            "a logarithmic axis",
        )


def _bars(pairs: Sequence[PairValues]) -> list[dict[str, Any]]:
    """Quantiles by head, or by layer where there are too many heads for one picture."""
    by_head = sum(one.alpha.shape[1] for one in pairs) <= _MOST_BARS
    bars = []
    for one in pairs:
        for head in range(one.alpha.shape[1]) if by_head else (slice(None),):
            record: dict[str, Any] = {
                "place": f"{one.layer}.{head}" if by_head else str(one.layer),
                "pairs": int(one.residual[:, head].size),
            }
            for what, column in (
                ("residual", one.residual), ("bound", one.bound), ("value", one.value_path)
            ):  # fmt: skip
                values = column[:, head].ravel()
                for key, level in (("q05", 0.05), ("median", 0.5), ("q95", 0.95)):
                    record[f"{what}_{key}"] = quantile(values, level)
            bars.append(record)
    return bars


def shares_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Signed shares and sizes of the parts, by layer."""
    layers = list(dict.fromkeys(str(record["layer"]) for record in records))
    with canvas(6.4, 5.0) as figure:
        panels = figure.subplots(2, 1, sharex=True)
        for axes, what, title in zip(
            panels, ("signed", "norm"), ("signed share", "size / exact"), strict=True
        ):
            for number, part in enumerate(PARTS.values()):
                found = [record[what] for record in records if record["part"] == part]
                values = np.array([one.value for one in found])
                ends = np.array([[one.low, one.high] for one in found]).T
                axes.bar(
                    np.arange(len(layers)) + 0.2 * (number - 1.5), values, 0.18,
                    yerr=np.abs(ends - values), color=COLOURS[number],
                    hatch=("", "//", "..", "xx")[number], edgecolor="white", label=part,
                    error_kw={"linewidth": 0.8},
                )  # fmt: skip
            axes.axhline(0, color=COLOURS[4], linewidth=0.8)
            axes.set_ylabel(title)
        panels[0].axhline(1, color=COLOURS[4], linewidth=0.8, linestyle=":")
        panels[1].set_xticks(np.arange(len(layers)), layers)
        panels[1].set_xlabel("scored layer")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
        return finish(
            figure,
            "shares",
            "Where the exact causal value comes from",
            "Above: signed shares, which add up to 1 in each layer; a bar below zero works "
            "against the exact value. Below: sizes whatever their sign. The first bar is what "
            "Value-Propagation computes; a large 'longer hops' or 'score path' bar is what it "
            "cannot see. Whiskers: 95 % intervals.",
            Table.of("shares_drawn", "Shares of the exact causal value", records),
            alt="Grouped bars by scored layer: signed shares and relative sizes of four parts",
        )


def quantile(values: Numbers, level: float) -> float:
    """Of the numbers that are there; NaN of fewer than ``FEWEST``."""
    values = values[~np.isnan(values)]
    return float(np.quantile(values, level)) if len(values) >= FEWEST else math.nan
