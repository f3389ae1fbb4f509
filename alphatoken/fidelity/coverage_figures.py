"""The pictures of the coverage diagnostic."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from alphatoken.fidelity.coverage_statistics import (
    STATISTICS,
    Band,
    Indices,
    Mask,
    Numbers,
    Pool,
    three,
)
from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import COLOURS, MARKERS, SEQUENTIAL, canvas, finish
from alphatoken.fidelity.intervals import Estimate

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
    """One panel a policy over one t-SNE, and one with the loss of every candidate."""
    columns = 3
    lines = math.ceil((len(kept) + 1) / columns)
    with canvas(9.0, 3.1 * lines) as fig:
        axes = list(fig.subplots(lines, columns, squeeze=False).flat)
        _losses_panel(fig, axes[0], pool.losses[drawn], places)
        for place, (name, mask) in enumerate(kept.items()):
            _panel(axes[place + 1], place, mask[drawn], places)
            title = f"{name}\nentropy {three(numbers[name]['entropy'])}"
            axes[place + 1].set_title(title, fontsize=9)
        for one in axes[len(kept) + 1 :]:
            one.set_visible(False)
        return finish(
            fig,
            "coverage-map",
            "Where the kept tokens lie",
            "One t-SNE of all candidates' contextual embeddings, the same in every panel. Grey: "
            "candidates that the policy drops. Look for whole regions left grey, and whether they "
            "are those where the loss (first panel) is high or low; do not read distances.",
            _map_data(pool, kept, drawn, places),
            alt=f"Scatter plots of the same {len(drawn)} tokens: loss, then kept tokens by policy "
            f"({', '.join(kept)}).",
        )


def _panel(axes: Axes, place: int, kept: Mask, places: Numbers) -> None:
    axes.scatter(
        places[~kept, 0], places[~kept, 1], s=4, c="#d0d0d0", linewidths=0, rasterized=True
    )
    axes.scatter(
        places[kept, 0],
        places[kept, 1],
        s=9,
        c=COLOURS[place % len(COLOURS)],
        marker=MARKERS[place % len(MARKERS)],
        alpha=0.7,
        linewidths=0,
        rasterized=True,
    )
    _bare(axes)


def _losses_panel(fig: Any, axes: Axes, losses: Numbers, places: Numbers) -> None:
    top = float(np.quantile(losses, 0.98))
    points = axes.scatter(
        places[:, 0],
        places[:, 1],
        s=7,
        c=losses,
        cmap=SEQUENTIAL,
        vmin=0,
        vmax=top,
        linewidths=0,
        rasterized=True,
    )
    fig.colorbar(points, ax=axes, shrink=0.8, label="nats", extend="max")
    axes.set_title("all candidates:\nloss of the token", fontsize=9)
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _map_data(pool: Pool, kept: Mapping[str, Mask], drawn: Indices, places: Numbers) -> Table:
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
    return Table.of("coverage-map", "Tokens in the picture, and who keeps them", records)


def numbers_figure(
    numbers: Mapping[str, Mapping[str, Estimate]], band: Mapping[str, Band]
) -> Figure:
    """A dot and an interval for each policy and statistic, with the band of random selection."""
    names = list(numbers)
    with canvas(9.0, 1.6 + 0.26 * len(names)) as fig:
        panels = fig.subplots(1, len(STATISTICS), sharey=True)
        for axes, (key, (title, unit, _)) in zip(panels, STATISTICS.items(), strict=True):
            axes.axvspan(*band[key], color="#9a9a9a", alpha=0.35, linewidth=0)
            for place, name in enumerate(names):
                _bar(axes, place, numbers[name][key])
            axes.set_title(title, fontsize=9)
            axes.set_xlabel(_folded(unit), fontsize=7)
            axes.tick_params(axis="x", labelsize=7)
            axes.locator_params(axis="x", nbins=4)
        panels[0].set_yticks(range(len(names)), names)
        panels[0].invert_yaxis()
        return finish(
            fig,
            "coverage-statistics",
            "Coverage against chance",
            "Points: the kept tokens of each policy, with 95 % intervals over rows. Grey band: "
            "95 % of random selections of the same size. Look for points outside the band: left "
            "of it the policy covers less than chance does.",
            _figure_data(numbers, band),
            alt="Dot plots of entropy, spread, volume, distinct tokens and loss by policy, with "
            "the band of random selection.",
        )


def _bar(axes: Axes, place: int, found: Estimate) -> None:
    if not found.defined:
        return
    colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
    axes.plot([found.low, found.high], [place, place], color=colour, linewidth=1.6)
    axes.plot(found.value, place, marker=marker, color=colour, markersize=6)


def _folded(text: str, width: int = 24) -> str:
    return "\n".join(textwrap.wrap(text, width))


def _figure_data(numbers: Mapping[str, Mapping[str, Estimate]], band: Mapping[str, Band]) -> Table:
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
    return Table.of("coverage-statistics", "What the dot plots show", records)


def overlap_figure(overlaps: Table, policies: tuple[str, ...], ratio: float) -> Figure:
    """The share of kept tokens that each two policies have in common."""
    count = len(policies)
    shares = np.eye(count)
    for record in overlaps.records():
        i, j = policies.index(str(record["policy"])), policies.index(str(record["other"]))
        shares[i, j] = shares[j, i] = record["in_common"]
    with canvas(1.6 + 0.85 * count, 1.0 + 0.55 * count) as fig:
        axes = fig.subplots()
        mesh = axes.imshow(shares, cmap=SEQUENTIAL, vmin=0, vmax=1, aspect="auto")
        for i in range(count):
            for j in range(count):
                ink = "black" if shares[i, j] > 0.45 else "white"
                axes.text(j, i, f"{shares[i, j]:.2f}", ha="center", va="center", color=ink)
        axes.set_xticks(range(count), policies, rotation=20, ha="right")
        axes.set_yticks(range(count), policies)
        axes.grid(visible=False)
        bar = fig.colorbar(mesh, ax=axes, label="share in common")
        bar.ax.axhline(ratio, color="#d55e00", linewidth=2)
        return finish(
            fig,
            "coverage-common",
            "Kept tokens in common",
            f"Share of kept tokens that two policies have in common. Unrelated policies share "
            f"{ratio:g} (the mark on the bar): look for pairs far above (they do the same) and "
            "below (they contradict each other). Intervals are in the table.",
            Table("coverage-common", overlaps.title, overlaps.columns, overlaps.rows),
            alt=f"Matrix of overlaps between {', '.join(policies)}.",
        )
