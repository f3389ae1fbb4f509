"""The gram-form ghost dot product of In-Run Data Shapley, written out.

Training and validation rows go through the model as one batch, with one backward of the summed
losses. With a the input and b the output error of a scored linear,

    <g_i, G> = 1/n sum_linears sum_{t in row i} sum_{s in validation} (a_t . a_s) (b_t . b_s)

so that no weight gradient is ever formed, and each pair of positions is. Unsummed over t it is one
number a position: the column sum of Psi, because b_t is the error of *all* later losses together.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers.peer import Batch, Peer, Run, Work, forward_losses

FILLING = {"input_ids": 0, "attention_mask": 0, "labels": -100}


def concatenated(batches: list[Batch]) -> dict[str, Tensor]:
    """All rows in one batch, padded on the right to the longest."""
    length = max(b["input_ids"].shape[1] for b in batches)
    return {
        key: torch.cat(
            [F.pad(b[key], (0, length - b[key].shape[1]), value=filler) for b in batches]
        )
        for key, filler in FILLING.items()
    }


@contextmanager
def recorded(modules: list[nn.Module]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """(input, output) of each scored linear of the forward inside."""
    seen: list[tuple[Tensor, Tensor]] = []

    def hook(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        seen.append((inputs[0].detach(), output))

    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def gram_ghost(work: Work, *, by_position: bool) -> Run:
    """Values by position (b, t), or by row (b,)."""
    modules = [work.model.get_submodule(place) for place in work.places]

    def run() -> Tensor:
        rows, length = work.batch["input_ids"].shape
        with recorded(modules) as seen:
            losses = forward_losses(work.model, concatenated([work.batch, *work.validation]))
        errors = torch.autograd.grad(losses.sum(), [output for _, output in seen])
        total = torch.zeros(rows, length, dtype=losses.dtype)
        for (a, _), b in zip(seen, errors, strict=True):
            train_a, train_b = a[:rows, :length], b[:rows, :length]
            held_a, held_b = a[rows:].flatten(0, 1), b[rows:].flatten(0, 1)
            total += ((train_a @ held_a.T) * (train_b @ held_b.T)).sum(-1)
        total /= work.count
        return total if by_position else total.sum(1)

    return run


PEERS = (
    Peer(
        "gram_ghost",
        "one value a row: In-Run Data Shapley's ghost dot product, gram form",
        "sample",
        partial(gram_ghost, by_position=False),
    ),
    Peer(
        "gram_ghost_position",
        "the same product left unsummed over the row's positions: path values",
        "path",
        partial(gram_ghost, by_position=True),
    ),
)
