"""The same for transformers' own Trainer: any causal language model, labels in the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from alphatoken.errors import InputError, UnsupportedError
from alphatoken.model.batch import label_mask
from alphatoken.train.gate import KeptOutputs, TokenGate
from alphatoken.train.options import AlphaOptions
from alphatoken.train.sft import LabelledRows, fused_losses, refuse_losses, with_responses

__all__ = ["AlphaConfig", "AlphaTrainer"]


@dataclass
class AlphaConfig(AlphaOptions, TrainingArguments):
    """transformers' ``TrainingArguments`` and the fields of ``AlphaOptions``."""

    def __post_init__(self) -> None:
        """transformers' checks, then ours."""
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.check_alpha()

    def check_alpha(self) -> None:
        """As for all; and losses that are not made of token log-probabilities."""
        super().check_alpha()
        refuse_losses("AlphaTrainer", fused_losses(self))


class AlphaTrainer(LabelledRows, Trainer):
    """transformers' ``Trainer`` on token-weighted cross-entropy.

    Batches need ``input_ids`` and ``labels`` (unshifted, -100 where nothing is learned). The loss
    is the cross-entropy that causal models compute themselves, built here of the logits.

    Its arguments are those of ``Trainer``, where ``args`` may be an ``AlphaConfig``,
    ``TrainingArguments`` or None; and ``validation_dataset``, ``retention_dataset``, ``fisher``,
    ``fisher_dataset``, ``policy`` and ``policy_reference`` of
    :class:`~alphatoken.train.mixin.AlphaTrainerMixin`. Data sets are tokenised rows with
    ``input_ids`` and ``labels``.
    """

    BASE, CONFIG, BASE_CONFIG = Trainer, AlphaConfig, TrainingArguments

    @staticmethod
    def check_rows(dataset: Any, args: Any, name: str = "training") -> None:
        """Refuse rows that are not tokenised; of a stream, and of other columns, none is read."""
        first = dataset[0] if isinstance(dataset, Sequence) and dataset else {"input_ids": ()}
        if not isinstance(first, Mapping) or "input_ids" not in first:
            raise InputError(
                f"rows of the {name} data set are not tokenised",
                got=f"{type(first).__name__}: {str(first)[:60]!r}",
                why="AlphaTrainer, as transformers' Trainer, reads input_ids and labels",
                remedy="alphatoken.data.encode_rows makes them; AlphaSFTTrainer takes texts",
            )

    def refuse_base(self) -> None:
        """Refuse losses of the caller's own."""
        refuse_losses("AlphaTrainer", {"compute_loss_func": self.compute_loss_func is not None})

    def base_loss(self, model: Any, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """Cross-entropy over the response tokens, divided as transformers divides it."""
        assert isinstance(model, TokenGate)
        labels = inputs["labels"]
        rest = {k: v for k, v in inputs.items() if k != "labels"}
        total = -model.logits({**rest, "use_cache": False}, labels).sum()
        count = label_mask(labels).sum() if num_items is None else torch.as_tensor(num_items)
        loss = total / count.to(total.device).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items is not None:
            loss = loss * self.accelerator.num_processes
        return loss

    def outputs_beside(self, seen: KeptOutputs, inputs: Mapping[str, Any], loss: Tensor) -> Any:
        """Of the training forward itself, in its graph: terms of them train as they would there.

        Raises:
            UnsupportedError: rows were left out of that forward.
        """
        if self.args.skip_dropped_rows:
            raise UnsupportedError(
                "outputs of a training forward without its dropped rows are of other rows",
                got="compute_loss(return_outputs=True), skip_dropped_rows=True",
                remedy="skip_dropped_rows=False",
            )
        return type(seen.outputs)(**{**seen.outputs, "loss": loss})

    def tokenised(self, dataset: Any, name: str) -> Any:
        """The rows as they are: they come tokenised."""
        return dataset

    def prepare_rows(self, dataset: Any, name: str) -> list[dict[str, Any]]:
        """The rows as they are."""
        rows = [{k: row[k] for k in ("input_ids", "labels")} for row in dataset]
        return with_responses(rows, name)
