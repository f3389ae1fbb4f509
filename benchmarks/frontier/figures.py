"""All figures of the frontier as one record a model, which the page is written from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken.certificate.metrics import spearman
from alphatoken.fidelity.advice import front
from alphatoken.support.storage import replacing
from benchmarks.frontier.chosen import chosen
from benchmarks.frontier.draws import Model
from benchmarks.frontier.measure import CAPTURED
from benchmarks.frontier.price import Scope
from benchmarks.frontier.settings import Setting, corrected, plain, random_settings, singles
from benchmarks.frontier.tables import Draws, measured, records

__all__ = ["collect", "load", "save", "worth"]

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
    found = records(
        draws, [*plain(depth), *corrected(depth), *random_settings(depth)], f"{model.name}, figures"
    )
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
        "singles": _singles(draws, depth),
        "sizes": _sizes(draws),
        "adam": _adam(model, adam, depth) if adam.names else None,
    }


def _singles(draws: Draws, depth: int) -> dict[str, list[float]]:
    """Mean Spearman of each layer's linears alone, by estimator."""
    found: dict[str, list[float]] = {name: [] for name in ("label", *CAPTURED)}
    for setting in singles(depth):
        ranks = [spearman(setting.values(s), s.columns["total"]) for s in draws.shares]
        found[setting.scope.estimator].append(round(float(np.mean(ranks)), 4))
    return found


def _sizes(draws: Draws) -> dict[str, float]:
    """Mean size of each part of label values, over the mean size of the values."""
    found: dict[str, list[float]] = {}
    for shares in draws.shares:
        whole = np.abs(shares.columns["total"]).mean()
        for name, column in shares.columns.items():
            if name.startswith("label/"):
                share = float(np.abs(column).mean() / whole)
                found.setdefault(name.removeprefix("label/"), []).append(share)
    return {name: round(float(np.mean(values)), 4) for name, values in found.items()}


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
    settings = [*plain(depth), *corrected(depth), *random_settings(depth)]
    found = records(draws, settings, f"{model.name}, Adam")
    found += chosen(draws, depth)
    return {
        "draws": list(draws.names),
        "tokens": draws.tokens,
        "rows": draws.rows,
        "records": [record.as_dict() for record in (*found, *others)],
        "singles": _singles(draws, depth),
        "sizes": _sizes(draws),
    }


def worth(found: Sequence[Mapping[str, Any]], gain: float = 0.02) -> list[Mapping[str, Any]]:
    """By rising price, what ranks better than everything cheaper, by ``gain`` in Spearman."""
    places = front([round(one["price"], 2) for one in found], [one["spearman"][0] for one in found])
    chosen: list[Mapping[str, Any]] = []
    for place in places:
        if not chosen or found[place]["spearman"][0] >= chosen[-1]["spearman"][0] + gain:
            chosen.append(found[place])
    return chosen


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


def load(path: Path) -> dict[str, Any]:
    """What is there; nothing where there is no file."""
    if not path.is_file():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
