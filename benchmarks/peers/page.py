"""The table of docs/peers.md, from benchmarks/results.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.pages import number, table
from benchmarks.peers.registry import ALL

_RESULTS = Path(__file__).resolve().parents[1] / "results.json"


def tables() -> str:
    """A line a peer: agreement, time and memory of ours over its own, and how it ranks tokens."""
    rows = json.loads(_RESULTS.read_text(encoding="utf-8"))
    lines = []
    for peer in ALL:
        found = {
            kind: [row for row in rows if row["name"] == f"peer_{kind}/{peer.name}"]
            for kind in ("time", "memory", "correlation")
        }
        time = _only(found["time"])
        lines.append(
            (
                f"`{peer.name}`",
                f"{time['agreement']:.0e}" if time else "–",
                number(time["ratio"] if time else None),
                number((_only(found["memory"]) or {}).get("ratio")),
                *(number(row["other"]) for row in found["correlation"]),
            )
        )
    head = ("peer", "differs from ours by", "time: ours / peer", "memory: ours / peer")
    return table((*head, "Spearman, near text", "Spearman, far text"), lines)


def _only(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    return rows[0] if rows else None
