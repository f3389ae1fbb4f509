"""The figures that stand side by side, and docs/fidelity.json, which the pages are written from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphatoken.diagnose import DIAGNOSTICS
from alphatoken.diagnose.diagnosis import Diagnosis
from benchmarks.diagnoses.subjects import Subject


@dataclass(frozen=True)
class Fact:
    """One line of a table.

    Attributes:
        label: what a reader calls it.
        diagnostic: whose table it is from.
        table: key.
        column: of the number.
        where: columns and the values by which its row is known.
        percent: shown as a percentage.
    """

    label: str
    diagnostic: str
    table: str
    column: str
    where: Mapping[str, Any]
    percent: bool = False


def _at_three(label: str, estimator: str) -> Fact:
    return Fact(label, "estimators", "layers", "spearman", {"estimator": estimator, "K": 3})


def _flow(label: str, part: str) -> Fact:
    return Fact(label, "value-propagation", "shares", "signed", {"layer": "all", "part": part})


def _step(label: str, prediction: str) -> Fact:
    return Fact(label, "utility", "one-token", "spearman", {"prediction": prediction})


def _retained(label: str, proxy: str) -> Fact:
    where = {"retention": "all sets", "proxy": proxy}
    return Fact(label, "fisher", "agreement", "spearman", where)


def _covered(label: str, policy: str) -> Fact:
    return Fact(label, "coverage", "coverage-entropy", "entropy", {"policy": policy})


FACTS: dict[str, tuple[Fact, ...]] = {
    "estimators": (
        _at_three("`label`", "label"),
        _at_three("`direct`", "direct"),
        _at_three("`alphatoken`, W = 32", "alphatoken"),
        _at_three("`path`", "path"),
        _at_three("`paper_literal`", "paper_literal"),
    ),
    "causal": (
        _flow("Value-Propagation sees", "value path within the window"),
        _flow("same path, beyond the window", "value path beyond the window"),
        _flow("through the attention scores", "score path"),
        _flow("longer hops", "longer hops"),
    ),
    "step": (
        _step("exact, all parameters, full P", "exact, all parameters, P=full"),
        _step("exact, all parameters, frozen P", "exact, all parameters, P=frozen"),
        _step("exact, all parameters, P = 1", "exact, all parameters, P=1"),
        _step("`alphatoken`, 3 layers, P = 1", "alphatoken, 3 layers, P=1"),
    ),
    "retention": (
        _retained("diagonal, token labels", "diagonal, token labels"),
        _retained("diagonal, free samples (the paper's)", "diagonal"),
        _retained("Kronecker", "kronecker"),
        _retained("bare drift, F = 1", "none"),
    ),
    "decisions": (
        Fact(
            "reversed by redrawing the validation rows", "stability", "decisions", "share",
            {"decision": "noise"}, percent=True,
        ),
    ),
    "heatmap": (
        Fact("share of the causal part", "heatmap", "heatmap-shares", "share",
             {"component": "adaptation_causal"}),
    ),
    "coverage": (
        _covered("what low perplexity keeps", "low-perplexity"),
        _covered("what `direct` keeps", "direct"),
        _covered("what `alphatoken` keeps", "alphatoken"),
        _covered("what `label` keeps", "label"),
    ),
    "drift": (
        Fact("change of the loss on code", "drift", "drift-sets", "loss_change",
             {"set": "mbpp"}),
    ),
}  # fmt: skip
"""By table of docs/fidelity.md."""


def cell(fact: Fact, diagnosis: Diagnosis) -> list[float] | None:
    """Value, low and high, or the value alone; None where the diagnosis has no such row.

    Raises:
        KeyError: it has no such table or column.
    """
    table = diagnosis.table(fact.table)
    for number, record in enumerate(table.records()):
        if all(record[name] == value for name, value in fact.where.items()):
            if f"{fact.column}_low" not in record:
                return [round(float(record[fact.column] or 0), 4)]
            estimate = table.estimate(number, fact.column)
            return [round(x, 4) for x in (estimate.value, estimate.low, estimate.high)]
    return None


def collect(subject: Subject, folder: Path) -> dict[str, Any]:
    """Figures of the diagnoses that are finished in a folder."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    done = {
        entry.name: Diagnosis.load(folder / entry.name)
        for entry in DIAGNOSTICS
        if Diagnosis.finished(folder / entry.name)
    }
    seconds = [float(record["diagnostics"][name]["seconds"]) for name in done]
    return {
        "name": subject.name,
        "description": subject.description,
        "command": shlex.join(subject.command("out")).replace("'", ""),
        "minutes": round(sum(seconds) / 60, 1),
        "facts": {
            table: {
                fact.label: cell(fact, done[fact.diagnostic])
                for fact in facts
                if fact.diagnostic in done
            }
            for table, facts in FACTS.items()
        },
    }
