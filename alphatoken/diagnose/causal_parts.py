"""The exact causal value of each token, layer by layer, in four parts that add up to it.

    causal = column sum - diagonal  of Psi  =  path value - direct value        exact
           = value path within W            what the estimator ``alphatoken`` computes
           + value path beyond W
           + score path                     hop - value path without window
           + longer hops                    through later layers: causal - hop

where the hop is the ordinary backward of a layer's attention, its scores included, less what stays
at its position. One recorded forward serves all of them; a layer's part is the contraction of its
own linears.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.data import Example
from alphatoken.diagnose.intervals import bootstrap
from alphatoken.diagnose.subject import Subject, gathered
from alphatoken.diagnose.valuing import Setting, scorer_for
from alphatoken.direction.objective import forward_losses, scoring_forward
from alphatoken.estimate.columns import contract_columns
from alphatoken.estimate.estimators import (
    TokenErrors,
    pull_back,
    scored_attentions,
    token_errors,
)
from alphatoken.model.backward import accumulate_errors
from alphatoken.model.batch import LabelledBatch, read_batch, to_token_index
from alphatoken.model.capture import Recorder, record
from alphatoken.model.uses import AttentionUse, DeltaUse
from alphatoken.scorer import Scorer

__all__ = [
    "PARTS",
    "causal_columns",
    "causal_parts",
    "causal_scorer",
    "share_records",
]

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
    """Hops through one call, from the errors at its heads' outputs."""

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
        found: dict[int, dict[str, Tensor]] = {}
        sides, names = [direction], scorer.scored.names
        for layer in sorted({use.linear.layer for use in recorder.linears}):
            here = [use.linear.layer == layer for use in recorder.linears]
            kept = {
                name: [e if own else None for e, own in zip(part, here, strict=True)]
                for name, part in columns.items()
            }
            first = contract_columns(
                recorder, TokenErrors(kept["exact"], kept["hop"]), sides, names
            )[0]
            second = contract_columns(
                recorder, TokenErrors(kept["value"], kept["near"]), sides, names
            )[0]
            found[layer] = {
                "exact": first.direct,
                "window": second.causal,
                "beyond": second.direct - second.causal,
                "score": first.causal - second.direct,
                "longer": first.direct - first.causal,
            }
    return found


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

    def of(given: dict[str, Tensor]) -> dict[tuple[int, str], Tensor]:
        batch = read_batch(given, max_length=subject.adapter.max_positions())
        return {
            (layer, name): to_token_index(column)[batch.mask]
            for layer, parts in causal_columns(
                scorer, batch, subject.config.window, direction
            ).items()
            for name, column in parts.items()
        }

    found = gathered(batches, subject.tracker("Causal parts", len(rows)), of)
    names = ("exact", *PARTS)
    layers = {
        str(layer): {name: found[layer, name] for name in names}
        for layer in dict.fromkeys(layer for layer, _ in found)
    }
    total = {name: np.sum([parts[name] for parts in layers.values()], axis=0) for name in names}
    return {**layers, "all": total}


def share_records(parts: Mapping[str, Numbers], rows: Numbers, layer: str) -> list[dict[str, Any]]:
    """One record a part of the exact causal value.

    ``signed = <part, exact> / <exact, exact>`` adds up to 1 over the parts and may be negative or
    above 1.
    """
    exact = parts["exact"]
    return [
        {
            "layer": layer,
            "part": title,
            "signed": bootstrap(_signed, parts[name], exact, groups=rows),
        }
        for name, title in PARTS.items()
    ]


def _signed(part: Numbers, exact: Numbers) -> float:
    whole = float(exact @ exact)
    return float(part @ exact) / whole if whole else math.nan
