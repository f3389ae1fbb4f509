"""Tables of docs/gpu.md, from benchmarks/gpu.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import load, table

JSON = Path(__file__).resolve().parents[1] / "gpu.json"


def tables() -> str:
    """All parts that were asked; one sentence where none was."""
    report = load(JSON)
    if not report:
        return "**No figure of a GPU exists yet**: none could be had.\n"
    parts: list[str] = [", ".join(f"{k} {v}" for k, v in report["machine"].items()) + ".\n"]
    for name, part in report["parts"].items():
        rows = _numbers(part["rows"]) if name == "numbers" else part["rows"]
        head = list(dict.fromkeys(key for row in rows for key in row))
        body = [[_cell(row.get(key)) for key in head] for row in rows]
        failed = f"**Failed**: {part['error']}\n\n" if part["error"] else ""
        parts.append(f"### {name}\n\n{failed}{table(head, body)}")
    return "\n".join(parts)


def _numbers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The worst error over estimators and layouts, by precision and kernel; one line for kernels
    that never ran for the same reason."""
    by: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        by.setdefault((row["precision"], row["kernel"]), []).append(row)
    worst, refused = [], dict[str, list[str]]()
    for (precision, kernel), group in by.items():
        ran = [row for row in group if row["error"] is not None]
        why = _reason(next((r["why"] for r in group if r["error"] is None), ""))
        if not ran:
            refused.setdefault(why, []).append(f"{kernel} ({precision})")
            continue
        worst.append(
            {
                "precision": precision,
                "kernel": kernel,
                "ran": f"{len(ran)} of {len(group)}",
                "worst error": max(row["error"] for row in ran),
                "beyond what is allowed": sum(row["ok"] is False for row in group),
                "why others did not": why,
            }
        )
    for why, names in refused.items():
        worst.append({"kernel": ", ".join(names), "ran": "0", "why others did not": why})
    return worst


def _reason(why: str) -> str:
    """The first sentence of the message, without the class of its error."""
    kind, _, message = why.partition(": ")
    return "not installed" if kind == "ImportError" else (message or kind).split(". ")[0]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.3g}" if isinstance(value, float) else str(value).replace("\n", " ")
