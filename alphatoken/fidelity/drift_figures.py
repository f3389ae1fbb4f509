"""The pictures of the drift diagnostic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import COLOURS, DASHES, MARKERS, canvas, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["layers_figure", "map_figure"]

Numbers = NDArray[np.float64]


def map_figure(
    places: Mapping[str, tuple[Numbers, Numbers]], numbers: Mapping[str, Mapping[str, Any]]
) -> Figure:
    """One t-SNE of the probes before and after, an arrow from one to the other."""
    with canvas(7.2, 5.2) as fig:
        axes = fig.subplots()
        for number, (name, (before, after)) in enumerate(places.items()):
            label = f"{name}: shift {numbers[name]['relative_shift']}"
            _arrows(axes, number, before, after, label)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.grid(visible=False)
        axes.spines[["left", "bottom"]].set_visible(False)
        fig.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        axes.set_title("open: before, filled: after fine-tuning", fontsize=9)
        return finish(
            fig,
            "drift-map",
            "Probes before and after",
            "One t-SNE of the mean states of all probes, before and after together. Look for sets "
            "whose filled markers have left their open ones as a group (a shift that all probes "
            "share), and for sets whose pairs stay neighbours. Lengths of lines are no distances.",
            _map_data(places),
            alt=f"Pairs of points joined by lines, before and after fine-tuning, for "
            f"{', '.join(places)}.",
        )


def _arrows(axes: Axes, number: int, before: Numbers, after: Numbers, label: str) -> None:
    colour = COLOURS[number % len(COLOURS)]
    marker = MARKERS[number % len(MARKERS)]
    moved = after - before
    axes.quiver(
        before[:, 0],
        before[:, 1],
        moved[:, 0],
        moved[:, 1],
        angles="xy",
        scale_units="xy",
        scale=1,
        width=0.0016,
        headwidth=5,
        headlength=6,
        color=colour,
        alpha=0.28,
    )
    axes.scatter(
        before[:, 0],
        before[:, 1],
        s=22,
        marker=marker,
        facecolors="none",
        edgecolors=colour,
        linewidths=0.9,
    )
    axes.scatter(after[:, 0], after[:, 1], s=22, marker=marker, c=colour, linewidths=0, label=label)


def _map_data(places: Mapping[str, tuple[Numbers, Numbers]]) -> Table:
    records = [
        {
            "set": name,
            "probe": probe,
            "before_x": float(start[0]),
            "before_y": float(start[1]),
            "after_x": float(stop[0]),
            "after_y": float(stop[1]),
        }
        for name, (before, after) in places.items()
        for probe, (start, stop) in enumerate(zip(before, after, strict=True))
    ]
    return Table.of("drift-map", "Places of the probes in the picture", records)


def layers_figure(
    layers: Sequence[Mapping[str, Any]], names: Sequence[str], places: Sequence[str]
) -> Figure:
    """Debiased CKA and relative shift, layer by layer, a line a set."""
    with canvas(9.0, 3.7) as fig:
        panels = fig.subplots(1, 2, sharex=True)
        for number, name in enumerate(names):
            own = [record for record in layers if record["set"] == name]
            for axes, key in zip(panels, ("cka_debiased", "relative_shift"), strict=True):
                _line(axes, number, [record[key] for record in own], name)
        panels[0].set_ylabel("debiased linear CKA")
        panels[1].set_ylabel("mean relative shift")
        panels[1].set_ylim(bottom=0)
        for axes in panels:
            axes.set_xticks(range(len(places)), [place.removeprefix("layer ") for place in places])
            axes.set_xlabel("layer")
            if len(places) > 16:
                axes.locator_params(axis="x", nbins=12)
        handles, labels = panels[0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
        return finish(
            fig,
            "drift-layers-figure",
            "Where in the model it moved",
            "Left: 1 where the probes keep their geometry, up to turns and scale. Right: how far a "
            "probe moved, turns included. Look for the layer where the lines leave 1, and for sets "
            "that move far with a CKA near 1: those shifted together, which the layers above may "
            "undo.",
            Table.of("drift-layers-figure", "CKA and shift by layer", layers),
            alt=f"Lines of CKA and shift over layers for {', '.join(names)}.",
        )


def _line(axes: Axes, number: int, found: Sequence[Any], name: str) -> None:
    values = np.array([estimate.value for estimate in found])
    low = np.array([estimate.low for estimate in found])
    high = np.array([estimate.high for estimate in found])
    places = np.arange(len(found)) + 0.06 * number  # side by side, so that bars can be told apart
    colour = COLOURS[number % len(COLOURS)]
    axes.errorbar(
        places,
        values,
        yerr=[values - low, high - values],
        color=colour,
        linestyle=DASHES[number % len(DASHES)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=4,
        linewidth=1.4,
        elinewidth=0.9,
        label=name,
    )
