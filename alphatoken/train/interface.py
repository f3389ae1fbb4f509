"""What a kind of trainer says of itself to the parts of its run: ``TrainerInterface``.

Records, checkpoints, the step guard and ``TrainerLoss`` are made by a trainer and reach back into
it. They are typed against this file, which knows none of them, and not against the trainer's hooks;
so a part can be read, and tested with a stand-in, without the trainer's code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

if TYPE_CHECKING:
    from transformers import Trainer

    _Base = Trainer
else:  # a trainer of ours has TRL's or transformers' after this class in its bases
    _Base = object


class TrainerInterface(_Base):
    """A trainer of TRL or transformers, and what ours say of it; base of the mixin.

    Attributes:
        own_collator: collator that the caller chose, or None.
        policy_handed_over: its policy came as an object or a class, not by a name in the options.
        records: ``RunRecords`` of the run.
        rows: ``RunRows`` of the run.
    """

    # Attributes of TRL's and transformers' trainers, which each of them types differently.
    args: Any
    model: Any
    processing_class: Any
    train_dataset: Any
    data_collator: Any
    state: Any
    accelerator: Any
    optimizer: Any

    own_collator: Any
    policy_handed_over: bool
    # Any: the files of their types import this one.
    records: Any
    rows: Any

    BESIDE: ClassVar[tuple[str, ...]] = ()
    """Columns of a row that its collator hands to the model beside tokens and labels."""

    # --- rows -------------------------------------------------------------------------------------

    @staticmethod
    def read(rows: Any, name: str, arguments: Mapping[str, Any]) -> Any:
        """Rows of the caller in the form that the trainer below reads; see ``python_rows``."""
        raise NotImplementedError

    def prepare_rows(self, dataset: Any, name: str) -> list[dict[str, Any]]:
        """Tokenised rows of a validation or retention dataset."""
        raise NotImplementedError

    def row_batch(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """Tokenised rows as one batch on the model's device."""
        raise NotImplementedError

    def tokenised(self, dataset: Any, name: str) -> Any:
        """Rows in the form of the training rows, tokenised like them; never packed."""
        raise NotImplementedError

    def fisher_prompts(self, rows: Any, samples: int) -> list[list[int]]:
        """Prompts of the first tokenised rows, for the Fisher's responses."""
        raise NotImplementedError

    def row_length(self, row: Mapping[str, Any]) -> int:
        """Tokens of a tokenised row in a batch; of a pair's longer sequence, as it is cut."""
        return len(row["input_ids"])

    def prepare_pool(self, rows: list[dict[str, Any]]) -> None:
        """Add to validation and retention rows what only the prepared model can give."""

    def weights_collator(self) -> tuple[Any, tuple[str, ...]]:
        """A collator of the training rows that lays their weights, and the columns it reads."""
        raise NotImplementedError

    def export_arguments(self) -> dict[str, Any]:
        """Arguments by which exported values find their rows again, such as a limit of length."""
        return {}

    @property
    def token_policy(self) -> Any:
        """The ``TokenPolicy`` whose weights are trained with; None where no token is weighed."""
        raise NotImplementedError

    # --- its loss ---------------------------------------------------------------------------------

    def refuse_base(self) -> None:
        """Refuse settings of the trainer below with which no loss is made of log-probabilities."""

    def say_objective(self) -> None:
        """Warn where validation rows are measured by another loss than training descends."""

    def reference_weights(self) -> dict[str, Tensor]:
        """Weights of a reference model that training may move, this process's part of each."""
        return {}

    # --- the checkpoint's part --------------------------------------------------------------------

    def alpha_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON values that a checkpoint holds beside transformers' state."""
        raise NotImplementedError

    def load_alpha_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore what ``alpha_state`` returned."""
        raise NotImplementedError
