"""Figures of docs/benchmarks.md, as SVG files: the same rows give the same bytes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from alphatoken.report.drawing import COLOURS, DASHES, MARKERS, canvas, save
from benchmarks.exponent import fitted_exponent

__all__ = ["draw"]

Row = dict[str, Any]


def draw(rows: Sequence[Row], folder: Path) -> list[tuple[str, str]]:
    """Draw what the rows allow; (file name, caption) of each figure that exists afterwards."""
    figures: list[tuple[str, str, Callable[[Any, Sequence[Row]], bool], tuple[float, float]]] = [
        (
            "targets.svg",
            "Ratios with a target, over their floor (bars: quartiles; mark: the target)",
            lambda figure, rows: _ratios(figure, _promised(rows)),
            (7.2, 0.34 * len(_promised(rows)) + 1.2),
        ),
        (
            "ratios.svg",
            "The other ratios over their floor (bars: quartiles)",
            lambda figure, rows: _ratios(figure, _others(rows)),
            (7.2, 0.28 * len(_others(rows)) + 1.2),
        ),
        (
            "contraction.svg",
            "Projected over gram contraction against the number of validation tokens, d = 1024",
            _contraction,
            (6.0, 3.6),
        ),
        (
            "time.svg",
            "Scoring time against T, whole and without attention; lines are the fits",
            _time,
            (6.0, 3.6),
        ),
        ("memory.svg", "Peak memory above the bare process against T", _memory, (6.0, 3.6)),
    ]
    drawn = []
    for name, caption, paint, size in figures:
        with canvas(*size) as figure:
            if not paint(figure, rows):
                continue
            folder.mkdir(parents=True, exist_ok=True)
            save(figure, folder / name)
        drawn.append((name, caption))
    return drawn


def _timed(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["floor"] > 0 and row.get("unit") != "exponent"]


def _promised(rows: Sequence[Row]) -> list[Row]:
    return [row for row in _timed(rows) if row.get("target") is not None]


def _others(rows: Sequence[Row]) -> list[Row]:
    return [row for row in _timed(rows) if row.get("target") is None]


def _ratios(figure: Any, shown: Sequence[Row]) -> bool:
    """Ratio over floor, one line a row; the floor is the line at 1, the target a mark."""
    if not shown:
        return False
    panel = figure.subplots()
    for place, row in enumerate(reversed(shown)):
        floor = row["floor"]
        ratio, target = row["ratio"] / floor, row.get("target")
        low, high = row.get("low", row["ratio"]) / floor, row.get("high", row["ratio"]) / floor
        panel.hlines(place, low, high, color=COLOURS[0], linewidth=3, alpha=0.5)
        panel.plot(ratio, place, MARKERS[0], color=COLOURS[0], markersize=4)
        if target is not None:
            colour = COLOURS[1] if row["ratio"] > target else COLOURS[2]
            panel.plot(target / floor, place, "|", color=colour, markersize=9, markeredgewidth=2)
    panel.axvline(1, color=COLOURS[4], linewidth=1)
    panel.set_xscale("log")
    ticks = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8)
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.minorticks_off()
    panel.set_ylim(-1, len(shown))
    panel.set_yticks(range(len(shown)), [_label(row) for row in reversed(shown)], fontsize=6.5)
    panel.set_xlabel("ratio over floor; upright mark: target")
    return True


def _label(row: Row) -> str:
    device = "" if row.get("device", "cpu") == "cpu" else f", {row['device']}"
    return f"{row['name']}{device}: {_shortened(row['size'])}"


def _shortened(size: str, most: int = 60) -> str:
    """Whole words."""
    if len(size) <= most:
        return size
    return size[:most].rsplit(" ", 1)[0].rstrip(",;") + " ..."


def _contraction(figure: Any, rows: Sequence[Row]) -> bool:
    series = {
        "G at hand": "projected_vs_gram_sizes",
        "G built anew": "projected_vs_gram_built_sizes",
    }
    found = {
        label: [row for row in rows if row["name"] == name and row.get("device", "cpu") == "cpu"]
        for label, name in series.items()
    }
    if not any(found.values()):
        return False
    panel = figure.subplots()
    for index, (label, line) in enumerate(found.items()):
        counts = [row["validation_tokens"] for row in line]
        ratios = [row["ratio"] for row in line]
        bars = [
            [row["ratio"] - row["low"] for row in line],
            [row["high"] - row["ratio"] for row in line],
        ]
        style = {"color": COLOURS[index], "marker": MARKERS[index], "linestyle": DASHES[0]}
        panel.errorbar(counts, ratios, yerr=bars, label=label, **style)
        floors = [row["floor"] for row in line]
        panel.plot(counts, floors, color=COLOURS[index], linestyle=":", label=f"{label}, FLOPs")
    panel.axhline(1, color=COLOURS[4], linewidth=1)
    panel.set(xscale="log", yscale="log", xlabel="validation tokens", ylabel="projected / gram")
    panel.legend(frameon=False)
    return True


def _time(figure: Any, rows: Sequence[Row]) -> bool:
    shown = [row for row in rows if row.get("samples") and row.get("device", "cpu") == "cpu"]
    if not shown:
        return False
    panel = figure.subplots()
    for index, row in enumerate(shown):
        estimator = row["size"].split(",")[0]
        lengths = sorted({int(s["length"]) for s in row["samples"]})
        for place, (apart, name) in enumerate(((True, "without attention"), (False, "whole"))):
            seconds = [
                statistics.median(
                    s["seconds"] - apart * s["attention"]
                    for s in row["samples"]
                    if s["length"] == length
                )
                for length in lengths
            ]
            slope = fitted_exponent(lengths, seconds)[0]
            panel.plot(
                lengths,
                seconds,
                color=COLOURS[index],
                marker=MARKERS[2 * index + place],
                linestyle=DASHES[place],
                label=f"{estimator}, {name}: T^{slope:.2f}",
            )
    panel.set(xscale="log", yscale="log", xlabel="T", ylabel="seconds")
    _lengths(panel, lengths)
    panel.legend(frameon=False)
    return True


def _lengths(panel: Any, lengths: Sequence[int]) -> None:
    panel.set_xticks(lengths, [str(length) for length in lengths])
    panel.minorticks_off()


def _memory(figure: Any, rows: Sequence[Row]) -> bool:
    shown = [
        row
        for row in rows
        if row["name"] == "score_peak_memory_length" and row.get("device", "cpu") == "cpu"
    ]
    if not shown:
        return False
    panel = figure.subplots()
    lines: dict[str, dict[int, float]] = {}
    for row in shown:
        lines.setdefault(row["size"].split(",")[0], {})[row["length"]] = row["ours"]
        lines.setdefault("training step", {})[row["length"]] = row["other"]
    lengths = sorted({row["length"] for row in shown})
    for index, (label, points) in enumerate(lines.items()):
        style = {"color": COLOURS[index], "marker": MARKERS[index], "linestyle": DASHES[index]}
        panel.plot(list(points), list(points.values()), label=label, **style)
    panel.set(xscale="log", yscale="log", xlabel="T", ylabel="MiB above the bare process")
    _lengths(panel, lengths)
    panel.legend(frameon=False)
    return True
