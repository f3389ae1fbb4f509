"""Peers made of autograd alone: a backward a token, many at once, per-sample, the gram form."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers.peer import (
    Batch,
    Peer,
    Run,
    Work,
    forward_losses,
    position_losses,
    right_padded,
    validation_gradient,
)

CHUNK = 32
"""Tokens whose backward passes run as one: their weight gradients are held together."""


def dot(gradients: tuple[Tensor, ...] | list[Tensor], direction: list[Tensor], dim: int) -> Tensor:
    """Sum over the scored weights of <g, G>; the first ``dim`` axes of g stay."""
    parts = (
        (g * m).flatten(dim).sum(-1) if dim else (g * m).sum()
        for g, m in zip(gradients, direction, strict=True)
    )
    return torch.stack(list(parts)).sum(0)


def per_token_autograd(work: Work) -> Run:
    """One forward; then for each response token k one backward: <d l_k / d W, G>."""

    def run() -> Tensor:
        weights = list(work.weights.values())
        direction = validation_gradient(work)
        losses = forward_losses(work.model, work.batch)
        values = torch.zeros_like(work.batch["labels"], dtype=losses.dtype)
        for row, p in (work.batch["labels"][:, 1:] != -100).nonzero().tolist():
            gradients = torch.autograd.grad(losses[row, p], weights, retain_graph=True)
            values[row, p + 1] = dot(gradients, direction, 0)
        return values

    return run


@contextmanager
def batched_attention() -> Iterator[None]:
    """Attention in plain operations: the fused CPU kernel's backward has no batching rule."""
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


def vmap_per_token(work: Work) -> Run:
    """The same with ``CHUNK`` backward passes vectorised into one (``is_grads_batched``)."""

    def run() -> Tensor:
        weights = list(work.weights.values())
        direction = validation_gradient(work)
        with batched_attention():
            losses = forward_losses(work.model, work.batch)
            chosen = (work.batch["labels"][:, 1:] != -100).nonzero()
            seeds = torch.eye(CHUNK, dtype=losses.dtype)
            values = torch.zeros_like(work.batch["labels"], dtype=losses.dtype)
            for part in chosen.split(CHUNK):
                picked = losses[part[:, 0], part[:, 1]]
                gradients = torch.autograd.grad(
                    picked,
                    weights,
                    seeds[: len(part), : len(part)],
                    retain_graph=True,
                    is_grads_batched=True,
                )
                values[part[:, 0], part[:, 1] + 1] = dot(gradients, direction, 1)
        return values

    return run


def vmap_per_sample(work: Work) -> Run:
    """Gradients of all rows at once, ``vmap(grad(row loss))``, each held in full; then <., G>.

    G itself is taken by one ordinary backward a validation batch, which is cheaper. Padding is
    moved behind the rows and no mask is passed: transformers' masks branch on data, which vmap
    refuses, and where they do not (eager attention), rows padded in front come out as NaN.
    """

    def loss(weights: dict[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
        inputs = {"input_ids": ids[None], "use_cache": False}
        logits = functional_call(work.model, weights, (), inputs).logits
        return position_losses(logits, labels[None]).sum()

    def run() -> Tensor:
        weights = {name: w.detach() for name, w in work.weights.items()}
        direction = validation_gradient(work)
        with batched_attention():
            gradients = vmap(grad(loss), in_dims=(None, 0, 0))(weights, *right_padded(work.batch))
        return dot([gradients[name] for name in weights], direction, 1)

    return run


# --- the gram form ------------------------------------------------------------------------------

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
    uses: list[tuple[Tensor, Tensor]] = []

    def hook(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        uses.append((inputs[0].detach(), output))

    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield uses
    finally:
        for handle in handles:
            handle.remove()


def gram_ghost(work: Work, *, by_position: bool) -> Run:
    """Values by position (b, t), or by row (b,), of In-Run Data Shapley's ghost dot product.

    Training and validation rows go through the model as one batch, with one backward of the summed
    losses. With a the input and b the output error of a scored linear,

        <g_i, G> = 1/n sum_linears sum_{t in row i} sum_{s in validation} (a_t . a_s) (b_t . b_s)

    so that no weight gradient is ever formed, and each pair of positions is. Unsummed over t it is
    the column sum of Psi, because b_t is the error of *all* later losses together.
    """
    modules = [work.model.get_submodule(place) for place in work.places]

    def run() -> Tensor:
        rows, length = work.batch["input_ids"].shape
        with recorded(modules) as uses:
            losses = forward_losses(work.model, concatenated([work.batch, *work.validation]))
        errors = torch.autograd.grad(losses.sum(), [output for _, output in uses])
        total = torch.zeros(rows, length, dtype=losses.dtype)
        for (a, _), b in zip(uses, errors, strict=True):
            train_a, train_b = a[:rows, :length], b[:rows, :length]
            held_a, held_b = a[rows:].flatten(0, 1), b[rows:].flatten(0, 1)
            total += ((train_a @ held_a.T) * (train_b @ held_b.T)).sum(-1)
        total /= work.count
        return total if by_position else total.sum(1)

    return run


PEERS = (
    Peer(
        "per_token_autograd",
        "label value of every token, by one backward pass a token",
        "label",
        per_token_autograd,
    ),
    Peer(
        "vmap_per_token",
        f"label value of every token, {CHUNK} backward passes vectorised (is_grads_batched)",
        "label",
        vmap_per_token,
    ),
    Peer(
        "vmap_per_sample",
        "one value a row, per-sample gradients by torch.func.vmap(grad)",
        "sample",
        vmap_per_sample,
    ),
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
