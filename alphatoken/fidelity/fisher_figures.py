"""Figures of ``fisher``: scores beside each other, overlap, agreement, convergence, the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from alphatoken.fidelity.curvature import BoundTerms
from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import COLOURS, DASHES, MARKERS, canvas, finish

__all__ = [
    "agreement_figure",
    "bound_figure",
    "convergence_figure",
    "overlap_figure",
    "scatter_figure",
]

Numbers = NDArray[Any]
_PARTS = {
    "residual": "||r_0||",
    "off_diagonal": "D_off ||dtheta||",
    "calibration": "D_cal ||dtheta||",
    "transfer": "D_transfer ||dtheta||",
    "cross": "cross term",
    "cubic": "M_3 / 2 ||dtheta||^2",
    "right": "right side",
    "left": "left side",
    "ideal": "||g_ideal||",
}


def scatter_figure(proxy: Numbers, oracle: Numbers) -> Figure:
    """Diagonal proxy against pooled oracle, token by token: values and ranks."""
    scaled = [x / max(float(np.abs(x).max()), 1e-300) for x in (proxy, oracle)]
    ranks = [stats.rankdata(x) / len(x) for x in (proxy, oracle)]
    records = [
        {"proxy": a, "oracle": b, "proxy_rank": c, "oracle_rank": d}
        for a, b, c, d in zip(*scaled, *ranks, strict=True)
    ]
    with canvas(7.2, 3.6) as figure:
        panels = figure.subplots(1, 2)
        for axes, (x, y), what in zip(
            panels, (scaled, ranks), ("value / largest", "rank / tokens"), strict=True
        ):
            axes.scatter(x, y, s=6, alpha=0.4, color=COLOURS[0], linewidths=0, rasterized=True)
            axes.set_xlabel(f"proxy, {what}")
            axes.set_ylabel(f"oracle, {what}")
        return finish(
            figure,
            "scatter",
            "Proxy and oracle score of each token",
            "A useful proxy fills the diagonal from lower left to upper right. Left: values "
            "divided by the largest, as the paper draws them, where a few heavy tokens decide the "
            "impression. Right: ranks, which alone decide what is kept.",
            Table.of("scatter", "Scores of the tokens", records),
            alt="Two scatter plots of proxy against oracle scores, by value and by rank",
        )


def overlap_figure(curve: Sequence[Mapping[str, Any]]) -> Figure:
    """Overlap of the kept part with the oracle's, by ratio, beside a random choice."""
    proxies = list(dict.fromkeys(record["proxy"] for record in curve))
    with canvas(6.4, 4.0) as figure:
        axes = figure.add_subplot()
        chance = [record for record in curve if record["proxy"] == proxies[0]]
        ratios = [record["ratio"] for record in chance]
        axes.fill_between(
            ratios, [r["random"].low for r in chance], [r["random"].high for r in chance],
            color=COLOURS[4], alpha=0.2, linewidth=0,
        )  # fmt: skip
        axes.plot(
            ratios, [r["random"].value for r in chance], color=COLOURS[4], linestyle=DASHES[2],
            label="random choice, 95 % of draws",
        )  # fmt: skip
        for number, proxy in enumerate(proxies):
            found = [record["overlap"] for record in curve if record["proxy"] == proxy]
            middle = np.array([one.value for one in found])
            ends = np.array([[one.low, one.high] for one in found]).T
            axes.errorbar(
                np.array(ratios) + 0.006 * number, middle, yerr=np.abs(ends - middle),
                color=COLOURS[number], marker=MARKERS[number], markersize=4, linewidth=1.2,
                linestyle=DASHES[number], label=proxy,
            )  # fmt: skip
        axes.set_xlabel("kept ratio")
        axes.set_ylabel("overlap with the oracle's choice")
        figure.legend(loc="outside upper center", ncols=2)
        return finish(
            figure,
            "overlap",
            "Kept tokens in common with the oracle",
            "Share of the oracle's kept tokens that each proxy keeps too. Only what lies above the "
            "grey band is better than chance; whiskers are 95 % intervals.",
            Table.of("overlap", "Overlap by ratio", curve),
            alt="Overlap with the oracle's kept tokens against the kept ratio, one line for each "
            "proxy, with a band for a random choice",
        )


def agreement_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Spearman of each proxy with each retention set."""
    targets = list(dict.fromkeys(record["retention"] for record in records))
    proxies = list(dict.fromkeys(record["proxy"] for record in records))
    with canvas(6.4, 1.2 + 0.55 * len(targets)) as figure:
        axes = figure.add_subplot()
        for number, proxy in enumerate(proxies):
            found = [record["spearman"] for record in records if record["proxy"] == proxy]
            middle = np.array([one.value for one in found])
            ends = np.array([[one.low, one.high] for one in found]).T
            axes.errorbar(
                middle, np.arange(len(targets)) + 0.16 * (number - (len(proxies) - 1) / 2),
                xerr=np.abs(ends - middle), color=COLOURS[number], marker=MARKERS[number],
                linestyle="none", markersize=4.5, label=proxy,
            )  # fmt: skip
        axes.axvline(0, color=COLOURS[4], linewidth=0.8)
        axes.set_yticks(np.arange(len(targets)), targets)
        axes.invert_yaxis()
        axes.set_xlabel("Spearman with the oracle")
        figure.legend(loc="outside upper center", ncols=2)
        return finish(
            figure,
            "agreement",
            "Rank correlation with each retention set",
            "Points to the right of zero rank tokens as real retention data would. Compare each "
            "Fisher with 'none', the bare drift; and the first row with the second, which leaves "
            "out what the reference's own gradient decides.",
            Table.of("agreement_drawn", "Rank correlations", records),
            alt="Spearman correlation with intervals for each proxy, one row for each retention "
            "set",
        )


def convergence_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Spearman against the number of samples, by labels."""
    with canvas(6.4, 3.8) as figure:
        axes = figure.add_subplot()
        number = 0
        for labels in dict.fromkeys(record["labels"] for record in records):
            chosen = [record for record in records if record["labels"] == labels]
            for what, title in (("with_main_fit", "full fit"), ("with_oracle", "oracle")):
                middle = np.array([record[what].value for record in chosen])
                ends = np.array([[r[what].low, r[what].high] for r in chosen]).T
                axes.errorbar(
                    [record["samples"] * 1.02**number for record in chosen], middle,
                    yerr=np.abs(ends - middle), color=COLOURS[number], marker=MARKERS[number],
                    linestyle=DASHES[number], markersize=4, linewidth=1.2,
                    label=f"{labels} labels, with the {title}",
                )  # fmt: skip
                number += 1
        axes.set_xscale("log", base=2)
        axes.set_xlabel("samples of the Fisher")
        axes.set_ylabel("Spearman of the scores")
        figure.legend(loc="outside upper center", ncols=2)
        return finish(
            figure,
            "convergence",
            "How many samples a Fisher needs",
            "Lines to the full fit (independent draws) rise to 1 as noise goes; where they are "
            "flat, more samples change no ranking. A flat line to the oracle says that samples are "
            "not what is missing.",
            Table.of("convergence_drawn", "Scores of Fishers of few samples", records),
            alt="Spearman correlation against number of samples for token and sequence labels",
        )


def bound_figure(terms: Mapping[str, BoundTerms]) -> Figure:
    """The summands of the bound, both sides, and the gradient itself, for the diagonal Fisher."""
    one = terms["diagonal"]
    values = {name: (part.value, part.exact) for name, part in one.parts.items() if part.known}
    values |= {"right": (one.right.value, one.right.exact)}
    values |= {"left": (one.left, True), "ideal": (one.ideal, True)}
    records: list[dict[str, Any]] = [
        {"term": _PARTS[name], "value": value, "at_least": not exact}
        for name, (value, exact) in values.items()
    ]
    with canvas(6.4, 3.6) as figure:
        axes = figure.add_subplot()
        for at_least, title, number in ((False, "exact", 0), (True, "at least", 1)):
            here = [i for i, record in enumerate(records) if record["at_least"] is at_least]
            axes.plot(
                [max(records[i]["value"], 1e-12) for i in here], here, color=COLOURS[number],
                marker=("o", ">")[number], linestyle="none", markersize=7, label=title,
            )  # fmt: skip
        axes.axvline(one.ideal, color=COLOURS[4], linestyle=DASHES[1], label="||g_ideal||")
        axes.set_xscale("log")
        axes.set_yticks(range(len(records)), [record["term"] for record in records])
        axes.invert_yaxis()
        axes.set_xlabel("norm")
        figure.legend(loc="outside upper center", ncols=3)
        return finish(
            figure,
            "bound_terms",
            "The proxy's bound, term by term",
            "The right side is the sum of all terms above it. If it lies beyond the dashed line, "
            "the bound is vacuous: a proxy of zero would meet it; the term farthest to the right "
            "is the reason. Triangles are lower limits.",
            Table.of("bound_drawn", "Terms of the bound, diagonal Fisher", records),
            alt="Points on a logarithmic axis: summands of the bound, both sides, and the "
            "retention gradient",
        )
