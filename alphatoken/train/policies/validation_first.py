"""Training on the validation rows first: the baseline of all methods that read them."""

from __future__ import annotations

import math
from typing import ClassVar

from alphatoken.errors import ConfigError
from alphatoken.train.policies.standard import Standard
from alphatoken.train.policies.trained_weights import (
    copy_weights,
    trainable,
    trained_copy,
    validation_schedule,
)
from alphatoken.train.policy import Needs, PolicySettings, PolicyStage

__all__ = ["ValidationFirst"]


class ValidationFirst(Standard):
    """All tokens with weight 1, from a model that has been trained on the validation rows.

        theta_0 -> theta_0'  by ``epochs`` of the validation rows,  then  w_t = 1  from theta_0'

    Values, references and warm-ups all learn from clean rows of the target. Where these may be
    trained on, this is the plain way of using them. The first training is done once and kept. It
    has a schedule of its own, since the rows are few: a constant rate without warm-up, one
    micro-batch a step, at least 24 steps where the rows allow. It takes over the run's other
    options, its collator and the kind and settings of its optimizer; callbacks, trackers,
    evaluation and overrides of a trainer's subclass have no part in it. A line announces it.
    A budget has no meaning here: mode "budget" keeps all too. The
    validation loss in the logs is then that of rows that were trained on.

    Args:
        settings: see ``PolicySettings``.
        epochs: number of passes over the validation rows. [above 0; raise it where the clean rows
            are of many kinds, lower it where retention suffers; ours; docs/selection.md took 6]
        learning_rate: rate of that training; None takes the run's. [null, or above 0; set it where
            the run's rate is too high for a few rows; ours]

    Raises:
        ConfigError: epochs or rate not above 0; a trainer that cannot train a model first (pairs,
            several processes).

    Source: a control. Oracle: TRL's trainer on the same rows, one after the other.
    """

    name: ClassVar[str] = "validation-first"
    family: ClassVar[str] = "sft"
    needs: ClassVar[Needs] = Needs(validation=True)
    source: ClassVar[str] = "control: the clean rows first"

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        epochs: float = 6.0,
        learning_rate: float | None = None,
    ) -> None:
        super().__init__(settings)
        for name, value in (("epochs", epochs), ("learning_rate", learning_rate)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} of validation-first lies above 0", got=repr(value))
        self.epochs, self.learning_rate = epochs, learning_rate

    def prepare(self, stage: PolicyStage) -> None:
        """Train on the validation rows; the run starts from there."""
        options = validation_schedule(stage, self.epochs, self.learning_rate)
        option = f"policy '{self.name}'"
        trained = trained_copy(
            stage, stage.validation, options, kind="validation-first", option=option
        )
        copy_weights(trainable(trained), trainable(stage.model))
