"""Rho-1: learn on the tokens on which the model is furthest behind a reference model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor, nn

from alphatoken.errors import ConfigError, require_choice
from alphatoken.select.masks import response_values
from alphatoken.train.policies.trained_weights import trained_copy, validation_schedule
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings, PolicyStage, TokenPolicy
from alphatoken_lab.methods.static import model_losses
from alphatoken_lab.methods.static_mask import second_model
from alphatoken_lab.methods.token_table import TokenTable

UNITS = ("token", "response")
_COLUMN = "reference_losses"


class Rho1(TokenPolicy):
    """Selective language modelling by excess loss.

        s_t = l_t(theta) - l_t(theta_RM),    l_t = -log p(y_t | x, y_<t)
        keep the ceil(k N) tokens of the batch with the largest s;  L = mean of l over them

    Signed, a hard mask, ranked anew at every step with the current model. The reference is the
    same base model after training on good rows: a model that was named (``reference``), or
    one that is trained first on the validation rows. Its losses are computed once. Published for
    pre-training; on response tokens it is the analogue for fine-tuning.

    With ``unit="response"`` a response has the mean of its tokens' scores and whole responses are
    kept, of the last one what the budget leaves: RHO-LOSS by rows, which finds rows of another
    kind where the tokens of each row are alike.

    Args:
        settings: see ``PolicySettings``.
        ratio: k, the published budget: 0.6 (1B) or 0.7 (7B). [above 0, to 1; raise it for clean
            rows; the paper's]
        unit: "token", or "response". ["token" or "response"; "response" where whole rows are wrong;
            ours; the paper ranks tokens]
        reference: the reference model. [null, or a folder or hub name; where there is one with the
            same tokenizer; the paper trains one]
        reference_epochs: without a named reference model, train one for so many epochs of the
            validation rows, with the trainer's own options. None asks for a reference model. [null,
            or above 0; where there is no second model; ours; the paper trains one for 3]
        reference_learning_rate: rate of that training; None takes the run's. [null, or above 0; set
            it where the run's rate is too high for a few rows; ours]

    Raises:
        ConfigError: ratio outside (0, 1]; another unit; epochs or rate not above 0; no reference
            model when the static pass begins, or two.

    Source: Lin et al., arXiv 2404.07965; microsoft/rho has no training code. Of responses:
        Mindermann et al., arXiv 2206.07137, whose examples have one loss each.
    """

    name: ClassVar[str] = "rho-1"
    needs: ClassVar[Needs] = Needs(columns=(_COLUMN,))
    scope: ClassVar[str] = "batch"
    rounding: ClassVar[str] = "ceil"
    denominator: ClassVar[str] = "kept"
    source: ClassVar[str] = "arXiv 2404.07965"

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        ratio: float = 0.6,
        unit: str = "token",
        reference: str | nn.Module | None = None,
        reference_epochs: float | None = None,
        reference_learning_rate: float | None = None,
    ) -> None:
        super().__init__(settings)
        if not 0 < ratio <= 1:
            raise ConfigError("ratio must lie in (0, 1]", got=repr(ratio))
        require_choice("unit of Rho-1", unit, UNITS)
        self.native_ratio = ratio
        self.unit, self.reference = unit, reference
        self.reference_epochs = reference_epochs
        self.reference_learning_rate = reference_learning_rate
        if reference_epochs is None:
            if reference_learning_rate is not None:
                raise ConfigError(
                    "no reference model is trained",
                    got=f"reference_learning_rate={reference_learning_rate} alone",
                    remedy="reference_epochs: how long it is trained on the validation rows",
                )
            return
        for name in ("reference_epochs", "reference_learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} of Rho-1 lies above 0", got=repr(value))
        if reference is not None:
            raise ConfigError(
                "a reference model was named, and one is to be trained",
                got=f"reference, reference_epochs={reference_epochs}",
                remedy="leave one of the two out",
            )
        self.needs = replace(type(self).needs, validation=True)  # type: ignore[misc]

    @property
    def by_response(self) -> bool:
        """True if whole responses are kept."""
        return self.unit == "response"

    @property
    def lacks(self) -> str | None:
        """The argument that is to name its second model; None if it needs none."""
        return "reference" if self.reference is None and self.reference_epochs is None else None

    def prepare(self, stage: PolicyStage) -> TokenTable:
        """Losses of all response tokens under the reference model."""
        return model_losses(stage, self._reference(stage), _COLUMN)

    def _reference(self, stage: PolicyStage) -> Any:
        if self.reference_epochs is None:
            return second_model(stage, self.reference, self.name)
        option = f"reference_epochs={self.reference_epochs}"
        options = validation_schedule(stage, self.reference_epochs, self.reference_learning_rate)
        kind = "rho-1-reference"
        return trained_copy(stage, stage.validation, options, kind=kind, option=option)

    def scores(self, batch: PolicyBatch) -> Tensor:
        """``s_t``, the excess loss; of a response the mean of its tokens'."""
        excess = -batch.log_probs - batch.columns[_COLUMN]
        return response_values(excess, batch.mask) if self.unit == "response" else excess
