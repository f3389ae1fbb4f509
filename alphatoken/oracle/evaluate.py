"""Tools of the oracles of retention, utility and preference: evaluate, displace, flatten.

Notation: batch row b, token index i. ``labels`` are unshifted, so token i is predicted by the
logits at i - 1 (its label position p = i - 1).

A *flat* vector of a parameter mapping is the concatenation, in the mapping's own order, of every
tensor read row by row (C order). Rows and columns of Hessians and Fishers follow that layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from alphatoken.errors import InputError
from alphatoken.oracle.gradients import IGNORED, Batch, Forward, known_labels, token_losses

__all__ = [
    "batch_losses",
    "batch_mask",
    "displaced",
    "flatten",
    "sequence_log_probabilities",
    "undisturbed",
    "unflatten",
]


def batch_mask(batch: Batch) -> Bool[Tensor, " batch token"]:
    """Mask of tokens that count: with a label, a token before it, and attention to that one."""
    mask = known_labels(batch) != IGNORED
    mask[:, 0] = False  # nothing predicts a row's first token
    return mask


def batch_losses(forward: Forward, batch: Batch) -> Float[Tensor, " batch token"]:
    """``-log p`` of each response token, 0 elsewhere: one forward, differentiable, exact.

    ``forward`` gets the batch without its labels.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return token_losses(forward(inputs), known_labels(batch))


def sequence_log_probabilities(forward: Forward, batch: Batch) -> Float[Tensor, " batch"]:
    """``log p(y | x)`` of each row: minus the *sum* of its response tokens' losses. Exact."""
    return -batch_losses(forward, batch).sum(dim=1)


@contextmanager
def undisturbed(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Evaluate with dropout off and gradients to ``parameters`` on; put every flag back after.

    Raises:
        InputError: an entry is not the model's parameter of that name, or one (tied) parameter is
            named twice.
    """
    _check_belongs(model, parameters)
    modes = [(module, module.training) for module in model.modules()]
    wanted = [(parameter, parameter.requires_grad) for parameter in parameters.values()]
    try:
        model.eval()
        for parameter, _ in wanted:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, flag in wanted:
            parameter.requires_grad_(flag)


@contextmanager
def displaced(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the live ``parameters`` hold ``values`` (same names) inside the block.

    The storages are exchanged, not overwritten: afterwards each parameter holds its old storage,
    bit for bit, and its version counter has not moved. Differentiate inside the block only.
    """
    before = {name: parameters[name].data for name in values}
    try:
        for name, value in values.items():
            parameters[name].data = value.detach().to(before[name])
        yield
    finally:
        for name, data in before.items():
            parameters[name].data = data


def flatten(tensors: Mapping[str, Tensor]) -> Float[Tensor, " flat"]:
    """One vector: the tensors in the mapping's order, each read in C order."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def unflatten(flat: Float[Tensor, " flat"], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undo :func:`flatten`: same names, order and shapes as ``like``."""
    parts = flat.split([tensor.numel() for tensor in like.values()])
    return {
        name: part.reshape(tensor.shape)
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }


def _check_belongs(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    # Tied weights have several names; each of them is valid.
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if own.get(name) is not parameter:
            raise InputError(
                "a given parameter is not the model's own",
                got=name,
                why="the loss would not depend on it, and every derivative would be zero",
                remedy="take the tensors from model.named_parameters()",
            )
    if len({id(parameter) for parameter in parameters.values()}) < len(parameters):
        raise InputError(
            "a tied parameter is named twice",
            got=", ".join(parameters),
            why="one variable would count as two",
            remedy="name it once, as model.named_parameters() does",
        )
