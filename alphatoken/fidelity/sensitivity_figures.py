"""Figures of the sensitivity diagnostic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import COLOURS, DASHES, MARKERS, canvas, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["masks", "ratios"]

Record = Mapping[str, Any]

_NAMES = {
    "estimator": "estimator",
    "K": "layers K",
    "W": "window W",
    "lambda": "lambda",
    "validation rows": "validation rows",
}
_VALIDATION, _SCORING = "validation FLOPs / step", "scoring FLOPs / step"


def masks(records: Sequence[Record]) -> Figure:
    """Overlap with the run's kept tokens above, cost below; one column a setting."""
    found = {
        setting: here
        for setting in _NAMES
        if len(here := [r for r in records if r["setting"] == setting]) > 1
    }
    with canvas(2.3 * len(found) + 0.6, 5.0) as fig:
        grid = fig.subplots(2, len(found), squeeze=False, sharey="row", height_ratios=[3, 2])
        for column, (setting, here) in enumerate(found.items()):
            _overlaps(grid[0, column], setting, here)
            _costs(grid[1, column], setting, here)
            for axes in grid[:, column]:
                _ticks(axes, [r["value"] for r in here])
            grid[0, column].tick_params(labelbottom=False)
        grid[0, 0].set_ylabel("overlap with the run's\nkept tokens")
        grid[0, 0].set_ylim(0.0, 1.05)
        grid[1, 0].set_ylabel("FLOPs over those\nof a training step")
        grid[1, 0].set_ylim(bottom=0.0)
        above, below = (row[0].get_legend_handles_labels() for row in grid)
        named = dict(zip(above[1] + below[1], above[0] + below[0], strict=True))
        fig.legend(
            named.values(), named.keys(), loc="outside lower center", ncols=len(named), fontsize=8
        )
        return finish(
            fig,
            "settings",
            "Kept tokens and cost, one setting at a time",
            "Above: a curve near 1 is a setting that hardly matters, one near the dashed line "
            "keeps tokens as if drawn at random. The run's own value is the large black mark. "
            "Below: what that value costs, so that a flat curve above a rising cost shows where "
            "to save. Lambda and the ratio cost nothing.",
            Table.of("settings_data", "Kept tokens and cost by setting", records),
            alt="Overlap with the run's kept tokens and cost in FLOPs for each tried value of "
            f"{', '.join(_NAMES[setting] for setting in found)}.",
        )


def _overlaps(axes: Axes, setting: str, records: Sequence[Record]) -> None:
    places = np.arange(len(records))
    values = np.array([r["overlap"].value for r in records])
    ends = np.array([[r["overlap"].low, r["overlap"].high] for r in records]).T
    line = "" if setting == "estimator" else DASHES[0]
    axes.errorbar(
        places, values, yerr=np.abs(ends - values), color=COLOURS[0], marker=MARKERS[0],
        markersize=4, linestyle=line, linewidth=1, capsize=2, label="overlap",
    )  # fmt: skip
    apart = [r.get("overlap, disjoint subsets") for r in records]
    if any(one is not None for one in apart):
        axes.plot(
            places, [np.nan if one is None else one.value for one in apart], color=COLOURS[1],
            marker=MARKERS[1], markersize=4, linestyle=DASHES[1], linewidth=1,
        )  # fmt: skip
        last = max(place for place, one in enumerate(apart) if one is not None)
        axes.annotate(
            "two disjoint\nsubsets", (last, apart[last].value), xytext=(0, -6),  # type: ignore[union-attr]
            textcoords="offset points", ha="center", va="top", fontsize=7, color=COLOURS[1],
        )  # fmt: skip
    own = [place for place, r in zip(places, records, strict=True) if r["default"]]
    axes.plot(
        own, values[own], linestyle="", marker="*", markersize=12, color="#000000",
        label="the run's value",
    )  # fmt: skip
    axes.axhline(
        records[0]["overlap by chance"], color="#3c3c3c", linestyle="--", linewidth=1,
        label="by chance",
    )  # fmt: skip
    axes.set_title(_NAMES[setting], fontsize=9)


def _costs(axes: Axes, setting: str, records: Sequence[Record]) -> None:
    places = [place for place, r in enumerate(records) if _SCORING in r]
    if not places:
        axes.text(0.5, 0.5, "no cost", transform=axes.transAxes, ha="center", fontsize=8)
        return
    for number, (key, label) in enumerate(
        ((_VALIDATION, "validation gradient"), (_SCORING, "scoring"))
    ):
        axes.plot(
            places, [records[place][key] for place in places], color=COLOURS[2 + number],
            marker=MARKERS[2 + number], markersize=4, linewidth=1,
            linestyle="" if setting == "estimator" else DASHES[number], label=label,
        )  # fmt: skip


def _ticks(axes: Axes, values: Sequence[str]) -> None:
    turned = max(len(value) for value in values) > 3 or len(values) > 7
    axes.set_xticks(
        range(len(values)),
        values,
        fontsize=7,
        rotation=60 if turned else 0,
        ha="right" if turned else "center",
        rotation_mode="anchor",
    )
    axes.set_xlim(-0.5, len(values) - 0.5)


def ratios(total: NDArray[np.float64], records: Sequence[Record]) -> Figure:
    """Share of the positive value that each ratio captures."""
    ordered = np.sort(total)[::-1]
    best = float(ordered[ordered > 0].sum())
    share = np.arange(1, len(ordered) + 1) / len(ordered)
    curve = np.cumsum(ordered) / best if best > 0 else np.full(len(ordered), np.nan)
    peak = float((total > 0).mean())
    (own,) = (r for r in records if r["default"])
    with canvas(6.0, 4.0) as fig:
        axes = fig.subplots()
        axes.plot(share, curve, color=COLOURS[0], label="highest values first")
        axes.plot(
            [0, 1], [0, curve[-1]], color=COLOURS[1], linestyle=DASHES[1], label="at random (mean)"
        )
        axes.plot(
            [own["value"]], [own["captured"].value], linestyle="", marker="*", markersize=13,
            color="#000000", label=f"the run: {own['value']:g}",
        )  # fmt: skip
        axes.axvline(
            peak, color=COLOURS[2], linestyle=DASHES[2], label=f"last positive value: {peak:.2f}"
        )
        axes.set(xlabel="ratio kept", ylabel="kept value over all positive value")
        axes.legend(fontsize=8)
        data = [
            {"ratio": float(x), "value": float(v), "captured": float(y)}
            for x, v, y in zip(share, ordered, curve, strict=True)
        ]
        return finish(
            fig,
            "ratios",
            "How much value each ratio captures",
            "The curve rises as long as values are positive. A steep rise and a long flat top mean "
            "that few tokens carry the value and the ratio may be small; where it falls again, "
            "tokens are kept that speak against the objective.",
            Table.of("ratios_data", "Value captured by ratio", data),
            alt=f"Captured value against the ratio: {own['captured'].value:.2f} at the run's "
            f"{own['value']:g}, largest at {peak:.2f}.",
        )
