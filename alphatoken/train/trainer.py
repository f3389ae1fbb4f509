"""The same for transformers' own Trainer: any causal language model, labels in the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from alphatoken.model.batch import label_mask
from alphatoken.train.gate import TokenGate
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

    Args:
        *args: as for ``Trainer``. ``args`` is an ``AlphaConfig``; or ``TrainingArguments`` or
            None, with our options' defaults.
        validation_dataset: tokenised rows with ``input_ids`` and ``labels``.
        retention_dataset: the same, for ``retention="data"``.
        fisher: of the reference model; None fits one and caches it.
        fisher_dataset: tokenised rows on whose prompts it is fitted; they should be trained on
            nowhere. None takes those of the training rows.
        policy: a ``TokenPolicy``, or its class, in place of the one that the options name.
        policy_reference: second model for policies that score with one, in place of
            ``policy_reference`` of the options.
        **kwargs: as for ``Trainer``.

    Raises:
        ConfigError, UnsupportedError: an option that cannot be honoured, by name, before any work.
    """

    BASE, CONFIG, BASE_CONFIG = Trainer, AlphaConfig, TrainingArguments

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

    def tokenised(self, dataset: Any, name: str) -> Any:
        """The rows as they are: they come tokenised."""
        return dataset

    def prepare_rows(self, dataset: Any, name: str) -> list[dict[str, Any]]:
        """The rows as they are."""
        rows = [{k: row[k] for k in ("input_ids", "labels")} for row in dataset]
        return with_responses(rows, name)
