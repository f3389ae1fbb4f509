"""What values cost, in training steps: one table, from what the frontier and the targets measured.

``docs/prices.json`` holds its numbers for ``docs/numbers.toml``, so that every page states the same
price. FLOPs are those of ``benchmarks.frontier.settings``, whose step forms the head where a loss
reads it. The other columns are against the step as PyTorch runs it, with logits at all positions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphatoken.support.storage import write_json
from benchmarks.data import MODELS
from benchmarks.pages import DOCS, number, span, table

FILE = DOCS / "prices.json"
PRICED = ("smollm2", "gemma3")
"""Models of the table."""

GPU = "H200"
_HERE = Path(__file__).parent
_SIZE = "2 x 512 tokens"


@dataclass(frozen=True)
class Priced:
    """One way of valuing.

    Attributes:
        says: what a table calls it.
        counted: name of its record in ``frontier.json``.
        timed: name and size of its rows in ``results.json``, after the model's.
        beside: whether the values are those of a training step's own forward. ``forward`` FLOPs
            are then taken off what is counted, and a step off what is timed, where they are in it.
    """

    says: str
    counted: str
    timed: tuple[str, str]
    beside: bool = False


WAYS = {
    "exact": Priced(
        "exact values (`label`, all parameters) by themselves, by two forwards",
        "label, all parameters, central",
        ("label_central", "label, central"),
    ),
    "exact_beside": Priced(
        "the same beside a training step, by one forward more",
        "label, all parameters, one-sided beside a step",
        ("label_one_sided", "label, one_sided"),
        beside=True,
    ),
    "exact_forward_mode": Priced(
        "the same by forward mode, which 16 bits need, by themselves",
        "label, all parameters",
        ("label_all", "label, all"),
    ),
    "paper": Priced(
        "the paper's values of three layers (the default) by themselves",
        "alphatoken, last 3",
        ("score_k3", "alphatoken, K=3"),
    ),
    "paper_beside": Priced(
        "the same beside a training step",
        "alphatoken, last 3",
        ("observe_k3", "alphatoken, K=3"),
        beside=True,
    ),
}


def prices() -> dict[str, dict[str, Any]]:
    """By model and way: FLOPs, FLOPs against all logits, time with quartiles, time on the GPU."""
    frontier = json.loads((DOCS / "frontier.json").read_text(encoding="utf-8"))
    rows = json.loads((_HERE / "results.json").read_text(encoding="utf-8"))
    history = (_HERE / "history.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [run for run in map(json.loads, history) if GPU in run["machine"]["gpu"]]
    return {
        model: {key: _price(model, way, frontier[model], rows, runs) for key, way in WAYS.items()}
        for model in PRICED
    }


def _price(model: str, way: Priced, counted: Any, rows: Any, runs: Any) -> dict[str, Any]:
    records = [*counted["records"], *counted["differences"]["records"]]
    price = {record["name"]: record["price"] for record in reversed(records)}
    name, what = f"{model}_{way.timed[0]}", f"{way.timed[1]}; {_SIZE}"
    (row,) = (r for r in rows if r["name"] == name and r["size"].startswith(what))
    whole = float(name.endswith("observe_k3"))  # a step with its values: the step goes off
    forward = price[WAYS["exact_beside"].counted]
    key = f"{name}: {what}"
    gpu = [ratio for run in runs for size, ratio in run["ratios"].items() if size.startswith(key)]
    return {
        "flops": price[way.counted] - whole * forward,
        "flops_all_logits": row["flops"] / row["flops_other"] - whole,
        "time": row["ratio"] - whole,
        "low": row["low"] - whole,
        "high": row["high"] - whole,
        "gpu_time": gpu[-1] - whole if gpu else None,
    }


def table_of_prices() -> str:
    """In training steps of the same batch."""
    head = ("values", "model", "FLOPs", "FLOPs, all logits", "time on a CPU", f"time on one {GPU}")
    lines = [
        (
            way.says,
            MODELS[model].name,
            number(price["flops"]),
            number(price["flops_all_logits"]),
            span((price["time"], price["low"], price["high"])),
            number(price["gpu_time"]),
        )
        for key, way in WAYS.items()
        for model in PRICED
        for price in (prices()[model][key],)
    ]
    return table(head, lines)


def write() -> None:
    """Write ``docs/prices.json``, with which the prices in prose are compared."""
    write_json(FILE, prices())
