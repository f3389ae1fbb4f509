"""Trainer over transformers' own Trainer: any causal language model, labels in the batch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Trainer, TrainingArguments

from alphatoken.errors import InputError, UnsupportedError
from alphatoken.model.batch import IGNORE, label_mask, token_losses
from alphatoken.model.forward import evaluation_mode
from alphatoken.train.log_prob_proxy import LogProbProxy
from alphatoken.train.options import AlphaOptions
from alphatoken.train.python_rows import (
    WEIGHTS,
    plain_rows,
    require_tokens,
    with_token_weights,
)
from alphatoken.train.sft import LabelledRows, refuse_losses
from alphatoken.train.trainer_loss import TrainerLoss


@dataclass
class AlphaConfig(AlphaOptions, TrainingArguments):
    """transformers' ``TrainingArguments`` and the fields of ``AlphaOptions``."""

    def __post_init__(self) -> None:
        """transformers' checks, then ours."""
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.check_alpha()


class LogitsLoss(TrainerLoss):
    """The cross-entropy that causal models compute themselves, built here of the logits.

    A mixture of experts adds the routers' loss, where the model gives it. At the first step it is
    compared with the model's own loss.
    """

    _compared = False
    """True once the model's own loss has agreed with the one that is built here."""

    def of(self, proxy: LogProbProxy, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """Cross-entropy over the response tokens, divided as transformers divides it."""
        labels = inputs["labels"]
        rest = {k: v for k, v in inputs.items() if k != "labels"}
        if not self._compared:
            self._compare(proxy, inputs, num_items)
        total = -proxy.logits({**rest, **self._without_cache}, labels).sum()
        count = label_mask(labels).sum() if num_items is None else torch.as_tensor(num_items)
        loss = total / count.to(total.device).clamp(min=1)
        if proxy.aux_loss is not None:
            loss = loss + self._router_share * proxy.aux_loss.to(loss.device)
        # Gradients are averaged over the processes, and the count is of all of them.
        if self.args.average_tokens_across_devices and num_items is not None:
            loss = loss * self.accelerator.num_processes
        return loss

    @cached_property
    def _without_cache(self) -> dict[str, bool]:
        """The argument that spares a cache, of a model whose forward takes it."""
        model = self.model
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft
        parameters = inspect.signature(inner.forward).parameters
        # Many of transformers take it among others, and their configuration has it.
        others = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        others = others and hasattr(getattr(inner, "config", None), "use_cache")
        return {"use_cache": False} if "use_cache" in parameters or others else {}

    @property
    def _router_share(self) -> float:
        """Weight of the routers' loss in that of a mixture of experts, as the model has it."""
        config = self.model.config.get_text_config()
        return float(getattr(config, "router_aux_loss_coef", 0.0))

    @torch.no_grad()
    def _compare(self, proxy: LogProbProxy, inputs: dict[str, Any], num_items: Any) -> None:
        """Compare once, in a forward without dropout, the loss built here with the model's own.

        Raises:
            UnsupportedError: the model makes another one of these labels.
        """
        labels = inputs["labels"]
        arguments = {**inputs, **self._without_cache}
        if num_items is not None and self._trainer.model_accepts_loss_kwargs:
            arguments["num_items_in_batch"] = num_items
        with evaluation_mode(self.model):
            outputs = proxy.plain(**arguments)
        self._compared = True  # on every process alike, whatever its first batch holds
        if not bool((labels[:, 1:] != IGNORE).any()):
            return
        count = (labels[:, 1:] != IGNORE).sum() if num_items is None else num_items
        ours = token_losses(outputs.logits, labels).sum() / count
        auxiliary = getattr(outputs, "aux_loss", None)
        if auxiliary is not None:
            ours = ours + self._router_share * auxiliary.to(ours.device)
        theirs = outputs.loss.to(ours)
        # Some models form it in their own precision; a part left out is larger than its rounding.
        tolerance = 1e-2 if outputs.logits.dtype.itemsize < 4 else 1e-4
        if not torch.allclose(ours, theirs, rtol=tolerance):
            raise UnsupportedError(
                "the model's loss is not the cross-entropy of its labels",
                got=f"{float(theirs):.6g} of {type(self.model).__name__}, the cross-entropy is "
                f"{float(ours):.6g}",
                why="AlphaTrainer would train without what the model adds to it",
                remedy="transformers' Trainer, or a model without that part of the loss",
            )


class AlphaTrainer(LabelledRows, Trainer):
    """transformers' ``Trainer`` on token-weighted cross-entropy.

    Batches need ``input_ids`` and ``labels`` (unshifted, -100 where nothing is learned). The loss
    is the cross-entropy that causal models compute themselves, built here of the logits, and the
    routers' loss of mixtures of experts where the model gives it. At the first step it is compared
    with the model's own. With all weights 1 a step is that of transformers' ``Trainer``, up to
    rounding.

    Its arguments are those of ``Trainer``, where ``args`` are an ``AlphaConfig``, and those of
    :class:`~alphatoken.train.mixin.AlphaTrainerMixin`. Data sets are tokenised rows with
    ``input_ids``, and with ``labels`` unless the collator makes them.
    """

    BASE, CONFIG, LOSS = Trainer, AlphaConfig, LogitsLoss
    BESIDE = ("attention_mask", "position_ids")

    @staticmethod
    def read(rows: Any, name: str, arguments: Mapping[str, Any]) -> Any:
        """Refuse rows that are not tokenised, or of which something would be lost."""
        plain = plain_rows(rows)
        whole = hasattr(plain, "__len__") and len(plain) > 0
        # Rows of a stream of ``datasets`` are looked at as they are read, those of others never.
        streamed = hasattr(rows, "map") and not hasattr(rows, "__len__")
        first: Any = {"input_ids": ()}
        if whole or streamed:
            first = next(iter(plain), first)
        if not isinstance(first, Mapping) or "input_ids" not in first:
            raise InputError(
                f"rows of the {name} data set are not tokenised",
                got=f"{type(first).__name__}: {str(first)[:60]!r}",
                why="AlphaTrainer, as transformers' Trainer, reads input_ids and labels",
                remedy="alphatoken.data.encode_rows makes them; AlphaSFTTrainer takes texts",
            )
        own_collator = arguments.get("data_collator") is not None
        if own_collator and not arguments.get(WEIGHTS):
            return rows
        if whole or streamed:
            read = {"input_ids", "labels", *AlphaTrainer.BESIDE}
            rows = require_tokens(rows, name, read, arguments)
            rows = with_token_weights(rows, name, arguments)
        if own_collator:
            return rows
        if whole and name == "training":
            _require_batches(plain, arguments["args"].train_batch_size)
        return rows

    def row_batch(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """One padded batch, as transformers' collator makes it."""
        batch = super().row_batch(rows)
        # That collator hands on the rows' own masks and positions.
        if self.own_collator is None:
            for name in self.BESIDE:
                if name in rows[0]:
                    own = [torch.as_tensor(row[name]) for row in rows]
                    batch[name] = pad_sequence(own, batch_first=True).to(self.args.device)
        return batch

    def refuse_base(self) -> None:
        """Refuse losses of the caller's own."""
        own = {"compute_loss_func": self.compute_loss_func is not None}
        refuse_losses("AlphaTrainer", own)

    def tokenised(self, dataset: Any, name: str) -> Any:
        """The rows as they are: they come tokenised."""
        return dataset

    def prepare_rows(self, dataset: Any, name: str) -> list[dict[str, Any]]:
        """The rows as they are; without labels, every token is one, or the collator says which."""
        rows = [dict(row) for row in plain_rows(dataset)]
        if self.own_collator is None:
            rows = [{"labels": row["input_ids"], **row} for row in rows]
            read = ("input_ids", "labels", *self.BESIDE)
            rows = [{k: row[k] for k in read if k in row} for row in rows]
        return self.with_responses(rows, name, dataset)


def _require_batches(rows: Any, size: int) -> None:
    """Refuse training rows of which transformers' own collator makes no batch of this size."""
    lengths = dict[int, int]()
    for number, row in enumerate(rows):
        if row.get("labels") is None:
            raise InputError(
                "training rows have no labels",
                got=f"row {number}: {', '.join(row)}",
                why="transformers' own collator makes none of tokens",
                remedy="dataset.map(lambda row: {'labels': row['input_ids']}), where every token "
                "is to be learned; or a data_collator that makes them",
            )
        lengths.setdefault(len(row["input_ids"]), number)
    if size > 1 and len(lengths) > 1:
        (one, first), (other, second), *_ = lengths.items()
        raise InputError(
            "training rows are of several lengths, and nothing pads them",
            got=f"row {first} has {one} tokens, row {second} has {other}",
            why="transformers' own collator makes batches of rows of one length",
            remedy="data_collator=transformers.DataCollatorForSeq2Seq(tokenizer), which pads "
            "labels too",
        )
