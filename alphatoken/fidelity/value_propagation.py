"""Diagnostic ``value-propagation``: the share of the causal value that it sees.

*Shares*: what part of every token's exact causal value Value-Propagation carries, and where the
rest flows. *Pairs*: attention weight and value-output deviation of the causal-window pairs, whose
product bounds what is left out (the paper's diagnostic). The pairs that a training run collected
(by the lab's callback ``watch_pairs``) are drawn beside those of the model, as in the paper, whose
figure is of pairs during training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken.data import Example
from alphatoken.errors import ConfigError, InputError
from alphatoken.fidelity.causal_parts import (
    causal_parts,
    causal_scorer,
    share_records,
)
from alphatoken.fidelity.collected_pairs import ALPHA, DEVIATION, CollectedPairs, PairCounts
from alphatoken.fidelity.diagnosis import Diagnosis, Table
from alphatoken.fidelity.figures import Figure, Guide
from alphatoken.fidelity.intervals import FEWEST
from alphatoken.fidelity.options import CheckedOptions
from alphatoken.fidelity.pairs import (
    choose_positions,
    pair_counts,
    see_calls,
    softmax_layers,
    weigh_pairs,
)
from alphatoken.fidelity.result import conclude
from alphatoken.fidelity.subject import Subject, places_of
from alphatoken.model.batch import read_batch, to_label_position
from alphatoken.model.scope import mixers_without_rule
from alphatoken.support.options import option

__all__ = ["Options", "collect_pairs", "diagnose", "training_records"]

NAME = "value-propagation"
LEVELS = (0.001, 0.01, 0.1)
"""Contours of attention weight times deviation."""


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Options of the probe; the subject decides on tokens, layers and window."""

    pairs: int = option(
        20_000, "maximum number of causal-window pairs in each layer and head", at_least=1
    )
    collected: str | None = option(
        None, "file of pairs that a training run collected; drawn beside those of the model"
    )

    def __post_init__(self) -> None:
        """Check every option."""
        super().__post_init__()
        if self.collected is not None and not Path(self.collected).is_file():
            raise ConfigError(
                "there is no file of collected pairs",
                got=self.collected,
                remedy="what the callback watch_pairs of the lab writes",
            )


# --- pairs -------------------------------------------------------------------------------------


def collect_pairs(
    subject: Subject, rows: Sequence[Example], layers: Sequence[int], budget: int
) -> tuple[PairCounts, float]:
    """Counts of the pairs of all batches and layers; and the share of positions looked at.

    A pair's positions both predict a response token: the self-only error of a query is zero
    elsewhere, so no other pair takes part in the values. The share is of token positions with a
    pair.
    """
    window, limit = subject.config.window, subject.adapter.max_positions()
    batches = [read_batch(batch, max_length=limit) for batch in subject.batches(rows)]
    used = [to_label_position(batch.mask) for batch in batches]
    chosen = choose_positions(used, window, budget, subject.seed)
    tracker = subject.tracker("Attention pairs", len(batches))
    found = PairCounts.total([])
    for number, (batch, mask, picked) in enumerate(zip(batches, used, chosen, strict=True)):
        for seen in see_calls(subject.adapter, layers, batch) if bool(picked.any()) else ():
            found += PairCounts.of(*weigh_pairs(seen, mask, picked, window))
        tracker.report(number + 1)
    whole = sum(int((pair_counts(mask, window) > 0).sum()) for mask in used)
    share = sum(int(mask.sum()) for mask in chosen) / whole if whole else 0.0
    return found, share


def training_records(collected: CollectedPairs) -> list[dict[str, Any]]:
    """One record a step and level: share of the probe's pairs at or above it."""
    return [
        {
            "step": step,
            "level": level,
            "pairs": collected.total([step]).pairs,
            "share": collected.total([step]).share_above(level),
        }
        for step in sorted(collected.steps)
        for level in LEVELS
    ]


# --- answer ------------------------------------------------------------------------------------


def _conclusion(shares: Table) -> str:
    """Share that Value-Propagation sees over all layers together."""
    whole = [i for i, record in enumerate(shares.records()) if record["layer"] == "all"]
    if not whole:
        return "No share was computed."
    seen = shares.estimate(whole[0], "signed")
    return f"Value-Propagation sees {seen} of the exact causal value."


# --- figures -----------------------------------------------------------------------------------


def density_figure(key: str, pairs: PairCounts, said: str) -> Figure:
    """Joint density of weight and deviation; ``said``: of which pairs."""
    alpha, deviation = 10.0**ALPHA, 10.0**DEVIATION
    cells = [
        {
            "alpha_from": float(alpha[i]),
            "alpha_to": float(alpha[i + 1]),
            "deviation_from": float(deviation[j]),
            "deviation_to": float(deviation[j + 1]),
            "pairs": int(pairs.joint[i, j]),
        }
        for i, j in zip(*np.nonzero(pairs.joint), strict=True)
    ]
    return Figure(
        "grid",
        key,
        Table.of(key, "Joint density of the pairs", cells),
        "Attention weight and value-output deviation",
        f"{said}, all scored layers and heads together, counted on a logarithmic scale. Dashed "
        "lines join pairs of equal risk (weight times deviation); above and beside are the "
        "margins. The approximation is safest where the mass lies far to the lower left of the "
        "lines; pairs to the upper right are those whose score path is left out at a cost.",
        x="alpha",
        y="deviation",
        colour="pairs",
        guides=tuple(Guide(level, "product", f"risk {level:g}") for level in LEVELS),
        xlabel="attention weight",
        ylabel="||v_t - o_k|| / sqrt(d_v)",
        scales=("log", "log"),
    )


def training_figures(collected: CollectedPairs) -> list[Figure]:
    """Density of what a run collected while it trained, and the share above each level by step."""
    steps = sorted(collected.steps)
    said = f"The pairs of a fixed probe at {len(steps)} steps from {steps[0]} to {steps[-1]}"
    table = Table.of(
        "risk_training", "Share of the probe's pairs above each level", training_records(collected)
    )
    by_step = Figure(
        "lines",
        "risk_training",
        table,
        "Risky pairs as training goes on",
        "Share of the fixed probe's pairs whose weight times deviation is at or above each level. "
        "Look for lines that rise: what Value-Propagation leaves out then grows while the model "
        "trains.",
        x="step",
        y="share",
        series="level",
        xlabel="optimizer step",
        ylabel="share of the pairs",
        limits=(None, (0.0, None)),
    )
    return [density_figure("density_training", collected.total(), said), by_step]


def diagnose(subject: Subject, options: Options | None = None) -> Diagnosis:
    """Measure what Value-Propagation leaves out on the subject's model and rows.

    Raises:
        InputError: too few response tokens, or no two of one row within the window.
        UnsupportedError: no scored layer mixes positions by softmax attention alone.
    """
    options = options or Options()
    collected = None if options.collected is None else CollectedPairs.load(options.collected)
    rows = subject.sample()
    subject.require_tokens(rows, FEWEST, "shares of so few tokens mean nothing")
    layers, others = softmax_layers(subject.adapter, subject.config.layers, "use estimator='label'")
    pairs, looked_at = collect_pairs(subject, rows, layers, options.pairs)
    if not pairs.pairs:
        raise InputError(
            "there is no causal-window pair of response tokens",
            got=f"{len(rows)} rows, window {subject.config.window}",
            why="Value-Propagation is about what one response token does to a later one",
            remedy="rows with two or more response tokens, and a window of at least 1",
        )
    depth = len(subject.adapter.layers())
    # Those above which every layer has a self-only rule, as the self-only backward needs.
    clear = [n for n in layers if not mixers_without_rule(subject.adapter, range(n, depth))]
    shares = _shares(subject, rows, clear)
    figures = [density_figure("density", pairs, "The causal-window pairs")]
    notes = _notes(subject, pairs, looked_at, others, layers, set(layers) - set(clear))
    if collected is not None:
        figures += training_figures(collected)
        notes.append(
            f"Pairs during training: {options.collected}, a probe of {collected.about['rows']} "
            f"rows with {collected.about['response_tokens']} response tokens, layers "
            f"{', '.join(map(str, collected.layers))}, window {collected.about['window']}."
        )
    return conclude(
        NAME,
        subject,
        _conclusion(shares),
        [shares],
        figures,
        valued=rows,
        notes=notes,
        settings={"pairs": options.pairs},
    )


def _shares(subject: Subject, rows: Sequence[Example], layers: Sequence[int]) -> Table:
    records: list[dict[str, Any]] = []
    if layers:
        row = places_of(rows)[:, 0]
        for layer, parts in causal_parts(subject, causal_scorer(subject, layers), rows).items():
            records += share_records(parts, row, layer)
    return Table.of("shares", "Parts of the exact causal value", records)


def _notes(
    subject: Subject,
    pairs: PairCounts,
    looked_at: float,
    others: Mapping[str, str],
    layers: Sequence[int],
    below: set[int],
) -> list[str]:
    notes = [
        "Shares are along the validation gradient (adaptation).",
        f"Pairs: {pairs.pairs}, both positions predicting a response "
        f"token, from {looked_at:.0%} of the token positions that have one, in layers "
        f"{', '.join(map(str, layers))}.",
    ]
    if others:
        named = "; ".join(f"{name} ({kind})" for name, kind in others.items())
        notes.append(f"Left out, not softmax attention alone: {named}.")
    if below:
        notes.append(
            "No shares for layers "
            + ", ".join(map(str, sorted(below)))
            + ": a layer above them has no self-only backward."
        )
    return notes
