"""Scorers for a subject: the user's own settings with another estimator, at another checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from alphatoken.config import ScorerConfig
from alphatoken.data import Example
from alphatoken.direction.drift import FisherDrift
from alphatoken.estimate.estimators import SPLIT
from alphatoken.fidelity.subject import Subject
from alphatoken.model.parameter_choice import ParameterChoice
from alphatoken.scorer import Scorer

__all__ = ["retention_term", "scorer_for", "with_estimator"]


def with_estimator(config: ScorerConfig, estimator: str) -> ScorerConfig:
    """The same settings for another estimator; what it does not allow falls back to the default.

    Raises:
        ConfigError: no such estimator.
    """
    changes: dict[str, str] = {"estimator": estimator}
    if estimator not in SPLIT or (estimator == "direct" and config.part == "causal"):
        changes["part"] = "both"
    if estimator != "label" and not ParameterChoice.read(config.parameters).captured:
        changes["parameters"] = "linears"
    return replace(config, **changes)  # type: ignore[arg-type] # mypy sees one type for all


def retention_term(subject: Subject, *, moved: bool = False) -> FisherDrift | None:
    """The retention term of the subject's values; None where it would be zero for every token.

    ``V = F o (W - W_ref)`` is zero at the reference: without a Fisher or a reference model given
    there is nothing to fit one for, unless the scored model has been ``moved`` away from it.
    """
    if subject.config.objective == "adaptation":
        return None
    if subject.fisher is not None:
        return subject.fisher
    if subject.reference is not None or moved:
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
        retention,
        config,
    )
    scorer.warn = False  # a diagnosis says itself which side decides
    return scorer
