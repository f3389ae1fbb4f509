"""The work of the peer benchmark, for time and memory."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.models import decoder, random_batch
from benchmarks.peers.peer import Work

WIDTH, DEPTH, LAYERS, VOCABULARY = 256, 4, 3, 2048
ROWS, LENGTH = 4, 64
HELD_OUT_ROWS, HELD_OUT_LENGTH, HELD_OUT_BATCHES = 4, 128, 2

DESCRIPTION = (
    f"d={WIDTH}, {DEPTH} layers, K={LAYERS}, {ROWS} x {LENGTH} tokens, "
    f"{HELD_OUT_BATCHES} validation batches of {HELD_OUT_ROWS} x {HELD_OUT_LENGTH}"
)


def batch_of(rows: int, length: int, seed: int) -> dict[str, Tensor]:
    """Random tokens without padding, the first quarter of each row prompt."""
    batch = random_batch(rows, length, VOCABULARY, seed=seed)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def model() -> torch.nn.Module:
    """The decoder, in evaluation mode."""
    made: torch.nn.Module = decoder(WIDTH, DEPTH, vocabulary=VOCABULARY)
    return made.eval()


def standard(own: torch.nn.Module | None = None, *, disposable: bool = False) -> Work:
    """The work whose time and memory are measured."""
    held_out = [batch_of(HELD_OUT_ROWS, HELD_OUT_LENGTH, 1 + i) for i in range(HELD_OUT_BATCHES)]
    train = batch_of(ROWS, LENGTH, 0)
    return Work(model() if own is None else own, train, held_out, LAYERS, disposable)
