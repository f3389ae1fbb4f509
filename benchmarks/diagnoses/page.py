"""The tables inside docs/fidelity.md, docs/estimators.md and README.md.

The prose is written by hand; each table in it stands between two comments, and
is written anew from the figures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from alphatoken.errors import ConfigError
from benchmarks.diagnoses.facts import FACTS
from benchmarks.frontier.page import table

__all__ = ["with_tables"]

Figures = Mapping[str, Any]

_PLACE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)

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


def with_tables(text: str, subjects: Figures, frontier: Figures) -> str:
    """The page with its tables written anew.

    Raises:
        ConfigError: it names a table that there is not.
    """

    def anew(match: re.Match[str]) -> str:
        name = match[2]
        if name == "ranking":
            written = _ranking(frontier)
        elif name == "conditions":
            written = _conditions(subjects)
        elif name in FACTS:
            written = _side_by_side(name, subjects)
        else:
            raise ConfigError("the page names no table", got=name, remedy=", ".join(FACTS))
        return match[1] + written + match[3]

    return _PLACE.sub(anew, text)


def _side_by_side(name: str, subjects: Figures) -> str:
    """Facts one below the other, models beside each other."""
    rows = [
        [
            fact.label,
            *(
                _estimate(one["facts"].get(name, {}).get(fact.label), percent=fact.percent)
                for one in subjects.values()
            ),
        ]
        for fact in FACTS[name]
    ]
    return table(["", *(one["name"] for one in subjects.values())], rows)


def _estimate(found: list[float] | None, *, percent: bool = False) -> str:
    if found is None:
        return ""
    value, low, high = (f"{100 * x:.0f}" if percent else f"{x:.2f}" for x in found)
    return f"{value}{' %' if percent else ''} [{low}, {high}]"


def _ranking(frontier: Figures) -> str:
    """Settings by price and rank correlation, from the frontier's figures."""
    found = [{r["name"]: r for r in one["records"]} for one in frontier.values()]
    head = [word for one in frontier.values() for word in (f"{one['name']}: steps", "Spearman")]

    def cells(record: Figures | None) -> tuple[str, str]:
        return (
            ("", "") if record is None
            else (f"{record['price']:.2f}", _estimate(record["spearman"]))
        )  # fmt: skip

    rows = [
        [label, *(cell for records in found for cell in cells(records.get(name)))]
        for label, name in _RANKED
    ]
    return table(["", *head], rows)


def _conditions(subjects: Figures) -> str:
    """Which model on which rows, how long all nine took, and the command."""
    parts = []
    for one in subjects.values():
        said = f"**{one['name']}**: {one['said']}; {one['minutes']:g} minutes on one core."
        parts += [said, "", "```", one["command"], "```", ""]
    return "\n".join(parts)
