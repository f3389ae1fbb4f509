"""Tokenised rows to a batch: padding, and float weights on token losses beside the labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from alphatoken.data.encode import Example
from alphatoken.errors import DataError, InputError
from alphatoken.model.batch import IGNORE


def padded(rows: Sequence[tuple[Any, Any]], pad: int = 0) -> dict[str, Tensor]:
    """Rows of (ids, labels) padded on the right: input_ids, attention_mask, labels, (b, t)."""
    columns = zip(*rows, strict=True)
    ids, labels = ([torch.as_tensor(own, dtype=torch.long) for own in column] for column in columns)
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence(list(map(torch.ones_like, ids)), batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE),
    }


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """One batch as transformers uses it: ``input_ids``, ``attention_mask``, ``labels``, (b, t).

    Rows are padded on the right, by tokens 0 with attention 0 and label -100: no value sees them.

    Raises:
        InputError: no examples.
    """
    if not examples:
        raise InputError("a batch needs at least one example", got="none")
    return padded([(example.input_ids, example.labels) for example in examples])


def batches(examples: Sequence[Example], size: int) -> Iterator[dict[str, Tensor]]:
    """Batches of ``size`` examples in their order; the last may be smaller."""
    for start in range(0, len(examples), size):
        yield collate(examples[start : start + size])


# --- weights beside the labels --------------------------------------------------------------------


class WeightedCollator:
    """Brings the column ``loss_weights`` into the batch, laid out as ``labels`` are.

    Args:
        inner: the collator that makes ``input_ids`` and ``labels`` of rows, such as TRL's
            ``DataCollatorForLanguageModeling``. It may pad each row on the right, or join all rows
            of the batch into one (``padding_free``).

    Called with rows that have ``input_ids``, ``labels`` and ``loss_weights``, unshifted and of one
    length (packed rows too), it returns the inner collator's batch and ``loss_weights``, float32
    in the shape of ``labels``, 0 wherever no label is.

    Raises:
        DataError: a row without weights, or columns of different lengths; a batch of another form.

    The loss is then ``sum(w_i l_i) / n``, n the labelled tokens of the step. Oracle: the same sum
    row by row, in the tests.
    """

    def __init__(self, inner: Callable[[list[dict[str, Any]]], Any]) -> None:
        self.inner = inner

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Inner collator's batch with ``loss_weights`` beside its labels."""
        own = [_checked(row, number) for number, row in enumerate(rows)]
        weights = [torch.as_tensor(row.pop("loss_weights"), dtype=torch.float32) for row in own]
        row_labels = [torch.as_tensor(row["labels"]) for row in own]
        batch: dict[str, Any] = self.inner(own)
        labels = batch["labels"]
        there = labels != IGNORE
        if bool((there & (_laid_out(row_labels, labels) != labels)).any()):
            raise _other_form(labels, row_labels)
        batch["loss_weights"] = _laid_out(weights, labels).masked_fill(~there, 0.0)
        return batch


def _checked(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    columns = ("input_ids", "labels", "loss_weights")
    lengths = {name: len(row[name]) for name in columns if row.get(name) is not None}
    if len(lengths) < len(columns) or len(set(lengths.values())) > 1:
        raise DataError(
            "a row has no weight for each of its tokens",
            got=f"row {number} of the batch: {lengths}",
            why="a weight would fall onto another token",
            remedy="remove_unused_columns=False, and dataset_kwargs={'skip_prepare_dataset': "
            "True} for TRL, which cuts the other columns alone",
        )
    return dict(row)


def _laid_out(rows: Sequence[Tensor], labels: Tensor) -> Tensor:
    laid_out = torch.zeros(labels.shape, dtype=rows[0].dtype)
    if len(labels) == len(rows) and all(len(row) <= labels.shape[1] for row in rows):
        for line, row in zip(laid_out, rows, strict=True):
            line[: len(row)] = row
        return laid_out
    joined = torch.cat(list(rows))
    if labels.shape[0] != 1 or len(joined) > labels.shape[1]:
        raise _other_form(labels, rows)
    laid_out[0, : len(joined)] = joined
    return laid_out


def _other_form(labels: Tensor, rows: Sequence[Tensor]) -> DataError:
    return DataError(
        "the batch is neither padded nor joined rows",
        got=f"labels {tuple(labels.shape)} of {[len(row) for row in rows]} tokens",
        why="a weight would fall onto another token",
        remedy="a collator that keeps rows in their order, padded on the right",
    )
