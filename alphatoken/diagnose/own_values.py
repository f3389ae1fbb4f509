"""Values of a run at its own settings, and against its validation rows one by one.

Values are linear in the direction: with M = sum_v w_v G_v the value of a token is
sum_v w_v <.., G_v>. Scored once against the summed gradient of every validation row, the tokens
have a value for every subset and every resample of those rows, by a weighted sum; so the decisions
under redrawn rows are had without another scoring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.data import Example
from alphatoken.diagnose.options import CheckedOptions
from alphatoken.diagnose.statistics import FEWEST, kept
from alphatoken.diagnose.subject import Subject
from alphatoken.diagnose.valuing import retention_term, scorer_for, values_along
from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import ConfigError, DataError, InputError
from alphatoken.estimate.names import WALK
from alphatoken.scorer import Scorer
from alphatoken.support.options import option

__all__ = ["Options", "OwnValues", "RowColumns", "keep_shares", "row_columns"]

Numbers = NDArray[np.float64]

_FEWEST_ROWS = 4
"""Fewest rows that are drawn again from themselves."""

_HELD = 2**28
"""Numbers of per-row gradients held at a time (1 GiB in float32)."""


@dataclass(frozen=True)
class Options(CheckedOptions):
    """Options of the diagnostics ``stability`` and ``arithmetic``: the number of draws."""

    resamples: int = option(
        500, "number of bootstrap resamples of the validation rows", at_least=50
    )


@dataclass(frozen=True)
class OwnValues:
    """Values of sampled training rows against sampled validation rows.

    Attributes:
        subject: whose settings they are.
        model: whose tokens are valued.
        retention: its retention term, or None.
        rows: the rows valued.
        validation: the rows that define the objective.
        scorer: of the values.
        values: as ``Subject.score`` returns them.
        notes: on the sample and on the model that was valued.
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
            _, model, said = subject.before_and_after()
            retention = subject.fisher or subject.fitted_fisher(
                layers="all", parameters=config.parameters
            )
            notes.append(f"Values are those of the model after fine-tuning. {said}")
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
    """Validation rows with a response, and a note where they are few."""
    usable = [row for row in subject.validation if row.response_tokens]
    if len(usable) < _FEWEST_ROWS:
        raise DataError(
            f"at least {_FEWEST_ROWS} validation rows are needed",
            got=f"{len(usable)} with a response",
            why="rows are drawn again from themselves; fewer say nothing of each other",
            remedy="give more validation rows",
        )
    if len(usable) < 16:
        return usable, [
            f"Only {len(usable)} validation rows: a bootstrap of so few understates the noise."
        ]
    return usable, []


# --- one by one -----------------------------------------------------------------------------------


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


def row_columns(
    subject: Subject, scorer: Scorer, rows: Sequence[Example], validation: Sequence[Example]
) -> RowColumns:
    """Score ``rows`` against every validation row by itself.

    The scorer's validation batches are put back afterwards. As many per-row gradients are held
    at a time as fit into 1 GiB (float32); for each such chunk the rows are sent through the model
    once more.

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
    size = sum(p.numel() for p in scorer.parameters.values())
    chunk = max(1, _HELD // size)
    blocks: list[Numbers] = []
    validation_before = scorer.validation
    try:
        for start in range(0, len(validation), chunk):
            directions = [
                _gradient(subject, scorer, row) for row in validation[start : start + chunk]
            ]
            label = f"Values against {start + len(directions)} of {len(validation)} validation rows"
            blocks.append(values_along(subject, scorer, rows, directions, label))
    finally:
        scorer.set_validation(validation_before)
    tokens = np.array([row.response_tokens for row in validation], dtype=np.int64)
    return RowColumns(np.concatenate(blocks, axis=1) * tokens, tokens)


def _gradient(subject: Subject, scorer: Scorer, row: Example) -> dict[str, Tensor]:
    """P o G of one validation row, a mean over its tokens."""
    scorer.set_validation(subject.batches([row]))
    return scorer.direction.adaptation


def keep_shares(
    columns: RowColumns, rest: Numbers, ratio: float, resamples: int, *, seed: int
) -> Numbers:
    """(n,) share of the resamples in which each token is kept.

    Args:
        columns: values against each of V rows.
        rest: (n,) what is added to them, the same in each resample.
        ratio: share to keep, at one threshold for all tokens.
        resamples: how many, each of V rows drawn from the V with replacement.
        seed: of the draws.
    """
    rows = len(columns.tokens)
    generator = np.random.default_rng(seed)
    weights = generator.multinomial(rows, np.full(rows, 1 / rows), size=resamples)
    share: Numbers = kept(columns.at(weights) + rest, ratio).mean(0)
    return share
