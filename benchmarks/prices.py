"""What values cost, in training steps: one table, from what the frontier and the targets measured.

``docs/prices.json`` holds its numbers for ``docs/numbers.toml``, so that every page states the same
price. FLOPs are those of ``benchmarks.frontier.settings``, whose step forms the head where a loss
reads it. Times are against TRL's step with its own head at response tokens, which forms the logits
once more in the backward; the GPU's, which are older, against a step with logits at all positions.
"""

from __future__ import annotations

import json
from typing import Any

from alphatoken.support.storage import write_json
from benchmarks.data import MODELS
from benchmarks.pages import DOCS, RESULTS, load, measured, number, span, table

FILE = DOCS / "prices.json"
PRICED = ("smollm2",)
"""Models of the table: those whose times are against TRL's own head."""

GPU = "H200"
_SIZE = "2 x 512 tokens"


WAYS = {
    "exact": (
        "exact values (`label`, all parameters) by themselves, by two forwards",
        "label, all parameters, central",
        ("label_central", "label, central"),
    ),
    "exact_beside": (
        "the same beside a training step, by one forward more",
        "label, all parameters, one-sided beside a step",
        ("label_one_sided", "label, one_sided"),
    ),
    "exact_forward_mode": (
        "the same by forward mode, which 16 bits need, by themselves",
        "label, all parameters",
        ("label_all", "label, all"),
    ),
    "paper": (
        "the paper's values of three layers (the default) by themselves",
        "alphatoken, last 3",
        ("score_k3", "alphatoken, K=3"),
    ),
    "paper_beside": (
        "the same beside a training step",
        "alphatoken, last 3",
        ("observe_k3", "alphatoken, K=3"),
    ),
}
"""Ways of valuing: what the table calls it, the name of its record in ``frontier.json``, and name
and size of its rows in ``results.json``, after the model's."""


def prices() -> dict[str, dict[str, Any]]:
    """By model and way: FLOPs, time with quartiles, time on the GPU."""
    frontier, rows = load(DOCS / "frontier.json"), measured()
    history = RESULTS.with_name("history.jsonl").read_text(encoding="utf-8").splitlines()
    runs = [run for run in map(json.loads, history) if GPU in run["machine"].get("gpu", "")]
    return {
        model: {
            key: _price(name, f"{model}_{timed[0]}", timed[1], frontier[model], rows, runs)
            for key, (_, name, timed) in WAYS.items()
        }
        for model in PRICED
    }


def _price(record: str, name: str, size: str, counted: Any, rows: Any, runs: Any) -> dict[str, Any]:
    records = [*counted["records"], *counted["differences"]["records"]]
    price = {one["name"]: one["price"] for one in reversed(records)}
    what = f"{size}; {_SIZE}"
    (row,) = (r for r in rows if r["name"] == name and r["size"].startswith(what))
    # Of a step with its values the step goes off what is timed, its forward off what is counted.
    whole = float(name.endswith("observe_k3"))
    forward = price[WAYS["exact_beside"][1]]
    key = f"{name}: {what}"
    gpu = [ratio for run in runs for size, ratio in run["ratios"].items() if size.startswith(key)]
    return {
        "flops": price[record] - whole * forward,
        "time": row["ratio"] - whole,
        "low": row["low"] - whole,
        "high": row["high"] - whole,
        "gpu_time": gpu[-1] - whole if gpu else None,
    }


def table_of_prices() -> str:
    """In training steps of the same batch."""
    head = ("values", "model", "FLOPs", "time on a CPU", f"time on one {GPU}")
    lines = [
        (
            says,
            MODELS[model].name,
            number(price["flops"]),
            span((price["time"], price["low"], price["high"])),
            number(price["gpu_time"]),
        )
        for key, (says, _, _) in WAYS.items()
        for model in PRICED
        for price in (prices()[model][key],)
    ]
    return table(head, lines)


def write() -> None:
    """Write ``docs/prices.json``, with which the prices in prose are compared."""
    write_json(FILE, prices())
