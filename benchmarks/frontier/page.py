"""Tables of docs/frontier.md, from docs/frontier.json."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from benchmarks.frontier.figures import with_differences, worth
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
            f"`{r['options']}`" if r["options"] else "",
        )
        for r in worth(usable)
    ]
    return table((one["name"], "price", "Spearman", "overlap", "options"), rows)


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
    found = one["differences"]["records"]
    forms = list(dict.fromkeys(r["name"] for r in found))
    rows = []
    for length in dict.fromkeys(r["length"] for r in found):
        own = [next(r for r in found if (r["name"], r["length"]) == (f, length)) for f in forms]
        stated = ", ".join(f"{r['stated']:.0e}" for r in own if r["stated"] is not None)
        cells = [f"{r['error']:.1e}, {number(r['spearman'][0], 4)}" for r in own]
        rows.append((f"found (said: {stated})" if length is None else f"{length:g}", *cells))
    prices = [next(r["price"] for r in found if r["name"] == form) for form in forms]
    heads = (f"{form} ({number(p)} of a step)" for form, p in zip(forms, prices, strict=True))
    return table((f"{one['name']}: norm of h M", *heads), rows)


def _parts(models: Mapping[str, Any]) -> str:
    """Spearman of the values of some parameters alone, models beside each other."""
    found = [{r["name"]: r for r in one["records"]} for one in models.values()]
    rows = [(name, *(span(by_name[name]["spearman"]) for by_name in found)) for name in _KINDS]
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
