"""Weights that a person brings: the policy ``weights``."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from alphatoken.errors import ConfigError
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings, TokenPolicy


class OwnWeights(TokenPolicy):
    """Every token by the weight that its row brings.

        update = sum_t w_t c_t grad log p_t,   w_t = (weight of the row) (weight of turn or token)

    c_t are the coefficients of the trainer's own loss. What brings no weight counts as 1. With
    all weights 1 a step is TRL's, bitwise. ``kept_normalization`` says what divides the loss:
    "response" the trainer's own count of tokens or pairs, whatever their weights, and "kept" the
    sum of the weights over the step. Weights are exact in float32. ``policy_mode`` and
    ``keep_ratio`` play no part.

    Args:
        settings: see ``PolicySettings``; none of them is read.
        allow_negative: whether weights below 0 are taken, which train away from their tokens.
            [True or False; set it where such weights are meant; ours]

    Raises:
        ConfigError: ``allow_negative`` is no truth value.

    Source: docs/own-weights.md. Oracle: per-token gradients by autograd, summed in a loop, in
    ``tests/property/test_own_weights.py``.
    """

    name: ClassVar[str] = "weights"
    family: ClassVar[str] = "both"
    needs: ClassVar[Needs] = Needs(row_weights=True)
    static = True
    divisor_scope: ClassVar[str] = "step"
    source: ClassVar[str] = "weights of the rows"

    def __init__(
        self, settings: PolicySettings | None = None, *, allow_negative: bool = False
    ) -> None:
        # In budget mode ``kept_normalization`` says what divides the loss, not the policy.
        super().__init__(replace(settings or PolicySettings(), mode="budget"))
        if not isinstance(allow_negative, bool):
            raise ConfigError(
                "allow_negative is true or false",
                got=repr(allow_negative),
                remedy="""policy_options={"allow_negative": true}""",
            )
        self.allow_negative = allow_negative

    @property
    def signed(self) -> bool:  # type: ignore[override]
        """Whether weights below 0 are taken."""
        return self.allow_negative

    @property
    def reads_ratio(self) -> bool:
        """False: the rows say what is kept."""
        return False

    def scores(self, batch: PolicyBatch) -> Tensor:
        """The weights: a token of a larger one goes first."""
        assert batch.row_weights is not None
        return batch.row_weights.to(batch.log_probs.dtype)

    def kept_tokens(self, batch: PolicyBatch) -> Tensor:
        """The sum of the weights, in float64."""
        return self.weights(batch).cpu().double().sum()

    def budget_weights(self, batch: PolicyBatch) -> Tensor:
        """The weights that the rows bring, whatever the budget."""
        return self.scores(batch)
