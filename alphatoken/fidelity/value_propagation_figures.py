"""The pictures of ``value-propagation``: joint density, residual and bound, shares by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.fidelity.collected_pairs import ALPHA, DEVIATION, CollectedPairs
from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import COLOURS, SEQUENTIAL
from alphatoken.fidelity.intervals import FEWEST, Estimate
from alphatoken.fidelity.pairs import PairValues
from alphatoken.fidelity.plots import Guide, Panel, Series, grouped, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "density",
    "density_figure",
    "quantile",
    "residual_figure",
    "shares_figure",
    "steps_figure",
    "training_figure",
]

Numbers = NDArray[Any]
_MOST_BARS = 48
_FEW_STEPS = 12  # each of which has its name on an axis


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
    return _density_picture(
        "density",
        "Attention weight and value-output deviation",
        "Each causal-window pair of each scored layer and head, counted on a logarithmic "
        "scale; the leftmost column holds all weights below it. Dashed lines join pairs of "
        "equal risk (weight times deviation). The approximation is safest where the mass lies "
        "far to the lower left of the lines; pairs to the upper right are those whose score "
        "path is left out at a cost.",
        (counts, edges_a, edges_d),
        levels,
    )


def training_figure(collected: CollectedPairs, levels: Sequence[float]) -> Figure:
    """The same density of what a run collected while it trained, all its steps together."""
    steps = sorted(collected.steps)
    return _density_picture(
        "density_training",
        "Attention weight and value-output deviation during training",
        f"The causal-window pairs of a fixed probe at {len(steps)} steps from {steps[0]} to "
        f"{steps[-1]}, all scored layers and heads together, counted on a logarithmic scale. "
        "Dashed lines join pairs of equal risk (weight times deviation); above and beside are the "
        "margins. The approximation is safest where the mass lies to the lower left of the lines.",
        _cropped(collected.total().joint),
        levels,
    )


def steps_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Share of the probe's pairs above each level, by step."""
    named = [{**record, "line": f"risk of {record['level']:g} and more"} for record in records]
    largest = max(record["share"] for record in records)
    steps = sorted({record["step"] for record in records})
    ticks: dict[str, Any] = {"xticks": steps} if len(steps) <= _FEW_STEPS else {}
    return picture(
        "risk_training",
        "Risky pairs as training goes on",
        "Share of the fixed probe's pairs whose weight times deviation is at or above each level. "
        "Look for lines that rise: what Value-Propagation leaves out then grows while the model "
        "trains.",
        Table.of("risk_training", "Share of the probe's pairs above each level", records),
        Panel(
            grouped(named, "line", "step", "share"),
            xlabel="optimizer step",
            **ticks,
            ylabel="share of the pairs",
            ylim=(0, 1.05 * largest if largest > 0 else 1.0),
        ),
    )


def _cropped(joint: Numbers) -> tuple[Numbers, Numbers, Numbers]:
    """Counts and edges without the empty rows and columns at the ends."""
    found, edges = joint, []
    for axis, whole in enumerate((ALPHA, DEVIATION)):
        filled = np.flatnonzero(joint.sum(1 - axis))
        first, last = (filled[0], filled[-1] + 1) if len(filled) else (0, len(whole) - 1)
        found = found.take(range(first, last), axis)
        edges.append(whole[first : last + 1])
    return found, edges[0], edges[1]


def _density_picture(
    key: str,
    title: str,
    caption: str,
    counted: tuple[Numbers, Numbers, Numbers],
    levels: Sequence[float],
) -> Figure:
    """Counts in the plane of weight and deviation, with both margins and lines of equal risk."""
    counts, edges_a, edges_d = counted
    alpha, deviation = 10.0**edges_a, 10.0**edges_d
    cells = [
        {
            "alpha_from": alpha[i],
            "alpha_to": alpha[i + 1],
            "deviation_from": deviation[j],
            "deviation_to": deviation[j + 1],
            "pairs": int(counts[i, j]),
        }
        for i, j in zip(*np.nonzero(counts), strict=True)
    ]
    contours = [
        Series(f"risk {level:g}", alpha, level / alpha, look=look % 5, joined=True, marker="")
        for look, level in enumerate(sorted(levels), start=1)
    ]

    def drawn(axes: Axes) -> None:
        _mesh_and_margins(axes, counts, alpha, deviation)

    return picture(
        key,
        title,
        caption,
        Table.of(key, "Joint density of the pairs", cells),
        Panel(
            contours,
            also=drawn,
            xlabel="attention weight",
            ylabel="||v_t - o_k|| / sqrt(d_v)",
            xscale="log",
            yscale="log",
            xlim=(alpha[0], alpha[-1]),
            ylim=(deviation[0], deviation[-1]),
        ),
        alt="Two-dimensional histogram of attention weight against normalised value-output "
        "deviation, both on logarithmic axes, with both margins and lines of equal product",
        size=(6.8, 5.2),
    )


def _mesh_and_margins(axes: Axes, counts: Numbers, alpha: Numbers, deviation: Numbers) -> None:
    from matplotlib.colors import LogNorm

    shown = np.ma.masked_equal(counts.T, 0)
    scale = LogNorm(1, max(counts.max(), 2))
    mesh = axes.pcolormesh(
        alpha, deviation, shown, norm=scale, cmap=SEQUENTIAL, rasterized=True, zorder=0
    )
    filled: dict[str, Any] = {"color": COLOURS[0], "fill": True, "alpha": 0.5}
    above = axes.inset_axes((0.0, 1.03, 1.0, 0.2), sharex=axes)
    above.stairs(counts.sum(1), alpha, **filled)
    above.tick_params(which="both", labelbottom=False)
    above.set_ylabel("pairs")
    beside = axes.inset_axes((1.03, 0.0, 0.2, 1.0), sharey=axes)
    beside.stairs(counts.sum(0), deviation, orientation="horizontal", **filled)
    beside.tick_params(which="both", labelleft=False)
    beside.tick_params(axis="x", labelrotation=45)
    beside.locator_params(axis="x", nbins=3, prune="lower")  # its 0 lies on another label
    beside.set_xlabel("pairs")
    axes.figure.colorbar(mesh, cax=axes.inset_axes((1.05, 1.03, 0.04, 0.2)), label="pairs")


def residual_figure(pairs: Sequence[PairValues]) -> Figure:
    """Residual, bound and value path of the pairs, by head."""
    bars = _bars(pairs)
    places = [bar["place"] for bar in bars]
    series = [
        Series(title, places, [_range(bar, what) for bar in bars])
        for what, title in (("bound", "bound"), ("residual", "residual"), ("value", "value path"))
    ]
    positive = any(bar["residual_median"] > 0 or bar["bound_median"] > 0 for bar in bars)

    def readable(axes: Axes) -> None:
        low, top = axes.get_ylim()
        axes.set_ylim(max(low, 1e-8 * top) if positive else low, top)

    return picture(
        "residual",
        "What is left out, its bound, and what is kept",
        "Median and 5 % to 95 % of the pairs. The residual (score path) never lies above its "
        "bound; how far below it says how loose the bound is. Where the residual is as high "
        "as the value path, Value-Propagation drops as much as it keeps. The axis ends eight "
        "powers of ten below its top: less than that is nothing.",
        Table.of("residual_quantiles", "Quantiles of the drawn norms", bars),
        Panel(
            series,
            columns=places,
            apart=0.22,
            also=readable,
            xlabel="layer.head" if "." in str(bars[0]["place"]) else "layer, all heads",
            ylabel="operator norm of a pair",
            yscale="log" if positive else "linear",
        ),
        size=(max(6.4, 0.16 * len(bars) + 2.0), 3.8),
    )


def _range(bar: Mapping[str, Any], what: str) -> Estimate:
    """Median and 90 % of the pairs."""
    middle, low, high = (bar[f"{what}_{key}"] for key in ("median", "q05", "q95"))
    return Estimate(middle, low, high, bar["pairs"])


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
    layers = list(dict.fromkeys(record["layer"] for record in records))

    def panel(measure: str, title: str, *levels: Guide, **axes: Any) -> Panel:
        series = grouped(records, "part", "layer", measure, joined=False)
        guides = [Guide(0.0, across=True, dashes="-"), *levels]
        return Panel(series, guides, columns=layers, apart=0.2, ylabel=title, **axes)

    return picture(
        "shares",
        "Where the exact causal value comes from",
        "Above: signed shares, which add up to 1 in each layer; a mark below zero works "
        "against the exact value. Below: sizes whatever their sign. The first mark is what "
        "Value-Propagation computes; a large 'longer hops' or 'score path' is what it "
        "cannot see. Whiskers: 95 % intervals.",
        Table.of("shares_drawn", "Shares of the exact causal value", records),
        panel("signed", "signed share", Guide(1.0, across=True, dashes=":")),
        panel("norm", "size / exact", xlabel="scored layer"),
        size=(6.4, 5.0),
        across=1,
        sharex=True,
    )


def quantile(values: Numbers, level: float) -> float:
    """Of the numbers that are there; NaN of fewer than ``FEWEST``."""
    values = values[~np.isnan(values)]
    return float(np.quantile(values, level)) if len(values) >= FEWEST else math.nan
