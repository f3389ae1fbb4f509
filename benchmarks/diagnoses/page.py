"""The pages: all sentences in docs/fidelity-measured.md, and the tables inside docs/fidelity.md.

The prose of docs/fidelity.md is written by hand; each table in it stands between two comments, and
is written anew from the figures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken.fidelity.registry import DIAGNOSTICS
from benchmarks.diagnoses.facts import FACTS

__all__ = ["sentences", "with_tables"]

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
    ("`label`, these and the layers that help most", "label, chosen for 0.75"),
    ("`label`, all parameters", "label, all parameters"),
)
"""Label, and name of a setting of the frontier."""


def with_tables(text: str, subjects: Figures, frontier: Figures) -> str:
    """The page with its tables written anew.

    Raises:
        ConfigError: it names a table that there is not.
    """

    def table(match: re.Match[str]) -> str:
        name = match[2]
        if name == "ranking":
            lines = _ranking(frontier)
        elif name in FACTS:
            lines = _side_by_side(name, subjects)
        else:
            raise ConfigError("the page names no table", got=name, remedy=", ".join(FACTS))
        return match[1] + "\n".join(lines) + "\n" + match[3]

    return _PLACE.sub(table, text)


def _side_by_side(name: str, subjects: Figures) -> Iterator[str]:
    """Facts one below the other, models beside each other."""
    yield "| " + " | ".join(["", *(one["name"] for one in subjects.values())]) + " |"
    yield "|---|" + "---:|" * len(subjects)
    for fact in FACTS[name]:
        cells = [
            _estimate(one["facts"].get(name, {}).get(fact.label), percent=fact.percent)
            for one in subjects.values()
        ]
        yield "| " + " | ".join([fact.label, *cells]) + " |"


def _estimate(found: list[float] | None, *, percent: bool = False) -> str:
    if found is None:
        return ""
    value, low, high = (f"{100 * x:.0f}" if percent else f"{x:.2f}" for x in found)
    return f"{value}{' %' if percent else ''} [{low}, {high}]"


def _ranking(frontier: Figures) -> Iterator[str]:
    """Settings by price and rank correlation, from the frontier's figures."""
    tables = [{r["name"]: r for r in one["records"]} for one in frontier.values()]
    names = [one["name"] for one in frontier.values()]
    yield "| " + " | ".join(["", *(f"{name}: steps | Spearman" for name in names)]) + " |"
    yield "|---|" + "---:|" * (2 * len(names))
    for label, name in _RANKED:
        cells = []
        for table in tables:
            record = table.get(name)
            cells.append(
                " | " if record is None
                else f"{record['price']:.2f} | {_estimate(record['spearman'])}"
            )  # fmt: skip
        yield "| " + " | ".join([label, *cells]) + " |"


# --- all sentences -------------------------------------------------------------------------------


def sentences(subjects: Figures) -> str:
    """docs/fidelity-measured.md."""
    times = ", ".join(f"{one['minutes']:g} minutes ({one['name']})" for one in subjects.values())
    lines = [
        "# Fidelity, measured",
        "",
        "Written by `python -m benchmarks.diagnoses`; do not edit by hand. The sentences are those",
        "that the diagnostics printed. `$DATA` and `$MODELS` are the folders of data and models.",
        "[What to make of it](fidelity.md).",
        "",
        f"All nine together took {times}, on one CPU core each, beside other work.",
    ]
    for one in subjects.values():
        lines += ["", f"**{one['name']}**: {one['said']}.", "", "```", one["command"], "```"]
    for entry in DIAGNOSTICS:
        lines += ["", f"## {entry.name}", "", entry.question]
        for one in subjects.values():
            if entry.name not in one["answers"]:
                continue
            lines += ["", f"### {entry.name}, {one['name']}", ""]
            lines += [f"* {_plain(sentence)}" for sentence in one["answers"][entry.name]]
            lines += ["", *(f"> {_plain(note)}\n>" for note in one["notes"][entry.name])]
    return "\n".join(lines).rstrip(">\n ") + "\n"


def _plain(sentence: str) -> str:
    """Without what Markdown would take for marks."""
    for mark in ("*", "_", "<", "$", "`", "|"):
        sentence = sentence.replace(mark, f"\\{mark}")
    return sentence
