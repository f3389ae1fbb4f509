"""Guard against steps with a gradient that no weigher has made.

An override of ``compute_loss`` or ``training_step`` may hand the trainer some other loss than the
weighted one. The step would then train on every token, and nothing would show it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import TrainerCallback

from alphatoken.errors import UnsupportedError
from alphatoken.train.interface import TrainerInterface

__all__ = ["StepGuard"]


class StepGuard(TrainerCallback):
    """Counts the weighted losses that a backward has reached since the step began.

    Args:
        trainer: whose run it is.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer, self._reached = trainer, 0

    def expect_gradient(self, loss: Tensor) -> None:
        """Count ``loss``, a weigher's, when its gradient is taken."""
        loss.register_hook(self._count)

    def _count(self, _: Tensor) -> None:
        self._reached += 1

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin to count weighted losses."""
        self._reached = 0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Stop where a micro-batch of the step was not weighed.

        Raises:
            UnsupportedError: before the optimizer has moved anything.
        """
        due = self._trainer.current_gradient_accumulation_steps
        if self._reached >= due:
            return
        raise UnsupportedError(
            "a step was about to be taken with a loss that is not weighted by token",
            got=f"{due - self._reached} of {due} micro-batches of step "
            f"{self._trainer.state.global_step}, trained by {type(self._trainer).__qualname__}",
            why="an override of compute_loss or training_step made a loss of its own, or put the "
            "model into evaluation mode: every token would be trained on",
            remedy="have the override call super().compute_loss(...), with the model in training "
            "mode, and add to the loss that it gives; or train with policy='all' and "
            "export_values=False",
        )
