"""Padding encoded rows to a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from alphatoken.data.encode import Example
from alphatoken.errors import InputError

__all__ = ["batches", "collate"]


def collate(
    examples: Sequence[Example],
    *,
    pad_token_id: int = 0,
    padding_side: str = "right",
) -> dict[str, Tensor]:
    """One batch as transformers uses it: ``input_ids``, ``attention_mask``, ``labels``, (b, t).

    Padding carries attention 0 and label -100, so ``pad_token_id`` has no influence on any value.
    With left padding ``position_ids`` is added (0 at the first real token): a model with absolute
    position embeddings would otherwise see shifted positions.

    Raises:
        InputError: no examples, or an unknown side.
    """
    if not examples:
        raise InputError("a batch needs at least one example", got="none")
    if padding_side not in ("left", "right"):
        raise InputError("unknown padding side", got=repr(padding_side), remedy="left or right")
    width = max(len(example.input_ids) for example in examples)
    shape = (len(examples), width)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    labels = torch.full(shape, -100, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    for index, example in enumerate(examples):
        length = len(example.input_ids)
        place = slice(0, length) if padding_side == "right" else slice(width - length, width)
        input_ids[index, place] = torch.tensor(example.input_ids, dtype=torch.long)
        labels[index, place] = torch.tensor(example.labels, dtype=torch.long)
        attention_mask[index, place] = 1
    batch = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    if padding_side == "left":
        batch["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)
    return batch


def batches(
    examples: Sequence[Example],
    size: int,
    *,
    pad_token_id: int = 0,
    padding_side: str = "right",
) -> Iterator[dict[str, Tensor]]:
    """Batches of ``size`` examples in their order; the last may be smaller."""
    for start in range(0, len(examples), size):
        yield collate(
            examples[start : start + size], pad_token_id=pad_token_id, padding_side=padding_side
        )
