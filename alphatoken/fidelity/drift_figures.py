"""The pictures of the drift diagnostic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.plots import LINE, Panel, Series, grouped, pairwise, picture

__all__ = ["layers_figure", "map_figure"]

Numbers = NDArray[np.float64]


def map_figure(
    places: Mapping[str, tuple[Numbers, Numbers]], numbers: Mapping[str, Mapping[str, Any]]
) -> Figure:
    """One t-SNE of the probes before and after, a line from one to the other."""
    series = []
    for look, (name, (before, after)) in enumerate(places.items()):
        x, y = (pairwise(before[:, axis], after[:, axis]) for axis in (0, 1))
        label = f"{name}: shift {numbers[name]['relative_shift']}"
        series += [
            Series("", x, y, look=look, joined=True, alpha=0.4, **LINE),
            Series("", *before.T, look=look, markerfacecolor="none"),
            Series(label, *after.T, look=look),
        ]
    records = [
        {"set": name, "probe": probe}
        | {"before_x": float(start[0]), "before_y": float(start[1])}
        | {"after_x": float(stop[0]), "after_y": float(stop[1])}
        for name, (before, after) in places.items()
        for probe, (start, stop) in enumerate(zip(before, after, strict=True))
    ]
    return picture(
        "drift-map",
        "Probes before and after",
        "One t-SNE of the mean states of all probes, before and after together. Look for sets "
        "whose filled markers have left their open ones as a group (a shift that all probes "
        "share), and for sets whose pairs stay neighbours. Lengths of lines are no distances.",
        Table.of("drift-map", "Places of the probes in the picture", records),
        Panel(series, bare=True, title="open: before, filled: after fine-tuning"),
        alt="Pairs of points joined by lines, before and after fine-tuning, for "
        f"{', '.join(places)}.",
        size=(7.2, 5.2),
    )


def layers_figure(layers: Sequence[Mapping[str, Any]], places: Sequence[str]) -> Figure:
    """Debiased CKA and relative shift, layer by layer, a line a set."""
    short = {place: place.removeprefix("layer ") for place in places}
    records = [{**record, "place": short[record["place"]]} for record in layers]

    def panel(measure: str, title: str, **axes: Any) -> Panel:
        series = grouped(records, "set", "place", measure)
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
