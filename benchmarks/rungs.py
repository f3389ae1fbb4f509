"""The ladder of precisions, as it is kept and as it is shown: one rung a dtype and estimator."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["LAYERS", "Rung", "read", "section"]

LAYERS = 3
"""Scored layers, in all rungs."""


@dataclass(frozen=True)
class Rung:
    """One dtype and estimator against float64.

    Attributes:
        subject: which model and text.
        precision: "bf16", "tf32" or "fp32".
        direction: "same" (G in this dtype as well) or "float64" (built there, then rounded).
        estimator: of the values.
        median: of the error over the sum of absolute terms, over tokens.
        worst: largest of them.
        rank: Spearman correlation with the float64 values.
        jaccard: kept by both over kept by either, at ratio 0.5.
        tokens: how many values.
        device: where.
    """

    subject: str
    precision: str
    direction: str
    estimator: str
    median: float
    worst: float
    rank: float
    jaccard: float
    tokens: int
    device: str


def read(path: Path) -> list[Rung]:
    """The rungs of a file."""
    return [Rung(**one) for one in json.loads(path.read_text(encoding="utf-8"))]


def section(rungs: Sequence[Rung]) -> str:
    """The section of docs/benchmarks.md."""
    lines = [
        "## Precision",
        "",
        "Written by `python -m benchmarks.precision`. Values in narrow arithmetic against float64,",
        "of one function: weights rounded to bf16 in every dtype. The error of a value is over the",
        "sum of the absolute terms that it is the sum of; rank is Spearman's correlation; overlap",
        "is kept by both over kept by either, at the kept half. G is built in the dtype itself, or",
        "in float64 and rounded. Sums are taken in float32 at least, whatever the model's dtype.",
        "The largest errors are of tokens that the model is nearly certain of: their error at the",
        "logits, 1 - p, cancels. Their values are among the smallest, so that ranks hardly move.",
    ]
    if not any(rung.precision == "tf32" for rung in rungs):
        lines += ["", "tf32 is arithmetic of CUDA devices: not measured here."]
    for subject in dict.fromkeys(rung.subject for rung in rungs):
        rows = [rung for rung in rungs if rung.subject == subject]
        lines += [
            "",
            f"**{subject}**, K = {LAYERS}, {rows[0].tokens} tokens, on {rows[0].device}:",
            "",
            "| estimator | precision | G | median error | largest | rank | overlap |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {r.estimator} | {r.precision} | {r.direction} | {r.median:.1e} | {r.worst:.1e} "
            f"| {r.rank:.6f} | {r.jaccard:.3f} |"
            for r in rows
        ]
    return "\n".join(lines) + "\n"
