"""The interface of a trainer to the parts of its run: ``TrainerInterface``.

Records, checkpoints, the step guard and ``TrainerLoss`` are made by a trainer and reach back into
it. They are typed against this file and not against the trainer, so that a part can be read, and
tested with a stand-in, without the trainer's code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from torch import Tensor

__all__ = ["TrainerInterface"]


class TrainerInterface(Protocol):
    """A transformers trainer with the hooks of :class:`~alphatoken.train.mixin.AlphaTrainerMixin`.

    Attributes:
        BESIDE: columns of a row that reach the model beside tokens and labels.
        args: configuration of the trainer, one of ours.
        model: as transformers holds it, wrapped once training has begun.
        accelerator: of the run; knows the process and its device.
        optimizer: None before training begins, unless the caller made it.
        optimizer_cls_and_kwargs: class and settings of an optimizer that the caller chose, or None.
        state: transformers' state of the run, with the step.
        processing_class: tokenizer or processor, or None.
        own_collator: collator that the caller chose, or None.
        train_dataset: prepared training rows; a policy that chooses rows replaces it.
        current_gradient_accumulation_steps: micro-batches of the current step.
        records: ``RunRecords`` of the run.
        rows: ``RunRows`` of the run.
    """

    BESIDE: ClassVar[tuple[str, ...]]

    args: Any
    model: Any
    accelerator: Any
    optimizer: Any
    optimizer_cls_and_kwargs: Any
    state: Any
    processing_class: Any
    own_collator: Any
    train_dataset: Any
    current_gradient_accumulation_steps: int
    # Any: the files of their types import this one.
    records: Any
    rows: Any

    # --- forwards ---------------------------------------------------------------------------------

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the precision that transformers runs a forward in."""
        ...

    def _prepare_inputs(self, inputs: Any) -> dict[str, Any]: ...

    # --- rows -------------------------------------------------------------------------------------

    def prepare_rows(self, dataset: Any, name: str) -> list[dict[str, Any]]:
        """Return the tokenised rows of a validation or retention dataset."""
        ...

    def row_batch(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Return tokenised rows as one batch on the model's device."""
        ...

    def tokenised(self, dataset: Any, name: str) -> Any:
        """Return rows tokenised as the training rows are, never packed."""
        ...

    def fisher_prompts(self, rows: Any, samples: int) -> list[list[int]]:
        """Return the prompts of the first tokenised rows."""
        ...

    def row_length(self, row: Mapping[str, Any]) -> int:
        """Return the tokens of a tokenised row in a batch."""
        ...

    def prepare_pool(self, rows: list[dict[str, Any]]) -> None:
        """Add to validation and retention rows what only the prepared model can give."""
        ...

    def export_arguments(self) -> dict[str, Any]:
        """Return the arguments by which exported values find their rows again."""
        ...

    # --- what is left of a run --------------------------------------------------------------------

    def save_state(self) -> None:
        """Write transformers' state of the run."""
        ...

    def alpha_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what a checkpoint holds beside transformers' state."""
        ...

    def load_alpha_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take back what ``alpha_state`` returned."""
        ...
