"""The frontier as a picture, and what each layer carries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alphatoken.fidelity.intervals import Estimate
from alphatoken.fidelity.plots import INK, Guide, Panel, Series, _legend
from alphatoken.report.drawing import canvas, save
from benchmarks.frontier.figures import worth

__all__ = ["draw"]

Figures = Mapping[str, Any]

_CURVES = {
    "label, last": "label: last K layers",
    "label, spread": "label: K spread layers",
    "label, everything last": "label: everything in the last K layers",
    "alphatoken, last": "alphatoken: last K layers",
    "direct, last": "direct: last K layers",
    "path, last": "path: last K layers",
}
"""Families that are drawn as curves, and their names."""

_ENDS = {
    "label, last": "label, all linears",
    "label, spread": "label, all linears",
    "label, everything last": "label, all parameters",
    "alphatoken, last": "alphatoken, all linears",
    "direct, last": "direct, all linears",
    "path, last": "path, all linears",
}


def draw(models: Figures, folder: Path) -> list[tuple[str, str]]:
    """Write the pictures; (file name, caption) of each."""
    folder.mkdir(parents=True, exist_ok=True)
    _picture(folder / "frontier.svg", [_frontier(one) for one in models.values()], 4.2)
    _picture(folder / "layers.svg", [_layers(one) for one in models.values()], 3.2)
    return [
        (
            "frontier.svg",
            "Rank correlation with the exact value against price in training steps (bars: 95 % "
            "over rows). The stepped line is the best of all measured settings for its price.",
        ),
        (
            "layers.svg",
            "Rank correlation of the linears of one layer alone with the exact value over all "
            "parameters.",
        ),
    ]


def _picture(path: Path, panels: Sequence[Panel], height: float) -> None:
    with canvas(3.4 * len(panels) + 0.4, height) as figure:
        every = list(figure.subplots(1, len(panels), squeeze=False, sharey=True).flat)
        for axes, panel in zip(every, panels, strict=True):
            panel.draw(axes)
        for axes in every[1:]:
            axes.set_ylabel("")
        _legend(figure, every)
        save(figure, path)


def _frontier(one: Figures) -> Panel:
    by_name = {record["name"]: record for record in one["records"]}
    series = [_best(one)]
    for look, (family, label) in enumerate(_CURVES.items()):
        found = [r for r in one["records"] if r["family"] == family]
        found = sorted([*found, by_name[_ENDS[family]]], key=lambda r: float(r["price"]))
        estimates = [Estimate(*r["spearman"], one["tokens"]) for r in found]
        series.append(Series(label, [r["price"] for r in found], estimates, look=look, joined=True))
    return Panel(
        series,
        [Guide(0.95, across=True, dashes=":"), Guide(0.6, dashes=":")],
        title=one["name"],
        xlabel="price in training steps",
        ylabel="Spearman with the exact value",
        xlim=(0.28, 1.04),
        ylim=(0.0, 1.03),
    )


def _best(one: Figures) -> Series:
    found = worth(one["records"], gain=0.0)
    x, y = [], []
    for place, record in enumerate(found):
        value = float(record["spearman"][0])
        end = found[place + 1]["price"] if place + 1 < len(found) else 1.03
        x += [record["price"], end]
        y += [value, value]
    return Series(
        "best of all measured", x, y, joined=True, marker="", color=INK, alpha=0.55, linewidth=2.2,
        linestyle="-",
    )  # fmt: skip


def _layers(one: Figures) -> Panel:
    series = [
        Series(name, range(one["depth"]), ranks, joined=True, look=look, markersize=3)
        for name, ranks, look in (
            (name, one["singles"][name], look)
            for name, look in (("label", 0), ("alphatoken", 3), ("direct", 4), ("path", 5))
        )
    ]
    return Panel(
        series,
        [Guide(0.0, across=True, dashes="-")],
        title=one["name"],
        xlabel="layer",
        ylabel="Spearman, one layer's linears",
    )
