"""Tables and picture of docs/frontier.md, from docs/frontier.json, which holds all figures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from alphatoken.diagnose.diagnosis import Table
from alphatoken.diagnose.figures import Figure, Guide
from alphatoken.diagnose.figures import draw as drawn
from alphatoken.diagnose.statistics import Estimate
from alphatoken.support.storage import replacing, write_text
from benchmarks.pages import DOCS, load, number, span, table

Record = Mapping[str, Any]

_KINDS = (
    "label, all linears",
    "attention alone, all layers",
    "MLP alone, all layers",
    "all norms alone",
    "embedding and head alone",
    "label, all parameters but the linears",
    "label, all parameters but all norms",
    "label, all parameters but embedding and head",
)


def worth(records: Sequence[Mapping[str, Any]], gain: float = 0.02) -> list[Mapping[str, Any]]:
    """By rising price, what ranks better than everything cheaper, by ``gain`` in Spearman."""
    usable = [one for one in records if not math.isnan(one["price"] + one["spearman"][0])]
    best = -math.inf
    chosen: list[Mapping[str, Any]] = []
    for one in sorted(usable, key=lambda one: (round(one["price"], 2), -one["spearman"][0])):
        score = one["spearman"][0]
        if score > best:
            best = score
            if not chosen or score >= chosen[-1]["spearman"][0] + gain:
                chosen.append(one)
    return chosen


def with_differences(one: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The records of a model, with label values by central differences where they were measured.

    Not the one-sided ones: the forward that they lie beside is no part of their price, and is of
    everybody else's.
    """
    differences = one.get("differences", {"records": []})["records"]
    return [*one["records"], *(r for r in differences if "beside" not in r["name"])]


def save(models: Mapping[str, Any], path: Path) -> None:
    """Write whole or not at all; a line for each record, so that changes can be read."""
    with replacing(path) as temporary:
        temporary.write_text(_lines(models, 3) + "\n", encoding="utf-8")


def _lines(value: Any, depth: int) -> str:
    """JSON whose outer mappings and lists, ``depth`` deep, have a line an entry."""
    if depth == 0 or not isinstance(value, (dict, list)) or not value:
        return json.dumps(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(_lines(entry, depth - 1) for entry in value) + "\n]"
    entries = (f"{json.dumps(name)}: {_lines(entry, depth - 1)}" for name, entry in value.items())
    return "{\n" + ",\n".join(entries) + "\n}"


# --- tables -------------------------------------------------------------------------------------


def tables(kind: str, *words: str) -> str:
    """``parts``, ``worth MODEL [adam]``, or ``layers``, ``formats``, ``differences`` of a MODEL."""
    models = load(DOCS / "frontier.json")
    if kind == "parts":
        return _parts(models)
    one = models[words[0]]
    if kind == "worth":
        return _worth(one, adam="adam" in words)
    return {"layers": _layers, "formats": _formats, "differences": _differences}[kind](one)


def _worth(one: Record, *, adam: bool) -> str:
    """By rising price, what the scorer's options can name and ranks better than all cheaper."""
    records = one["adam"]["records"] if adam else with_differences(one)
    usable = [r for r in records if r["usable"] and r["family"] != "without the exact P"]
    rows = [
        (
            r["name"],
            number(r["price"]),
            span(r["spearman"]),
            number(r["overlap"][0]),
        )
        for r in worth(usable)
    ]
    return table((one["name"], "price", "Spearman", "overlap"), rows)


def _layers(one: Record) -> str:
    """Spearman and price of the linears of K layers."""
    by_name = {r["name"]: r for r in one["records"]}

    def cell(name: str) -> str:
        record = by_name.get(name)
        return "" if record is None else f"{record['spearman'][0]:.2f} ({record['price']:.2f})"

    columns = (
        ("label, last {}", "label, all linears"),
        ("label, spread {}", "label, all linears"),
        ("alphatoken, last {}", "alphatoken, all linears"),
        ("path, last {}", "path, all linears"),
    )
    counts = [k for k in (1, 3, 5, 8, 10, 15, 20) if k < one["depth"]]
    rows = [(str(k), *(cell(name.format(k)) for name, _ in columns)) for k in counts]
    rows.append(("all", *(cell(name) for _, name in columns)))
    head = (f"{one['name']}: K", *(name.format("K") for name, _ in columns))
    return table(head, rows)


def _differences(one: Record) -> str:
    """Error and rank by the norm of h M; the row without a norm is the library's own h."""
    records = one["differences"]["records"]
    forms = list(dict.fromkeys(r["name"] for r in records))
    rows = []
    for length in dict.fromkeys(r["length"] for r in records):
        own = [next(r for r in records if (r["name"], r["length"]) == (f, length)) for f in forms]
        stated = ", ".join(f"{r['stated']:.0e}" for r in own if r["stated"] is not None)
        cells = [f"{r['error']:.1e}, {number(r['spearman'][0], 4)}" for r in own]
        rows.append((f"found (said: {stated})" if length is None else f"{length:g}", *cells))
    prices = [next(r["price"] for r in records if r["name"] == form) for form in forms]
    heads = (f"{form} ({number(p)} of a step)" for form, p in zip(forms, prices, strict=True))
    return table((f"{one['name']}: norm of h M", *heads), rows)


def _parts(models: Mapping[str, Any]) -> str:
    """Spearman of the values of some parameters alone, models beside each other."""
    by_model = [{r["name"]: r for r in one["records"]} for one in models.values()]
    rows = [(name, *(span(by_name[name]["spearman"]) for by_name in by_model)) for name in _KINDS]
    return table(("setting", *(one["name"] for one in models.values())), rows)


_BY_FORMAT = (
    "alphatoken, last 3",
    "label, last 3",
    "label, spread 4",
    "direct, all linears",
    "label, all linears",
    "label, all parameters but the linears",
    "label, chosen for 0.75",
)


def _formats(one: Record) -> str:
    """Mean Spearman of the draws of each kind of rows."""
    formats = list(dict.fromkeys(name.rsplit("-", 1)[0] for name in one["draws"]))
    by_name = {r["name"]: r["by_draw"] for r in one["records"]}

    def mean(draws: Mapping[str, float], kind: str) -> float:
        return fmean(x for name, x in draws.items() if name.rsplit("-", 1)[0] == kind)

    rows = [(name, *(number(mean(by_name[name], kind)) for kind in formats)) for name in _BY_FORMAT]
    return table((one["name"], *formats), rows)


# --- picture --------------------------------------------------------------------------------------

_CURVES = {
    "label, last": "label: last K layers",
    "label, spread": "label: K spread layers",
    "alphatoken, last": "alphatoken: last K layers",
    "direct, last": "direct: last K layers",
    "path, last": "path: last K layers",
}
"""Families that are drawn as curves, and their names."""


def draw(models: Record, path: Path) -> None:
    """Write the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = drawn(_frontier(models)).svg.splitlines()
    write_text(path, "\n".join(map(str.rstrip, lines)) + "\n")


def _frontier(models: Record) -> Figure:
    """Curves of the families, and the best of all measured settings for each price."""
    records: list[dict[str, Any]] = []
    for one in models.values():
        by_name = {record["name"]: record for record in one["records"]}
        measured = [r for r in with_differences(one) if r.get("length") is None]
        pairs = [("best of all measured", record) for record in worth(measured, gain=0.0)]
        for family, label in _CURVES.items():
            own = [r for r in one["records"] if r["family"] == family] + [
                by_name[f"{family.split(',')[0]}, all linears"]
            ]
            pairs += [(label, record) for record in sorted(own, key=lambda r: float(r["price"]))]
        records += [
            {
                "model": one["name"],
                "settings": label,
                "price": record["price"],
                "spearman": Estimate(*record["spearman"], one["tokens"]),
            }
            for label, record in pairs
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
