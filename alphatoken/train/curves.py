"""Curves over training steps as inline SVG: told apart by colour, by dashes and by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alphatoken.report.build import number

__all__ = ["CHARTS", "Chart", "ChartSpec", "Curve", "charts"]

WIDTH, HEIGHT = 360, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 10, 26
_MOST_POINTS = 400

# Okabe and Ito's palette, without yellow: distinct under the common colour-vision deficiencies,
# and dark enough for a thin line on white. Dashes tell the lines apart without any colour.
COLOURS = ("#0072b2", "#d55e00", "#007a5e", "#a3507f", "#3c3c3c")
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 4")


@dataclass(frozen=True)
class ChartSpec:
    """A chart that is drawn if any of its keys was logged.

    Attributes:
        title: its heading.
        meaning: a sentence for the reader.
        keys: logged name -> name in the legend.
        zero: whether the axis must show 0.
    """

    title: str
    meaning: str
    keys: Mapping[str, str]
    zero: bool = False


_KEPT, _WEIGHT = "alpha/kept_share", "alpha/weight_share"
_PARTS = {
    "adaptation": "adaptation",
    "stability": "stability",
    "adaptation_direct": "adaptation, direct",
    "adaptation_causal": "adaptation, causal",
    "stability_direct": "stability, direct",
    "stability_causal": "stability, causal",
}

CHARTS: tuple[ChartSpec, ...] = (
    ChartSpec(
        "Loss",
        "The trainer's own loss over all response tokens, kept or not.",
        {"loss": "training", "eval_loss": "evaluation"},
    ),
    ChartSpec(
        "Validation objective",
        "On the validation rows that were drawn, and on those that are only watched.",
        {"alpha/validation_pool": "drawn rows", "alpha/validation_held_out": "held out"},
    ),
    ChartSpec(
        "Validation gap",
        "Held-out minus drawn: where it grows, the run fits the validation rows themselves.",
        {"alpha/validation_gap": "gap"},
        zero=True,
    ),
    ChartSpec(
        "Share kept",
        "Response tokens with a positive weight, and the mean weight of a response token.",
        {_KEPT: "kept", _WEIGHT: "mean weight"},
        zero=True,
    ),
    ChartSpec(
        "Value of a token",
        "Median and central 90 % of the totals since the log before.",
        {"alpha/total_median": "median", "alpha/total_q05": "5 %", "alpha/total_q95": "95 %"},
        zero=True,
    ),
    ChartSpec(
        "What the value is made of",
        "Each component's share of the summed magnitudes, stability with its weight.",
        {f"alpha/{key}_share": name for key, name in _PARTS.items()},
        zero=True,
    ),
    ChartSpec(
        "Balance",
        "‖λV‖ / ‖G‖, median over the scored matrices: far from 1, one side decides alone.",
        {"alpha/balance": "balance"},
        zero=True,
    ),
    ChartSpec(
        "Drift",
        "Distance of the scored weights from the reference, relative to its norm.",
        {"alpha/relative_drift": "relative drift"},
        zero=True,
    ),
    ChartSpec(
        "Preference margin",
        "TRL's reward margin of the pairs trained on.",
        {"rewards/margins": "margin"},
        zero=True,
    ),
    ChartSpec(
        "Pairs ranked right",
        "Share of pairs whose chosen side has the higher reward.",
        {"rewards/accuracies": "accuracy"},
        zero=True,
    ),
    ChartSpec("Gradient norm", "Before clipping.", {"grad_norm": "norm"}, zero=True),
    ChartSpec("Learning rate", "As scheduled.", {"learning_rate": "rate"}, zero=True),
    ChartSpec(
        "Speed",
        "Tokens a second, over all processes.",
        {"alpha/tokens_per_second": "tokens/s"},
        zero=True,
    ),
    ChartSpec(
        "Scoring",
        "Seconds since the log before: of scoring (reused values cost none), and of the validation "
        "and retention gradients that values are taken against.",
        {"alpha/scoring_seconds": "scoring", "alpha/direction_seconds": "gradients"},
        zero=True,
    ),
)


@dataclass(frozen=True)
class Curve:
    """One line: its SVG path, and what a reader of the legend sees."""

    key: str
    name: str
    path: str
    dots: list[tuple[float, float]]
    colour: str
    dash: str
    last: str


@dataclass(frozen=True)
class Tick:
    """A mark on an axis, in the drawing's own units."""

    place: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A drawing with its axes."""

    title: str
    meaning: str
    curves: list[Curve]
    x: list[Tick]
    y: list[Tick]
    first: float
    last: float
    low: float
    high: float
    width: int = WIDTH
    height: int = HEIGHT
    left: int = _LEFT
    right: int = WIDTH - _RIGHT
    top: int = _TOP
    bottom: int = HEIGHT - _BOTTOM


def charts(history: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """All charts for which something was logged, from a trainer's ``log_history``."""
    drawn = (_chart(spec, history) for spec in CHARTS)
    return [chart for chart in drawn if chart is not None]


def _chart(spec: ChartSpec, history: Sequence[Mapping[str, Any]]) -> Chart | None:
    lines = {key: _points(history, key) for key in spec.keys}
    lines = {key: points for key, points in lines.items() if points}
    if lines.get(_WEIGHT) == lines.get(_KEPT):  # of a mask they are the same
        lines.pop(_WEIGHT, None)
    values = [v for points in lines.values() for _, v in points if v is not None]
    steps = [s for points in lines.values() for s, _ in points]
    if not values:
        return None
    low, high = (min(*values, 0.0), max(*values, 0.0)) if spec.zero else (min(values), max(values))
    if low == high:
        low, high = low - (abs(low) or 1.0) / 10, high + (abs(high) or 1.0) / 10
    y_ticks = _ticks(low, high, 5)
    low, high = min(low, y_ticks[0]), max(high, y_ticks[-1])
    first, last = min(*steps, 0.0), max(*steps, 1.0)

    def x(step: float) -> float:
        return round(_LEFT + (step - first) / (last - first) * (WIDTH - _LEFT - _RIGHT), 1)

    def y(value: float) -> float:
        return round(_TOP + (high - value) / (high - low) * (HEIGHT - _TOP - _BOTTOM), 1)

    curves = []
    for index, (key, points) in enumerate(lines.items()):
        placed = [(x(s), None if v is None else y(v)) for s, v in _thin(points)]
        shown = [v for _, v in points if v is not None]
        curves.append(
            Curve(
                key=key,
                name=spec.keys[key],
                path=_path(placed),
                dots=_lonely(placed),
                colour=COLOURS[index % len(COLOURS)],
                dash=DASHES[index % len(DASHES)],
                last=_last(shown[-1]) if shown else "–",
            )
        )
    return Chart(
        title=spec.title,
        meaning=spec.meaning,
        curves=curves,
        x=[Tick(x(s), f"{s:,.0f}") for s in _ticks(first, last, 5) if s == int(s)],
        y=[Tick(y(v), _short(v, y_ticks[1] - y_ticks[0])) for v in y_ticks],
        first=first,
        last=last,
        low=low,
        high=high,
    )


Points = Sequence[tuple[float, float | None]]


def _points(history: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float | None]]:
    """(step, value) of every log that has the key; None, a gap, where it is not finite."""
    found: list[tuple[float, float | None]] = []
    for entry in history:
        value = entry.get(key)
        if isinstance(value, (int, float)) and isinstance(entry.get("step"), (int, float)):
            found.append((float(entry["step"]), float(value) if math.isfinite(value) else None))
    return found if any(value is not None for _, value in found) else []


def _thin(points: Points) -> Points:
    """At most so many points, keeping the lowest and the highest of each stretch."""
    if len(points) <= _MOST_POINTS:
        return points
    stretch = -(-len(points) * 2 // _MOST_POINTS)
    kept = {points[-1]}
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        finite = [p for p in part if p[1] is not None]
        if len(finite) < len(part):  # keep the gap
            kept.add(next(p for p in part if p[1] is None))
        if finite:
            ends = {min(finite, key=lambda p: p[1] or 0.0), max(finite, key=lambda p: p[1] or 0.0)}
            kept |= ends
    return sorted(kept, key=lambda p: p[0])


def _path(placed: Points) -> str:
    """Lines between neighbours; a gap begins a new one."""
    parts = []
    begin = True
    for x, y in placed:
        if y is None:
            begin = True
            continue
        parts.append(f"{'M' if begin else 'L'}{x:g} {y:g}")
        begin = False
    return "".join(parts)


def _lonely(placed: Points) -> list[tuple[float, float]]:
    """Points with a gap on both sides, which no line shows."""
    heights = [None, *(y for _, y in placed), None]
    return [
        (x, y)
        for (x, y), before, after in zip(placed, heights, heights[2:], strict=False)
        if y is not None and before is None and after is None
    ]


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers that span [low, high] from below to above.

    >>> _ticks(0.0, 0.93, 5)
    [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    span = high - low
    size = 10.0 ** math.floor(math.log10(span / most))
    step = next(s * size for s in (1, 2, 2.5, 5, 10, 20) if span / (s * size) <= most - 1)
    start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(start, end + 1)]


def _last(value: float) -> str:
    """The number in the legend."""
    if 1e3 <= abs(value) < 1e6:
        return f"{value:,.0f}".replace("-", "\u2212")
    return number(value).removeprefix("+")


def _short(value: float, step: float) -> str:
    """A tick's number with the decimals that its step needs."""
    if value == 0:
        return "0"
    if abs(value) >= 1e5 or step < 1e-4:
        return number(value, 2).removeprefix("+")
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) + (f"{step:e}"[2] == "5")
    return f"{value:,.{decimals}f}".replace("-", "\u2212")
