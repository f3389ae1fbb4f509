"""docs/benchmarks.md and its figures, from the rows."""

from __future__ import annotations

from typing import Any

from benchmarks import plots, results, rungs
from benchmarks.results import Places
from benchmarks.targets import TARGETS

__all__ = ["page", "write_page"]

Row = dict[str, Any]

INTRODUCTION = """# Benchmarks

Written by `make bench` (the targets, about 25 minutes on two quiet cores) and `python -m
benchmarks.run --all` (every size); do not edit by hand. The same script runs on CUDA where there is
one. Every row is a ratio, ours / other, of two things measured in turn in one run: the median of
the pairwise ratios, quartiles in brackets. The floor is the ratio that the arithmetic alone asks
for: FLOPs of a partial backward, one contraction a scored linear, and the validation side where it
is timed. Times are seconds, memory is MiB. "of ceiling" is the share of the FLOP/s of one large
matrix product, measured in the same run, that our side and the other reach. A step is forward and
backward of all parameters; the optimizer is left out, which makes every overhead look larger.
Machines are shared and noisy: read the ratios, not the seconds.

Measured on: {machines}.

"""


def write_page(rows: list[Row], places: Places) -> None:
    """Page and figures; the JSON files are read, not written."""
    figures = plots.draw(rows, places.figures)
    results.write_text(places.page, page(rows, places, figures))


def page(rows: list[Row], places: Places, figures: list[tuple[str, str]]) -> str:
    """The page as Markdown.

    Args:
        rows: all of them.
        places: of the precision data and the notes.
        figures: (file name, what it shows) of those that could be drawn.
    """
    machines = sorted({", ".join(f"{k} {v}" for k, v in row["machine"].items()) for row in rows})
    parts = [INTRODUCTION.format(machines="; ".join(machines) or "nothing yet")]
    judged = [row for name in TARGETS for row in _worst(rows, name)]
    if judged:
        parts.append("## Targets\n\n" + targets_table(judged))
    for name, caption in figures:
        parts.append(f"\n![{caption}]({places.figures.name}/{name})\n\n*{caption}*\n")
    parts.append("\n## All measurements\n\n" + table(rows))
    if places.precision.exists():
        parts.append("\n" + rungs.section(rungs.read(places.precision)))
    if places.notes.exists():
        parts.append("\n" + places.notes.read_text(encoding="utf-8").rstrip() + "\n")
    return "".join(parts)


def _worst(rows: list[Row], name: str) -> list[Row]:
    """Of the rows of one target, on each device the one that comes off worst against it."""
    found: dict[str, Row] = {}
    for row in rows:
        if row["name"] != name or row.get("target") is None:
            continue
        held = found.setdefault(row.get("device", "cpu"), row)
        if row["ratio"] / row["target"] > held["ratio"] / held["target"]:
            found[row.get("device", "cpu")] = row
    return list(found.values())


def targets_table(rows: list[Row]) -> str:
    """What is promised, what is measured where it comes off worst, whether it is met."""
    lines = [
        "| promise | at its worst | device | ratio | floor | target | met |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        says = TARGETS[row["name"]].says
        target = "" if row.get("target") is None else f"{row['target']:.3g}"
        met = {True: "yes", False: "**no**", None: ""}[row.get("met")]
        lines.append(
            f"| `{row['name']}`: {says} | {row['size']} | {row.get('device', 'cpu')} "
            f"| {_ratio(row)} "
            f"| {row['floor']:.3g} | {target} | {met} |"
        )
    return "\n".join(lines) + "\n"


def table(rows: list[Row]) -> str:
    """A Markdown table of the rows."""
    lines = [
        "| measurement | size | ours | other | ratio | floor | target | tokens/s | of ceiling "
        "| remarks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        target = row.get("target")
        speed = f"{row['tokens_per_s']:.4g}" if "tokens_per_s" in row else ""
        shares = [row.get(f"share_of_ceiling_{side}") for side in ("ours", "other")]
        reached = ", ".join(f"{share:.0%}" for share in shares if share is not None)
        device = "" if row.get("device", "cpu") == "cpu" else f" ({row['device']})"
        lines.append(
            f"| {row['name']}{device} | {row['size']} | {row['ours']:.4g} | {row['other']:.4g} "
            f"| {_ratio(row)} | {row['floor']:.3g} | {'' if target is None else f'{target:.3g}'} "
            f"| {speed} | {reached} | {row['note']} |"
        )
    return "\n".join(lines) + "\n"


def _ratio(row: Row) -> str:
    spread = f" [{row['low']:.3g}, {row['high']:.3g}]" if "low" in row else ""
    return f"{row['ratio']:.3g}{spread}"
