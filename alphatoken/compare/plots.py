"""Figures of a grid: target against retention, and time against target; one panel a task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alphatoken.compare.methods import START
from alphatoken.compare.tables import Line

__all__ = ["draw_quality", "draw_time"]

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "alphatoken",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "figure.facecolor": "white",
}
_MARKS = "osD^vP*Xhp<>d8"


def draw_quality(lines: Mapping[str, Sequence[Line]], path: Path) -> None:
    """Target against retention: a line's mean as a mark, its seeds as dots.

    A method that is far worse than the others stands at the edge with its value, off the scale.
    """
    _draw(lines, path, "target", "retention")


def draw_time(lines: Mapping[str, Sequence[Line]], path: Path) -> None:
    """Target against training time."""
    _draw(lines, path, "target", "time")


def _draw(tasks: Mapping[str, Sequence[Line]], path: Path, x: str, y: str) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(6.2 * len(tasks), 5.2))
        for number, (task, lines) in enumerate(tasks.items()):
            axis = figure.add_subplot(1, len(tasks), number + 1)
            shown = [line for line in lines if line.values(x) and line.values(y)]
            axis.set_title(task)
            units = {r["unit"] for line in lines for r in line.records if r.get("unit")}
            axis.set_xlabel(f"{x} ({' or '.join(sorted(units)) or 'no result'})")
            axis.set_ylabel(y if y != "time" else "training time (s)")
            if shown:
                _panel(axis, shown, x, y)
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None})
    text = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(line.rstrip() for line in text) + "\n", encoding="utf-8")


def _panel(axis: Any, lines: Sequence[Line], x: str, y: str) -> None:
    from matplotlib import colormaps

    colours = colormaps["tab20"]
    names = list(dict.fromkeys(line.policy for line in lines))
    means = sorted(_mean(line, x) for line in lines if line.policy != START) or [0.0]
    middle = means[len(means) // 2]
    edge = middle + 4 * max(means[3 * len(means) // 4] - means[len(means) // 4], 0.05)
    for line in lines:
        place = names.index(line.policy)
        colour = "black" if line.policy == START else colours(place % 20)
        fill = colour if line.mode == "native" else "none"
        label = f"{line.policy}, {line.mode}" if line.policy != START else "before training"
        at, up = _mean(line, x), _mean(line, y)
        if at > edge:
            axis.annotate(f"{label}: {at:.2f} →", (edge, up), ha="right", fontsize=7, color=colour)
            continue
        dots = zip(line.values(x), line.values(y), strict=False)
        for one in dots:
            axis.plot(*one, ".", color=colour, alpha=0.4, markersize=4)
        mark = _MARKS[place % len(_MARKS)]
        axis.plot(at, up, mark, color=colour, markerfacecolor=fill, markersize=8, label=label)
    axis.legend(fontsize=6, ncols=2, frameon=False, loc="best")


def _mean(line: Line, key: str) -> float:
    found = line.mean(key)
    assert found is not None
    return found
