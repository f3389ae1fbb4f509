"""Float weights on token losses, beside the labels, through any trainer's collator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from alphatoken.errors import DataError
from alphatoken.model.batch import IGNORE

__all__ = ["WeightedCollator"]


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
        """Collate some rows."""
        own = [_checked(row, number) for number, row in enumerate(rows)]
        weights = [torch.tensor(row.pop("loss_weights"), dtype=torch.float32) for row in own]
        given = [torch.tensor(row["labels"]) for row in own]
        batch: dict[str, Any] = self.inner(own)
        labels = batch["labels"]
        there = labels != IGNORE
        if bool((there & (_laid_out(given, labels) != labels)).any()):
            raise _other_form(labels, given)
        batch["loss_weights"] = _laid_out(weights, labels).masked_fill(~there, 0.0)
        return batch


def _checked(row: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The row, which has a weight for each of its tokens."""
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
    """Padded on the right, or joined, whichever the labels are; 0 elsewhere."""
    found = torch.zeros(labels.shape, dtype=rows[0].dtype)
    if len(labels) == len(rows) and all(len(one) <= labels.shape[1] for one in rows):
        for line, one in zip(found, rows, strict=True):
            line[: len(one)] = one
        return found
    joined = torch.cat(list(rows))
    if labels.shape[0] != 1 or len(joined) > labels.shape[1]:
        raise _other_form(labels, rows)
    found[0, : len(joined)] = joined
    return found


def _other_form(labels: Tensor, rows: Sequence[Tensor]) -> DataError:
    return DataError(
        "the batch is neither padded nor joined rows",
        got=f"labels {tuple(labels.shape)} of {[len(one) for one in rows]} tokens",
        why="a weight would fall onto another token",
        remedy="a collator that keeps rows in their order, padded on the right",
    )
