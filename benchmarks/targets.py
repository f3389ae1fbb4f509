"""The ratios that the project promises, by the name of their row, and whether a row meets them."""

from __future__ import annotations

from typing import Any

from benchmarks.pages import measured, number, span, table

Row = dict[str, Any]


TARGETS: dict[str, tuple[float | None, str]] = {
    "projected_vs_gram": (
        1 / (0.9 * 8),
        "projected against gram contraction, 16,384 validation tokens, d = 4096: "
        "0.9 of the FLOP ratio 8",
    ),
    "label_vs_step": (
        1.25,
        "all label values, K = all, against a plain training step",
    ),
    "label_vs_per_token": (None, "all T label values against T backward passes: 8 / T"),
    "score_overhead_k3": (
        1.12,
        "a step with `alphatoken` values at K = 3 of 28 layers, validation side apart",
    ),
    "score_peak_memory": (1.15, "its peak memory"),
    "time_exponent": (1.1, "exponent of the time in T, attention apart, to T = 8192"),
    **{
        f"time_exponent{of}_whole": (
            None,
            f"the exponent{says} with attention: that of the FLOPs plus 0.1",
        )
        for of, says in (("", ""), ("_label", " of `label`"))
    },
    "score_overhead_k3_fisher": (1.12, "the same step with both sides of M"),
    "score_peak_memory_fisher": (1.15, "its peak memory"),
    "time_exponent_label": (1.1, "the exponent of `label`"),
    "score_long": (0.9, "values at K = 3 and T = 4,096"),
    "checkpointed_peak_memory": (
        None,
        "peak memory with gradient checkpointing, G's pass in: `label` over all parameters 1.30, "
        "`walk` with its own steps 1.5",
    ),
    "time_against_validation": (
        1.1,
        "scoring against 16 times the validation rows, G built: as fast",
    ),
    **{
        f"{key}_{row}": (limit, says)
        for key in ("smollm2", "gemma3")
        for row, limit, says in (
            ("label_all", 1.1, "label values over all parameters"),
            ("observe_k3", None, "a step with values at K = 3: 1.05 of its floor"),
            ("first_use", 1.0, "the first use, G apart"),
            ("peak_memory", 1.15, "peak memory"),
            ("label_central", 0.68, "label values by two forwards"),
            ("label_one_sided", 0.34, "label values by one forward more, beside a step"),
            ("differences_peak", None, "the peak memory of both: a copy of the weights more"),
        )
        # Gemma's times have not been measured against TRL's own head.
        if key == "smollm2" or row in ("peak_memory", "differences_peak")
    },
}
"""Row that the default run measures -> the most that its ratio may be, and the promise in words;
with None the row brings its own limit."""


def judged(row: Row) -> Row:
    """The row with ``target`` and ``met``, both None where nothing is promised."""
    limit, _ = TARGETS.get(row["name"], (None, ""))
    limit = row.get("target") if limit is None else limit
    return {**row, "target": limit, "met": None if limit is None else row["ratio"] <= limit}


def table_of_targets() -> str:
    """What is promised, what is measured at the worst size, whether it is met; by device."""
    rows, lines = measured(), []
    for name, (_, promise) in TARGETS.items():
        own = [row for row in rows if row["name"] == name]
        for device in dict.fromkeys(row["device"] for row in own):
            here = [row for row in own if row["device"] == device]
            row = max(here, key=lambda one: one["ratio"] / one["target"])
            ratio = span((row["ratio"], row["low"], row["high"]), 3) if "low" in row else None
            lines.append(
                (
                    f"`{name}`: {promise}" + f" ({device})" * (device != "cpu"),
                    ratio or number(row["ratio"], 3),
                    number(row["floor"], 3),
                    number(row["target"], 3),
                    "yes" if row["met"] else "**no**",
                )
            )
    head = ("promise", "ratio", "floor", "target", "met")
    return table(head, lines)
