"""The pictures of the diagnostic ``utility``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.plots import INK, LINE, Guide, Panel, Series, pairwise, picture
from alphatoken.fidelity.prediction import Prediction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["scatter_figure", "selection_figure", "sweep_figure"]


def _columns(table: Table, *names: str) -> list[dict[str, Any]]:
    return [{name: record[name] for name in names} for record in table.records()]


def scatter_figure(left_out: Table, shown: Sequence[Prediction]) -> Figure:
    """Predicted against actual effect of every token and random group; a panel a prediction."""
    title = "Predicted against actual effect of leaving tokens out"
    records = _columns(left_out, "left_out", "tokens", "actual", *(p.name for p in shown))
    return picture(
        "scatter",
        title,
        "Each mark is one token (circle) or one random group (square) left out of a real "
        "step. On the dashed line the prediction is right; a cloud without slope means that "
        "the value says nothing about what the step does. Without a dashed line the value is "
        "not in units of the loss, and only the order counts. Axes are linear near 0 and "
        "logarithmic beyond.",
        Table.of("scatter", title, records),
        *(_scatter_panel(records, prediction) for prediction in shown),
        size=(3.4 * max(len(shown), 1.5), 3.9),
    )


def _scatter_panel(records: Sequence[Mapping[str, Any]], prediction: Prediction) -> Panel:
    series = []
    for label, single in (("one token", True), ("random group", False)):
        chosen = [record for record in records if (record["tokens"] == 1) == single]
        columns = ([r[name] for r in chosen] for name in (prediction.name, "actual"))
        series.append(Series(label, *columns, alpha=0.8))
    near, here = (_near_zero([r[name] for r in records]) for name in ("actual", prediction.name))

    def logarithmic(axes: Axes) -> None:
        beyond = near if prediction.calibrated else here
        axes.set_xscale("symlog", linthresh=beyond)
        axes.set_yscale("symlog", linthresh=near)
        axes.set_xticks(_ticks(axes.get_xlim(), beyond))
        axes.set_yticks(_ticks(axes.get_ylim(), near))
        axes.minorticks_off()
        if prediction.calibrated:
            ends = [min(min(axes.get_xlim()), 0.0), max(axes.get_xlim())]
            axes.plot(ends, ends, "--", color=INK, linewidth=1, label="right")

    return Panel(
        series,
        also=logarithmic,
        title=prediction.name + (" (yours)" if prediction.own else ""),
        xlabel="predicted" if prediction.calibrated else "value, times the step size",
        ylabel="actual change of the validation loss",
    )


def _near_zero(values: Sequence[float]) -> float:
    """The lower quartile of the sizes: nearer to 0 an axis is linear."""
    sizes = sorted(abs(value) for value in values)
    return max(sizes[len(sizes) // 4], 1e-300)


def _ticks(limits: tuple[float, float], scale: float) -> list[float]:
    """0 and, on each side, the highest power of ten inside that is beyond the linear part."""
    found = [0.0]
    for end in limits:
        power = 10.0 ** math.floor(math.log10(abs(end))) if end else 0.0
        if power > 3 * scale:
            found.append(math.copysign(power, end))
    return sorted(found)


def sweep_figure(
    etas: Sequence[float], errors: Mapping[str, Sequence[float]], eta: float, data: Table
) -> Figure:
    """Relative errors by step size, beside the user's step size."""
    title = "Where first order breaks: error of the prediction by step size"
    guides = [
        Guide(eta, label="your step size", dashes="-"),
        Guide(0.1, across=True, label="10 % and 50 %", dashes=":"),
        Guide(0.5, across=True, dashes=":"),
    ]
    return picture(
        "linearisation",
        title,
        "To the right lines rise because a step is not infinitesimal: read where they cross "
        "10 % and 50 %. A line that rises to the left as well shows rounding: differences of "
        "losses cancel. The lines with the true step leave only the curvature of the loss; "
        "where they lie far below, the optimizer's own linearisation is what fails.",
        replace(data, key="linearisation", title=title, note=""),
        Panel(
            [Series(name, etas, values, joined=True) for name, values in errors.items()],
            guides,
            xlabel="step size",
            ylabel="||predicted - actual|| / ||actual||",
            xscale="log",
            yscale="log",
        ),
        size=(6.8, 4.4),
    )


def selection_figure(selection: Table, best: Prediction) -> Figure:
    """Actual and predicted effect of what each rule of selection leaves out."""
    title = "What leaving a part of the tokens out does to the validation loss"
    records = _columns(selection, "left_out", "tokens", "actual", best.name)
    rows = range(len(records))
    actual, predicted = ([float(r[name] or 0) for r in records] for name in ("actual", best.name))
    series = [
        Series("actual", actual, rows),
        Series("predicted", predicted, rows),
        Series(
            "", pairwise(actual, predicted), pairwise(rows, rows), joined=True, color="#bbbbbb",
            zorder=1, **LINE,
        ),
    ]  # fmt: skip
    return picture(
        "selection-effect",
        title,
        "A rule is good if leaving its lowest tokens out lies to the left of leaving random "
        "ones out. The distance between the two marks is what first order misses.",
        Table.of("selection-effect", title, records),
        Panel(
            series,
            [Guide(0.0)],
            rows=[str(record["left_out"]) for record in records],
            also=lambda axes: axes.locator_params(axis="x", nbins=5),
            xlabel="change of the validation loss (right: worse without them)",
        ),
        size=(6.4, 1.2 + 0.4 * len(records)),
    )
