"""Padding of tokenised rows to a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from alphatoken.data.encode import Example
from alphatoken.errors import InputError

__all__ = ["batches", "collate", "padded"]


def padded(rows: Sequence[tuple[Any, Any]], pad: int = 0) -> dict[str, Tensor]:
    """Rows of (ids, labels) padded on the right: input_ids, attention_mask, labels, (b, t)."""
    columns = zip(*rows, strict=True)
    ids, labels = ([torch.as_tensor(own, dtype=torch.long) for own in one] for one in columns)
    return {
        "input_ids": pad_sequence(ids, batch_first=True, padding_value=pad),
        "attention_mask": pad_sequence(list(map(torch.ones_like, ids)), batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
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
