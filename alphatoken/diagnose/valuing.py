"""Values of a subject under other settings, at another checkpoint, along other directions.

Values are linear in the direction: with M = sum_v w_v G_v the value of a token is
sum_v w_v <.., G_v>. Scored once against the summed gradient of every validation row, the tokens
have a value for every subset and every resample of those rows, by a weighted sum
(``recombined``); so the decisions under redrawn rows need no further scoring.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.config import ESTIMATORS, READ_BY, WALK, ScorerConfig, refused_by_estimator
from alphatoken.data import Example
from alphatoken.diagnose.statistics import FEWEST, Numbers, kept
from alphatoken.diagnose.subject import Subject, gathered
from alphatoken.direction.drift import FisherDrift
from alphatoken.direction.objective import objective_gradient
from alphatoken.errors import ConfigError, CoverageError, DataError, InputError, UnsupportedError
from alphatoken.estimate.captured import Captured, assign_columns, contract_columns
from alphatoken.estimate.forward_mode import label_values
from alphatoken.estimate.proofs import CoverageReport
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.model.batch_slice import around_responses
from alphatoken.model.choice import layers_within
from alphatoken.scorer import Scorer

WINDOWED = ("alphatoken", "paper_literal")
"""Estimators that Value-Propagation's window changes."""

_DEPTHS = 8  # numbers of layers that are tried
_FEWEST_ROWS = 4  # that are drawn again from themselves
_HELD = 2**28  # numbers of per-row gradients held at a time (1 GiB in float32)


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

    ``V = F o (theta - theta_ref)`` is zero at the reference: without a Fisher or a reference model
    given there is nothing to fit one for.
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
    estimator = scorer.estimator

    def of(batch: dict[str, Tensor]) -> dict[int, Tensor]:
        checked = read_batch(batch, max_length=scorer.adapter.max_positions())
        # ``Scorer.score`` would prove coverage and isolation on this model; this way goes round it.
        if estimator.proofs.pending:
            estimator.prove(around_responses(checked), directions)
        return {n: v[checked.mask] for n, v in enumerate(_along(scorer, checked, directions))}

    return np.stack([*gathered(subject.batches(rows), tracker, of).values()], axis=1)


def _along(
    scorer: Scorer, batch: LabelledBatch, directions: Sequence[Mapping[str, Tensor]]
) -> list[Tensor]:
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
        return ", ".join(
            name if key == "estimator" else f"{key}={name}"
            for key, name in self.columns.items()
            if name is not None
        )

    @property
    def columns(self) -> dict[str, Any]:
        """Cells of a table for this setting."""
        window = "T" if self.window is None else self.window
        shown = window if self.estimator in WINDOWED else None
        return {"estimator": self.estimator, "K": len(self.layers), "W": shown}

    def config(self, base: ScorerConfig) -> ScorerConfig:
        """Options of a scorer that computes it: the validation side alone, P = 1."""
        return replace(
            base,
            estimator=self.estimator,
            derivative=base.derivative if self.estimator == "label" else "auto",
            layers="all" if self.everything else list(self.layers),
            window=self.window if self.estimator in WINDOWED else ScorerConfig.window,
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
    named = dict(subject.model.named_parameters(remove_duplicate=False))
    # By the identity of the parameter: a tied one has several names.
    m_of = {id(named[name]): matrix for name, matrix in direction.items()}
    for setting in sorted(settings, key=lambda one: -len(one.layers)):
        config = setting.config(subject.config)
        scorer = scorer_for(subject, rows=subject.validation[:1], config=config)
        if setting.estimator in proved:  # of at least these layers, which come first
            scorer.estimator.proofs.take(proved[setting.estimator])
        own = {name: m_of[id(parameter)] for name, parameter in scorer.parameters.items()}
        values[setting] = values_along(subject, scorer, rows, [own], f"Values, {setting}")[:, 0]
        proved[setting.estimator] = scorer.coverage
    return {setting: values[setting] for setting in settings}


# --- values at the run's own settings -------------------------------------------------------------


@dataclass(frozen=True)
class OwnValues:
    """Values of sampled training ``rows`` against all ``validation`` rows with a response.

    ``model`` is whose tokens are valued, with its ``retention`` term or None; ``values`` are as
    ``Subject.score`` returns them; ``notes`` are on the sample and on the model.
    """

    subject: Subject
    model: nn.Module
    retention: FisherDrift | None
    rows: list[Example]
    validation: list[Example]
    scorer: Scorer
    values: dict[str, NDArray[Any]]
    notes: list[str]

    @classmethod
    def of(cls, subject: Subject, *, tuned: bool = False) -> OwnValues:
        """Sample rows and score them.

        Args:
            subject: what is diagnosed.
            tuned: whether the model after fine-tuning is valued, where the retention term is not
                zero, with a Fisher of all layers; else the model as it was given.

        Raises:
            ConfigError: the objective has no validation side. InputError: too few tokens.
            DataError: too few validation rows.
        """
        config = subject.config
        if config.objective == "stability":
            raise ConfigError(
                "the run has no validation side that its decisions could depend on",
                got="objective='stability'",
                remedy="objective='both' or 'adaptation'",
            )
        rows = subject.sample()
        subject.require_tokens(rows, 2 * FEWEST, "rankings and shares of decisions are compared")
        validation, notes = _validation(subject)
        model, retention = subject.model, None
        if not tuned:
            retention = retention_term(subject)
            if retention is None and config.objective == "both":
                notes.append(
                    "The model as given is its own reference, so its retention term is zero: these "
                    "are adaptation values."
                )
        elif config.objective != "adaptation":
            _, model, origin = subject.before_and_after()
            # Of all layers, because numbers of scored layers are compared with one Fisher.
            retention = subject.fisher or subject.fitted_fisher(
                layers="all", parameters=config.parameters
            )
            notes.append(f"Values are those of the model after fine-tuning. {origin}")
        scorer = scorer_for(subject, model=model, retention=retention, rows=validation)
        values = subject.score(scorer, rows, "Values of the run")
        return cls(subject, model, retention, rows, validation, scorer, values, notes)

    @property
    def total(self) -> Numbers:
        """Total values of shape (n,)."""
        return self.values["total"]

    @property
    def groups(self) -> NDArray[Any]:
        """(n,) row of each token."""
        return self.values["row"]

    @property
    def rest(self) -> Numbers:
        """(n,) what no validation row changes: lambda times the stability value."""
        stability = self.values.get("stability", np.zeros_like(self.total))
        return stability * self.subject.config.stability_weight


def _validation(subject: Subject) -> tuple[list[Example], list[str]]:
    usable = [row for row in subject.validation if row.response_tokens]
    if len(usable) < _FEWEST_ROWS:
        raise DataError(
            f"at least {_FEWEST_ROWS} validation rows are needed",
            got=f"{len(usable)} with a response",
            why="rows are drawn again from themselves; fewer say nothing of each other",
            remedy="give more validation rows",
        )
    note = f"Only {len(usable)} validation rows: a bootstrap of so few understates the noise."
    return usable, [note] if len(usable) < 16 else []


# --- against validation rows one by one -----------------------------------------------------------

Columns = tuple[Numbers, NDArray[np.int64]]
"""(n, V) values of n tokens against the *summed* gradient of each row's response tokens, and (V,)
how many response tokens the rows have."""


def recombined(columns: Columns, weights: NDArray[Any]) -> Numbers:
    """Adaptation values if row v is there ``weights[..., v]`` times: (..., V) to (..., n).

        value = sum_v w_v c_v / sum_v w_v n_v

    which is what scoring against those rows gives, because J_tgt is a mean over tokens.
    Exact up to rounding. Oracle: ``Scorer`` with those rows as its validation batches.

    Raises:
        InputError: weights without any response token.
    """
    sums, tokens = columns
    counts = np.asarray(weights, dtype=np.float64) @ tokens
    if not (counts > 0).all():
        raise InputError(
            "a choice of validation rows has no response token",
            got=f"{int((counts <= 0).sum())} of {counts.size} choices",
            remedy="leave out rows without a response",
        )
    values: Numbers = (weights @ sums.T) / counts[..., None]
    return values


def row_columns(
    subject: Subject, scorer: Scorer, rows: Sequence[Example], validation: Sequence[Example]
) -> Columns:
    """Score ``rows`` against every validation row by itself.

    The scorer's validation batches are put back afterwards.

    Raises:
        ConfigError: the objective has no validation side, P depends on the batch, or values are
            along a walk, whose optimizer divides gradients by their own size.
    """
    config = scorer.config
    if not config.adapts or config.preconditioner == "full" or config.estimator == WALK:
        raise ConfigError(
            "validation rows can be told apart only where values are linear in their gradients",
            got=f"estimator={config.estimator!r}, objective={config.objective!r}, "
            f"preconditioner={config.preconditioner!r:.40}",
            remedy="an estimator other than 'walk', objective='both' or 'adaptation', "
            "preconditioner=None",
        )
    # As many gradients are held at a time as fit into 1 GiB; for each such chunk the rows are sent
    # through the model once more.
    size = sum(p.numel() for p in scorer.parameters.values())
    chunk = max(1, _HELD // size)
    blocks: list[Numbers] = []
    validation_before = scorer.validation
    try:
        for start in range(0, len(validation), chunk):
            directions = []
            for row in validation[start : start + chunk]:
                scorer.set_validation(subject.batches([row]))
                directions.append(scorer.direction.adaptation)
            label = f"Values against {start + len(directions)} of {len(validation)} validation rows"
            blocks.append(values_along(subject, scorer, rows, directions, label))
    finally:
        scorer.set_validation(validation_before)
    # Each direction is a mean over the tokens of its row: times their number, it is a sum.
    tokens = np.array([row.response_tokens for row in validation], dtype=np.int64)
    return np.concatenate(blocks, axis=1) * tokens, tokens


def keep_shares(
    columns: Columns, rest: Numbers, ratio: float, resamples: int, *, seed: int
) -> Numbers:
    """(n,) share of the resamples in which each token is kept.

    Args:
        columns: values against each of V rows.
        rest: (n,) what is added to them, the same in each resample.
        ratio: share to keep, at one threshold for all tokens.
        resamples: how many, each of V rows drawn from the V with replacement.
        seed: of the draws.
    """
    rows = len(columns[1])
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(rows, np.full(rows, 1 / rows), size=resamples)
    share: Numbers = kept(recombined(columns, weights) + rest, ratio).mean(0)
    return share
