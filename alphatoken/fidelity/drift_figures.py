"""The pictures of the drift diagnostic."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.fidelity.clouds import density_of, ellipse_of
from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import COLOURS, DASHES
from alphatoken.fidelity.plots import CLOUD, Panel, Series, grouped, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["layers_figure", "map_figure"]

Numbers = NDArray[np.float64]


def map_figure(
    places: Mapping[str, Mapping[str, Numbers]],
    numbers: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> Figure:
    """A panel a set: one t-SNE of the probes under every model, with ellipses and margins.

    Args:
        places: set -> model -> (n, 2), the model before first.
        numbers: model -> set -> its record.
    """
    panels = []
    for name, clouds in places.items():
        series = [
            Series(model, *cloud.T, look=look, alpha=0.5, **CLOUD)
            for look, (model, cloud) in enumerate(clouds.items())
        ]
        shifts = ", ".join(
            f"{model} {numbers[model][name]['relative_shift'].value:.2f}"
            for model in clouds
            if model in numbers
        )
        title = textwrap.fill(f"{name}: mean shift {shifts}", 44)
        margins = partial(_ellipses_and_margins, clouds=clouds)
        panels.append(Panel(series, bare=True, also=margins, xlabel=title))
    records = [
        {"set": name, "model": model, "probe": probe, "x": float(x), "y": float(y)}
        for name, clouds in places.items()
        for model, cloud in clouds.items()
        for probe, (x, y) in enumerate(cloud)
    ]
    across = min(len(panels), 2)
    return picture(
        "drift-map",
        "Probes before and after",
        "One t-SNE of the mean states of a set's probes under all models together. Ellipses hold "
        "95 % of a normal cloud with the same mean and covariance, curves are the densities along "
        "each axis. Look for clouds whose ellipse and curves have left those of the model before. "
        "Lengths in the picture are no distances; the mean shift under it is measured in the "
        "states themselves.",
        Table.of("drift-map", "Places of the probes in the picture", records),
        *panels,
        alt=f"Scatter plots of probes under each model, with ellipses, for {', '.join(places)}.",
        size=(4.6 * across, 4.4 * -(-len(panels) // across) + 0.3),
        across=across,
    )


def _ellipses_and_margins(axes: Axes, clouds: Mapping[str, Numbers]) -> None:
    """Over the points: the ellipse of each cloud, and its density along both axes."""
    above = axes.inset_axes((0.0, 1.02, 1.0, 0.16), sharex=axes)
    beside = axes.inset_axes((1.02, 0.0, 0.16, 1.0), sharey=axes)
    for look, cloud in enumerate(clouds.values()):
        style: dict[str, Any] = {
            "color": COLOURS[look % len(COLOURS)],
            "linestyle": DASHES[look % len(DASHES)],
            "linewidth": 1.2,
        }
        axes.plot(*ellipse_of(cloud).T, **style)
        for axis, margin in enumerate((above, beside)):
            at, height = density_of(cloud[:, axis])
            margin.plot(*((at, height) if axis == 0 else (height, at)), **style)
    for margin in (above, beside):
        margin.set_axis_off()


def layers_figure(layers: Sequence[Mapping[str, Any]], places: Sequence[str]) -> Figure:
    """Debiased CKA and relative shift, layer by layer, a line a set and model (``line``)."""
    short = {place: place.removeprefix("layer ") for place in places}
    records = [{**record, "place": short[record["place"]]} for record in layers]

    def panel(measure: str, title: str, **axes: Any) -> Panel:
        series = grouped(records, "line", "place", measure)
        columns = list(short.values())
        return Panel(series, columns=columns, apart=0.06, xlabel="layer", ylabel=title, **axes)

    return picture(
        "drift-layers-figure",
        "Where in the model it moved",
        "Left: 1 where the probes keep their geometry, up to turns and scale. Right: how far a "
        "probe moved, turns included. Look for the layer where the lines leave 1, and for sets "
        "that move far with a CKA near 1: those shifted together, which the layers above may "
        "undo.",
        Table.of("drift-layers-figure", "CKA and shift by layer", layers),
        panel("cka_debiased", "debiased linear CKA"),
        panel("relative_shift", "mean relative shift", ylim=(0, None)),
        size=(9.0, 3.7),
    )
