"""Padding of tokenised rows to a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from alphatoken.data.encode import Example
from alphatoken.errors import InputError

__all__ = ["batches", "collate", "padded"]


def padded(rows: Sequence[tuple[Any, Any]], pad: int = 0) -> dict[str, Tensor]:
    """Rows of (ids, labels) padded on the right: input_ids, attention_mask, labels, (b, t)."""
    shape = (len(rows), max(len(ids) for ids, _ in rows))
    input_ids = torch.full(shape, pad, dtype=torch.long)
    labels = torch.full(shape, -100, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    for index, (own, learned) in enumerate(rows):
        input_ids[index, : len(own)] = torch.as_tensor(own)
        labels[index, : len(own)] = torch.as_tensor(learned)
        attention_mask[index, : len(own)] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


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
