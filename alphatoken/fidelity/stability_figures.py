"""Figures of the stability diagnostic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from alphatoken.fidelity.decisions import DECISIONS
from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import COLOURS, MARKERS, canvas, finish
from alphatoken.fidelity.intervals import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["keep_probability", "sizes", "sources"]

Record = Mapping[str, Any]

_STATES = dict(zip(DECISIONS, zip(COLOURS, MARKERS, strict=True), strict=False))


def keep_probability(tokens: Sequence[Record], uncertain: float) -> Figure:
    """Share of resamples in which each token is kept, sorted by value, and its histogram."""
    kept = sum(record["keep share"] for record in tokens)  # every resample keeps as many
    with canvas(8.0, 3.8) as fig:
        left, right = fig.subplots(1, 2, width_ratios=[3, 1], sharey=True)
        for name, (colour, marker) in _STATES.items():
            here = [record for record in tokens if record["decision"] == name]
            left.plot(
                [record["rank"] + 1 for record in here],
                [record["keep share"] for record in here],
                linestyle="",
                marker=marker,
                markersize=3.0,
                color=colour,
                label=f"{name} ({len(here)})",
                rasterized=True,
            )
        left.axvline(kept + 0.5, color="#3c3c3c", linewidth=1, linestyle="--")
        left.annotate(
            "threshold",
            (kept + 0.5, 1.05),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
        for axes in (left, right):
            for level in (uncertain, 1 - uncertain):
                axes.axhline(level, color="#3c3c3c", linewidth=0.8, linestyle=":")
        left.set(
            xlabel="tokens, by falling value",
            ylabel="share of resamples that keep it",
            ylim=(-0.03, 1.12),
        )
        left.legend(loc="upper right", bbox_to_anchor=(1.0, 0.93), markerscale=2, fontsize=8)
        shares = [record["keep share"] for record in tokens]
        right.hist(shares, bins=20, range=(0, 1), orientation="horizontal", color=COLOURS[5])
        right.set(xlabel="tokens")
        noise = sum(record["decision"] == "noise" for record in tokens)
        return finish(
            fig,
            "keep_probability",
            "How sure each decision is under other validation rows",
            "A sharp step at the threshold means sure decisions; a long slope means that which "
            "tokens are kept there depends on which validation rows happened to be drawn. Between "
            "the dotted lines a decision counts as noise. Right: how many tokens there are at each "
            "height.",
            Table.of("keep_probability_data", "Keep share of each token", tokens),
            alt=f"Keep share of {len(tokens)} tokens sorted by value; {noise} lie between the "
            "limits of noise.",
        )


def sources(records: Sequence[Record], by_batch: Sequence[Record], ratio: float) -> Figure:
    """Share of decisions that each change reverses, on a logarithmic axis."""
    rows = [_source(record) for record in records] + [
        {
            "source": "batch threshold",
            "variant": f"two orders, {record['rows a batch']} rows a batch",
            "flips": record["flips between two orders"],
        }
        for record in by_batch
        if "flips between two orders" in record
    ]
    smallest = 1e-4
    names = list(dict.fromkeys(row["source"] for row in rows))
    with canvas(8.0, 0.8 + 0.34 * len(rows)) as fig:
        axes = fig.subplots()
        for height, row in enumerate(rows):
            place = names.index(row["source"])
            _interval(axes, row["flips"], height, COLOURS[place], MARKERS[place], smallest)
        chance = 2 * ratio * (1 - ratio)
        axes.axvline(chance, color="#3c3c3c", linestyle="--", linewidth=1)
        axes.annotate(
            "by chance", (chance, -0.7), ha="center", va="bottom", annotation_clip=False, fontsize=8
        )
        axes.set_yticks(
            range(len(rows)), [f"{row['source']}: {row['variant']}" for row in rows], fontsize=8
        )
        axes.set(
            xscale="log",
            xlim=(smallest / 1.6, 1.0),
            xlabel="share of keep or drop decisions reversed",
            ylim=(len(rows) - 0.5, -0.6),
        )
        axes.set_xticks(
            [smallest, 1e-3, 1e-2, 1e-1, 1.0], ["none", "0.1 %", "1 %", "10 %", "100 %"]
        )
        return finish(
            fig,
            "sources",
            "What reverses decisions",
            "Each mark is a change that should not matter for a good decision. Look for marks near "
            "the dashed line, where decisions are as if drawn at random. Marks at the left edge: "
            "no decision changes. Padding and neighbours in the batch belong there.",
            Table.of("sources_data", "Reversed decisions by source", rows),
            alt="Share of decisions reversed by each source of chance, with 95 % intervals.",
        )


def _source(record: Record) -> dict[str, Any]:
    return {name: record[name] for name in ("source", "variant", "flips")}


def _interval(
    axes: Axes, found: Estimate, height: int, colour: str, marker: str, smallest: float
) -> None:
    """A mark with its interval; zero sits on the left edge."""
    if not found.defined:
        return
    value, low, high = (max(x, smallest) for x in (found.value, found.low, found.high))
    axes.plot([low, high], [height, height], color=colour, linewidth=1.5)
    axes.plot([value], [height], color=colour, marker=marker, markersize=6, clip_on=False)


_HOW = {
    "subsets": "subsets of the rows there are",
    "measured": "all rows",
    "check": "check: drawn from half of the rows",
    "drawn": "drawn from the rows there are",
}


def sizes(records: Sequence[Record]) -> Figure:
    """Share of noise decisions by the number of validation rows."""
    with canvas(5.6, 3.6) as fig:
        axes = fig.subplots()
        for place, (how, label) in enumerate(_HOW.items()):
            here = [r for r in records if r["how"] == how and r["noise"].defined]
            if not here:
                continue
            shift = 1.06 if how == "check" else 1.0
            values = np.array([100 * r["noise"].value for r in here])
            axes.errorbar(
                [shift * r["validation rows"] for r in here],
                values,
                yerr=np.abs(
                    np.array([[100 * r["noise"].low, 100 * r["noise"].high] for r in here]).T
                    - values
                ),
                color=COLOURS[place],
                marker=MARKERS[place],
                linestyle="",
                capsize=3,
                label=label,
                markerfacecolor="white" if how in ("check", "drawn") else COLOURS[place],
            )
        ticks = sorted({r["validation rows"] for r in records})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set(xlabel="validation rows", ylabel="noise decisions, %")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
        return finish(
            fig,
            "sizes",
            "How many validation rows sure decisions need",
            "The share of noise falls with the rows; where it flattens, more rows buy little. "
            "Open marks are computed by drawing more rows than there are; believe them as far as "
            "the check agrees with the measured mark beside it.",
            Table.of("sizes_data", "Noise by the number of validation rows", records),
            alt="Share of noise decisions against the number of validation rows.",
        )
