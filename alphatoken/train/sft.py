"""Alpha-SFT: TRL's SFTTrainer with a gradient weighted by token value."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from alphatoken.data.collate import padded
from alphatoken.data.weights import LOSS_WEIGHTS
from alphatoken.errors import (
    AlphaTokenWarning,
    InputError,
    UnsupportedError,
    warn_caller,
)
from alphatoken.model.batch import IGNORE, label_mask
from alphatoken.model.loading import text_tokenizer
from alphatoken.train.mixin import AlphaTrainerMixin, choose_bf16
from alphatoken.train.options import AlphaOptions
from alphatoken.train.python_rows import (
    bars_of_many,
    columns_of,
    plain_rows,
    read_rows,
    warn_of_left,
)
from alphatoken.train.row_weights import RowWeightsCollator, prepared_with_weights

_COMPARED, _APART = 64, 0.8
"""Rows whose labels are compared, and the least difference of form that is said."""


@dataclass
class AlphaSFTConfig(AlphaOptions, SFTConfig):
    """TRL's ``SFTConfig`` and the fields of ``AlphaFields``, which says what each is."""

    def __post_init__(self) -> None:
        """TRL's checks, then ours."""
        choose_bf16(self)
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.check_alpha()


def refuse_losses(trainer: str, refused: Mapping[str, bool]) -> None:
    """Raise for the first that is there.

    Raises:
        UnsupportedError: names it.
    """
    base = {"AlphaSFTTrainer": "TRL's SFTTrainer", "AlphaTrainer": "transformers' Trainer"}[trainer]
    for name, present in refused.items():
        if present:
            raise UnsupportedError(
                f"{trainer} does not work with {name}",
                why="token weights act on the token log-probabilities that the model's own forward "
                "gives, and with it the loss is made elsewhere or values cannot be taken",
                remedy=f"leave it off; or train with {base} itself, which weighs no token",
            )


def padded_batch(
    rows: Sequence[Mapping[str, Any]], pad: int, device: Any
) -> dict[str, torch.Tensor]:
    """Tokenised rows padded on the right: input_ids, attention_mask, labels."""
    batch = padded([(row["input_ids"], row["labels"]) for row in rows], pad)
    return {name: tensor.to(device) for name, tensor in batch.items()}


class LabelledRows(AlphaTrainerMixin):
    """Rows with ``input_ids`` and ``labels``: what SFT and plain language modelling share."""

    def row_batch(self, rows: Sequence[Mapping[str, Any]]) -> Any:
        """One padded batch, by the collator that was handed over where there is one."""
        if self.own_collator is None:
            tokenizer = text_tokenizer(self.processing_class)
            pad = getattr(tokenizer, "pad_token_id", None) or 0  # any: padding is masked
            return padded_batch(rows, pad, self.args.device)
        if not self._rows_have_labels:  # which ``TrainingRows`` adds for policies
            rows = [{k: v for k, v in row.items() if k != "labels"} for row in rows]
        collate = self._get_collator_with_removed_columns(data_collator=self.own_collator)
        return self._prepare_inputs(collate([dict(row) for row in rows]))

    def weights_collator(self) -> tuple[Any, tuple[str, ...]]:
        """The trainer's collator, and weights beside its labels."""
        return RowWeightsCollator(self.data_collator), (LOSS_WEIGHTS,)

    @property
    def _rows_have_labels(self) -> bool:
        rows = plain_rows(self.train_dataset)
        return not hasattr(rows, "__len__") or "labels" in rows[0]

    def labels_of(self, row: Mapping[str, Any]) -> torch.Tensor:
        """(t,) labels of one row, as training gives them."""
        if self.own_collator is None:
            return torch.as_tensor(row.get("labels", row["input_ids"]))
        labels: torch.Tensor = self.row_batch([dict(row)])["labels"][0].cpu()
        return labels

    def with_responses(
        self, rows: list[dict[str, Any]], name: str, dataset: Any
    ) -> list[dict[str, Any]]:
        """Rows with a response token.

        Warns if validation and training rows differ in their labels, and of rows of the ``dataset``
        as it was handed over that are not left.

        Raises:
            InputError: none has.
        """
        labels = [self.labels_of(row) for row in rows]
        kept = [i for i, own in enumerate(labels) if bool(label_mask(own[None]).any())]
        if not kept:
            raise InputError(
                f"no row of the {name} dataset has a response token",
                got=f"{len(rows)} rows",
                why="there is no objective to value tokens against",
                remedy="check the prompt/completion split and max_length",
            )
        if name == "validation":
            self._compare_labels([labels[i] for i in kept])
        warn_of_left(dataset, kept, name, self.args)
        return [rows[i] for i in kept]

    def _compare_labels(self, validation_labels: Sequence[torch.Tensor]) -> None:
        """Warn where validation rows label their prompts and training rows do not, or the reverse.

        Their forms differ then: prompt and completion here, plain text or chats there.
        """
        trained = list(self._first_labels())
        if not trained:
            return
        ours, whole = _labelled(validation_labels[:_COMPARED])
        theirs, all_of_them = _labelled(trained)
        if abs(whole - all_of_them) > _APART:
            warn_caller(
                f"validation rows label {ours:.0%} of their tokens and training rows "
                f"{theirs:.0%}: they are of another form, and values are of an objective that "
                "training does not have. Give validation rows the form of the training rows",
                AlphaTokenWarning,
            )

    def _first_labels(self) -> Iterator[torch.Tensor]:
        """Labels of the first training rows, one after the other; none of a stream."""
        rows = plain_rows(self.train_dataset)
        count = min(len(rows), _COMPARED) if hasattr(rows, "__len__") else 0
        return (self.labels_of(rows[i]) for i in range(count))

    def fisher_prompts(self, rows: Any, samples: int) -> list[list[int]]:
        """The tokens before the first response token of each row."""
        prompts = []
        for row in plain_rows(rows):
            labels = self.labels_of(row).tolist()
            first = next((i for i, label in enumerate(labels) if label != IGNORE), len(labels))
            prompts.append(list(row["input_ids"][: max(first, 1)]))
            if len(prompts) == samples:
                break
        return prompts


def _labelled(rows: Sequence[torch.Tensor]) -> tuple[float, float]:
    """(share of the tokens that are labelled, share of the rows whose tokens all are)."""
    marks = [row != IGNORE for row in rows]
    # The first token of a row is predicted by nothing, and some preparations leave it out.
    whole = sum(bool(mark[1:].all()) for mark in marks)
    share = float(torch.cat(marks).float().mean())
    return share, whole / len(marks)


def _completion_labels(row: Mapping[str, Any], *, end: bool) -> dict[str, list[int]]:
    """Labels of the completion alone; of a row that was cut, whose mask TRL leaves whole.

    Args:
        row: that TRL tokenised.
        end: its end was kept, not its start.
    """
    labels, mask = row["labels"], row["completion_mask"]
    mask = mask[len(mask) - len(labels) :] if end else mask[: len(labels)]
    kept = zip(labels, mask, strict=True)
    return {"labels": [label if own else IGNORE for label, own in kept]}


class AlphaSFTTrainer(LabelledRows, SFTTrainer):
    """TRL's ``SFTTrainer`` that trains on the valuable part of each response.

        update  =  sum over kept tokens of  d loss / d lp_t  *  grad lp_t

    The reported loss is TRL's own over all response tokens. With ``keep_ratio=1`` (or
    ``policy="all"``) every step equals TRL's, bit for bit.

    Its arguments are those of TRL's ``SFTTrainer``, where ``args`` are an ``AlphaSFTConfig``, and
    those of :class:`~alphatoken.train.mixin.AlphaTrainerMixin`. Data sets come in any form that TRL
    takes, or as lists of records or texts. Training rows that repeat a validation, retention or
    evaluation row are counted in a warning.

    Source: eq. sft_masked_loss. Oracle: ``alphatoken.oracle``; equality with TRL is tested.
    """

    BASE, CONFIG = SFTTrainer, AlphaSFTConfig
    _tag_names = [*SFTTrainer._tag_names, "alphatoken"]  # noqa: RUF012  (as TRL declares it)

    read = staticmethod(read_rows)

    def refuse_base(self) -> None:
        """Refuse losses of the caller's own, and images."""
        refused = {
            "compute_loss_func": self.compute_loss_func is not None,
            "a vision dataset": self._is_vision_dataset,
        }
        refuse_losses("AlphaSFTTrainer", refused)

    def row_length(self, row: Mapping[str, Any]) -> int:
        """Length of a row; of a packed row, that of its longest document."""
        return max(map(int, row.get("seq_lengths") or [len(row["input_ids"])]))

    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        """TRL's preparation; of training rows whose weights are read, with a column of them."""
        prepare = partial(
            super()._prepare_dataset,
            processing_class=processing_class,
            formatting_func=formatting_func,
            dataset_name=dataset_name,
        )
        with bars_of_many(dataset):
            if dataset_name != "train" or self.row_weights == "refused":
                return prepare(dataset=dataset, args=args, packing=packing)
            tokenizer = text_tokenizer(processing_class)
            if self.chat_template is not None:  # TRL writes the rows with it
                tokenizer = copy.deepcopy(tokenizer)
                tokenizer.chat_template = self.chat_template
            return prepared_with_weights(
                prepare,
                dataset,
                args,
                packing,
                tokenizer=tokenizer,
                weights=self.row_weights,
                text_field=args.dataset_text_field,
            )

    def tokenised(self, dataset: Any, name: str) -> Any:
        """TRL's own preparation, without packing, labelled as training rows are."""
        if self._skip_prepare_dataset:
            return dataset
        own = "input_ids" in columns_of(plain_rows(dataset), name)
        prepared = self._prepare_dataset(
            dataset=dataset,
            processing_class=self.processing_class,
            args=self.args,
            packing=False,
            formatting_func=self._formatting_func,
            dataset_name=name,
        )
        # Rows that come tokenised keep their labels. Of others TRL decides by the form of the
        # training rows whether it labels completions alone. Where those came with labels of their
        # own, it would label the prompts of these rows too.
        unmasked = "completion_mask" in (getattr(prepared, "column_names", None) or ())
        whole = self.args.completion_only_loss is False or (
            name != "Fisher" and self._trains_whole()
        )
        if own or whole or not unmasked:
            return prepared
        end = self.args.truncation_mode == "keep_end"
        with bars_of_many(prepared):
            return prepared.map(partial(_completion_labels, end=end))

    def prepare_rows(self, dataset: Any, name: str) -> list[dict[str, Any]]:
        """Tokenised rows that have a response, labelled as training rows are."""
        prepared = plain_rows(self.tokenised(dataset, name))
        rows = [{"labels": row["input_ids"], **row} for row in prepared]
        if self.own_collator is None:  # which would read other columns, too
            rows = [{column: row[column] for column in ("input_ids", "labels")} for row in rows]
        return self.with_responses(rows, name, dataset)

    def _trains_whole(self) -> bool:
        """True if the first training rows are labelled whole; of a stream nothing is known."""
        has_length = hasattr(plain_rows(self.train_dataset), "__len__")
        return has_length and all(bool((labels != IGNORE).all()) for labels in self._first_labels())
