"""The pictures of the diagnostic ``utility``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import COLOURS, DASHES, MARKERS, canvas, finish
from alphatoken.fidelity.prediction import Prediction

__all__ = ["draw"]


def draw(
    left_out: Table,
    predictions: Sequence[Prediction],
    etas: Sequence[float],
    errors: Mapping[str, Sequence[float]],
    eta: float,
    selection: Table,
) -> tuple[Figure, ...]:
    """All figures.

    Args:
        left_out: every token and random group, its actual effect, and each prediction.
        predictions: the first is the best; one of them may be the user's own.
        etas: step sizes of the sweep.
        errors: relative errors by name.
        eta: the user's step size.
        selection: what selection would leave out.
    """
    shown = [p for p in predictions if p.own or p is predictions[0]]
    figures = [_scatter(left_out, shown), _sweep(etas, errors, eta)]
    if selection.rows:
        figures.append(_selection(selection, predictions[0]))
    return tuple(figures)


def _scatter(left_out: Table, shown: Sequence[Prediction]) -> Figure:
    title = "Predicted against actual effect of leaving tokens out"
    records = left_out.records()
    with canvas(3.4 * max(len(shown), 1.5), 3.6) as figure:
        panels = figure.subplots(1, len(shown), squeeze=False)[0]
        for axes, prediction in zip(panels, shown, strict=True):
            _panel(axes, records, prediction)
        panels[0].set_ylabel("actual change of the validation loss")
        columns = ("left_out", "tokens", "actual", *(p.name for p in shown))
        data = [{name: record[name] for name in columns} for record in records]
        return finish(
            figure,
            "scatter",
            title,
            "Each mark is one token (circle) or one random group (square) left out of a real "
            "step. On the dashed line the prediction is right; a cloud without slope means that "
            "the value says nothing about what the step does. Without a dashed line the value is "
            "not in units of the loss, and only the order counts. Axes are linear near 0 and "
            "logarithmic beyond.",
            Table.of("scatter", title, data),
            alt="Scatter of predicted against actual change of the validation loss.",
        )


def _panel(axes: Any, records: Sequence[Mapping[str, Any]], prediction: Prediction) -> None:
    name = prediction.name
    sizes = sorted(abs(float(r["actual"])) for r in records)
    small = max(sizes[len(sizes) // 4], 1e-300)
    for place, single in enumerate((True, False)):
        chosen = [r for r in records if (r["tokens"] == 1) == single]
        axes.plot(
            [float(r[name]) for r in chosen],
            [float(r["actual"]) for r in chosen],
            MARKERS[place],
            color=COLOURS[place],
            markersize=4,
            alpha=0.8,
            label="one token" if single else "random group",
        )
    spread = sorted(abs(float(r[name])) for r in records)
    scale = small if prediction.calibrated else max(spread[len(spread) // 4], 1e-300)
    axes.set_xscale("symlog", linthresh=scale)
    axes.set_yscale("symlog", linthresh=small)
    axes.set_xticks(_ticks(axes.get_xlim(), scale))
    axes.set_yticks(_ticks(axes.get_ylim(), small))
    axes.minorticks_off()
    axes.tick_params(labelsize=7)
    if prediction.calibrated:
        ends = [min(min(axes.get_xlim()), 0.0), max(axes.get_xlim())]
        axes.plot(ends, ends, "--", color="#888888", linewidth=1, label="right")
    axes.set_xlabel("predicted" if prediction.calibrated else "value, times the step size")
    axes.set_title(name + (" (yours)" if prediction.own else ""), fontsize=8)
    axes.legend(fontsize=7)


def _ticks(limits: tuple[float, float], scale: float) -> list[float]:
    """0 and, on each side, the highest power of ten inside that is beyond the linear part."""
    found = [0.0]
    for end in limits:
        power = 10.0 ** math.floor(math.log10(abs(end))) if end else 0.0
        if power > 3 * scale:
            found.append(math.copysign(power, end))
    return sorted(found)


def _sweep(etas: Sequence[float], errors: Mapping[str, Sequence[float]], eta: float) -> Figure:
    title = "Where first order breaks: error of the prediction by step size"
    with canvas(6.8, 4.4) as figure:
        axes = figure.add_subplot()
        for place, (name, values) in enumerate(errors.items()):
            axes.plot(
                etas, values, label=name, color=COLOURS[place], marker=MARKERS[place],
                linestyle=DASHES[place], markersize=4,
            )  # fmt: skip
        axes.axvline(eta, color="#888888", linewidth=1, label="your step size")
        for limit in (0.1, 0.5):
            axes.axhline(limit, color="#888888", linestyle=":", linewidth=0.8)
            axes.annotate(
                f"{limit:.0%}", (1.01, limit), xycoords=("axes fraction", "data"), fontsize=7,
                va="center",
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("step size")
        axes.set_ylabel("||predicted - actual|| / ||actual||")
        figure.legend(fontsize=7, ncols=3, loc="outside lower center")
        data = [
            {"step_size": step} | {name: values[place] for name, values in errors.items()}
            for place, step in enumerate(etas)
        ]
        return finish(
            figure,
            "linearisation",
            title,
            "To the right lines rise because a step is not infinitesimal: read where they cross "
            "10 % and 50 %. A line that rises to the left as well shows rounding: differences of "
            "losses cancel. The lines with the true step leave only the curvature of the loss; "
            "where they lie far below, the optimizer's own linearisation is what fails.",
            Table.of("linearisation", title, data),
            alt="Relative error of the prediction against the step size, both logarithmic.",
        )


def _selection(selection: Table, best: Prediction) -> Figure:
    title = "What leaving a part of the tokens out does to the validation loss"
    records = selection.records()
    with canvas(6.4, 1.2 + 0.4 * len(records)) as figure:
        axes = figure.add_subplot()
        for place, record in enumerate(records):
            ends = [float(record["actual"] or 0), float(record[best.name] or 0)]
            axes.plot(ends, [place, place], color="#bbbbbb", linewidth=1, zorder=1)
            for end, (value, name) in enumerate(zip(ends, ("actual", "predicted"), strict=True)):
                axes.plot(
                    [value], [place], MARKERS[end], color=COLOURS[end],
                    label=name if not place else None,
                )  # fmt: skip
        axes.axvline(0, color="#888888", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(records)), [str(r["left_out"]) for r in records], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("change of the validation loss (right: worse without them)")
        axes.legend(fontsize=7)
        columns = ("left_out", "tokens", "actual", best.name)
        data = [{name: record[name] for name in columns} for record in records]
        return finish(
            figure,
            "selection-effect",
            title,
            "A rule is good if leaving its lowest tokens out lies to the left of leaving random "
            "ones out. The distance between the two marks is what first order misses.",
            Table.of("selection-effect", title, data),
            alt="Actual and predicted change of the validation loss, one row a rule.",
        )
