"""The pictures of the stability diagnostic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from alphatoken.fidelity.decisions import DECISIONS
from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import COLOURS
from alphatoken.fidelity.intervals import Estimate
from alphatoken.fidelity.plots import CLOUD, Guide, Panel, grouped, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["keep_probability", "sizes", "sources"]

Record = Mapping[str, Any]

_SMALLEST = 1e-4  # of a share on a logarithmic axis: smaller ones lie on its left edge


def keep_probability(tokens: Sequence[Record], uncertain: float) -> Figure:
    """Share of resamples in which each token is kept, sorted by value, and its histogram."""
    shares = [record["keep share"] for record in tokens]
    count = Counter(record["decision"] for record in tokens)
    limits = [Guide(level, across=True, dashes=":") for level in (uncertain, 1 - uncertain)]

    def histogram(axes: Axes) -> None:
        axes.hist(shares, bins=20, range=(0, 1), orientation="horizontal", color=COLOURS[5])

    return picture(
        "keep_probability",
        "How sure each decision is under other validation rows",
        "A sharp step at the threshold means sure decisions; a long slope means that which "
        "tokens are kept there depends on which validation rows happened to be drawn. Between "
        "the dotted lines a decision counts as noise. Right: how many tokens there are at each "
        "height.",
        Table.of("keep_probability_data", "Keep share of each token", tokens),
        Panel(
            grouped(
                tokens, "decision", "rank", "keep share", joined=False,
                labels={name: f"{name} ({count[name]})" for name in DECISIONS}, **CLOUD,
            ),
            # Every resample keeps as many tokens, which is the sum of the shares.
            [Guide(sum(shares) - 0.5, label="threshold"), *limits],
            xlabel="tokens, by falling value",
            ylabel="share of resamples that keep it",
            ylim=(-0.03, 1.03),
        ),
        Panel((), limits, also=histogram, xlabel="tokens"),
        alt=f"Keep share of {len(tokens)} tokens sorted by value; {count['noise']} lie between "
        "the limits of noise.",
        size=(8.0, 3.8),
        width_ratios=[3, 1],
        sharey=True,
    )  # fmt: skip


def sources(records: Sequence[Record], by_batch: Sequence[Record], ratio: float) -> Figure:
    """Share of decisions that each change reverses, on a logarithmic axis."""
    rows = [{name: r[name] for name in ("source", "variant", "flips")} for r in records] + [
        {
            "source": "batch threshold",
            "variant": f"two orders, {record['rows a batch']} rows a batch",
            "flips": record["flips between two orders"],
        }
        for record in by_batch
        if "flips between two orders" in record
    ]
    drawn = [{**r, "flips": _in_sight(r["flips"]), "row": row} for row, r in enumerate(rows)]
    return picture(
        "sources",
        "What reverses decisions",
        "Each mark is a change that should not matter for a good decision. Look for marks near "
        "the dashed line, where decisions are as if drawn at random. Marks at the left edge: "
        "no decision changes. Padding and neighbours in the batch belong there.",
        Table.of("sources_data", "Reversed decisions by source", rows),
        Panel(
            grouped(drawn, "source", "flips", "row", joined=False, markersize=6, clip_on=False),
            [Guide(2 * ratio * (1 - ratio), label="by chance")],
            rows=[f"{row['source']}: {row['variant']}" for row in rows],
            xlabel="share of keep or drop decisions reversed",
            xscale="log",
            xlim=(_SMALLEST / 1.6, 1.0),
            xticks=[_SMALLEST, 1e-3, 1e-2, 1e-1, 1.0],
            xticklabels=["none", "0.1 %", "1 %", "10 %", "100 %"],
        ),
        size=(8.0, 1.0 + 0.34 * len(rows)),
    )


def _in_sight(share: Estimate) -> Estimate:
    """The same where it can be drawn; zero sits on the left edge."""
    value, low, high = (max(x, _SMALLEST) for x in (share.value, share.low, share.high))
    return replace(share, value=value, low=low, high=high) if share.defined else share


def sizes(records: Sequence[Record]) -> Figure:
    """Share of noise decisions by the number of validation rows."""
    labels = {
        "subsets": "subsets of the rows there are",
        "measured": "all rows",
        "check": "check: drawn from half of the rows",
        "drawn": "drawn from the rows there are",
    }
    series = grouped(
        records, "how", "validation rows", "noise", labels=labels, joined=False, capsize=3
    )
    for one in series:
        if one.label in (labels["check"], labels["drawn"]):
            one.style["markerfacecolor"] = "white"
    ticks = sorted({record["validation rows"] for record in records})
    return picture(
        "sizes",
        "How many validation rows sure decisions need",
        "The share of noise falls with the rows; where it flattens, more rows buy little. "
        "Open marks are computed by drawing more rows than there are; believe them as far as "
        "the check agrees with the measured mark beside it.",
        Table.of("sizes_data", "Noise by the number of validation rows", records),
        Panel(
            series,
            apart=0.03,
            xlabel="validation rows",
            ylabel="share of noise decisions",
            ylim=(0, None),
            xscale="log",
            xticks=ticks,
            xticklabels=ticks,
        ),
        size=(5.6, 3.9),
    )
