"""Scorers for a subject with other settings, at another checkpoint, along other directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.config import WALK_OPTIONS, ScorerConfig
from alphatoken.data import Example
from alphatoken.direction.drift import FisherDrift
from alphatoken.estimate.columns import Side, contract_columns
from alphatoken.estimate.estimators import SPLIT, WALK
from alphatoken.estimate.forward_mode import label_values
from alphatoken.estimate.token_values import assign_columns
from alphatoken.fidelity.subject import Subject, gathered
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.model.batch_slice import around_responses
from alphatoken.model.parameter_choice import ParameterChoice
from alphatoken.scorer import Scorer
from alphatoken.scoring.passes import Weights

__all__ = ["retention_term", "scorer_for", "values_along", "with_estimator"]


def with_estimator(config: ScorerConfig, estimator: str) -> ScorerConfig:
    """The same settings for another estimator; what it does not allow falls back to the default.

    Raises:
        ConfigError: no such estimator.
    """
    if estimator == WALK:
        return ScorerConfig(WALK, **{name: getattr(config, name) for name in WALK_OPTIONS})
    changes: dict[str, Any] = {"estimator": estimator, "curvature": False}
    changes |= {name: getattr(ScorerConfig, name) for name in WALK_OPTIONS}
    if estimator != "label":
        changes["derivative"] = "auto"
    if estimator not in SPLIT or (estimator == "direct" and config.part == "causal"):
        changes["part"] = "both"
    if estimator != "label" and not ParameterChoice.read(config.parameters).captured:
        changes["parameters"] = "linears"
    return replace(config, **changes)


def retention_term(subject: Subject) -> FisherDrift | None:
    """The retention term of the subject's values; None where it would be zero for every token.

    ``V = F o (W - W_ref)`` is zero at the reference: without a Fisher or a reference model given
    there is nothing to fit one for.
    """
    if subject.config.objective == "adaptation":
        return None
    if subject.fisher is not None:
        return subject.fisher
    if subject.reference is not None:
        return subject.fitted_fisher()
    return None


def scorer_for(
    subject: Subject,
    estimator: str | None = None,
    *,
    model: nn.Module | None = None,
    retention: FisherDrift | None = None,
    rows: Sequence[Example] | None = None,
    config: ScorerConfig | None = None,
) -> Scorer:
    """A scorer with the subject's objective, or with other validation ``rows``.

    By default its own settings at its own model; ``estimator`` changes that one, ``config`` all.
    """
    if config is None:
        config = with_estimator(subject.config, estimator or subject.config.estimator)
    scorer = Scorer(
        subject.model if model is None else model,
        subject.batches(subject.validation if rows is None else rows),
        None if config.estimator == WALK else retention,
        config,
    )
    scorer.warn = False  # a diagnosis says itself which side decides
    return scorer


def values_along(
    subject: Subject,
    scorer: Scorer,
    rows: Sequence[Example],
    directions: Sequence[Mapping[str, Tensor]],
    label: str = "",
) -> NDArray[np.float64]:
    """Values of the response tokens of ``rows`` along several directions: (n, directions).

    The scorer's estimator, layers, window and parts; its own M plays no role and is not built.
    Values are linear in M, so one forward a batch serves all directions with captured estimators;
    with ``label`` there is a dual forward each, whatever ``derivative`` says. Tokens come in (row,
    position) order. Equal to ``Scorer.score`` with that M, up to rounding.

    Args:
        subject: whose batches they come in.
        scorer: with ``preconditioner`` other than "full".
        rows: encoded.
        directions: parameter name -> M, for every scored parameter.
        label: of the progress.
    """
    tracker = subject.tracker(label or f"Values, {scorer.config.estimator}", len(rows))

    def of(batch: dict[str, Tensor]) -> dict[int, Tensor]:
        checked = read_batch(batch, max_length=scorer.adapter.max_positions())
        # The proofs of coverage and isolation, on this model.
        if scorer.valuer.capture_check.pending:
            scorer.valuer.prove(around_responses(checked))
        return {n: v[checked.mask] for n, v in enumerate(_along(scorer, checked, directions))}

    return np.stack([*gathered(subject.batches(rows), tracker, of).values()], axis=1)


def _along(
    scorer: Scorer, batch: LabelledBatch, directions: Sequence[Mapping[str, Tensor]]
) -> list[Tensor]:
    """(b, t) values along each direction."""
    if not scorer.config.captured:
        first = scorer.scored.first or 0
        return [label_values(scorer.adapter, batch, m, first=first) for m in directions]
    with scorer.valuer.forward(batch, Weights(None, None)) as seen:
        errors, sides = scorer.valuer.errors(seen), [Side(m) for m in directions]
        columns = contract_columns(seen.recorded[0], errors, sides, scorer.scored.names)
    position = scorer.config.causal_position
    parts = [assign_columns(column, batch.mask, position) for column in columns]
    return [direct + causal for direct, causal, _ in parts]
