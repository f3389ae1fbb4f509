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
from collections.abc import Mapping, Sequence
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
from alphatoken.fidelity.collected_pairs import CollectedPairs
from alphatoken.fidelity.diagnosis import Diagnosis, Table, Verdict
from alphatoken.fidelity.intervals import FEWEST, Estimate, bootstrap, few_rows
from alphatoken.fidelity.options import CheckedOptions, option
from alphatoken.fidelity.pairs import PairValues, choose_positions, measure_pairs, see_calls
from alphatoken.fidelity.registry import find
from alphatoken.fidelity.subject import Subject
from alphatoken.fidelity.value_propagation_figures import (
    density_figure,
    quantile,
    residual_figure,
    shares_figure,
    steps_figure,
    training_figure,
)
from alphatoken.model.batch import LabelledBatch, read_batch, to_label_position
from alphatoken.model.capture import mixers_without_rule, resolve_layers

__all__ = [
    "Options",
    "collect_pairs",
    "diagnose",
    "head_records",
    "label_positions",
    "risk_records",
    "said_of_training",
    "softmax_layers",
    "training_records",
    "violations",
]

NAME = "value-propagation"
Numbers = NDArray[Any]

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


def said_of_training(collected: CollectedPairs, records: Sequence[Mapping[str, Any]]) -> str:
    """What the highest level says about the run."""
    own = [record for record in records if record["level"] == records[-1]["level"]]
    first, last, whole = own[0], own[-1], collected.total()
    return (
        f"While the run trained ({len(own)} looks from step {first['step']} to {last['step']}, "
        f"{whole.pairs} pairs of a fixed probe), {whole.share_above(first['level']):.2%} of the "
        f"pairs had weight times deviation of {first['level']:g} or more: {first['share']:.2%} at "
        f"the first look, {last['share']:.2%} at the last. These are counts, without an interval."
    )


# --- answer ------------------------------------------------------------------------------------


def _answer(
    heads: Sequence[Mapping[str, Any]],
    risks: Sequence[Mapping[str, Any]],
    shares: Sequence[Mapping[str, Any]],
    agreement: Sequence[Mapping[str, Any]],
) -> list[str]:
    said = []
    whole = [record for record in shares if record["layer"] == "all"]
    if whole:
        window, beyond, score, longer = whole
        said.append(
            f"Of the exact causal value, Value-Propagation carries {window['signed']} (signed "
            f"share, all scored layers); {beyond['signed']} flows along the same path beyond the "
            f"window, {score['signed']} through the attention scores and {longer['signed']} "
            "through longer hops, none of which it sees."
        )
        near, _, hop = [record for record in agreement if record["layer"] == "all"]
        said.append(
            f"Its distance from the exact causal value is {near['relative_error']} of that "
            f"value's size, and it ranks tokens with Spearman {near['spearman']} to it; every "
            f"same-layer hop together reaches {hop['relative_error']} and {hop['spearman']}."
        )
    wrong = sum(record["violations"] for record in heads)
    checked = sum(record["pairs"] for record in heads)
    said.append(
        f"The measured residual exceeds its bound on {wrong} of {checked} pairs"
        + (", as it must." if not wrong else ": this must not happen; please report it.")
        + f" In the middle head it is {_middle(heads, 'tightness')} of the bound in the median, "
        f"and in sum {_middle(heads, 'score_over_value')} times the value path, which is kept: "
        "norms of what could flow; the shares above say what does."
    )
    highest = risks[-1]
    said.append(
        f"Pairs with weight times deviation above {highest['alpha_times_deviation_above']:g} are "
        f"{highest['share_of_pairs']} of all, and carry {highest['share_of_residual']} of the "
        "summed residual: judge by the second number, not the first."
    )
    return said


def _verdict(shares: Sequence[Mapping[str, Any]]) -> Verdict:
    whole = [record for record in shares if record["layer"] == "all"]
    seen = str(whole[0]["signed"]) if whole else ""
    return Verdict(
        f"Value-Propagation sees {seen} of the causal value." if seen else "No share was computed.",
        seen,
        "share of the exact causal value that Value-Propagation sees",
        "where much of the flow is missed, take estimator='label', which misses nothing.",
    )


def _middle(heads: Sequence[Mapping[str, Any]], name: str) -> str:
    """The head in the middle of the heads, with its interval."""
    found = sorted((h[name] for h in heads if h[name].defined), key=lambda one: one.value)
    return str(found[len(found) // 2]) if found else "not computed"


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
    figures = [density_figure(pairs, options.bins, options.levels), residual_figure(pairs)]
    tables = [
        Table.of("heads", "Residual and bound by layer and head", heads, _HEADS_NOTE),
        Table.of("risk", "Pairs above each contour", risks),
    ]
    if shares:
        figures.insert(0, shares_figure(shares))
        tables.insert(0, Table.of("shares", "Parts of the exact causal value", shares))
        tables.insert(1, Table.of("agreement", "Approximations of it", agreement))
    answer = _answer(heads, risks, shares, agreement)
    notes = _notes(subject, rows, pairs, looked_at, others, set(layers) - set(clear))
    if collected is not None:
        records = training_records(collected, sorted(options.levels))
        answer.append(said_of_training(collected, records))
        figures += [training_figure(collected, options.levels), steps_figure(records)]
        notes.append(
            f"Pairs during training: {options.collected}, a probe of {collected.about['rows']} "
            f"rows with {collected.about['response_tokens']} response tokens, layers "
            f"{', '.join(map(str, collected.layers))}, window {collected.about['window']}."
        )
    return Diagnosis(
        NAME,
        find(NAME).question,
        tuple(answer),
        tuple(tables),
        tuple(figures),
        tuple(notes),
        subject.settings() | {"pairs": options.pairs, "head_reduction": "per_head"},
        verdict=_verdict(shares),
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
