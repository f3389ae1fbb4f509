"""Diagnostic ``value-propagation``: the share of the causal value that it sees.

*Shares*: what part of every token's exact causal value Value-Propagation carries, and where the
rest flows. *Pairs*: attention weight and value-output deviation of the causal-window pairs, whose
product bounds what is left out (the paper's diagnostic). The pairs that a training run collected
(by the lab's callback ``watch_pairs``) are drawn beside those of the model, as in the paper, whose
figure is of pairs during training.
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
from alphatoken.diagnose import CheckedOptions
from alphatoken.diagnose.diagnosis import DOUBTFUL, Diagnosis, Table, graded
from alphatoken.diagnose.figures import Figure, Guide
from alphatoken.diagnose.pairs import (
    ALPHA,
    DEVIATION,
    CollectedPairs,
    PairCounts,
    attention_calls,
    choose_positions,
    pair_counts,
    softmax_layers,
    weigh_pairs,
)
from alphatoken.diagnose.statistics import FEWEST, bootstrap
from alphatoken.diagnose.subject import Subject, conclude, gathered, places_of
from alphatoken.diagnose.valuing import Setting, scorer_for
from alphatoken.direction.objective import forward_losses, scoring_forward
from alphatoken.errors import ConfigError, InputError
from alphatoken.estimate.captured import (
    TokenErrors,
    contract_columns,
    pull_back,
    scored_attentions,
    token_errors,
)
from alphatoken.model.attention import AttentionUse
from alphatoken.model.batch import LabelledBatch, read_batch, to_label_position, to_token_index
from alphatoken.model.capture import Recorder, accumulate_errors, record
from alphatoken.model.delta_rule import DeltaUse
from alphatoken.model.scope import mixers_without_rule
from alphatoken.scorer import Scorer
from alphatoken.support.options import option

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
        """Check that the file is there, too."""
        super().__post_init__()
        if self.collected is not None and not Path(self.collected).is_file():
            raise ConfigError(
                "there is no file of collected pairs",
                got=self.collected,
                remedy="what the callback watch_pairs of the lab writes",
            )


Numbers = NDArray[Any]

PARTS = {
    "window": "value path within the window",
    "beyond": "value path beyond the window",
    "score": "score path",
    "longer": "longer hops",
}
"""The four parts of the exact causal value, and how they are called."""


def hop_errors(recorder: Recorder, loss: Tensor) -> list[Tensor | None]:
    """Errors of all hops within one layer, at the linears: ordinary less self-only.

    Args:
        recorder: one recorded forward.
        loss: scalar, sum of its token losses.

    Returns:
        A list parallel to ``recorder.linears``: (b, t, d_out), or None where no hop ends.

    Exactness: one hop of the self-only errors within each layer, exactly. Oracle:
    ``alphatoken.oracle.propagation.one_hop``.
    """
    scored = scored_attentions(recorder)
    heads = accumulate_errors(recorder, loss, [one.output for one in scored], "self")
    hops: list[Tensor | None] = [None] * len(recorder.linears)
    for attention, error in zip(scored, heads, strict=True):
        if error is not None:
            for index, hop in _hop_errors_of(recorder, attention, error).items():
                hops[index] = hop
    return hops


def _hop_errors_of(
    recorder: Recorder, attention: AttentionUse | DeltaUse, error: Tensor
) -> dict[int, Tensor]:
    def pulled(mode: str) -> dict[int, Tensor]:
        with recorder.switch.to(mode):
            return pull_back(recorder, attention, attention.output, error)

    own = pulled("self")  # the direct part has it already
    return {i: e - own[i] if i in own else e for i, e in pulled("ordinary").items()}


def causal_columns(
    scorer: Scorer,
    batch: LabelledBatch,
    window: int | None,
    direction: Mapping[str, Tensor],
) -> dict[int, dict[str, Tensor]]:
    """Exact causal value and its four parts, by layer and position of use: each (b, t).

        causal = column sum - diagonal  of Psi  =  path value - direct value        exact
               = value path within W            what the estimator ``alphatoken`` computes
               + value path beyond W
               + score path                     hop - value path without window
               + longer hops                    through later layers: causal - hop

    The hop is the ordinary backward of a layer's attention, its scores included, less what stays at
    its position. One recorded forward serves all of them; a layer's part is the contraction of its
    own linears.

    Args:
        scorer: of the layers; supplies the scope and the names.
        batch: checked.
        window: W; None for no limit.
        direction: parameter name -> M.

    Exactness: all exact up to rounding (differences of exact quantities). Oracle:
    ``alphatoken.oracle.influence``, ``alphatoken.oracle.propagation``.
    """
    with record(scorer.adapter, scorer.scope) as recorder:
        with scoring_forward(scorer.adapter, scorer.scored.first):
            losses = forward_losses(scorer.adapter, batch, "batch")
        with torch.enable_grad():
            loss = losses.sum()

        def errors(estimator: str, part: str, limit: int | None = None) -> TokenErrors:
            return token_errors(recorder, loss, estimator, window=limit, part=part)

        own, every = errors("direct", "both").direct, errors("path", "both").direct
        columns = {
            "exact": [
                whole if whole is None or part is None else whole - part
                for whole, part in zip(every, own, strict=True)
            ],
            "hop": hop_errors(recorder, loss),
            "near": errors("alphatoken", "causal", window).causal,
            "value": errors("alphatoken", "causal").causal,
        }
        by_layer: dict[int, dict[str, Tensor]] = {}
        for layer in sorted({use.linear.layer for use in recorder.linears}):
            here = [use.linear.layer == layer for use in recorder.linears]
            part = {
                name: [e if own else None for e, own in zip(column, here, strict=True)]
                for name, column in columns.items()
            }
            # A contraction takes two columns of errors: here they are no direct and causal part.
            ((exact, hop),), ((value, near),) = (
                contract_columns(recorder, TokenErrors(*pair), [direction], scorer.scored.names)
                for pair in ((part["exact"], part["hop"]), (part["value"], part["near"]))
            )
            by_layer[layer] = {
                "exact": exact,
                "window": near,
                "beyond": value - near,
                "score": hop - value,
                "longer": exact - hop,
            }
    return by_layer


def causal_scorer(subject: Subject, layers: Sequence[int]) -> Scorer:
    """A scorer of these layers along the validation gradient, for scope, names and direction."""
    config = Setting("alphatoken", tuple(layers)).config(subject.config)
    return scorer_for(subject, config=replace(config, uncovered="skip"))


def causal_parts(
    subject: Subject, scorer: Scorer, rows: Sequence[Example]
) -> dict[str, dict[str, Numbers]]:
    """The parts of every response token of ``rows``, at the position that predicts it.

    Layer, by its number or "all" for their sum -> part, a key of ``PARTS`` or "exact" -> one number
    a token, in (row, position) order.
    """
    direction = scorer.direction.adaptation
    batches = subject.batches(rows)
    scorer.score(batches[0])  # the library's proofs of coverage and isolation, on this model

    def of(tensors: dict[str, Tensor]) -> dict[tuple[int, str], Tensor]:
        batch = read_batch(tensors, max_length=subject.adapter.max_positions())
        return {
            (layer, name): to_token_index(column)[batch.mask]
            for layer, parts in causal_columns(
                scorer, batch, subject.config.window, direction
            ).items()
            for name, column in parts.items()
        }

    columns = gathered(batches, subject.tracker("Causal parts", len(rows)), of)
    names = ("exact", *PARTS)
    layers = {
        str(layer): {name: columns[layer, name] for name in names}
        for layer in dict.fromkeys(layer for layer, _ in columns)
    }
    total = {name: np.sum([parts[name] for parts in layers.values()], axis=0) for name in names}
    return {**layers, "all": total}


def share_records(parts: Mapping[str, Numbers], rows: Numbers, layer: str) -> list[dict[str, Any]]:
    """One record a part of the exact causal value.

    ``signed = <part, exact> / <exact, exact>`` adds up to 1 over the parts and may be negative or
    above 1.
    """
    exact = parts["exact"]
    signed = {name: bootstrap(_signed, parts[name], exact, groups=rows) for name in PARTS}
    return [
        {"layer": layer, "part": title, "signed": signed[name]} for name, title in PARTS.items()
    ]


def _signed(part: Numbers, exact: Numbers) -> float:
    whole = float(exact @ exact)
    return float(part @ exact) / whole if whole else math.nan


# --- pairs -------------------------------------------------------------------------------------


def collect_pairs(
    subject: Subject, rows: Sequence[Example], layers: Sequence[int], budget: int
) -> tuple[PairCounts, float]:
    """Counts of the pairs of all batches and layers; and the share of positions looked at.

    A pair's positions both predict a response token. The share is of token positions with a pair.
    """
    # The self-only error of a query is zero elsewhere: no other pair takes part in the values.
    window, limit = subject.config.window, subject.adapter.max_positions()
    batches = [read_batch(batch, max_length=limit) for batch in subject.batches(rows)]
    used = [to_label_position(batch.mask) for batch in batches]
    chosen = choose_positions(used, window, budget, subject.seed)
    tracker = subject.tracker("Attention pairs", len(batches))
    counts: list[PairCounts] = []
    for number, (batch, mask, picked) in enumerate(zip(batches, used, chosen, strict=True)):
        calls = attention_calls(subject.adapter, layers, batch) if bool(picked.any()) else ()
        for _, call, output in calls:
            counts.append(PairCounts.of(*weigh_pairs(call, output, mask, picked, window)))
        tracker.report(number + 1)
    whole = sum(int((pair_counts(mask, window) > 0).sum()) for mask in used)
    share = sum(int(mask.sum()) for mask in chosen) / whole if whole else 0.0
    return PairCounts.total(counts), share


def training_records(collected: CollectedPairs) -> list[dict[str, Any]]:
    """One record a step and level: share of the probe's pairs at or above it."""
    counts = {step: collected.total([step]) for step in sorted(collected.steps)}
    return [
        {"step": step, "level": level, "pairs": of.pairs, "share": of.share_above(level)}
        for step, of in counts.items()
        for level in LEVELS
    ]


def _conclusion(shares: Table) -> str:
    whole = [i for i, record in enumerate(shares.records()) if record["layer"] == "all"]
    if not whole:
        return "No share was computed."
    share = shares.estimate(whole[0], "signed")
    return f"Value-Propagation sees {share} of the exact causal value."


_TOO_MUCH = 1.2


def _mark(shares: Table) -> str:
    whole = [i for i, record in enumerate(shares.records()) if record["layer"] == "all"]
    if not whole:
        return ""
    share = shares.estimate(whole[0], "signed")
    # More than all of it is as far off as less.
    return DOUBTFUL if share.high > _TOO_MUCH else graded(share)


def density_figure(key: str, pairs: PairCounts, which: str) -> Figure:
    """Joint density of weight and deviation of the pairs that ``which`` names."""
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
        f"{which}, all scored layers and heads together, counted on a logarithmic scale. Dashed "
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
    which = f"The pairs of a fixed probe at {len(steps)} steps from {steps[0]} to {steps[-1]}"
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
    return [density_figure("density_training", collected.total(), which), by_step]


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
        mark=_mark(shares),
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
        numbers = ", ".join(map(str, sorted(below)))
        notes.append(
            f"No shares for layers {numbers}: a layer above them has no self-only backward."
        )
    return notes
