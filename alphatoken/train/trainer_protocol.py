"""What the parts of a run ask of the trainer that they are parts of.

``AlphaTrainerMixin`` is composed of parts with state of their own: a weigher of tokens, the run's
records, its checkpoints. Each part is handed the trainer as this protocol, so that what passes
between them is written down and checked by the type checker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from alphatoken.train.gradient_weights import GradientWeightedModel
    from alphatoken.train.micro_batch import Carried, MicroBatch
    from alphatoken.train.policy import TokenPolicy

__all__ = ["TrainerParts"]


class TrainerParts(Protocol):
    """A transformers trainer that can say how its loss is made of response tokens.

    The attributes are transformers' own. The methods are what one kind of trainer (plain language
    modelling, SFT, preferences) answers differently from another.
    """

    args: Any
    model: Any
    state: Any
    accelerator: Any
    optimizer: Any
    train_dataset: Any
    processing_class: Any

    def base_loss(self, model: Any, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """The trainer's own loss, with a gate in the model's place."""

    def own_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs of a pass that is not the training forward."""

    def value_weights(self, coefficients: Tensor, mask: Tensor, num_items: Any) -> Tensor | None:
        """Factor on each token's loss in its value (b, t); None for 1."""

    def step_scale(self, num_items: Any) -> float:
        """From a micro-batch's gradient to an estimate of the whole step's."""

    def final_coefficients(
        self,
        gate: GradientWeightedModel,
        coefficients: Tensor,
        weights: Tensor,
        inputs: Mapping[str, Any],
    ) -> Tensor:
        """Coefficients of the update once the weights are known, before they are normalised."""

    def reference_log_probs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Tensor | None]:
        """Inputs, and (b, t) log-probabilities of the reference model where the policy asks."""

    def reference_logits(self) -> Callable[[Mapping[str, Any]], Tensor] | None:
        """Inputs of a forward to logits of the reference model; None where there is none."""

    def check_policy(self, policy: TokenPolicy) -> None:
        """Refuse a policy that this kind of trainer cannot carry out with its options."""

    def read_micro_batch(
        self, inputs: Mapping[str, Any], carried: Carried, num_items: Any
    ) -> MicroBatch:
        """Labels, mask and pools of a batch."""

    def prepare_rows(self, dataset: Any, name: str) -> list[dict[str, Any]]:
        """Tokenised rows of a validation or retention dataset."""

    def row_batch(self, rows: Sequence[dict[str, Any]]) -> Any:
        """Tokenised rows as one batch on the model's device."""

    def tokenised(self, dataset: Any, name: str) -> Any:
        """Rows in the form of the training rows, tokenised like them; never packed."""

    def row_length(self, row: Mapping[str, Any]) -> int:
        """Tokens of a tokenised row in a batch."""

    def prepare_pool(self, rows: list[dict[str, Any]]) -> None:
        """Whatever validation and retention rows need that only the prepared model can give."""

    def fisher_prompts(self, rows: Any, samples: int) -> list[list[int]]:
        """Prompts of the first tokenised rows, for the Fisher's responses."""

    def fisher_sequences(self, rows: Any, samples: int) -> Any:
        """The first tokenised rows, whole: on their prefixes labels are sampled anew."""

    def export_arguments(self) -> dict[str, Any]:
        """How the trainer cuts long rows, so that exported values find their rows again."""

    # --- transformers' own --------------------------------------------------------------------

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]: ...

    def _get_learning_rate(self) -> float: ...

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Autocast, where the run has it."""

    def save_state(self) -> None:
        """Write ``trainer_state.json``."""
