"""The pictures of ``fisher``: scores beside each other, overlap, agreement, samples, the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from alphatoken.fidelity.curvature import BoundTerms
from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.plots import CLOUD, INK, Guide, Panel, Series, grouped, picture

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
}


def scatter_figure(proxy: Numbers, oracle: Numbers) -> Figure:
    """Diagonal proxy against pooled oracle, token by token: values and ranks."""
    scaled = [x / max(float(np.abs(x).max()), 1e-300) for x in (proxy, oracle)]
    ranks = [stats.rankdata(x) / len(x) for x in (proxy, oracle)]
    records = [
        {"proxy": a, "oracle": b, "proxy_rank": c, "oracle_rank": d}
        for a, b, c, d in zip(*scaled, *ranks, strict=True)
    ]
    return picture(
        "scatter",
        "Proxy and oracle score of each token",
        "A useful proxy fills the diagonal from lower left to upper right. Left: values "
        "divided by the largest, as the paper draws them, where a few heavy tokens decide the "
        "impression. Right: ranks, which alone decide what is kept.",
        Table.of("scatter", "Scores of the tokens", records),
        *(
            Panel(
                [Series("", *columns, alpha=0.4, **CLOUD)],
                xlabel=f"proxy, {what}",
                ylabel=f"oracle, {what}",
            )
            for columns, what in ((scaled, "value / largest"), (ranks, "rank / tokens"))
        ),
        size=(7.2, 3.6),
    )


def overlap_figure(curve: Sequence[Mapping[str, Any]]) -> Figure:
    """Overlap of the kept part with the oracle's, by ratio, beside a random choice."""
    chance = [record for record in curve if record["proxy"] == curve[0]["proxy"]]
    ratios, random = [r["ratio"] for r in chance], [r["random"] for r in chance]
    by_chance = Series(
        "random choice, 95 % of draws", ratios, random, band=True, color=INK, marker="",
        linestyle=":",
    )  # fmt: skip
    return picture(
        "overlap",
        "Kept tokens in common with the oracle",
        "Share of the oracle's kept tokens that each proxy keeps too. Only what lies above the "
        "grey band is better than chance; whiskers are 95 % intervals.",
        Table.of("overlap", "Overlap by ratio", curve),
        Panel(
            [*grouped(curve, "proxy", "ratio", "overlap"), by_chance],
            apart=0.006,
            xlabel="kept ratio",
            ylabel="overlap with the oracle's choice",
        ),
    )


def agreement_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Spearman of each proxy with each retention set."""
    targets = list(dict.fromkeys(record["retention"] for record in records))
    return picture(
        "agreement",
        "Rank correlation with each retention set",
        "Points to the right of zero rank tokens as real retention data would. Compare each "
        "Fisher with 'none', the bare drift; and the first row with the second, which leaves "
        "out what the reference's own gradient decides.",
        Table.of("agreement_drawn", "Rank correlations", records),
        Panel(
            grouped(records, "proxy", "spearman", "retention", joined=False),
            [Guide(0.0, dashes="-")],
            rows=targets,
            apart=0.16,
            xlabel="Spearman with the oracle",
        ),
        size=(6.4, 1.4 + 0.55 * len(targets)),
    )


def convergence_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Spearman against the number of samples, by labels."""
    compared = [
        {"line": f"{record['labels']} labels, with the {title}", "samples": record["samples"]}
        | {"spearman": record[key]}
        for record in records
        for key, title in (("with_main_fit", "full fit"), ("with_oracle", "oracle"))
    ]
    samples = sorted({record["samples"] for record in records})
    return picture(
        "convergence",
        "How many samples a Fisher needs",
        "Lines to the full fit (independent draws) rise to 1 as noise goes; where they are "
        "flat, more samples change no ranking. A flat line to the oracle says that samples are "
        "not what is missing.",
        Table.of("convergence_drawn", "Scores of Fishers of few samples", records),
        Panel(
            grouped(compared, "line", "samples", "spearman"),
            apart=0.02,
            xlabel="samples of the Fisher",
            ylabel="Spearman of the scores",
            xscale="log",
            xticks=samples,
            xticklabels=samples,
        ),
    )


def bound_figure(one: BoundTerms) -> Figure:
    """The summands of the bound, both sides, and the gradient itself, for the diagonal Fisher."""
    parts = [(_PARTS[name], p.value, p.exact) for name, p in one.parts.items() if p.known]
    sides = [("right side", one.right.value, one.right.exact), ("left side", one.left, True)]
    records: list[dict[str, Any]] = [
        {"term": term, "value": value, "at_least": not exact}
        for term, value, exact in [*parts, *sides, ("||g_ideal||", one.ideal, True)]
    ]
    series = []
    for label, at_least, marker in (("exact", False, "o"), ("at least", True, ">")):
        own = [record for record in records if record["at_least"] is at_least]
        values, names = [max(r["value"], 1e-12) for r in own], [r["term"] for r in own]
        series.append(Series(label, values, names, marker=marker, markersize=7))
    return picture(
        "bound_terms",
        "The proxy's bound, term by term",
        "The right side is the sum of all terms above it. If it lies beyond the dashed line, "
        "the bound is vacuous: a proxy of zero would meet it; the term farthest to the right "
        "is the reason. Triangles are lower limits.",
        Table.of("bound_drawn", "Terms of the bound, diagonal Fisher", records),
        Panel(
            series,
            [Guide(one.ideal, label="||g_ideal||")],
            rows=[record["term"] for record in records],
            xlabel="norm",
            xscale="log",
        ),
        size=(6.4, 3.8),
    )
