"""Tables of docs/selection.md, from docs/selection.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pages import DOCS, load, number, table

Entry = Mapping[str, Any]
Gap = Mapping[str, float]

_PLAIN = ("standard", "dpo")


def tables(kind: str, *words: str) -> str:
    """``methods GRID [TASK...]``, ``others GRID...``, ``options GRID`` or ``finding GRID``."""
    found = load(DOCS / "selection.json")
    if kind == "methods":
        tasks = found["grids"][words[0]]["tasks"]
        return _methods({name: tasks[name] for name in words[1:] or tasks})
    if kind == "others":
        return _others([found["grids"][name] for name in words])
    if kind == "options":
        return _options(found["grids"][words[0]]["options"])
    return _finding(found["finding"][words[0]])


def _methods(tasks: Mapping[str, Sequence[Entry]]) -> str:
    """Methods one below the other, tasks beside each other: differences to all tokens."""
    names = list(dict.fromkeys(e["method"] for entries in tasks.values() for e in entries))
    by = {task: {e["method"]: e for e in entries} for task, entries in tasks.items()}
    rows = []
    for name in names:
        if name in _PLAIN:
            continue
        cells = [_beside_plain(by[task].get(name), kind) for task in tasks for kind in _KINDS]
        rows.append((f"`{name}`", *cells))
    head = [f"{task}: {kind}" for task in tasks for kind in _KINDS]
    return table(("minus `standard`", *head), rows)


_KINDS = ("target", "retention")


def _others(grids: Sequence[Mapping[str, Any]]) -> str:
    """A line a grid, task and method, where a task has more than one."""
    rows = [
        (
            f"{grid['model']}, {task}",
            f"`{entry['method']}`",
            number(entry["target"], 3),
            *(_beside_plain(entry, kind) for kind in _KINDS),
        )
        for grid in grids
        for task, entries in grid["tasks"].items()
        for entry in entries
        if len(entries) > 1
    ]
    return table(("model, task", "method", "target loss", "target", "retention"), rows)


def _options(tried: Sequence[Mapping[str, Any]]) -> str:
    """Each method beside the one that it adds an option to."""
    rows = [
        (
            f"{one['hypothesis']['what']} ({one['hypothesis']['task']})",
            f"`{one['hypothesis']['base']}`",
            _gap(one["target"]),
            _gap(one["retention"]),
        )
        for one in tried
    ]
    return table(("option (task)", "beside", "target", "retention"), rows)


def _finding(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """Areas under the curve by number, tasks beside each other."""
    first = next(iter(tasks.values()))
    names = [name for name in first if isinstance(first[name], dict)]
    rows = []
    for name in names:
        areas = [found[name] for found in tasks.values()]
        rows.append((name, *(f"{a['auc']:.2f} [{a['low']:.2f}, {a['high']:.2f}]" for a in areas)))
    heads = [f"{task} ({found['planted']:.0%} planted)" for task, found in tasks.items()]
    return table(("number", *heads), rows)


def _beside_plain(entry: Entry | None, kind: str) -> str:
    against = {} if entry is None else entry["against"][kind]
    return _gap(next((against[name] for name in _PLAIN if against.get(name)), None))


def _gap(gap: Gap | None) -> str:
    """Bold where three seeds leave 0 outside."""
    if gap is None:
        return "–"
    said = f"{gap['mean']:+.3f} [{gap['low']:+.3f}, {gap['high']:+.3f}]"
    apart = gap["seeds"] >= 3 and not gap["low"] <= 0 <= gap["high"]
    return f"**{said}**" if apart else said
