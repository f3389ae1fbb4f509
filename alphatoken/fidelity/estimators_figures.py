"""The pictures of the diagnostic ``estimators``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from alphatoken.estimate.estimators import ESTIMATORS
from alphatoken.fidelity.advice import Advice
from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import COLOURS, DASHES, MARKERS, canvas, finish
from alphatoken.fidelity.intervals import Estimate
from alphatoken.fidelity.readings import WINDOWED, Setting

__all__ = ["draw"]

Found = Mapping[Setting, Mapping[str, Estimate]]


def draw(
    found: Found,
    costs: Mapping[Setting, float],
    advice: Sequence[Advice],
    own: Setting,
    noise: Table,
    price: str,
) -> tuple[Figure, ...]:
    """All figures; one with nothing to draw is left out.

    Args:
        found: agreement with the exact value, per setting.
        costs: in training steps.
        advice: what is worth its price.
        own: the user's setting.
        noise: table of the planted noise.
        price: "flops" or "seconds".
    """
    ranked = {s: measures["spearman"] for s, measures in found.items()}
    depths = {s: e for s, e in ranked.items() if s.window == own.window or _plain(s)}
    depths = {s: e for s, e in depths.items() if s.layers == _last(s, found)}
    windows = {s: e for s, e in ranked.items() if s.layers == own.layers and not _plain(s)}
    figures = [_pareto(ranked, costs, advice, own, price), _by_depth(depths)]
    if windows:
        figures.append(_by_window(windows, ranked, own))
    figures.append(_noise(noise))
    return tuple(figures)


def _plain(setting: Setting) -> bool:
    return setting.estimator not in WINDOWED


def _last(setting: Setting, found: Found) -> tuple[int, ...]:
    """The last K layers, for the K of this setting."""
    end = 1 + max(layer for s in found for layer in s.layers)
    return tuple(range(end - len(setting.layers), end))


def _look(estimator: str) -> dict[str, Any]:
    place = ESTIMATORS.index(estimator)
    return {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": DASHES[place]}


def _lines(axes: Any, series: Mapping[str, Sequence[tuple[float, Estimate]]], **more: Any) -> None:
    """One line an estimator with its intervals, slightly apart so that bars do not hide."""
    for estimator, points in series.items():
        usable = [(x, e) for x, e in points if e.defined]
        if not usable:
            continue
        x = [x for x, _ in usable]
        y = [e.value for _, e in usable]
        bars = [[e.value - e.low for _, e in usable], [e.high - e.value for _, e in usable]]
        axes.errorbar(
            x, y, yerr=bars, label=estimator, capsize=2, markersize=4, elinewidth=0.8,
            **_look(estimator), **more,
        )  # fmt: skip
    axes.axhline(0, color="#888888", linewidth=0.8)
    axes.set_ylabel("Spearman with the exact value")


def _series(
    ranked: Mapping[Setting, Estimate], place: Any
) -> dict[str, list[tuple[float, Estimate]]]:
    series: dict[str, list[tuple[float, Estimate]]] = {}
    for setting, estimate in ranked.items():
        series.setdefault(setting.estimator, []).append((place(setting), estimate))
    return {name: sorted(points, key=lambda p: p[0]) for name, points in series.items()}


def _records(ranked: Mapping[Setting, Estimate]) -> list[dict[str, Any]]:
    return [
        {
            "estimator": s.estimator,
            "K": len(s.layers),
            "W": None if _plain(s) else ("T" if s.window is None else s.window),
            "spearman": estimate,
        }
        for s, estimate in ranked.items()
    ]


def _by_depth(ranked: Mapping[Setting, Estimate]) -> Figure:
    title = "Rank agreement by number of scored layers"
    with canvas() as figure:
        axes = figure.add_subplot()
        _lines(axes, _series(ranked, lambda s: float(len(s.layers))))
        axes.set_xlabel("K, the last K layers are scored")
        axes.set_xticks(sorted({len(s.layers) for s in ranked}))
        axes.legend(fontsize=7, ncols=2)
        return finish(
            figure,
            "depth",
            title,
            "Higher is better. Look for lines that stop rising: more layers cost more and rank no "
            "better. Where 'label' is far above the others, the exact value is not what the "
            "estimators measure. Bars are 95 % intervals over rows.",
            Table.of("depth", title, _records(ranked)),
            alt="Spearman correlation with the exact value against the number of scored layers, "
            "one line an estimator.",
        )


def _by_window(
    windows: Mapping[Setting, Estimate], ranked: Mapping[Setting, Estimate], own: Setting
) -> Figure:
    title = f"Rank agreement by window, K = {len(own.layers)}"
    finite = [s.window for s in windows if s.window is not None]
    end = 2.0 * max([1, *finite])

    def place(setting: Setting) -> float:
        return end if setting.window is None else float(setting.window)

    direct = [
        (s, e) for s, e in ranked.items() if s.estimator == "direct" and s.layers == own.layers
    ]
    with canvas() as figure:
        axes = figure.add_subplot()
        _lines(axes, _series(windows, place))
        for setting, estimate in direct:
            look = _look(setting.estimator)
            axes.axhline(
                estimate.value, color=look["color"], linestyle=look["linestyle"], label="direct"
            )
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_xlim(-0.3, 1.2 * end)
        axes.minorticks_off()
        ticks = sorted({place(s) for s in windows})
        axes.set_xticks(ticks, ["T" if t == end else f"{t:g}" for t in ticks])
        axes.set_xlabel("window W in positions (T: no limit)")
        figure.legend(fontsize=7, ncols=3, loc="outside lower center")
        return finish(
            figure,
            "window",
            title,
            "W = 0 has no causal part. Look whether the line rises with W: if it stays level or "
            "falls, Value-Propagation does not pay on this model.",
            Table.of("window", title, _records(dict(windows) | dict(direct))),
            alt="Spearman correlation with the exact value against the window.",
        )


def _pareto(
    ranked: Mapping[Setting, Estimate],
    costs: Mapping[Setting, float],
    advice: Sequence[Advice],
    own: Setting,
    price: str,
) -> Figure:
    title = "Cost against fidelity"
    chosen = {found.setting for found in advice}
    with canvas(6.8, 4.4) as figure:
        axes = figure.add_subplot()
        for estimator in dict.fromkeys(s.estimator for s in ranked):
            points = [s for s in ranked if s.estimator == estimator and ranked[s].defined]
            axes.plot(
                [costs[s] for s in points],
                [ranked[s].value for s in points],
                **(_look(estimator) | {"linestyle": "none"}),
                markersize=5,
                alpha=0.8,
                label=estimator,
            )
        axes.step(
            [a.cost for a in advice],
            [a.spearman.value for a in advice],
            where="post",
            color="#3c3c3c",
            linewidth=1.2,
            label="worth its price",
        )
        _mark(axes, ranked, costs, advice, own)
        low, high = axes.get_xlim()
        axes.set_xlim(low - 0.12 * (high - low), high)  # room for the names
        axes.set_xlabel(f"cost of values and direction, in training steps ({price})")
        axes.set_ylabel("Spearman with the exact value")
        axes.legend(fontsize=7, loc="lower right")
        records = _records(ranked)
        for record, setting in zip(records, ranked, strict=True):
            record |= {"cost_in_training_steps": costs[setting], "advised": setting in chosen}
        return finish(
            figure,
            "pareto",
            title,
            "Up and to the left is better. The line joins the settings that are worth their "
            "price; the ring is your setting: what lies above it and not to its right is better "
            "at no higher cost. The exact value over all parameters is 1 by definition.",
            Table.of("pareto", title, records),
            alt="Scatter of cost in training steps against Spearman correlation, one mark a "
            "setting.",
        )


def _mark(
    axes: Any,
    ranked: Mapping[Setting, Estimate],
    costs: Mapping[Setting, float],
    advice: Sequence[Advice],
    own: Setting,
) -> None:
    """A ring around the user's setting, and names beside what is advised."""
    if own in ranked and ranked[own].defined:
        axes.plot(
            [costs[own]], [ranked[own].value], "o", markersize=12, markerfacecolor="none",
            markeredgecolor="#d55e00", markeredgewidth=1.5, label="your setting",
        )  # fmt: skip
    width, height = (abs(b - a) for a, b in (axes.get_xlim(), axes.get_ylim()))
    for place, found in enumerate(advice):
        after = advice[place + 1] if place + 1 < len(advice) else None
        if (
            after is not None
            and after.cost - found.cost < 0.1 * width
            and abs(after.spearman.value - found.spearman.value) < 0.03 * height
        ):
            continue  # two names would lie on each other; the table has both
        axes.annotate(
            str(found.setting),
            (found.cost, found.spearman.value),
            xytext=(-4, 5),
            textcoords="offset points",
            fontsize=6.5,
            ha="right",
        )


def _noise(noise: Table) -> Figure:
    title = "Finding planted random tokens"
    records = [r for r in noise.records() if not math.isnan(float(r["auc"] or math.nan))]
    with canvas(6.4, 0.9 + 0.32 * max(len(records), 3)) as figure:
        axes = figure.add_subplot()
        for place, record in enumerate(records):
            value, low, high = (float(record[f"auc{end}"] or 0) for end in ("", "_low", "_high"))
            loss = str(record["score"]).startswith("loss")
            axes.errorbar(
                [value], [place], xerr=[[value - low], [high - value]], capsize=2,
                color=COLOURS[1] if loss else COLOURS[0], marker=MARKERS[1] if loss else "o",
            )  # fmt: skip
        axes.axvline(0.5, color="#888888", linestyle="--", linewidth=1)
        axes.set_yticks(range(len(records)), [str(r["score"]) for r in records])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xlabel("AUC (0.5: knows nothing, 1: finds all)")
        columns = ("score", "auc", "auc_low", "auc_high", "auc_n")
        data = [{name: record[name] for name in columns} for record in records]
        return finish(
            figure,
            "noise-auc",
            title,
            "To the right of the dashed line a score finds noise, to the left it prefers noise to "
            "real text. Square: the loss; circles: values. Bars are 95 % intervals over rows.",
            Table.of("noise-auc", title, data),
            alt="Area under the ROC curve for finding planted tokens, one row a score.",
        )
