"""The work of the peer benchmark: one size for time and memory, growing ones for the limits."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.models import decoder, random_batch
from benchmarks.peers.peer import Work

WIDTH, DEPTH, LAYERS, VOCABULARY = 256, 4, 3, 2048
ROWS, LENGTH = 4, 64
HELD_OUT_ROWS, HELD_OUT_LENGTH, HELD_OUT_BATCHES = 4, 128, 2
LONGEST = 2**16

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
    made: torch.nn.Module = decoder(WIDTH, DEPTH, vocabulary=VOCABULARY, length=LONGEST)
    return made.eval()


def standard(own: torch.nn.Module | None = None, *, disposable: bool = False) -> Work:
    """The work whose time and memory are measured."""
    held_out = [batch_of(HELD_OUT_ROWS, HELD_OUT_LENGTH, 1 + i) for i in range(HELD_OUT_BATCHES)]
    train = batch_of(ROWS, LENGTH, 0)
    return Work(model() if own is None else own, train, held_out, LAYERS, disposable)


def longer(own: torch.nn.Module, tokens: int) -> Work:
    """One training row of so many tokens, one validation row."""
    held_out = [batch_of(1, HELD_OUT_LENGTH, 1)]
    return Work(own, batch_of(1, tokens, 0), held_out, LAYERS)


def wider(own: torch.nn.Module, tokens: int) -> Work:
    """So many validation tokens in batches of ``HELD_OUT_ROWS`` rows, one short training row."""
    one = HELD_OUT_ROWS * HELD_OUT_LENGTH
    held_out = [batch_of(HELD_OUT_ROWS, HELD_OUT_LENGTH, 1 + i) for i in range(tokens // one)]
    return Work(own, batch_of(1, LENGTH, 0), held_out, LAYERS)


AXES = {"T": (longer, 64, LONGEST), "N_v": (wider, 512, 2**20)}
"""Axis -> (work of a size, first size, last size); sizes double."""
