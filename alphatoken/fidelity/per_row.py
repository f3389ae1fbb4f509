"""Values are linear in the direction: many directions in one pass, validation rows one by one.

With M = sum_v w_v G_v the value of a token is sum_v w_v <.., G_v>: scored once against the summed
gradient of every validation row, the tokens have a value for every subset and every resample of
those rows, by a weighted sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.data import Example
from alphatoken.direction.objective import forward_losses, scoring_forward
from alphatoken.errors import ConfigError, InputError
from alphatoken.estimate.columns import Side, contract_columns
from alphatoken.estimate.estimators import SWITCHED, TokenErrors, token_errors
from alphatoken.estimate.forward_mode import label_values
from alphatoken.estimate.token_values import assign_columns
from alphatoken.fidelity.subject import Subject
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.model.capture import record
from alphatoken.scorer import Scorer

__all__ = ["RowColumns", "absolute_terms", "row_columns", "values_along"]

Numbers = NDArray[np.float64]

_HELD = 2**28
"""Numbers of per-row gradients held at a time (1 GiB in float32)."""


@dataclass(frozen=True)
class RowColumns:
    """Values of n tokens against each of V validation rows.

    Attributes:
        sums: (n, V) value against the *summed* gradient of a row's response tokens.
        tokens: (V,) response tokens of the rows.
    """

    sums: Numbers
    tokens: NDArray[np.int64]

    def at(self, weights: NDArray[Any]) -> Numbers:
        """Adaptation values if row v is there ``weights[..., v]`` times: (..., V) to (..., n).

            value = sum_v w_v c_v / sum_v w_v n_v

        which is what scoring against those rows gives, because J_tgt is a mean over tokens.
        Exact up to rounding. Oracle: ``Scorer`` with those rows as its validation batches.

        Raises:
            InputError: weights without any response token.
        """
        counts = np.asarray(weights, dtype=np.float64) @ self.tokens
        if not (counts > 0).all():
            raise InputError(
                "a choice of validation rows has no response token",
                got=f"{int((counts <= 0).sum())} of {counts.size} choices",
                remedy="leave out rows without a response",
            )
        values: Numbers = (weights @ self.sums.T) / counts[..., None]
        return values

    @property
    def whole(self) -> Numbers:
        """(n,) values against all rows."""
        return self.at(np.ones(len(self.tokens)))


def values_along(
    scorer: Scorer, batch: Mapping[str, Any], directions: Sequence[Mapping[str, Tensor]]
) -> Numbers:
    """Values of the response tokens of one batch along several directions: (n, directions).

    The scorer's estimator, layers, window and parts; its own M plays no role. One forward for
    all directions with captured estimators, one dual forward each with ``label``. Tokens in (row,
    position) order. The proofs are not run here: score something first.

    Args:
        scorer: with ``preconditioner`` other than "full".
        batch: labelled.
        directions: parameter name -> M, for every scored parameter.
    """
    checked = read_batch(batch, max_length=scorer.adapter.max_positions())
    if not scorer.config.captured:
        first = scorer.scored.first or 0
        found = [label_values(scorer.adapter, checked, m, first=first) for m in directions]
    else:
        with _errors(scorer, checked) as (recorder, errors):
            sides = [Side(m) for m in directions]
            columns = contract_columns(recorder, errors, sides, scorer.scored.names)
        position = scorer.config.causal_position
        parts = [assign_columns(column, checked.mask, position) for column in columns]
        found = [direct + causal for direct, causal, _ in parts]
    flat = [values[checked.mask].double().cpu().numpy() for values in found]
    stacked: Numbers = np.stack(flat, axis=1)
    return stacked


def absolute_terms(
    scorer: Scorer, batch: Mapping[str, Any], direction: Mapping[str, Tensor]
) -> Numbers | None:
    """Sum of the absolute terms of each token's value; None for ``label``, which sums none.

    What rounding is relative to: a value may be far smaller where its terms cancel.
    """
    if not scorer.config.captured:
        return None
    checked = read_batch(batch, max_length=scorer.adapter.max_positions())
    with _errors(scorer, checked) as (recorder, errors):
        recorder.linears = [replace(use, x=use.x.abs()) for use in recorder.linears]
        sizes = TokenErrors(
            [None if e is None else e.abs() for e in errors.direct],
            [None if e is None else e.abs() for e in errors.causal],
        )
        side = Side({name: m.abs() for name, m in direction.items()})
        (column,) = contract_columns(recorder, sizes, [side], scorer.scored.names)
    direct, causal, _ = assign_columns(column, checked.mask, scorer.config.causal_position)
    terms: Numbers = (direct + causal)[checked.mask].double().cpu().numpy()
    return terms


@contextmanager
def _errors(scorer: Scorer, batch: LabelledBatch) -> Any:
    """The recorded forward of ``batch``, and its errors as the scorer's estimator splits them."""
    config, adapter = scorer.config, scorer.adapter
    with record(adapter, scorer.scope, attention=config.estimator in SWITCHED) as recorder:
        with scoring_forward(adapter, scorer.scored.first):
            losses = forward_losses(adapter, batch, "batch")
        with torch.enable_grad():
            loss = losses.sum()
        errors = token_errors(
            recorder,
            loss,
            config.estimator,
            window=config.window,
            head_reduction=config.head_reduction,
            part=config.part,
        )
        yield recorder, errors


def row_columns(
    subject: Subject, scorer: Scorer, rows: Sequence[Example], validation: Sequence[Example]
) -> RowColumns:
    """Score ``rows`` against every validation row by itself.

    The scorer's validation batches are put back afterwards. As many per-row gradients are held
    at a time as fit into 1 GiB (float32); for each such chunk the rows are sent through the model
    once more.

    Raises:
        ConfigError: the objective has no validation side, or P depends on the batch.
    """
    if not scorer.config.adapts or scorer.config.preconditioner == "full":
        raise ConfigError(
            "validation rows can be told apart only where values are linear in their gradients",
            got=f"objective={scorer.config.objective!r}, "
            f"preconditioner={scorer.config.preconditioner!r:.40}",
            remedy="objective='both' or 'adaptation', preconditioner=None",
        )
    size = sum(p.numel() for p in scorer.parameters.values())
    chunk = max(1, _HELD // size)
    batches = subject.batches(rows)
    tracker = subject.tracker("Values against each validation row", len(validation))
    blocks: list[Numbers] = []
    given = scorer.validation
    try:
        for start in range(0, len(validation), chunk):
            held = [_gradient(subject, scorer, row) for row in validation[start : start + chunk]]
            blocks.append(np.concatenate([values_along(scorer, b, held) for b in batches]))
            tracker.report(min(start + chunk, len(validation)))
    finally:
        scorer.set_validation(given)
    tokens = np.array([row.response_tokens for row in validation], dtype=np.int64)
    return RowColumns(np.concatenate(blocks, axis=1) * tokens, tokens)


def _gradient(subject: Subject, scorer: Scorer, row: Example) -> dict[str, Tensor]:
    """P o G of one validation row, a mean over its tokens."""
    scorer.set_validation(subject.batches([row]))
    return scorer.direction.adaptation
