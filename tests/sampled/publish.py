"""What became of the sampled mutants, in a small file that is kept and in prose.

``python -m tests.sampled publish`` writes ``found.json`` from what the runs left in build/mutants/;
the page of kills is made from it. Every mutant that no test saw has a sentence in ``EXPLAINED``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

from tests.sampled.explained import EXPLAINED

FOUND = Path(__file__).with_name("found.json")


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share, by Wilson."""
    if not count:
        return 0.0, 1.0
    share, spread = hits / count, z * z / count
    middle = share + spread / 2
    half = z * sqrt(share * (1 - share) / count + spread / (4 * count))
    return (middle - half) / (1 + spread), (middle + half) / (1 + spread)


def summary(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts of one room's results, and the mutants that no test saw."""
    ends = Counter(entry["end"] for entry in entries.values())
    slow = sum(entry.get("how") == "took too long" for entry in entries.values())
    left = {
        key: {k: entry[k] for k in ("end", "operator", "before", "after", "tests")}
        for key, entry in sorted(entries.items())
        if entry["end"] in ("survived", "unreached")
    }
    return {"ends": dict(sorted(ends.items())), "took_too_long": slow, "unseen": left}


def paragraphs(
    found: dict[str, Any],
    table: Callable[[list[str], list[list[str]]], str],
    code: Callable[[str], str],
    text: Callable[[str], str],
) -> str:
    """The section of the page of kills."""
    rows, unseen = [], []
    for room, of in found["rooms"].items():
        ends, left = of["ends"], of["unseen"]
        killed, survived = ends.get("killed", 0), ends.get("survived", 0)
        alike = sum(_alike(key) for key, entry in left.items() if entry["end"] == "survived")
        missed, count = survived - alike, killed + survived - alike
        low, high = wilson(missed, count)
        rows.append([
            room, str(sum(ends.values())), str(ends.get("unreached", 0)),
            f"{killed} ({of['took_too_long']} by time)", str(survived), str(alike),
            f"{missed} of {count}: {missed / max(1, count):.0%} [{low:.0%}, {high:.0%}]",
        ])  # fmt: skip
        for key, entry in left.items():
            change = f"{code(_short(entry['before']))} → {_after(entry, code)}"
            unseen.append([code(key.partition(":")[0]), entry["operator"], change,
                           entry["end"], text(EXPLAINED.get(key, "not looked at"))])  # fmt: skip
    head = ["Room", "Drawn", "Not reached", "Killed", "Survived", "Equivalent", "Missed [95 %]"]
    return "\n".join(
        [
            "## Sampled mutants\n",
            "Named mutants are errors that somebody thought of. Beside them `python -m "
            "tests.sampled` draws mutants from all places of the syntax trees at which one of the "
            "usual operators applies: comparisons, arithmetic, constants off by one, conditions "
            "negated or fixed, `and` for `or`, dropped statements, exchanged arguments, returned "
            "`None`, moved slice bounds, `min` for `max`. Texts, annotations, assertions and "
            "error messages are left out. Each mutant meets the quickest tests of the fast tier "
            "that execute its line; a failing test or several times the usual processor time "
            "kills it. *Not reached* are mutants of lines that no measured test executes: "
            "they were not tried. *Equivalent* are those of which the table below says that no "
            "value depends on the change; the last column is the share of the others that no test "
            f"saw, with Wilson's interval. {text(found['note'])}\n",
            table(head, rows),
            "Those that no test saw, or none was measured for:\n",
            table(["Function", "Operator", "Change", "End", "What it is"], unseen),
        ]
    )


def _alike(key: str) -> bool:
    return EXPLAINED.get(key, "").startswith("Equivalent")


def _after(entry: dict[str, Any], code: Callable[[str], str]) -> str:
    return code(_short(entry["after"])) if entry["after"] else "nothing"


def _short(source: str) -> str:
    line = " ".join(source.split())
    return line if len(line) <= 90 else f"{line[:87]}..."
