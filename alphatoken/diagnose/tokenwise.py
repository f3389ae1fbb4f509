"""Gradients of single tokens through the untouched model, for comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.data import Example, collate
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.oracle.gradients import per_token_gradients
from alphatoken.support.precision import blocks

__all__ = ["draw", "draw_short", "inner_products", "token_gradients"]


def draw(count: int, most: int, seed: int) -> NDArray[np.int64]:
    """Draw at most ``most`` of ``count`` places, without replacement, in rising order."""
    chosen = np.random.default_rng(seed).permutation(count)[:most]
    return np.sort(chosen).astype(np.int64)


def draw_short(
    lengths: Sequence[int] | NDArray[Any], rows: NDArray[Any], most: int, seed: int
) -> tuple[NDArray[np.int64], int]:
    """Draw at most ``most`` tokens at random from those of the shorter half of the rows.

    One backward a token goes through its whole row, so a token of a long row costs more. More rows
    are taken, by rising length, as long as they have fewer than ``most`` tokens.

    Args:
        lengths: positions of each row.
        rows: row of each token, numbered as ``lengths``.
        most: tokens.
        seed: of the draw.

    Returns:
        Places among the tokens in rising order, and the length of the longest row drawn from. Every
        token of the rows drawn from is as likely as another: what is said of the sample holds for
        rows of at most that length.
    """
    order = np.argsort(np.asarray(lengths), kind="stable")
    taken = -(-len(order) // 2)
    while taken < len(order) and int(np.isin(rows, order[:taken]).sum()) < most:
        taken += 1
    candidates = np.flatnonzero(np.isin(rows, order[:taken]))
    chosen = candidates[draw(len(candidates), most, seed)]
    return chosen.astype(np.int64), int(np.asarray(lengths)[order[taken - 1]])


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
    model = adapter.model
    for row, found in groupby(places, key=itemgetter(0)):
        batch = {name: x.to(device) for name, x in collate([rows[row]]).items()}
        tokens = [(0, position) for _, position in found]
        with evaluation_mode(model), torch.enable_grad():
            yield from per_token_gradients(model, adapter.forward, batch, parameters, tokens)


def _product(a: Tensor, b: Tensor) -> float:
    """Product of two tensors of one shape, with float64 copies no larger than a block."""
    return sum(float(x.double() @ y.double()) for x, y in blocks(a, b))


def inner_products(
    gradients: Iterator[dict[str, Tensor]],
    direction: Mapping[str, Tensor],
    done: Callable[[int], None] = lambda count: None,
) -> NDArray[np.float64]:
    """(token, parameter) of ``<gradient, M>``, one column a parameter of ``direction``, float64.

    Beside M one gradient is held at a time, and no copy of either beyond a block of numbers;
    ``done`` gets the number of tokens after each.
    """
    found: list[list[float]] = []
    for gradient in gradients:
        found.append([_product(gradient[name], m) for name, m in direction.items()])
        del gradient  # before the next one is computed
        done(len(found))
    return np.array(found)
