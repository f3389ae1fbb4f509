"""The summary pictures of the heatmap diagnostic: kinds of tokens, shares of components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from alphatoken.fidelity.diagnosis import Figure, Table
from alphatoken.fidelity.intervals import Estimate
from alphatoken.fidelity.plots import Guide, Panel, Series, picture

__all__ = ["kinds_figure", "shares_figure"]


def kinds_figure(kinds: Sequence[Mapping[str, Any]], ratio: float) -> Figure:
    """Share of each kind of token that is kept, with the ratio that all tokens have."""
    names = [f"{kind['kind']} ({kind['tokens']})" for kind in kinds]
    return picture(
        "heatmap-kinds-figure",
        "Which kinds of tokens are kept",
        "Share kept of each kind of token (how many in brackets), with 95 % intervals; "
        f"dashed: {ratio:g}, the share of all tokens. Look for intervals that do not touch "
        "the line. A kind without a dot has too few tokens.",
        Table.of("heatmap-kinds-figure", "Share kept by kind of token", kinds),
        Panel(
            [Series("", [kind["kept"] for kind in kinds], names)],
            [Guide(ratio)],
            rows=names,
            xlabel="share kept",
            xlim=(-0.02, 1.02),
        ),
        size=(6.4, 1.3 + 0.32 * len(kinds)),
    )


def shares_figure(shares: Mapping[str, Estimate], names: Mapping[str, str]) -> Figure:
    """Share of each component in the summed magnitudes."""
    rows = [names[key] for key in shares]
    return picture(
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
        Panel(
            [Series("", shares.values(), rows)],
            rows=rows,
            xlabel="share of the summed magnitudes",
            xlim=(-0.02, 1.02),
        ),
        size=(6.4, 1.2 + 0.32 * len(shares)),
    )
