"""The frontier as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alphatoken.diagnose.diagnosis import Table
from alphatoken.diagnose.figures import Figure, Guide
from alphatoken.diagnose.figures import draw as drawn
from alphatoken.diagnose.statistics import Estimate
from alphatoken.support.storage import write_text
from benchmarks.frontier.figures import with_differences, worth

Figures = Mapping[str, Any]

_CURVES = {
    "label, last": "label: last K layers",
    "label, spread": "label: K spread layers",
    "alphatoken, last": "alphatoken: last K layers",
    "direct, last": "direct: last K layers",
    "path, last": "path: last K layers",
}
"""Families that are drawn as curves, and their names."""

_ENDS = {
    "label, last": "label, all linears",
    "label, spread": "label, all linears",
    "alphatoken, last": "alphatoken, all linears",
    "direct, last": "direct, all linears",
    "path, last": "path, all linears",
}


def draw(models: Figures, path: Path) -> None:
    """Write the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = drawn(_frontier(models)).svg.splitlines()
    write_text(path, "\n".join(map(str.rstrip, lines)) + "\n")


def _frontier(models: Figures) -> Figure:
    """Curves of the families, and the best of all measured settings for each price."""
    records: list[dict[str, Any]] = []
    for one in models.values():
        by_name = {record["name"]: record for record in one["records"]}
        measured = [r for r in with_differences(one) if r.get("length") is None]
        found = [("best of all measured", record) for record in worth(measured, gain=0.0)]
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
