"""Values of a run at its own settings, with which a diagnostic compares its changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from alphatoken.data import Example
from alphatoken.direction.drift import FisherDrift
from alphatoken.errors import ConfigError, DataError
from alphatoken.fidelity.intervals import FEWEST
from alphatoken.fidelity.subject import Subject
from alphatoken.fidelity.valuing import retention_term, scorer_for
from alphatoken.scorer import Scorer

__all__ = ["OwnValues"]

Numbers = NDArray[np.float64]

_FEWEST_ROWS = 4
"""Fewest rows that are drawn again from themselves."""


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
        notes: what is to be said of all this.
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
    """Validation rows that are used, and what is to be said of them."""
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
