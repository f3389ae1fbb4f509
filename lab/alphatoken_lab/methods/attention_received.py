"""Attention that each token receives from the tokens after it, without a T x T matrix.

A_t = mean over layers, heads and real queries q >= t of alpha_{q,t}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from alphatoken.errors import ConfigError, require_choice
from alphatoken.model.attention import AttentionStatistics
from alphatoken.model.protocol import AttentionCall, NativeAttention, find_adapter
from alphatoken.model.scope import resolve_layers

__all__ = ["HEADS", "QUERIES", "receiving"]

HEADS = ("mean", "max")
QUERIES = ("mean", "sum")


class _Received:
    """Sums over the attention calls of one forward."""

    def __init__(self, real: Tensor, heads: str, queries: str) -> None:
        self.real, self.heads, self.queries = real, heads, queries
        self.total: Tensor | None = None
        self.calls = 0

    def __call__(self, call: AttentionCall, native: NativeAttention) -> Tensor:
        statistics = AttentionStatistics(call)
        batch, length = call.query.shape[0], call.query.shape[2]
        received = torch.zeros(batch, length, dtype=statistics.dtype, device=call.query.device)
        real = self.real.to(received)
        for block in statistics.row_blocks():
            alpha = statistics.softmax(block)[0].flatten(1, 2)  # (b, h, k, t)
            by_query = alpha.mean(1) if self.heads == "mean" else alpha.amax(1)
            received[:, block.columns] += torch.einsum("bk,bkt->bt", real[:, block.rows], by_query)
        if self.queries == "mean":
            later = real.flip(1).cumsum(1).flip(1)  # real queries at or after t
            received = received / later.clamp(min=1)
        self.total = received if self.total is None else self.total + received
        self.calls += 1
        return native(call.query, call.key, call.value)

    def result(self) -> Float[Tensor, "b t"]:
        """Mean over the calls."""
        assert self.total is not None
        return self.total / self.calls


@contextmanager
def receiving(
    model: Any,
    inputs: Mapping[str, Tensor],
    *,
    layers: int | str | Sequence[int] = "all",
    heads: str = "mean",
    queries: str = "mean",
) -> Iterator[_Received]:
    """Context in which one forward of ``inputs`` is watched; ``result()`` gives (b, t).

    Args:
        model: a decoder whose attention is on transformers' interface.
        inputs: of that forward; padding is read from ``attention_mask``.
        layers: K for the last K, "all", or indices.
        heads: "mean" or "max" over the query heads.
        queries: "mean" over the real queries at or after t, or their "sum" (then early tokens
            receive more because more queries see them).

    Raises:
        ConfigError: other options, or no softmax attention in these layers.
    """
    require_choice("heads", heads, HEADS)
    require_choice("queries", queries, QUERIES)
    adapter = find_adapter(model)
    chosen = resolve_layers(adapter, layers)
    modules = [module for layer in chosen for module in adapter.attention_modules(layer)]
    if not modules:
        raise ConfigError(
            "none of the layers has softmax attention",
            got=f"layers {list(chosen)}",
            why="there are no attention scores to read",
            remedy="choose other layers, or leave the filter 'ri' out",
        )
    ids = inputs["input_ids"]
    mask = inputs.get("attention_mask")
    real = torch.ones_like(ids) if mask is None else (mask != 0).to(ids.dtype)
    received = _Received(real, heads, queries)
    with adapter.override_attention(modules, received):
        yield received
