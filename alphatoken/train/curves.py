"""Curves over training steps: told apart by colour, by dashes and by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.report.drawing import COLOURS, DASHES, canvas, svg_text
from alphatoken.report.numbers import number
from alphatoken.report.page import Picture, anchor_of

__all__ = ["CHARTS", "ChartSpec", "charts"]


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
    zero: bool = True


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
        zero=False,
    ),
    ChartSpec(
        "Validation objective",
        "On the validation rows that were drawn, and on those that are only watched.",
        {"alpha/validation_pool": "drawn rows", "alpha/validation_held_out": "held out"},
        zero=False,
    ),
    ChartSpec(
        "Validation gap",
        "Held-out minus drawn: where it grows, the run fits the validation rows themselves.",
        {"alpha/validation_gap": "gap"},
    ),
    ChartSpec(
        "Share kept",
        "Response tokens with a positive weight, and the mean weight of a response token.",
        {_KEPT: "kept", _WEIGHT: "mean weight"},
    ),
    ChartSpec(
        "Value of a token",
        "Of the totals since the log before.",
        {"alpha/total_mean": "mean", "alpha/total_std": "standard deviation"},
    ),
    ChartSpec(
        "What the value is made of",
        "Each component's share of the summed magnitudes, stability with its weight.",
        {f"alpha/{key}_share": name for key, name in _PARTS.items()},
    ),
    ChartSpec(
        "Balance",
        "‖λV‖ / ‖G‖, median over the scored matrices: far from 1, one side decides alone.",
        {"alpha/balance": "balance"},
    ),
    ChartSpec(
        "Drift",
        "Distance of the scored weights from the reference, relative to its norm.",
        {"alpha/relative_drift": "relative drift"},
    ),
    ChartSpec(
        "Preference margin",
        "TRL's reward margin of the pairs trained on.",
        {"rewards/margins": "margin"},
    ),
    ChartSpec(
        "Pairs ranked right",
        "Share of pairs whose chosen side has the higher reward.",
        {"rewards/accuracies": "accuracy"},
    ),
    ChartSpec("Gradient norm", "Before clipping.", {"grad_norm": "norm"}),
    ChartSpec("Learning rate", "As scheduled.", {"learning_rate": "rate"}),
    ChartSpec(
        "Speed",
        "Tokens a second, over all processes.",
        {"alpha/tokens_per_second": "tokens/s"},
    ),
    ChartSpec(
        "Scoring",
        "Seconds since the log before: of scoring, and of the validation and retention gradients "
        "that values are taken against.",
        {"alpha/scoring_seconds": "scoring", "alpha/direction_seconds": "gradients"},
    ),
)


def charts(history: Sequence[Mapping[str, Any]]) -> list[Picture]:
    """All charts for which something was logged, from a trainer's ``log_history``."""
    drawn = (_chart(spec, history) for spec in CHARTS)
    return [chart for chart in drawn if chart is not None]


def _chart(spec: ChartSpec, history: Sequence[Mapping[str, Any]]) -> Picture | None:
    lines = {key: points for key in spec.keys if (points := logged(history, key)) is not None}
    weight, kept = lines.get(_WEIGHT), lines.get(_KEPT)
    if weight is not None and kept is not None and np.array_equal(weight, kept, equal_nan=True):
        del lines[_WEIGHT]  # of a mask they are the same
    if not lines:
        return None
    steps = np.concatenate([points[0] for points in lines.values()])
    first, last = min(steps.min(), 0.0), max(steps.max(), 1.0)
    names = {
        key: f"{spec.keys[key]} {number(points[1][np.isfinite(points[1])][-1])}"
        for key, points in lines.items()
    }
    with canvas(3.75, 2.5) as figure:
        axes = figure.subplots()
        for index, (key, points) in enumerate(lines.items()):
            axes.plot(
                *points,
                color=COLOURS[index],
                linestyle=DASHES[index],
                label=names[key],
                marker="o" if (lonely := _lonely(points[1])) else "",
                markersize=3,
                markevery=lonely,
                gid=anchor_of(key),
            )
        axes.set_xlim(first, last)
        if spec.zero:
            axes.update_datalim([(first, 0.0)])
            axes.autoscale_view(scalex=False)
        axes.locator_params(axis="x", nbins=6, integer=True)
        axes.ticklabel_format(useOffset=False)
        figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=8)
        svg = svg_text(figure)
        box = axes.get_position()
    return Picture(
        anchor_of(spec.title),
        spec.title,
        spec.meaning,
        svg,
        alt=f"{spec.title} from step {first:.0f} to {last:.0f}; last: {', '.join(names.values())}",
        data={
            "keys": "|".join(lines),
            "names": "|".join(spec.keys[key] for key in lines),
            "steps": f"{first} {last}",
            "box": f"{box.x0:.4f} {box.x1:.4f} {1 - box.y1:.4f} {1 - box.y0:.4f}",
        },
    )


Points = NDArray[np.float64]


def logged(history: Sequence[Mapping[str, Any]], key: str) -> Points | None:
    """(2, n) steps and values of every log that has the key; NaN, a gap, where not finite."""
    found = [
        (entry["step"], entry[key])
        for entry in history
        if all(isinstance(entry.get(name), (int, float)) for name in (key, "step"))
    ]
    points: Points = np.array(found, dtype=np.float64).reshape(-1, 2).T
    points[1][~np.isfinite(points[1])] = np.nan
    return points if np.isfinite(points[1]).any() else None


def _lonely(values: Points) -> list[int]:
    """Places of points with a gap on both sides, which no line shows."""
    gap = np.isnan(np.concatenate([[np.nan], values, [np.nan]]))
    places: list[int] = np.flatnonzero(~gap[1:-1] & gap[:-2] & gap[2:]).tolist()
    return places
