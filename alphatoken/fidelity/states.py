"""Hidden states of one forward: block by block, and what the output head reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.errors import ModelError, require_choice
from alphatoken.model.batch import LabelledBatch, read_batch, to_label_position, token_losses
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from alphatoken.support.progress import Tracker

__all__ = ["POOLS", "PooledStates", "States", "TokenStates", "pooled_states", "token_states"]

POOLS = ("all", "prompt", "response")
"""Which tokens of a row are averaged: all that are no padding, or one side of it."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class States:
    """What one forward computed.

    Attributes:
        layers: output of each decoder block (b, t, d), in the order of use.
        read: (b, t, d) what the output head reads, which is after the final norm; the last
            block's output where no module of the model makes the logits.
        losses: (b, t) loss of every response token, 0 elsewhere.
        has_head: whether such a module was found.
    """

    layers: tuple[Tensor, ...]
    read: Tensor
    losses: Tensor
    has_head: bool


@dataclass(frozen=True)
class TokenStates:
    """One row a response token, in (row, position) order.

    Attributes:
        states: (n, d) what the head reads where the token is predicted.
        losses: (n,) its loss.
        ids: (n,) its id.
        has_head: as in ``States``.
    """

    states: Numbers
    losses: Numbers
    ids: NDArray[np.int64]
    has_head: bool


@dataclass(frozen=True)
class PooledStates:
    """One row a sequence.

    Attributes:
        places: "layer 1", ..., and "head".
        states: for each place, (n, d) mean over the pooled tokens.
        losses: (n,) summed loss of the response tokens.
        tokens: (n,) how many there are.
        has_head: as in ``States``.
    """

    places: tuple[str, ...]
    states: tuple[Numbers, ...]
    losses: Numbers
    tokens: Numbers
    has_head: bool


@torch.no_grad()
def states_of(adapter: DecoderAdapter, batch: LabelledBatch) -> States:
    """Run the model once, dropout off, and look on; nothing of it is changed.

    The head is found as the last module outside the blocks that maps the width of the blocks to
    that of the logits: no adapter has to name it.

    Raises:
        ModelError: a block returned no hidden states.
    """
    layers: list[Tensor] = []
    heads: list[tuple[Tensor, int]] = []
    with evaluation_mode(adapter.model), _watched(adapter, layers, heads):
        logits = adapter.forward(batch.inputs)
    if not layers:
        raise ModelError("no decoder block ran", got=type(adapter.model).__qualname__)
    wanted = (layers[-1].shape[-1], logits.shape[-1])
    found = [entry for entry, width in heads if (entry.shape[-1], width) == wanted]
    read = found[-1] if found else layers[-1]
    losses = token_losses(logits, batch.labels)
    return States(tuple(layers), read, losses, bool(found))


@contextmanager
def _watched(
    adapter: DecoderAdapter, layers: list[Tensor], heads: list[tuple[Tensor, int]]
) -> Iterator[None]:
    blocks = set(adapter.layers())  # a block used at two depths is hooked once, and reports twice
    inside = {module for block in blocks for module in block.modules()}

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        if not isinstance(hidden, Tensor):
            raise ModelError("a decoder block returned no hidden states", got=type(hidden).__name__)
        layers.append(hidden)

    def outside(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        entry = args[0] if args else None
        if isinstance(entry, Tensor) and isinstance(output, Tensor) and entry.dim() == 3:
            heads.append((entry, output.shape[-1]))

    leaves = [m for m in adapter.model.modules() if m not in inside and not any(m.children())]
    handles = [block.register_forward_hook(leave) for block in blocks]
    handles += [module.register_forward_hook(outside) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _batches_of(
    model: nn.Module, batches: Sequence[dict[str, Tensor]], tracker: Tracker
) -> Iterator[tuple[LabelledBatch, States]]:
    adapter = find_adapter(model)
    device = next(model.parameters()).device
    rows = 0
    for batch in batches:
        moved = {name: tensor.to(device) for name, tensor in batch.items()}
        checked = read_batch(moved, max_length=adapter.max_positions())
        yield checked, states_of(adapter, checked)
        rows += len(checked.labels)
        tracker.report(rows)


def token_states(
    model: nn.Module, batches: Sequence[dict[str, Tensor]], tracker: Tracker
) -> TokenStates:
    """States at the position *before* each response token: where the model predicts it.

    The contextual embedding of a token as its loss sees it: it holds the prefix, not the token.
    """
    states, losses, ids, has_head = [], [], [], True
    for batch, found in _batches_of(model, batches, tracker):
        predicting = to_label_position(batch.mask)
        states.append(_numbers(found.read[predicting]))
        losses.append(_numbers(found.losses[batch.mask]))
        ids.append(batch.labels[batch.mask].cpu().numpy())
        has_head = has_head and found.has_head
    return TokenStates(
        np.concatenate(states), np.concatenate(losses), np.concatenate(ids), has_head
    )


def pooled_states(
    model: nn.Module,
    batches: Sequence[dict[str, Tensor]],
    tracker: Tracker,
    *,
    pool: str = "all",
) -> PooledStates:
    """Mean state of each row, at the output of every block and at the head's input.

    Args:
        model: whose states.
        batches: labelled rows.
        tracker: told of the rows that are done.
        pool: one of ``POOLS``; a row without such a token gets NaN.

    Raises:
        ConfigError: an unknown pool.
    """
    require_choice("pool", pool, POOLS)
    columns: list[list[Numbers]] = []
    losses, tokens, has_head = [], [], True
    for batch, found in _batches_of(model, batches, tracker):
        weights = _pooled_mask(batch, pool)
        means = [_numbers(_mean(state, weights)) for state in (*found.layers, found.read)]
        columns = columns or [[] for _ in means]
        for column, mean in zip(columns, means, strict=True):
            column.append(mean)
        losses.append(_numbers(found.losses.sum(1)))
        tokens.append(_numbers(batch.mask.sum(1)))
        has_head = has_head and found.has_head
    depth = len(columns) - 1
    return PooledStates(
        (*(f"layer {i + 1}" for i in range(depth)), "head"),
        tuple(np.concatenate(column) for column in columns),
        np.concatenate(losses),
        np.concatenate(tokens),
        has_head,
    )


def _pooled_mask(batch: LabelledBatch, pool: str) -> Tensor:
    attention = batch.inputs.get("attention_mask")
    real = torch.ones_like(batch.mask) if attention is None else attention != 0
    if pool == "prompt":
        return real & ~batch.mask
    return batch.mask if pool == "response" else real


def _mean(state: Float[Tensor, "b t d"], mask: Tensor) -> Float[Tensor, "b d"]:
    """Mean over the masked positions, in float64; padding cannot reach it, whatever it holds."""
    wide = state.double().masked_fill(~mask.unsqueeze(-1), 0.0)
    return wide.sum(1) / mask.sum(1, keepdim=True)


def _numbers(tensor: Tensor) -> Numbers:
    return tensor.detach().double().cpu().numpy()
