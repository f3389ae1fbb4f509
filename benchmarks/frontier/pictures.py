"""The frontier as a picture, and what each layer carries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alphatoken.fidelity.diagnosis import Table
from alphatoken.fidelity.figures import Figure, Guide
from alphatoken.fidelity.figures import draw as drawn
from alphatoken.fidelity.intervals import Estimate
from alphatoken.support.storage import write_text
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
    figures = _frontier(models), _layers(models)
    for one in figures:
        lines = drawn(one).svg.splitlines()
        write_text(folder / f"{one.key}.svg", "\n".join(map(str.rstrip, lines)) + "\n")
    return [(f"{one.key}.svg", one.caption) for one in figures]


def _frontier(models: Figures) -> Figure:
    """Curves of the families, and the best of all measured settings for each price."""
    records: list[dict[str, Any]] = []
    for one in models.values():
        by_name = {record["name"]: record for record in one["records"]}
        found = [("best of all measured", record) for record in worth(one["records"], gain=0.0)]
        for family, label in _CURVES.items():
            own = [r for r in one["records"] if r["family"] == family] + [by_name[_ENDS[family]]]
            found += [(label, record) for record in sorted(own, key=lambda r: float(r["price"]))]
        records += [
            {
                "model": one["name"],
                "settings": label,
                "price": record["price"],
                "spearman": Estimate(*record["spearman"], one["tokens"]),
            }
            for label, record in found
        ]
    return Figure(
        "lines",
        "frontier",
        Table.of("frontier", "Rank correlation by price", records),
        "Rank correlation by price",
        "Rank correlation with the exact value against price in training steps (bars: 95 % "
        "over rows). The first line is the best of all measured settings for its price.",
        x="price",
        y="spearman",
        series="settings",
        facets="model",
        guides=(Guide(0.95, "y"), Guide(0.6)),
        xlabel="price in training steps",
        ylabel="Spearman with the exact value",
        limits=((0.28, 1.04), (0.0, 1.03)),
    )


def _layers(models: Figures) -> Figure:
    records = [
        {"model": one["name"], "estimator": name, "layer": layer, "spearman": rank}
        for one in models.values()
        for name in ("label", "alphatoken", "direct", "path")
        for layer, rank in enumerate(one["singles"][name])
    ]
    return Figure(
        "lines",
        "layers",
        Table.of("layers", "Rank correlation of single layers", records),
        "Rank correlation of single layers",
        "Rank correlation of the linears of one layer alone with the exact value over all "
        "parameters.",
        x="layer",
        y="spearman",
        series="estimator",
        facets="model",
        guides=(Guide(0.0, "y"),),
        ylabel="Spearman, one layer's linears",
    )
