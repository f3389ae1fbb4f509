"""Psi over the 3-D tensors of mixtures of experts, by a copy of them for every position.

    Psi[b, k, t] = < d l_k / d W^(t), M >

W^(t) is the copy of the tensor that position t alone uses. The mixture's own forward is run one
position at a time, each with its copy, and autograd does the rest: nothing is said here of routing,
of which expert saw what, of inputs or of errors. Rows k are label positions, columns t positions of
use, as in :mod:`alphatoken.oracle.influence`, whose readouts apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.errors import InputError
from alphatoken.oracle.gradients import Batch, Forward, run_losses
from alphatoken.oracle.influence import Influence

__all__ = ["expert_influence"]

Copies = dict[str, list[Tensor]]
"""Parameter name -> the copies, in the order in which positions ran."""


@contextmanager
def _copied_per_position(mixtures: Mapping[str, nn.Module]) -> Iterator[Copies]:
    """Inside, each position of these mixtures runs with copies of the parameters of its own.

    Args:
        mixtures: name -> module whose forward takes tensors with one row a position, and gives one
            back. Its name must be the prefix of its parameters' names.
    """
    copies: Copies = {}
    with ExitStack() as stack:
        for name, module in mixtures.items():
            own = module.forward
            module.forward = partial(_row_by_row, name, module, own, copies)
            stack.callback(delattr, module, "forward")
        yield copies


def _row_by_row(
    name: str, module: nn.Module, own: Callable[..., Tensor], copies: Copies, *args: Any, **kw: Any
) -> Tensor:
    outputs = []
    for n in range(len(args[0] if args else next(iter(kw.values())))):
        # W^(t): leaves of the graph that only position t uses
        fresh = {
            parameter: value.detach().clone().requires_grad_()
            for parameter, value in module.named_parameters(recurse=False)
        }
        with _holding(module, fresh):
            row = {key: value[n : n + 1] for key, value in kw.items()}
            outputs.append(own(*(value[n : n + 1] for value in args), **row))
        for parameter, copy in fresh.items():
            copies.setdefault(f"{name}.{parameter}", []).append(copy)
    return torch.cat(outputs)


@contextmanager
def _holding(module: nn.Module, fresh: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the module holds these tensors in place of its parameters."""
    kept = dict(module._parameters)
    try:
        for parameter in fresh:  # what is None stays
            del module._parameters[parameter]
        module.__dict__.update(fresh)
        yield
    finally:
        for parameter in fresh:
            del module.__dict__[parameter]
        module._parameters.clear()  # so that they come back in their order
        module._parameters.update(kept)


def expert_influence(
    forward: Forward,
    batch: Batch,
    mixtures: Mapping[str, nn.Module],
    direction: Mapping[str, Tensor],
) -> Influence:
    """The influence matrix of each parameter of the mixtures that the direction names.

    Formula: ``Psi[b, k, t] = sum (d l_k / d W^(t)) * M``, all entries of the parameter.

    Args:
        forward: batch without labels -> logits; no gradient checkpointing, dropout off.
        batch: with ``labels``.
        mixtures: the modules that hold the parameters, by name.
        direction: parameter name -> M in the parameter's own shape. Others are left out.

    Exactness: exact up to the model's own arithmetic; contraction in float64. Costs a copy of every
    parameter for each position, and one backward for each label.

    Raises:
        InputError: a mixture did not run once on every position, or none holds a named parameter.

    Source: mathematics of section 2; the paper has no mixtures.
    """
    with _copied_per_position(mixtures) as copies:
        losses = run_losses(forward, batch)
    rows, length = batch["labels"].shape
    lacking = set(direction) - copies.keys()
    # a copy for each of the b t positions, row by row
    odd = [name for name in copies if len(copies[name]) != rows * length]
    if lacking or odd:
        raise InputError(
            "the copies of a mixture's parameters do not fit the batch",
            got=f"without copies: {sorted(lacking)}; in another number than positions: {odd}",
            why="each position of the batch must have a copy of its own",
            remedy="name mixtures that run once on the flattened batch, and their parameters",
        )
    terms = {n: torch.zeros(rows, length, length, dtype=torch.float64) for n in direction}
    absolute = {name: torch.zeros_like(term) for name, term in terms.items()}
    for (b, i), loss in losses.items():
        for name, m in direction.items():
            # the copies of row b alone: rows do not interact
            by_position = _entries(loss, copies[name][b * length : (b + 1) * length], m)
            for t, entries in by_position.items():
                # Psi[b, k, t] = <d l_k / d W^(t), M>, k = i - 1
                terms[name][b, i - 1, t] = entries.sum()
                absolute[name][b, i - 1, t] = entries.abs().sum()
    return Influence(terms, absolute)


def _entries(loss: Tensor, copies: Sequence[Tensor], m: Tensor) -> dict[int, Tensor]:
    """Gradient of each position's copy times M, entry by entry; empty without a path."""
    gradients = torch.autograd.grad(loss, list(copies), retain_graph=True, allow_unused=True)
    return {
        t: gradient.double() * m.double()
        for t, gradient in enumerate(gradients)
        if gradient is not None
    }
