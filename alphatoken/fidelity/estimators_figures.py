"""The pictures of the diagnostic ``estimators``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alphatoken.estimate.estimators import ESTIMATORS
from alphatoken.fidelity.advice import Advice
from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.intervals import Estimate
from alphatoken.fidelity.plots import INK, LINE, Guide, Panel, Series, grouped, picture
from alphatoken.fidelity.readings import WINDOWED, Setting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["depth_figure", "noise_figure", "pareto_figure", "window_figure"]

Ranked = Mapping[Setting, Estimate]
_RANKED = "Spearman with the exact value"


def _plain(setting: Setting) -> bool:
    return setting.estimator not in WINDOWED


def _look(estimator: str) -> int:
    return ESTIMATORS.index(estimator)


def _series(ranked: Ranked, place: Callable[[Setting], float], **style: Any) -> list[Series]:
    """One series an estimator, in the look that it has in every picture."""
    found = []
    for estimator in dict.fromkeys(setting.estimator for setting in ranked):
        own = sorted((s for s in ranked if s.estimator == estimator), key=place)
        scores = [ranked[setting] for setting in own]
        look = _look(estimator)
        found.append(Series(estimator, map(place, own), scores, look=look, joined=True, **style))
    return found


def _records(ranked: Ranked) -> list[dict[str, Any]]:
    return [setting.columns | {"spearman": estimate} for setting, estimate in ranked.items()]


def depth_figure(ranked: Ranked, own: Setting) -> Figure:
    """Spearman by the number K of last layers, at the user's window."""
    end = 1 + max(layer for setting in ranked for layer in setting.layers)
    ranked = {
        s: estimate
        for s, estimate in ranked.items()
        if s.layers == tuple(range(end - len(s.layers), end))
        and (s.window == own.window or _plain(s))
    }
    title = "Rank agreement by number of scored layers"
    depths = sorted({len(setting.layers) for setting in ranked})
    return picture(
        "depth",
        title,
        "Higher is better. Look for lines that stop rising: more layers cost more and rank no "
        "better. Where 'label' is far above the others, the exact value is not what the "
        "estimators measure. Bars are 95 % intervals.",
        Table.of("depth", title, _records(ranked)),
        Panel(
            _series(ranked, lambda setting: len(setting.layers), capsize=2),
            [Guide(0.0, across=True, dashes="-")],
            xlabel="K, the last K layers are scored",
            ylabel=_RANKED,
            xticks=depths,
        ),
    )


def window_figure(ranked: Ranked, own: Setting) -> Figure | None:
    """Spearman by window, at the user's layers; None where no estimator has a window."""
    here = {s: estimate for s, estimate in ranked.items() if s.layers == own.layers}
    windows = {s: estimate for s, estimate in here.items() if not _plain(s)}
    direct = {s: estimate for s, estimate in here.items() if s.estimator == "direct"}
    if not windows:
        return None
    title = f"Rank agreement by window, K = {len(own.layers)}"
    widths = sorted({math.inf if s.window is None else s.window for s in windows})
    level = [
        Series("direct", [0, len(widths) - 1], [estimate.value] * 2, look=_look("direct"),
               joined=True, marker="")
        for estimate in direct.values()
    ]  # fmt: skip

    def place(setting: Setting) -> int:
        return widths.index(math.inf if setting.window is None else setting.window)

    return picture(
        "window",
        title,
        "W = 0 has no causal part. Look whether the line rises with W: if it stays level or "
        "falls, Value-Propagation does not pay on this model.",
        Table.of("window", title, _records({**windows, **direct})),
        Panel(
            [*_series(windows, place, capsize=2), *level],
            [Guide(0.0, across=True, dashes="-")],
            columns=["T" if width == math.inf else f"{width:g}" for width in widths],
            xlabel="window W in positions (T: no limit)",
            ylabel=_RANKED,
        ),
    )


def pareto_figure(
    ranked: Ranked,
    costs: Mapping[Setting, float],
    advice: Sequence[Advice],
    own: Setting,
    price: str,
) -> Figure:
    """Spearman by cost in training steps ("flops" or "seconds"), and what is worth its price."""
    title = "Cost against fidelity"
    series = [
        Series(one.label, one.x, [e.value for e in one.y], look=one.look, markersize=5)
        for one in _series(ranked, costs.__getitem__)
    ]
    ends = [a.cost for a in advice], [a.spearman.value for a in advice]
    line: dict[str, Any] = LINE | {"joined": True, "drawstyle": "steps-post", "color": INK}
    series.append(Series("worth its price", *ends, **line))
    if own in ranked:
        ring: dict[str, Any] = {"marker": "o", "markersize": 12, "markerfacecolor": "none"}
        series.append(Series("your setting", [costs[own]], [ranked[own].value], look=1, **ring))
    records = _records(ranked)
    chosen = {found.setting for found in advice}
    for record, setting in zip(records, ranked, strict=True):
        record |= {"cost_in_training_steps": costs[setting], "advised": setting in chosen}

    def named(axes: Axes) -> None:
        low, high = axes.get_xlim()
        axes.set_xlim(low - 0.12 * (high - low), high)  # room for the names
        _name_the_advised(axes, advice)

    return picture(
        "pareto",
        title,
        "Up and to the left is better. The line joins the settings that are worth their "
        "price; the ring is your setting: what lies above it and not to its right is better "
        "at no higher cost. The exact value over all parameters is 1 by definition.",
        Table.of("pareto", title, records),
        Panel(
            series,
            also=named,
            xlabel=f"cost of values and direction, in training steps ({price})",
            ylabel=_RANKED,
        ),
        size=(6.8, 4.7),
    )


def _name_the_advised(axes: Axes, advice: Sequence[Advice]) -> None:
    """Names beside what is advised, but for two that would lie on each other."""
    width, height = (abs(b - a) for a, b in (axes.get_xlim(), axes.get_ylim()))
    for found, after in zip(advice, [*advice[1:], None], strict=True):
        if (
            after is not None
            and after.cost - found.cost < 0.1 * width
            and abs(after.spearman.value - found.spearman.value) < 0.03 * height
        ):
            continue  # the table has both
        axes.annotate(
            str(found.setting),
            (found.cost, found.spearman.value),
            xytext=(-4, 5),
            textcoords="offset points",
            fontsize=6.5,
            ha="right",
        )


def noise_figure(noise: Table) -> Figure:
    """How well each score finds planted tokens, from the table of the planted noise."""
    title = "Finding planted random tokens"
    columns = ("score", "auc", "auc_low", "auc_high", "auc_n")
    records = [{name: record[name] for name in columns} for record in noise.records()]
    records = [r for r in records if not math.isnan(float(r["auc"] or math.nan))]
    drawn = [
        {
            "score": record["score"],
            "auc": noise.estimate(row, "auc"),
            "kind": "loss" if str(record["score"]).startswith("loss") else "values",
        }
        for row, record in enumerate(noise.records())
        if record["score"] in [known["score"] for known in records]
    ]
    return picture(
        "noise-auc",
        title,
        "To the right of the dashed line a score finds noise, to the left it prefers noise to "
        "real text. Square: the loss; circles: values. Bars are 95 % intervals.",
        Table.of("noise-auc", title, records),
        Panel(
            grouped(
                drawn, "kind", "auc", "score", {"values": "values", "loss": "loss"}, joined=False
            ),
            [Guide(0.5)],
            rows=[str(record["score"]) for record in records],
            xlabel="AUC (0.5: knows nothing, 1: finds all)",
            xlim=(0, 1),
        ),
        size=(6.4, 1.2 + 0.32 * max(len(records), 3)),
    )
