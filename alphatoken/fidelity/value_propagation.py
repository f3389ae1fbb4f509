"""``value-propagation``: how much of what flows from token to token does Value-Propagation see?

Three looks at the same approximation. *Pairs*: attention weight and value-output deviation of the
causal-window pairs, whose product bounds what is left out (the paper's diagnostic). *Residual*:
the norm of the score path that is left out, measured, beside its bound. *Shares*: what part of
every token's exact causal value Value-Propagation carries, and where the rest flows. The pairs that
a training run collected (``--collect_value_propagation N``) are drawn beside those of the model, as
in the paper, whose figure is of pairs during training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.data import Example
from alphatoken.errors import ConfigError, InputError, UnsupportedError
from alphatoken.fidelity.causal_parts import (
    agreement_records,
    causal_parts,
    causal_scorer,
    share_records,
)
from alphatoken.fidelity.collected_pairs import ALPHA, DEVIATION, CollectedPairs
from alphatoken.fidelity.diagnosis import Answer, Diagnosis, Table
from alphatoken.fidelity.figures import Figure, Guide, draw_all
from alphatoken.fidelity.intervals import FEWEST, Estimate, bootstrap, few_rows
from alphatoken.fidelity.options import CheckedOptions, option
from alphatoken.fidelity.pairs import (
    PairValues,
    choose_positions,
    density,
    measure_pairs,
    see_calls,
)
from alphatoken.fidelity.registry import find
from alphatoken.fidelity.subject import Subject
from alphatoken.model.batch import LabelledBatch, read_batch, to_label_position
from alphatoken.model.capture import mixers_without_rule, resolve_layers

__all__ = [
    "Options",
    "collect_pairs",
    "diagnose",
    "head_records",
    "label_positions",
    "risk_records",
    "softmax_layers",
    "training_records",
    "violations",
]

NAME = "value-propagation"
Numbers = NDArray[Any]

_MOST_BARS = 48

# How far a norm computed in this dtype may be off; a violation of the bound is more than that.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}


@dataclass(frozen=True)
class Options(CheckedOptions):
    """What is looked at; the subject decides on tokens, layers and window."""

    pairs: int = option(
        20_000, "most causal-window pairs looked at in each layer and head", least=1
    )
    levels: tuple[float, ...] = option(
        (0.001, 0.01, 0.1), "contours of attention weight times deviation", above=0, below=math.inf
    )
    collected: str | None = option(
        None, "file of pairs that a training run collected; drawn beside those of the model"
    )
    bins: int = option(48, "cells a side of the joint density", least=2)
    draws: int = option(60, "bootstrap samples of each interval", least=10)

    def __post_init__(self) -> None:
        """Check every option."""
        super().__post_init__()
        if not self.levels:
            raise ConfigError("levels must be positive numbers", got=repr(self.levels))
        if self.collected is not None and not Path(self.collected).is_file():
            raise ConfigError(
                "there is no file of collected pairs",
                got=self.collected,
                remedy="output_dir/_alphatoken/value-propagation.safetensors of a run with "
                "--collect_value_propagation N",
            )


# --- pairs -------------------------------------------------------------------------------------


def label_positions(batch: LabelledBatch) -> Tensor:
    """(b, t) True where a response token is predicted: the pairs that carry a valued token's error.

    The self-only error of a query is zero elsewhere, so no other pair takes part in the values.
    """
    return to_label_position(batch.mask)


def softmax_layers(subject: Subject) -> tuple[tuple[int, ...], dict[str, str]]:
    """The scored layers that mix positions by softmax attention alone, and the others by name."""
    adapter = subject.adapter
    kept: list[int] = []
    others: dict[str, str] = {}
    for layer in resolve_layers(adapter, subject.config.layers):
        mixers = adapter.other_mixers([layer])
        others |= mixers
        if not mixers:
            kept.append(layer)
    return tuple(kept), others


def collect_pairs(
    subject: Subject, rows: Sequence[Example], layers: Sequence[int], budget: int
) -> tuple[list[PairValues], float]:
    """Pairs of all batches by layer, ``row`` counted over all rows; and the positions' share.

    The share is that of token positions with a pair that were looked at.
    """
    window = subject.config.window
    batches = [_checked(subject, batch) for batch in subject.batches(rows)]
    used = [label_positions(batch) for batch in batches]
    chosen = choose_positions(used, window, budget, subject.seed)
    everything = choose_positions(used, window, 2**62, subject.seed)
    tracker = subject.tracker("Attention pairs", len(batches))
    found: list[PairValues] = []
    for number, (batch, mask, picked) in enumerate(zip(batches, used, chosen, strict=True)):
        if bool(picked.any()):
            for seen in see_calls(subject.adapter, layers, batch):
                one = measure_pairs(seen, mask, picked, window)
                found.append(replace(one, row=one.row + number * subject.batch_size))
        tracker.report(number + 1)
    whole = sum(int(mask.sum()) for mask in everything)
    share = sum(int(mask.sum()) for mask in chosen) / whole if whole else 0.0
    return _by_layer(found), share


def _checked(subject: Subject, batch: Mapping[str, Tensor]) -> LabelledBatch:
    return read_batch(batch, max_length=subject.adapter.max_positions())


def _by_layer(found: Sequence[PairValues]) -> list[PairValues]:
    """One entry a layer: the pairs of all its calls."""
    names = ("row", "k", "t", "alpha", "deviation", "residual", "bound", "value_path")
    return [
        PairValues(
            layer,
            *(
                np.concatenate([getattr(one, name) for one in found if one.layer == layer])
                for name in names
            ),
        )
        for layer in sorted({one.layer for one in found})
    ]


def violations(pairs: PairValues, rounding: float) -> NDArray[np.bool_]:
    """(n, h) True where the measured residual exceeds its bound by more than rounding."""
    return np.asarray(pairs.residual > pairs.bound * (1 + rounding))


def head_records(
    pairs: Sequence[PairValues], *, rounding: float, draws: int
) -> list[dict[str, Any]]:
    """One record a layer and head: residual, bound, tightness, score path over value path.

    Medians have intervals over rows; 95 % of the pairs lie below ``q95``. Score path over value
    path is a ratio of sums, so that pairs count by what flows between them.
    """
    records = []
    for one in pairs:
        wrong = violations(one, rounding)
        for head in range(one.alpha.shape[1]):
            residual, bound = one.residual[:, head], one.bound[:, head]
            records.append(
                {
                    "layer": one.layer,
                    "head": head,
                    "pairs": len(residual),
                    "residual": _median(residual, one.row, draws),
                    "residual_q95": quantile(residual, 0.95),
                    "bound": _median(bound, one.row, draws),
                    "tightness": _median(_ratio(residual, bound), one.row, draws),
                    "score_over_value": _ratio_of_sums(
                        residual, one.value_path[:, head], one.row, draws
                    ),
                    "violations": int(wrong[:, head].sum()),
                }
            )
    return records


def _ratio(top: Numbers, bottom: Numbers) -> Numbers:
    """NaN where the bottom is zero: nothing flows there."""
    return np.divide(top, bottom, out=np.full_like(top, np.nan), where=bottom > 0)


def _median(values: Numbers, rows: Numbers, draws: int) -> Estimate:
    kept = ~np.isnan(values)
    if not kept.any():
        return Estimate.undefined(0, "not computed")
    return bootstrap(
        lambda column: float(np.median(column)),
        values[kept],
        groups=rows[kept],
        draws=draws,
        what="pairs",
    )


def risk_records(
    pairs: Sequence[PairValues], levels: Sequence[float], draws: int
) -> list[dict[str, Any]]:
    """For each level: share of pairs with ``alpha d`` above it, and of the residual they carry."""
    risk = [one.alpha * one.deviation for one in pairs]
    rows = np.concatenate([one.row for one in pairs])
    count = np.concatenate([np.full(len(r), float(r.shape[1])) for r in risk])
    whole = np.concatenate([np.nansum(one.residual, 1) for one in pairs])
    records = []
    for level in levels:
        above = np.concatenate([(r > level).sum(1).astype(np.float64) for r in risk])
        carried = np.concatenate(
            [np.nansum(one.residual * (r > level), 1) for one, r in zip(pairs, risk, strict=True)]
        )
        records.append(
            {
                "alpha_times_deviation_above": level,
                "share_of_pairs": _ratio_of_sums(above, count, rows, draws),
                "share_of_residual": _ratio_of_sums(carried, whole, rows, draws),
            }
        )
    return records


def _ratio_of_sums(top: Numbers, bottom: Numbers, rows: Numbers, draws: int) -> Estimate:
    """``sum(top) / sum(bottom)`` with an interval over rows, or over items where rows are few."""
    known = ~(np.isnan(top) | np.isnan(bottom))
    if not known.any():
        return Estimate.undefined(0, "not computed")
    top, bottom = top[known], bottom[known]
    names, place = np.unique(rows[known], return_inverse=True)
    if len(names) >= FEWEST:
        top, bottom = (np.bincount(place, x).astype(np.float64) for x in (top, bottom))

    def ratio(a: Numbers, b: Numbers) -> float:
        return float(a.sum() / b.sum()) if b.sum() else math.nan

    found = bootstrap(ratio, top, bottom, draws=draws)
    return replace(found, count=int(known.sum()))


def training_records(collected: CollectedPairs, levels: Sequence[float]) -> list[dict[str, Any]]:
    """One record a step and level: share of the probe's pairs at or above it."""
    return [
        {
            "step": step,
            "level": level,
            "pairs": collected.total([step]).pairs,
            "share": collected.total([step]).share_above(level),
        }
        for step in sorted(collected.steps)
        for level in levels
    ]


# --- answer ------------------------------------------------------------------------------------


def _numbers(
    heads: Sequence[Mapping[str, Any]], collected: CollectedPairs | None, levels: Sequence[float]
) -> Table:
    """Counts over all heads, the head in their middle, and shares of a whole run's pairs."""
    found: dict[str, Any] = {
        "pairs checked against the bound": sum(record["pairs"] for record in heads),
        "pairs beyond the bound": sum(record["violations"] for record in heads),
        "residual over bound, middle head": _middle(heads, "tightness"),
        "score path over value path, middle head": _middle(heads, "score_over_value"),
    }
    if collected is not None:
        whole = collected.total()
        found["pairs of the probe during training"] = whole.pairs
        found |= {f"share of these of risk {x:g} and more": whole.share_above(x) for x in levels}
    return Table.of_numbers(found)


def _answer(shares: Sequence[Mapping[str, Any]]) -> Answer:
    whole = [record for record in shares if record["layer"] == "all"]
    seen = str(whole[0]["signed"]) if whole else ""
    return Answer(
        f"Value-Propagation sees {seen} of the causal value." if seen else "No share was computed.",
        seen,
        "share of the exact causal value that Value-Propagation sees",
        "where much of the flow is missed, take estimator='label', which misses nothing.",
    )


def _middle(heads: Sequence[Mapping[str, Any]], name: str) -> Estimate:
    """The head in the middle of the heads, with its interval."""
    found = sorted((h[name] for h in heads if h[name].defined), key=lambda one: float(one.value))
    return found[len(found) // 2] if found else Estimate.undefined(0, "not computed")


# --- figures -----------------------------------------------------------------------------------


def cells_of(key: str, counts: Numbers, alpha: Numbers, deviation: Numbers) -> Table:
    """Cells of a joint density that hold a pair; ``alpha`` and ``deviation`` are edges."""
    cells = [
        {
            "alpha_from": float(alpha[i]),
            "alpha_to": float(alpha[i + 1]),
            "deviation_from": float(deviation[j]),
            "deviation_to": float(deviation[j + 1]),
            "pairs": int(counts[i, j]),
        }
        for i, j in zip(*np.nonzero(counts), strict=True)
    ]
    return Table.of(key, "Joint density of the pairs", cells)


def density_figure(cells: Table, levels: Sequence[float], said: str) -> Figure:
    """Joint density of weight and deviation; ``said``: of which pairs."""
    return Figure(
        "grid",
        cells.key,
        cells,
        "Attention weight and value-output deviation",
        f"{said}, all scored layers and heads together, counted on a logarithmic scale. Dashed "
        "lines join pairs of equal risk (weight times deviation); above and beside are the "
        "margins. The approximation is safest where the mass lies far to the lower left of the "
        "lines; pairs to the upper right are those whose score path is left out at a cost.",
        x="alpha",
        y="deviation",
        colour="pairs",
        guides=tuple(Guide(level, "product", f"risk {level:g}") for level in sorted(levels)),
        xlabel="attention weight",
        ylabel="||v_t - o_k|| / sqrt(d_v)",
        scales=("log", "log"),
    )


def training_figures(collected: CollectedPairs, levels: Sequence[float]) -> list[Figure]:
    """Density of what a run collected while it trained, and the share above each level by step."""
    steps = sorted(collected.steps)
    said = f"The pairs of a fixed probe at {len(steps)} steps from {steps[0]} to {steps[-1]}"
    cells = cells_of("density_training", collected.total().joint, 10.0**ALPHA, 10.0**DEVIATION)
    return [
        density_figure(cells, levels, said),
        steps_figure(training_records(collected, levels)),
    ]


def steps_figure(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Share of the probe's pairs above each level, by step."""
    return Figure(
        "lines",
        "risk_training",
        Table.of("risk_training", "Share of the probe's pairs above each level", records),
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


def _residual_figure(pairs: Sequence[PairValues]) -> Figure:
    """Residual, bound and value path of the pairs, by head."""
    bars = _bars(pairs)
    return Figure(
        "bars",
        "residual",
        Table.of("residual_quantiles", "Quantiles of the drawn norms", bars),
        "What is left out, its bound, and what is kept",
        "Median and 5 % to 95 % of the pairs. The residual (score path) never lies above its "
        "bound; how far below it says how loose the bound is. Where the residual is as high "
        "as the value path, Value-Propagation drops as much as it keeps.",
        x="place",
        y=("bound", "residual", "value_path"),
        ylabel="operator norm of a pair",
        scales=("linear", "symlog"),
    )


def _bars(pairs: Sequence[PairValues]) -> list[dict[str, Any]]:
    """Quantiles by head, or by layer where there are too many heads for one picture."""
    by_head = sum(one.alpha.shape[1] for one in pairs) <= _MOST_BARS
    return [
        {
            "place": f"{one.layer}.{head}" if by_head else str(one.layer),
            **{
                name: _spread(getattr(one, name)[:, head].ravel())
                for name in ("bound", "residual", "value_path")
            },
        }
        for one in pairs
        for head in (range(one.alpha.shape[1]) if by_head else (slice(None),))
    ]


def _spread(values: Numbers) -> Estimate:
    """Median of the numbers that are there, and the ends that hold 90 % of them."""
    middle, low, high = (quantile(values, level) for level in (0.5, 0.05, 0.95))
    return Estimate(middle, low, high, int(values.size))


def quantile(values: Numbers, level: float) -> float:
    """Of the numbers that are there; NaN of fewer than ``FEWEST``."""
    values = values[~np.isnan(values)]
    return float(np.quantile(values, level)) if len(values) >= FEWEST else math.nan


def _shares_figures(shares: Table) -> Iterator[Figure]:
    """Signed shares and sizes of the parts, by layer."""
    for measure, title, said, guides in (
        ("signed", "Where the exact causal value comes from", "Signed shares, which add up to 1 "
         "in each layer; a mark below zero works against the exact value.",
         (Guide(0.0, "y"), Guide(1.0, "y"))),
        ("norm", "Sizes of the parts of the exact causal value", "Whatever their sign, over the "
         "size of the exact value.", (Guide(0.0, "y"),)),
    ):  # fmt: skip
        yield Figure(
            "bars",
            "shares" if measure == "signed" else "shares-size",
            shares,
            title,
            f"{said} The first mark is what Value-Propagation computes; a large 'longer hops' or "
            "'score path' is what it cannot see. Bars are 95 % intervals.",
            x="layer",
            y=measure,
            series="part",
            guides=guides,
            ylabel="signed share" if measure == "signed" else "size / exact",
        )


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
    layers, others = softmax_layers(subject)
    if not layers:
        raise UnsupportedError(
            "Value-Propagation has no attention weights to propagate along",
            got="; ".join(f"{name}: {kind}" for name, kind in others.items()),
            why="every scored layer mixes positions in another way than softmax attention",
            remedy="score layers with softmax attention, or use estimator='label'",
        )
    pairs, looked_at = collect_pairs(subject, rows, layers, options.pairs)
    if not sum(len(one.row) for one in pairs):
        raise InputError(
            "there is no causal-window pair of response tokens",
            got=f"{len(rows)} rows, window {subject.config.window}",
            why="Value-Propagation is about what one response token does to a later one",
            remedy="rows with two or more response tokens, and a window of at least 1",
        )
    dtype = next(subject.model.parameters()).dtype
    heads = head_records(pairs, rounding=_ROUNDING.get(dtype, 0.1), draws=options.draws)
    risks = risk_records(pairs, sorted(options.levels), options.draws)
    clear = _layers_with_self_rule(subject, layers)
    shares, agreement = _shares(subject, rows, clear, options.draws)
    counts, *edges = density(pairs, options.bins)
    cells = cells_of("density", counts, *(10.0**edge for edge in edges))
    figures = [
        density_figure(cells, options.levels, "The causal-window pairs"),
        _residual_figure(pairs),
    ]
    tables = [
        Table.of("heads", "Residual and bound by layer and head", heads, _HEADS_NOTE),
        Table.of("risk", "Pairs above each contour", risks),
        _numbers(heads, collected, sorted(options.levels)),
    ]
    if shares:
        tables.insert(0, Table.of("shares", "Parts of the exact causal value", shares))
        tables.insert(1, Table.of("agreement", "Approximations of it", agreement))
        figures = [*_shares_figures(tables[0]), *figures]
    notes = _notes(subject, rows, pairs, looked_at, others, set(layers) - set(clear))
    if any(record["violations"] for record in heads):
        notes.append("WARNING: pairs lie beyond the bound; this must not happen, please report it.")
    if collected is not None:
        figures += training_figures(collected, sorted(options.levels))
        notes.append(
            f"Pairs during training: {options.collected}, a probe of {collected.about['rows']} "
            f"rows with {collected.about['response_tokens']} response tokens, layers "
            f"{', '.join(map(str, collected.layers))}, window {collected.about['window']}. Their "
            "shares are counts, without an interval."
        )
    return Diagnosis(
        NAME,
        find(NAME).question,
        _answer(shares),
        tuple(tables),
        draw_all(figures),
        tuple(notes),
        subject.settings() | {"pairs": options.pairs, "head_reduction": "per_head"},
    )


_HEADS_NOTE = (
    "Operator norms of one pair's Jacobian from the layer's normalised input to one head's output. "
    "tightness: residual / bound. score_over_value: summed norms left out over those kept. The "
    "bound is on this Jacobian, not on the error of the values; the shares measure that."
)


def _layers_with_self_rule(subject: Subject, layers: Sequence[int]) -> list[int]:
    """Those above which every layer has a self-only rule, as the self-only backward needs."""
    depth = len(subject.adapter.layers())
    return [n for n in layers if not mixers_without_rule(subject.adapter, range(n, depth))]


def _shares(
    subject: Subject, rows: Sequence[Example], layers: Sequence[int], draws: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if not layers:
        return [], []
    found = causal_parts(subject, causal_scorer(subject, layers), rows)
    shares: list[dict[str, Any]] = []
    agreement: list[dict[str, Any]] = []
    scopes = {str(layer): parts for layer, parts in found.parts.items()} | {"all": found.total()}
    for layer, parts in scopes.items():
        shares += share_records(parts, found.row, layer, draws)
        agreement += agreement_records(parts, found.row, layer, draws)
    return shares, agreement


def _notes(
    subject: Subject,
    rows: Sequence[Example],
    pairs: Sequence[PairValues],
    looked_at: float,
    others: Mapping[str, str],
    below: set[int],
) -> list[str]:
    notes = [
        f"Shares are of {subject.counted(rows)}, along the validation gradient (adaptation).",
        f"Pairs: {sum(one.alpha.size for one in pairs)}, both positions predicting a response "
        f"token, from {looked_at:.0%} of the token positions that have one, in layers "
        f"{', '.join(str(one.layer) for one in pairs)}.",
        f"Everything is computed in the model's {subject.settings()['dtype']}.",
    ]
    notes += few_rows(len(rows))
    if others:
        named = "; ".join(f"{name} ({kind})" for name, kind in others.items())
        notes.append(f"Left out, not softmax attention alone: {named}.")
    if below:
        notes.append(
            "No shares for layers "
            + ", ".join(map(str, sorted(below)))
            + ": a layer above them has no self-only backward."
        )
    unknown = [str(one.layer) for one in pairs if np.isnan(one.bound).any()]
    if unknown:
        notes.append(
            f"No bound in layers {', '.join(unknown)}: no single projection of the attention "
            "module's input makes the keys."
        )
    if subject.config.head_reduction != "per_head":
        notes.append("Shares are per head; the scorer is set to head-mean attention weights.")
    return notes
