"""Ours beside a peer: the same quantity, and how far the two are apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from alphatoken import Scorer, ScorerConfig
from alphatoken.diagnose.statistics import spearman
from alphatoken.estimate.captured import Captured, contract_columns
from alphatoken.model.batch import label_mask, read_batch, to_token_index
from alphatoken.values import TokenValues
from benchmarks.peers.peer import Peer, Work

OURS = {"label": "label", "path": "path", "sample": "path"}
"""The estimator of ours that gives a peer's quantity, the cheapest one."""


def scorer(work: Work, estimator: str) -> Scorer:
    """Ours for the same layers and the same validation batches; adaptation only."""
    config = ScorerConfig(estimator=estimator, layers=work.layers)
    return Scorer(work.model, list(work.validation), None, config)


def ours(work: Work, estimator: str) -> Callable[[], TokenValues]:
    """The whole work each time: G is built anew."""
    valued = scorer(work, estimator)

    def run() -> TokenValues:
        valued.refresh()
        return valued.score(work.batch, components=False)

    return run


def reference(work: Work, estimand: str) -> Tensor:
    """What a peer of this estimand should give, by our exact estimators."""
    if estimand == "path":
        path, batch = scorer(work, "path"), read_batch(work.batch)
        m, names = path.direction.total(), path.scored.names
        captured = path.estimator
        assert isinstance(captured, Captured)
        with captured.forward(batch) as recording:
            recorder, errors = recording.recorder, captured.errors(recording)
            ((direct, causal),) = contract_columns(recorder, errors, [m], names)
        return direct + causal
    values = scorer(work, "label").score(work.batch).total
    return values if estimand == "label" else values.sum(1)


def in_double(work: Work) -> Work:
    """The same work in float64."""
    return replace(work, model=copy.deepcopy(work.model).double())


@dataclass(frozen=True)
class Agreement:
    """How far a peer is from what it should give, and how it ranks tokens.

    Attributes:
        error: largest difference over the largest value.
        allowed: the tolerance.
        correlation: Spearman over the response tokens with the exact label values of the same
            layers; a peer with one value a row gives it to each of the row's tokens.
    """

    error: float
    allowed: float
    correlation: float

    @property
    def agrees(self) -> bool:
        return self.error <= self.allowed

    def __str__(self) -> str:
        word = "agrees" if self.agrees else "DOES NOT AGREE"
        return (
            f"{word} with ours to {self.error:.0e}; "
            f"rank correlation with label {self.correlation:.2f}"
        )


def tokenwise(peer_values: Tensor, work: Work, estimand: str) -> Tensor:
    """A peer's values as one value a response token (b, t), 0 elsewhere."""
    labels = work.batch["labels"]
    values = {
        "label": lambda: peer_values,
        "path": lambda: to_token_index(peer_values),
        "sample": lambda: peer_values[:, None].expand(labels.shape),
    }[estimand]()
    return values.masked_fill(~label_mask(labels), 0.0)


def relative_error(actual: Tensor, wanted: Tensor) -> float:
    """Largest difference over the largest value; infinite for another shape or a NaN."""
    if actual.shape != wanted.shape:
        return math.inf
    error = float((actual.double() - wanted.double()).abs().max() / wanted.abs().max())
    return error if math.isfinite(error) else math.inf


def agreement(peer: Peer, work: Work, peer_values: Tensor, exact: Work | None = None) -> Agreement:
    """``found`` against our values in float64 (``exact``: the work in float64, if at hand)."""
    exact = exact or in_double(work)
    labels, counted = reference(exact, "label"), label_mask(work.batch["labels"])
    wanted = labels if peer.estimand == "label" else reference(exact, peer.estimand)
    return Agreement(
        relative_error(peer_values.detach(), wanted),
        peer.allowed(next(work.model.parameters()).dtype),
        spearman(tokenwise(peer_values, work, peer.estimand)[counted], labels[counted]),
    )
