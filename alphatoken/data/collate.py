"""Padding encoded rows to a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from alphatoken.data.encode import Example
from alphatoken.errors import InputError

__all__ = ["batches", "collate"]


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """One batch as transformers uses it: ``input_ids``, ``attention_mask``, ``labels``, (b, t).

    Rows are padded on the right, by tokens 0 with attention 0 and label -100: no value sees them.

    Raises:
        InputError: no examples.
    """
    if not examples:
        raise InputError("a batch needs at least one example", got="none")
    shape = (len(examples), max(len(example.input_ids) for example in examples))
    input_ids = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, -100, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    for index, example in enumerate(examples):
        length = len(example.input_ids)
        input_ids[index, :length] = torch.tensor(example.input_ids, dtype=torch.long)
        labels[index, :length] = torch.tensor(example.labels, dtype=torch.long)
        attention_mask[index, :length] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def batches(examples: Sequence[Example], size: int) -> Iterator[dict[str, Tensor]]:
    """Batches of ``size`` examples in their order; the last may be smaller."""
    for start in range(0, len(examples), size):
        yield collate(examples[start : start + size])
