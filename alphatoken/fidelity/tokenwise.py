"""Tokens sent one by one through the untouched model: the ground of every comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.data import Example, collate
from alphatoken.model.capture import evaluation_mode
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.oracle.gradients import per_token_gradients

__all__ = ["draw", "first_names", "inner_products", "token_gradients"]


def draw(count: int, most: int, seed: int) -> NDArray[np.int64]:
    """At most ``most`` of ``count`` places, drawn without replacement, in rising order."""
    chosen = np.random.default_rng(seed).permutation(count)[:most]
    return np.sort(chosen).astype(np.int64)


def token_gradients(
    adapter: DecoderAdapter,
    rows: Sequence[Example],
    places: Sequence[tuple[int, int]],
    parameters: Mapping[str, Tensor],
    device: torch.device,
) -> Iterator[dict[str, Tensor]]:
    """Gradient of the loss of each token (row, position), in the order given.

    One ordinary backward a token, dropout off. A row runs alone, so neither padding nor its
    neighbours take part; nothing of the capture machinery does.
    """

    def forward(inputs: Mapping[str, Any]) -> Tensor:
        return adapter.forward(inputs)

    start = 0
    while start < len(places):
        row = places[start][0]
        stop = start
        while stop < len(places) and places[stop][0] == row:
            stop += 1
        batch = {name: x.to(device) for name, x in collate([rows[row]]).items()}
        tokens = [(0, position) for _, position in places[start:stop]]
        with evaluation_mode(adapter.model), torch.enable_grad():
            yield from per_token_gradients(adapter.model, forward, batch, parameters, tokens)
        start = stop


def inner_products(
    gradients: Iterator[dict[str, Tensor]], direction: Mapping[str, Tensor]
) -> NDArray[np.float64]:
    """(token, parameter) of ``<gradient, M>``, one column a parameter of ``direction``, float64."""
    wide = {name: matrix.double() for name, matrix in direction.items()}
    return np.array(
        [[float((g[name].double() * m).sum()) for name, m in wide.items()] for g in gradients]
    )


def first_names(model: nn.Module, parameters: Mapping[str, Tensor]) -> list[str]:
    """Names in ``model.named_parameters()`` of these parameters, each once."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return list(dict.fromkeys(names[id(parameter)] for parameter in parameters.values()))
