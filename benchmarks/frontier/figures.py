"""All figures of the frontier as one record a model, which the page's tables are written from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alphatoken.support.storage import replacing
from benchmarks.frontier.chosen import chosen
from benchmarks.frontier.draws import Model
from benchmarks.frontier.price import Scope
from benchmarks.frontier.settings import Setting, plain
from benchmarks.frontier.tables import Draws, measured, records

_OF_ADAM = {
    "frozen": "label, all parameters, frozen denominator",
    "plain": "label, all parameters, without P",
    "plain alphatoken K=3": "alphatoken, last 3, without P",
}
"""Columns of Adam's draws: values that are ranked against those of the exact next step."""


def collect(model: Model, folder: Path, sizes: Any) -> dict[str, Any] | None:
    """The figures of one model; None where no draw is there."""
    draws = Draws.load(folder, sizes)
    if not draws.names:
        return None
    depth = int(sizes.config.num_hidden_layers)
    found = records(draws, plain(depth), f"{model.name}, figures")
    found += chosen(draws, depth)
    adam = Draws.load(folder, sizes, adam=True)
    return {
        "name": model.name,
        "depth": depth,
        "draws": list(draws.names),
        "tokens": draws.tokens,
        "rows": draws.rows,
        "sum_error": max(shares.facts["sum_error"] for shares in draws.shares),
        "records": [record.as_dict() for record in found],
        "adam": _adam(model, adam, depth) if adam.names else None,
    }


def _adam(model: Model, draws: Draws, depth: int) -> dict[str, Any]:
    every = tuple(range(depth))
    last = Scope("alphatoken", every[-3:])
    whole = Scope("label", every, every, embedding=True, final=True, head=True)
    others = [
        measured(
            draws,
            Setting(said, "without the exact P", last if name.endswith("K=3") else whole),
            [shares.columns[name] for shares in draws.shares],
        )
        for name, said in _OF_ADAM.items()
    ]
    found = records(draws, plain(depth), f"{model.name}, Adam")
    found += chosen(draws, depth)
    return {
        "draws": list(draws.names),
        "tokens": draws.tokens,
        "rows": draws.rows,
        "records": [record.as_dict() for record in (*found, *others)],
    }


def worth(found: Sequence[Mapping[str, Any]], gain: float = 0.02) -> list[Mapping[str, Any]]:
    """By rising price, what ranks better than everything cheaper, by ``gain`` in Spearman."""
    usable = [one for one in found if not math.isnan(one["price"] + one["spearman"][0])]
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
    found = one.get("differences", {"records": []})["records"]
    return [*one["records"], *(r for r in found if "beside" not in r["name"])]


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
