"""The tables inside docs/fidelity.md, docs/estimators.md and README.md.

The prose is written by hand; ``python -m benchmarks`` writes the tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.diagnoses.facts import FACTS
from benchmarks.pages import DOCS, Writer, load, table

Figures = Mapping[str, Any]

_RANKED = (
    ("`alphatoken`, K = 3 (default)", "alphatoken, last 3"),
    ("`direct`, K = 3", "direct, last 3"),
    ("`path`, K = 3", "path, last 3"),
    ("`label`, K = 3", "label, last 3"),
    ("`label`, 4 layers spread", "label, spread 4"),
    ("`direct`, all linears", "direct, all linears"),
    ("`path`, all linears", "path, all linears"),
    ("`label`, all linears", "label, all linears"),
    ("`label`, norms and embedding", "label, all parameters but the linears"),
    ("`label`, parts and layers chosen for 0.75", "label, chosen for 0.75"),
    ("`label`, all parameters", "label, all parameters"),
)
"""Label, and name of a setting of the frontier."""


def _side_by_side(*names: str) -> str:
    """Facts of diagnostics one below the other, models beside each other."""
    subjects = load(DOCS / "fidelity.json")
    rows = [
        [
            fact.label,
            *(
                _estimate(one["facts"].get(name, {}).get(fact.label), percent=fact.percent)
                for one in subjects.values()
            ),
        ]
        for name in names
        for fact in FACTS[name]
    ]
    return table(["", *(one["name"] for one in subjects.values())], rows)


def _estimate(numbers: list[float] | None, *, percent: bool = False) -> str:
    if numbers is None:
        return ""
    value, *ends = (f"{100 * x:.0f}" if percent else f"{x:.2f}" for x in numbers)
    return f"{value}{' %' if percent else ''}" + (f" [{', '.join(ends)}]" if ends else "")


def _ranking() -> str:
    """Settings by price and rank correlation, from the frontier's figures."""
    frontier = load(DOCS / "frontier.json")
    by_model = [{r["name"]: r for r in one["records"]} for one in frontier.values()]
    head = [word for one in frontier.values() for word in (f"{one['name']}: steps", "Spearman")]

    def cells(record: Figures | None) -> tuple[str, str]:
        return (
            ("", "") if record is None
            else (f"{record['price']:.2f}", _estimate(record["spearman"]))
        )  # fmt: skip

    rows = [
        [label, *(cell for records in by_model for cell in cells(records.get(name)))]
        for label, name in _RANKED
    ]
    return table(["", *head], rows)


WRITERS: dict[str, Writer] = {
    "ranking": _ranking,
    **{name: partial(_side_by_side, name) for name in FACTS},
}
"""Name of a table -> what writes it."""
