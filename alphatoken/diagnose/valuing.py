"""Values of a subject under other settings, at another checkpoint, along other directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.config import READ_BY, ScorerConfig, refused_by_estimator
from alphatoken.data import Example
from alphatoken.diagnose.subject import Subject, gathered
from alphatoken.direction.drift import FisherDrift
from alphatoken.direction.objective import objective_gradient
from alphatoken.errors import CoverageError, UnsupportedError
from alphatoken.estimate.columns import contract_columns
from alphatoken.estimate.forward_mode import label_values
from alphatoken.estimate.names import ESTIMATORS, WALK
from alphatoken.estimate.proofs import CoverageReport
from alphatoken.estimate.token_values import assign_columns
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.model.batch_slice import around_responses
from alphatoken.model.layer_choice import layers_within
from alphatoken.scorer import Scorer
from alphatoken.scoring.captured import Captured

__all__ = [
    "WINDOWED",
    "Setting",
    "along",
    "depths_of",
    "full_gradient",
    "read",
    "retention_term",
    "scorer_for",
    "supported",
    "values_along",
    "windows_of",
    "with_estimator",
]

WINDOWED = ("alphatoken", "paper_literal")
"""Estimators that Value-Propagation's window changes."""

_DEPTHS = 8  # numbers of layers that are tried

Numbers = NDArray[np.float64]


def with_estimator(config: ScorerConfig, estimator: str) -> ScorerConfig:
    """The same settings for another estimator; what it does not allow falls back to the default.

    Raises:
        ConfigError: no such estimator.
    """
    if estimator == WALK:
        of_walks = [name for name, readers in READ_BY.items() if readers == (WALK,)]
        return ScorerConfig(WALK, **{name: getattr(config, name) for name in of_walks})
    refused = refused_by_estimator({**vars(config), "estimator": estimator})
    defaults: dict[str, Any] = {name: getattr(ScorerConfig, name) for name, _ in refused}
    return replace(config, estimator=estimator, **defaults)


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
) -> Numbers:
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
        # The proofs of coverage, isolation and derivatives, on this model.
        if scorer.estimator.proofs.pending:
            scorer.estimator.prove(around_responses(checked), directions)
        return {n: v[checked.mask] for n, v in enumerate(_along(scorer, checked, directions))}

    return np.stack([*gathered(subject.batches(rows), tracker, of).values()], axis=1)


def _along(
    scorer: Scorer, batch: LabelledBatch, directions: Sequence[Mapping[str, Tensor]]
) -> list[Tensor]:
    """(b, t) values along each direction."""
    estimator = scorer.estimator
    if not isinstance(estimator, Captured):
        first = scorer.scored.first or 0
        return [label_values(scorer.adapter, batch, m, first=first) for m in directions]
    with estimator.forward(batch) as recording:
        errors, (recorder, _) = estimator.errors(recording), recording.recorded
        columns = contract_columns(recorder, errors, directions, scorer.scored.names)
    parts = [assign_columns(column, batch.mask) for column in columns]
    return [direct + causal for direct, causal, _ in parts]


# --- many settings along one direction ------------------------------------------------------------


def depths_of(requested: Sequence[int], depth: int, own: int) -> list[int]:
    """Numbers of last layers to try: those requested, or a spread on a log scale; and ``own``.

    >>> depths_of((), 5, 3), depths_of((), 32, 3), depths_of((2, 20), 28, 3)
    ([1, 2, 3, 4, 5], [1, 2, 3, 4, 7, 12, 20, 32], [2, 3, 20])

    Raises:
        ConfigError: more layers than there are.
    """
    layers_within(max(requested, default=1), depth)
    spread = {round(depth ** (i / (_DEPTHS - 1))) for i in range(_DEPTHS)}
    usual = sorted(range(1, depth + 1) if depth <= _DEPTHS else spread)
    return sorted({min(k, depth) for k in (*(requested or usual), own)})


def windows_of(requested: Sequence[int], longest: int, own: int | None) -> list[int | None]:
    """Windows to try: those requested, or 0 and powers of two below the longest row; own; no limit.

    >>> windows_of((), 9, 3)
    [0, 1, 2, 3, 4, 8, None]
    """
    powers = [2**i for i in range(longest.bit_length()) if 2**i < longest]
    chosen = {*(requested or (0, *powers))} | ({own} if own is not None else set())
    return [*sorted(chosen), None]


@dataclass(frozen=True, order=True)
class Setting:
    """One setting of an estimator.

    Attributes:
        estimator: one of ``ESTIMATORS``.
        layers: indices of the scored layers.
        window: W; None for no limit, and where there is none.
        everything: label values over all trainable parameters, not only over the layers' linears.
    """

    estimator: str
    layers: tuple[int, ...]
    window: int | None = None
    everything: bool = False

    def __str__(self) -> str:
        """Text of the setting for a reader."""
        if self.everything:
            return f"{self.estimator}, all parameters"
        whole = f"{self.estimator}, K={len(self.layers)}"
        if self.estimator not in WINDOWED:
            return whole
        return f"{whole}, W={'T' if self.window is None else self.window}"

    @property
    def columns(self) -> dict[str, Any]:
        """Cells of a table for this setting."""
        windowed = self.estimator in WINDOWED
        window = ("T" if self.window is None else self.window) if windowed else None
        return {"estimator": self.estimator, "K": len(self.layers), "W": window}

    def config(self, base: ScorerConfig) -> ScorerConfig:
        """Options of a scorer that computes it: the validation side alone, P = 1."""
        return replace(
            base,
            estimator=self.estimator,
            derivative=base.derivative if self.estimator == "label" else "auto",
            layers=list(self.layers),
            window=self.window,
            parameters="all" if self.everything else "linears",
            objective="adaptation",
            part="both",
            preconditioner=None,
        )


def full_gradient(subject: Subject) -> dict[str, Tensor]:
    """Gradient of the mean validation loss by every trainable parameter, by name."""
    named = {n: p for n, p in subject.model.named_parameters() if p.requires_grad}
    validation = subject.batches(subject.validation)
    return objective_gradient(subject.adapter, named, validation, first=None)


def supported(
    subject: Subject, layers: tuple[int, ...], rows: Sequence[Example]
) -> tuple[dict[str, CoverageReport], dict[str, str]]:
    """Estimators that this model allows on these layers with what was proved; why not the others.

    Each scores a slice of the two shortest rows for real, with the scorer's own proofs of coverage
    and isolation.
    """
    whole, *_ = subject.batches(sorted(rows, key=lambda row: len(row.input_ids))[:2])
    shown = around_responses(read_batch(whole, max_length=subject.adapter.max_positions()))
    batch = {**shown.inputs, "labels": shown.labels}
    tracker = subject.tracker("What the model allows", len(ESTIMATORS))
    reports, refused = {}, {}
    for number, estimator in enumerate(ESTIMATORS):
        tracker.report(number)
        config = Setting(estimator, layers, subject.config.window).config(subject.config)
        try:
            scorer = Scorer(subject.model, batch, None, config)
            scorer.score(batch)
        except (UnsupportedError, CoverageError) as problem:
            refused[estimator] = str(problem).splitlines()[0]
        else:
            reports[estimator] = scorer.coverage
    return reports, refused


def read(
    subject: Subject,
    rows: Sequence[Example],
    direction: Mapping[str, Tensor],
    settings: Sequence[Setting],
) -> dict[Setting, Numbers]:
    """Values of the response tokens of ``rows`` under every setting, along one direction.

    Args:
        subject: model, batch size, options that are not varied.
        rows: to value.
        direction: parameter name -> M, at least over the parameters of every setting.
        settings: what to compute.

    Returns:
        Of each setting, flat in (row, position) order, what ``Scorer.score(...).total`` gives for
        its config, up to rounding; label values by forward mode.
    """
    values: dict[Setting, Numbers] = {}
    proved: dict[str, CoverageReport] = {}
    for setting in sorted(settings, key=lambda one: -len(one.layers)):
        config = setting.config(subject.config)
        scorer = scorer_for(subject, rows=subject.validation[:1], config=config)
        if setting.estimator in proved:  # of at least these layers
            scorer.estimator.proofs.take(proved[setting.estimator])
        own = along(subject.model, direction, scorer.parameters)
        values[setting] = values_along(subject, scorer, rows, [own], f"Values, {setting}")[:, 0]
        proved[setting.estimator] = scorer.coverage
    return {setting: values[setting] for setting in settings}


def along(
    model: nn.Module, direction: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return ``direction`` keyed as ``parameters``; a tied parameter has several names."""
    named = dict(model.named_parameters(remove_duplicate=False))
    direction_of = {id(named[name]): matrix for name, matrix in direction.items()}
    return {name: direction_of[id(parameter)] for name, parameter in parameters.items()}
