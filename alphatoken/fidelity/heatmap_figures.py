"""The summary pictures of the heatmap diagnostic: kinds of tokens, shares of components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.drawing import COLOURS, MARKERS, canvas, finish

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from alphatoken.fidelity.intervals import Estimate

__all__ = ["kinds_figure", "shares_figure"]


def kinds_figure(kinds: Sequence[Mapping[str, Any]], ratio: float) -> Figure:
    """Share of each kind of token that is kept, with the ratio that all tokens have."""
    with canvas(6.4, 1.3 + 0.32 * len(kinds)) as fig:
        axes = fig.subplots()
        axes.axvline(ratio, color="#3c3c3c", linestyle="--", linewidth=1)
        for place, kind in enumerate(kinds):
            _dot(axes, place, kind["kept"], 0)
        labels = [f"{kind['kind']} ({kind['tokens']})" for kind in kinds]
        axes.set_yticks(range(len(kinds)), labels)
        axes.set_ylim(len(kinds) - 0.5, -0.5)
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("share kept")
        return finish(
            fig,
            "heatmap-kinds-figure",
            "Which kinds of tokens are kept",
            "Share kept of each kind of token (how many in brackets), with 95 % intervals; "
            f"dashed: {ratio:g}, the share of all tokens. Look for intervals that do not touch "
            "the line. A kind without a dot has too few tokens.",
            Table.of("heatmap-kinds-figure", "Share kept by kind of token", kinds),
            alt="Dot plot of the share kept: " + ", ".join(str(kind["kind"]) for kind in kinds),
        )


def shares_figure(shares: Mapping[str, Estimate], names: Mapping[str, str]) -> Figure:
    """Share of each component in the summed magnitudes."""
    with canvas(6.4, 1.2 + 0.32 * len(shares)) as fig:
        axes = fig.subplots()
        for place, share in enumerate(shares.values()):
            _dot(axes, place, share, place)
        axes.set_yticks(range(len(shares)), [names[key] for key in shares])
        axes.set_ylim(len(shares) - 0.5, -0.5)
        axes.set_xlim(-0.02, 1.02)
        axes.set_xlabel("share of the summed magnitudes")
        return finish(
            fig,
            "heatmap-shares-figure",
            "What the values are made of",
            "Share of each component in the summed magnitudes over all tokens, with 95 % "
            "intervals. Look for a component that is so small that the ranking would be the same "
            "without it.",
            Table.of(
                "heatmap-shares-figure",
                "Shares of the components",
                [{"component": key, "share": share} for key, share in shares.items()],
            ),
            alt="Dot plot of the shares of " + ", ".join(names[key] for key in shares),
        )


def _dot(axes: Axes, place: int, found: Estimate, style: int) -> None:
    if not found.defined:
        return
    colour = COLOURS[style % len(COLOURS)]
    axes.plot([found.low, found.high], [place, place], color=colour, linewidth=1.6)
    axes.plot(found.value, place, marker=MARKERS[style % len(MARKERS)], color=colour)
