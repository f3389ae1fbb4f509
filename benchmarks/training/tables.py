"""Measured cells to Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from alphatoken_lab.compare.tables import markdown
from benchmarks.training.grid import POLICIES
from benchmarks.training.statistics import Mean

Cells = Sequence[dict[str, Any]]

NAMES = {
    ("all", "none"): "standard (all tokens)",
    ("random", "none"): "random half",
    ("bottom", "alphatoken"): "bottom half by `alphatoken`",
    ("top", "alphatoken"): "top half by `alphatoken`",
    ("top", "label"): "top half by `label`",
}


def chosen(cells: Cells, **wanted: Any) -> list[dict[str, Any]]:
    """Cells with these fields, by seed."""
    found = [c for c in cells if all(c[key] == value for key, value in wanted.items())]
    return sorted(found, key=lambda cell: cell["seed"])


def mean(cells: Cells, key: str) -> Mean:
    """Over the cells' seeds."""
    return Mean.of([cell[key] for cell in cells])


def difference(cells: Cells, base: Cells, key: str) -> Mean | None:
    """Mean of cell minus base, seed by seed; None where no seed is in both."""
    by_seed = {cell["seed"]: cell[key] for cell in base}
    pairs = [cell[key] - by_seed[cell["seed"]] for cell in cells if cell["seed"] in by_seed]
    return Mean.of(pairs) if pairs else None


def main_table(cells: Cells, task: str, noise: float) -> str:
    """Policies of one task, and their paired difference to random selection."""
    cells = chosen(cells, task=task, noise=noise, variant="main")
    base = chosen(cells, policy="random")
    rows = []
    for policy, estimator in POLICIES:
        part = chosen(cells, policy=policy, estimator=estimator)
        if part:
            rows.append([NAMES[policy, estimator], *_columns(part, base, task)])
    return markdown(["policy", *_heads(task)], rows)


def variant_table(
    cells: Cells, groups: Sequence[tuple[str, Cells]], base: Cells, task: str = "sft_math"
) -> str:
    """Named groups of cells against one base."""
    rows = [[name, *_columns(part, base, task)] for name, part in groups if part]
    return markdown(["run", *_heads(task)], rows)


def _heads(task: str) -> list[str]:
    more = ["accuracy", "margin"] if task == "dpo" else ["wrong among kept"]
    heads = ["kept tokens", "target loss", "target − random", "retention loss"]
    return [*heads, "retention − random", "validation gap", *more]


def _columns(part: Cells, base: Cells, task: str) -> list[str]:
    shown = [
        f"{mean(part, 'kept_tokens').mean:,.0f}",
        mean(part, "target_loss").text(),
        _against(part, base, "target_loss"),
        mean(part, "retention_loss").text(),
        _against(part, base, "retention_loss"),
        mean(part, "validation_gap").text("+"),
    ]
    if task == "dpo":
        return [*shown, mean(part, "accuracy").text(), mean(part, "margin").text("+")]
    wrong = mean(part, "wrong_share_of_kept")
    return [*shown, f"{wrong.mean:.1%}" if part[0]["noise"] else "–"]


def _against(part: Cells, base: Cells, key: str) -> str:
    """Bold where the interval leaves 0 out."""
    found = difference(part, base, key)
    if found is None or part[0]["policy"] == "random":
        return "–"
    text = found.text("+")
    return f"**{text}**" if found.clear else text


def by_variant(cells: Cells, names: Iterable[str], **wanted: Any) -> list[tuple[str, Cells]]:
    """(name, cells) of several variants."""
    return [(name, chosen(cells, variant=name, **wanted)) for name in names]
