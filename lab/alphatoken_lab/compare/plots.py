"""Figures of a task: what each method learnt and kept, and what it cost; one line a method."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphatoken.report.drawing import COLOURS, canvas, save
from alphatoken_lab.compare.methods import PLAIN, START
from alphatoken_lab.compare.tables import Line

__all__ = ["draw_cost", "draw_quality", "upper_limit"]

_BLUE, _RED, _GREEN, _, _BLACK, _SKY, _ORANGE = COLOURS
_CONTROLS = (START, "random", "bottom", *PLAIN.values())
_VALUES = ("alphatoken", "label")
_LINE = 0.19  # inches of one method

_PARTS = (
    ("training", None, "#b8b8b8"),
    ("validation and retention gradients", "direction_time", _BLUE),
    ("scoring", "scoring_time", _RED),
)


def draw_quality(lines: Sequence[Line], path: Path) -> bool:
    """Retention and target of each method, best overall first; False if nothing was measured.

    A mark is the mean (filled: native, hollow: budget), strokes are seeds; dashed lines are
    training on all tokens and the model before training. A method far worse than the others stands
    at the edge, as an arrow with its value. Black are controls, red what selects by token value.
    """
    keys = [k for k in ("retention", "target") if any(line.values(k) for line in lines)]
    shown = [line for line in lines if all(line.values(key) for key in keys)]
    if not keys or not shown:
        return False
    higher = _unit(lines) == "score"
    rank = "overall" if all(line.values("overall") for line in shown) else keys[-1]
    shown.sort(key=lambda line: _mean(line, rank), reverse=higher)
    with canvas(8.2, 1.1 + _LINE * len(shown)) as figure:
        panels = figure.subplots(1, len(keys), sharey=True, squeeze=False)[0]
        for key, axes in zip(keys, panels, strict=True):
            better = "higher" if higher else "lower"
            axes.set_xlabel(f"{key}: {_unit(lines)}, {better} is better")
            _dots(axes, shown, key, higher)
        _names(panels[0], shown)
        save(figure, path)
    return True


def draw_cost(lines: Sequence[Line], path: Path) -> bool:
    """Training time in its parts, and peak memory; False if nothing was measured."""
    shown = [line for line in lines if line.values("time")]
    if not shown:
        return False
    with canvas(8.2, 1.3 + _LINE * len(shown)) as figure:
        time, memory = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
        left = [0.0] * len(shown)
        for label, key, colour in _PARTS:
            width = [_part(line, key) for line in shown]
            time.barh(range(len(shown)), width, left=left, color=colour, label=label, height=0.7)
            left = [a + b for a, b in zip(left, width, strict=True)]
        before = [line.mean("setup_time") or 0.0 for line in shown]
        time.barh(
            range(len(shown)), before, left=left, height=0.7, label="before training",
            color="none", edgecolor="#8a8a8a", hatch="////", linewidth=0.5,
        )  # fmt: skip
        time.set_xlabel("seconds")
        time.set_axisbelow(True)
        figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=8)
        _dots(memory, shown, "peak_memory", False, scale=1e6, line=False)
        memory.set_xlabel("peak memory (MB)")
        _names(time, shown)
        save(figure, path)
    return True


def _part(line: Line, key: str | None) -> float:
    """Seconds of one part; of the rest if it has no key."""
    if key is not None:
        return line.mean(key) or 0.0
    return _mean(line, "time") - sum(_part(line, k) for _, k, _ in _PARTS if k is not None)


def upper_limit(means: Sequence[float]) -> float:
    """Where a scale ends that shows the bulk: four quartile distances above the median.

    The largest mean if that is below it.
    """
    ordered = sorted(means)
    if len(ordered) < 4:
        return ordered[-1]
    first, middle, third = statistics.quantiles(ordered, n=4, method="inclusive")
    return min(ordered[-1], middle + 4 * max(third - first, 0.02 * abs(middle)))


def _dots(
    axes: Any, lines: Sequence[Line], key: str, higher: bool, *, scale: float = 1.0,
    line: bool = True,
) -> None:  # fmt: skip
    """Mean and seeds of each method in its line."""
    means = [_mean(one, key) / scale for one in lines]
    trained = [m for m, one in zip(means, lines, strict=True) if one.policy != START]
    edge = float("inf") if higher else upper_limit(trained or means)
    inside = [m for m in means if m <= edge]
    margin = 0.06 * (max(inside) - min(inside) or abs(max(inside)) or 1.0)
    for place, (one, mean) in enumerate(zip(lines, means, strict=True)):
        colour = _colour(one)
        if line and one.policy in (START, *PLAIN.values()) and mean <= edge:
            axes.axvline(mean, color=colour, linestyle="--", linewidth=0.8, zorder=0)
        if mean > edge:
            text = f"{mean:.2f} \N{BLACK RIGHT-POINTING TRIANGLE}"
            axes.text(
                max(inside) + margin, place, text, ha="right", va="center", color=colour, size=7.5
            )
            continue
        seeds = [value / scale for value in one.values(key)]
        axes.plot(seeds, [place] * len(seeds), "|", color=colour, alpha=0.6, markersize=7)
        face = colour if one.mode == "native" else "white"
        axes.plot(mean, place, "o", color=colour, markerfacecolor=face, markersize=5)
    axes.set_axisbelow(True)
    axes.set_xlim(min(inside) - margin, max(inside) + margin)


def _names(axes: Any, lines: Sequence[Line]) -> None:
    budget = {line.policy for line in lines if line.mode == "budget"}
    both = {line.policy for line in lines if line.mode == "native"} & budget
    axes.set_yticks(
        range(len(lines)),
        [f"{one.policy} ({one.mode})" if one.policy in both else one.policy for one in lines],
        fontsize=8,
    )
    for tick, one in zip(axes.get_yticklabels(), lines, strict=True):
        tick.set_color(_colour(one))
    axes.set_ylim(len(lines) - 0.4, -0.6)


def _colour(line: Line) -> str:
    if line.policy in _CONTROLS:
        return _BLACK
    by_value = line.policy in _VALUES or bool(line.mean("direction_time"))
    return _RED if by_value else _BLUE


def _unit(lines: Sequence[Line]) -> str:
    units = {str(r["unit"]) for line in lines for r in line.records if r.get("unit")}
    return " or ".join(sorted(units))


def _mean(line: Line, key: str) -> float:
    found = line.mean(key)
    assert found is not None
    return found
