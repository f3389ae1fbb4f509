"""The pictures of the coverage diagnostic."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from alphatoken.fidelity.coverage_statistics import STATISTICS, Band, Indices, Mask, Numbers, Pool
from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import SEQUENTIAL
from alphatoken.fidelity.intervals import Estimate
from alphatoken.fidelity.plots import CLOUD, Guide, Panel, Series, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["map_figure", "numbers_figure", "overlap_figure"]


def map_figure(
    pool: Pool,
    kept: Mapping[str, Mask],
    numbers: Mapping[str, Mapping[str, Estimate]],
    drawn: Indices,
    places: Numbers,
) -> Figure:
    """One panel a policy over one t-SNE of what some policy keeps, and one with all losses."""
    losses = pool.losses[drawn]

    def coloured_by_loss(axes: Axes) -> None:
        top = float(np.quantile(losses, 0.98))
        points = axes.scatter(
            places[:, 0], places[:, 1], s=7, c=losses, cmap=SEQUENTIAL, vmin=0, vmax=top,
            linewidths=0, rasterized=True,
        )  # fmt: skip
        axes.figure.colorbar(points, ax=axes, shrink=0.8, label="nats", extend="max")

    title = "all kept tokens:\nloss of the token"
    panels = [Panel(bare=True, also=coloured_by_loss, title=title)]
    for look, (name, mask) in enumerate(kept.items()):
        inside = mask[drawn]
        series = [
            Series("", *places[~inside].T, marker="o", color="#d0d0d0", **CLOUD),
            Series("", *places[inside].T, look=look, alpha=0.7, **CLOUD),
        ]
        title = f"{name}\nentropy {numbers[name]['entropy']:.3f}"
        panels.append(Panel(series, bare=True, title=title))
    records = [
        {
            "row": int(pool.rows[token]),
            "token_id": int(pool.ids[token]),
            "x": float(x),
            "y": float(y),
            "loss": float(pool.losses[token]),
            "cluster": int(pool.labels[token]),
            **{name: bool(mask[token]) for name, mask in kept.items()},
        }
        for token, (x, y) in zip(drawn, places, strict=True)
    ]
    return picture(
        "coverage-map",
        "Where the kept tokens lie",
        "One t-SNE of the contextual embeddings of every token that some policy keeps, the same in "
        "every panel. Grey: tokens that others keep and this policy drops. Look for whole regions "
        "left grey, and whether they are those where the loss (first panel) is high or low; do not "
        "read distances.",
        Table.of("coverage-map", "Tokens in the picture, and who keeps them", records),
        *panels,
        alt=f"Scatter plots of the same {len(drawn)} tokens: loss, then kept tokens by policy "
        f"({', '.join(kept)}).",
        size=(9.0, 3.1 * -(-len(panels) // 3)),
        across=3,
    )


def numbers_figure(
    numbers: Mapping[str, Mapping[str, Estimate]], band: Mapping[str, Band]
) -> Figure:
    """A dot and an interval for each policy and statistic, with the band of random selection."""
    records = [
        {
            "statistic": key,
            "policy": name,
            "value": found[key],
            "band_low": band[key][0],
            "band_high": band[key][1],
        }
        for key in STATISTICS
        for name, found in numbers.items()
    ]
    panels = [
        Panel(
            [Series("", [numbers[name][key]], [name], markersize=6) for name in numbers],
            [Guide(band[key], label="random selections")],
            rows=list(numbers),
            also=_narrow,
            title=title,
            xlabel=textwrap.fill(unit, 24),
        )
        for key, (title, unit, _) in STATISTICS.items()
    ]
    return picture(
        "coverage-statistics",
        "Coverage against chance",
        "Points: the kept tokens of each policy, with 95 % intervals. Grey band: "
        "95 % of random selections of the same size. Look for points outside the band: left "
        "of it the policy covers less than chance does.",
        Table.of("coverage-statistics", "What the dot plots show", records),
        *panels,
        size=(9.0, 1.8 + 0.26 * len(numbers)),
        sharey=True,
    )


def _narrow(axes: Axes) -> None:
    axes.xaxis.label.set_fontsize(7)
    axes.tick_params(axis="x", labelsize=7)
    axes.locator_params(axis="x", nbins=4)


def overlap_figure(overlaps: Table, policies: tuple[str, ...], ratio: float) -> Figure:
    """The share of kept tokens that each two policies have in common."""
    count = len(policies)
    shares = np.eye(count)
    for record in overlaps.records():
        i, j = policies.index(str(record["policy"])), policies.index(str(record["other"]))
        shares[i, j] = shares[j, i] = record["in_common"]

    def matrix(axes: Axes) -> None:
        mesh = axes.imshow(shares, cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="auto")
        for (i, j), share in np.ndenumerate(shares):
            ink = "black" if share > 0.45 else "white"
            axes.text(j, i, f"{share:.2f}", ha="center", va="center", color=ink)
        axes.grid(visible=False)
        bar = axes.figure.colorbar(mesh, ax=axes, label="share in common")
        bar.ax.axhline(ratio, color="#d55e00", linewidth=2)

    return picture(
        "coverage-common",
        "Kept tokens in common",
        f"Share of kept tokens that two policies have in common. Unrelated policies share "
        f"{ratio:g} (the mark on the bar): look for pairs far above (they do the same) and "
        "below (they contradict each other). Intervals are in the table.",
        Table("coverage-common", overlaps.title, overlaps.columns, overlaps.rows),
        Panel(rows=policies, columns=policies, also=matrix),
        alt=f"Matrix of overlaps between {', '.join(policies)}.",
        size=(1.6 + 0.85 * count, 1.0 + 0.55 * count),
    )
