"""The trainers' own policies: shares of the response tokens, all of them, the clean rows first."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from alphatoken.errors import ConfigError
from alphatoken.select.masks import response_values, select_bottom, select_random
from alphatoken.train.policies.trained_weights import (
    copy_weights,
    trainable,
    trained_copy,
    validation_schedule,
)
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings, PolicyStage, TokenPolicy


class TopRatioPolicy(TokenPolicy):
    """The most valuable tokens among those that are ranked together.

        w_t = 1 for the ceil(rho n) largest of n values v_t, of equal ones the first;  else 0

    A run that keeps all tokens (rho = 1) trains on those without a value too, which only padding
    predicts: it is the run of the trainer below. With any other rho their weight is 0.

    Args:
        settings: see ``PolicySettings``; both modes keep ``keep_ratio``.
        unit: "token"; or "response", ranked by its mean value and kept or dropped whole.

    Raises:
        NumericalError: a value to rank by is NaN or infinite.

    Source: eq. sft_masked_loss. Oracle: ``tests/property/test_trainer_oracle.py``.
    """

    name: ClassVar[str] = "top"
    family: ClassVar[str] = "both"
    needs: ClassVar[Needs] = Needs(values=True)
    divisor_scope: ClassVar[str] = "step"
    source: ClassVar[str] = "AlphaToken"

    def __init__(self, settings: PolicySettings | None = None, *, unit: str = "token") -> None:
        super().__init__(settings)
        self.unit = unit

    def keeps_all(self, full: bool) -> bool:
        """True if the budget is every token, whatever happens to be kept in one micro-batch."""
        return self.settings.keep_ratio == 1

    def scores(self, batch: PolicyBatch) -> Tensor:
        """(b, t) values of the tokens, or of the responses that they are in."""
        assert batch.values is not None
        if self.unit == "response":
            return response_values(batch.values, batch.mask)
        return batch.values


class BottomRatioPolicy(TopRatioPolicy):
    """The least valuable tokens: a control of equal budget."""

    name: ClassVar[str] = "bottom"

    def select(
        self, scores: Tensor, mask: Tensor, ratio: float, generator: torch.Generator | None
    ) -> Tensor:
        """True for the ``ratio`` of smallest value."""
        return select_bottom(scores, mask, ratio)


class RandomRatioPolicy(TopRatioPolicy):
    """Tokens drawn uniformly: a control of equal budget, which values nothing.

    A draw is a function of (run seed, step, micro-batch, process).
    """

    name: ClassVar[str] = "random"
    needs: ClassVar[Needs] = Needs()

    def scores(self, batch: PolicyBatch) -> Tensor:
        """0: no token goes before another."""
        return torch.zeros_like(batch.log_probs)

    def select(
        self, scores: Tensor, mask: Tensor, ratio: float, generator: torch.Generator | None
    ) -> Tensor:
        """True for a uniformly random ``ratio``."""
        return select_random(mask, ratio, generator=generator)


class AllTokensPolicy(TopRatioPolicy):
    """Every token with weight 1; values are for the ledger and the page only."""

    name: ClassVar[str] = "all"

    def keeps_all(self, full: bool) -> bool:
        """True, whatever ``keep_ratio`` is."""
        return True

    @property
    def reads_ratio(self) -> bool:
        """False: every token is kept."""
        return False

    def select(
        self, scores: Tensor, mask: Tensor, ratio: float, generator: torch.Generator | None
    ) -> Tensor:
        """True for every response token."""
        return mask


RATIO_POLICIES: dict[str, type[TopRatioPolicy]] = {
    "top": TopRatioPolicy,
    "random": RandomRatioPolicy,
    "bottom": BottomRatioPolicy,
    "all": AllTokensPolicy,
}
"""Policies of the trainers themselves, all of whose settings are options of the run."""


class Standard(TokenPolicy):
    """Every response token with weight 1: TRL's own fine-tuning.

        w_t = 1

    As the name in the options it is TRL's trainer untouched, without token values; as an object it
    goes the way of all policies, and gives the same update bit for bit. A budget has no meaning
    here: mode "budget" keeps all too.
    """

    name: ClassVar[str] = "standard"
    family: ClassVar[str] = "both"
    published_loss: ClassVar[str] = "cross_entropy"
    static: bool = True
    source: ClassVar[str] = "supervised fine-tuning"

    def scores(self, batch: PolicyBatch) -> Tensor:
        """0: no token goes before another."""
        return torch.zeros_like(batch.log_probs)

    def budget_weights(self, batch: PolicyBatch) -> Tensor:
        """1 on the response, whatever the budget."""
        return batch.mask.to(batch.log_probs.dtype)

    @property
    def reads_ratio(self) -> bool:
        """False: every token is kept."""
        return False


class DPO(Standard):
    """Direct preference optimisation as TRL has it, with every token of both responses.

        L = -log sigma(beta [sum_t Delta_t^w - sum_t Delta_t^l]),  Delta_t = log pi/pi_ref (y_t)

    beta is TRL's option (0.1).

    Source: Rafailov et al., arXiv 2305.18290; TRL's ``DPOTrainer``.
    """

    name: ClassVar[str] = "dpo"
    family: ClassVar[str] = "preference"
    published_loss: ClassVar[str] = "dpo"
    source: ClassVar[str] = "arXiv 2305.18290; TRL"


class ValidationFirst(Standard):
    """All tokens with weight 1, from a model that has been trained on the validation rows.

        theta_0 -> theta_0'  by ``epochs`` of the validation rows,  then  w_t = 1  from theta_0'

    Values, references and warm-ups all learn from clean rows of the target. Where these may be
    trained on, this is the plain way of using them. The first training is done once and kept. It
    has a schedule of its own, since the rows are few: a constant rate without warm-up, one
    micro-batch a step, at least 24 steps where the rows allow. The run's other options, collator
    and optimizer stay; callbacks, trackers, evaluation and overrides of a trainer's subclass have
    no part in it. Mode "budget" keeps all tokens too. The validation loss in the logs is then that
    of rows that were trained on.

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
