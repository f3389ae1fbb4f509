"""Walks on a copy of the model, with an ordinary training loop; and what lies along them.

Nothing is moved in place and nothing is shared: the copy is trained as anybody would train it, and
a token's value is one loss less another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from alphatoken.oracle.evaluate import batch_losses
from alphatoken.oracle.gradients import (
    Batch,
    Forward,
    directed_parameters,
    label_values,
    run_losses,
)

__all__ = ["curvature_along", "label_values_along", "walk_values", "walked"]

ForwardOf = Callable[[nn.Module], Forward]
"""Makes the forward of a model: batch without labels -> logits."""


def walked(
    model: nn.Module,
    forward_of: ForwardOf,
    batches: Sequence[Batch],
    steps: int,
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
) -> nn.Module:
    """Train a copy for some steps, each on the mean token loss of the next batch in turn.

    Args:
        model: where the walk starts; it stays as it is.
        forward_of: of a model.
        batches: validation batches.
        steps: n.
        optimizer: from parameters to what steps them.

    Returns:
        The copy, in evaluation mode.

    Exactness: that of the optimizer. Source: ours. Oracle of ``alphatoken.direction.walk``.
    """
    twin = copy.deepcopy(model).eval()
    stepper = optimizer([p for p in twin.parameters() if p.requires_grad])
    for step in range(steps):
        batch = batches[step % len(batches)]
        losses = run_losses(forward_of(twin), batch)
        stepper.zero_grad()
        # J of this batch: the mean token loss
        torch.stack(list(losses.values())).mean().backward()
        stepper.step()
    return twin


@torch.no_grad()
def walk_values(
    model: nn.Module, end: nn.Module, forward_of: ForwardOf, batch: Batch
) -> Float[Tensor, "b t"]:
    """``e_k = l_k(model) - l_k(end)``, index i for token i, 0 off the response.

    Both models are in the mode that the caller put them in. Exactness: exact.
    Source: Rho-1's excess loss. Oracle of ``Scorer.score`` with ``estimator="walk"``.
    """
    return batch_losses(forward_of(model), batch) - batch_losses(forward_of(end), batch)


def _moved(model: nn.Module, end: nn.Module, share: float) -> nn.Module:
    """A copy whose weights lie a share of the way from the one model to the other."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        triples = zip(twin.parameters(), model.parameters(), end.parameters(), strict=True)
        for here, first, last in triples:
            # theta + s D, D = theta_end - theta
            here.copy_(first + share * (last - first))
    return twin


def _along(model: nn.Module, end: nn.Module) -> dict[str, Tensor]:
    """-D by parameter: from the end back to the start."""
    last = dict(end.named_parameters())
    return {name: (p - last[name]).detach() for name, p in model.named_parameters()}


def label_values_along(
    model: nn.Module, end: nn.Module, forward_of: ForwardOf, batch: Batch, nodes: int = 12
) -> Float[Tensor, "b t"]:
    """``integral_0^1 <grad l_k(theta + s D), -D> ds`` by Gauss and Legendre's rule.

    One backward a token and node. Exactness: of polynomials of degree ``2 nodes - 1`` in s.
    """
    back, values = _along(model, end), torch.zeros(batch["labels"].shape, dtype=torch.float64)
    for position, weight in zip(*np.polynomial.legendre.leggauss(nodes), strict=True):
        twin = _moved(model, end, float(position + 1) / 2)
        # nodes and weights of [-1, 1] brought to [0, 1]: s = (z + 1) / 2, ds = dz / 2
        values += float(weight) / 2 * label_values(twin, forward_of(twin), batch, back)
    return values


def curvature_along(
    model: nn.Module, end: nn.Module, forward_of: ForwardOf, batch: Batch, share: float
) -> Float[Tensor, "b t"]:
    """``D' H_k(theta + share D) D`` of each token's loss: the derivative along D of <grad l_k, D>.

    The forward goes through operators that autograd differentiates twice. Exactness: exact up to
    the model's own arithmetic; the contraction is in float64.
    """
    twin, direction = _moved(model, end, share), _along(model, end)
    parameters = directed_parameters(twin, direction)
    along = [direction[name].to(parameter) for name, parameter in parameters.items()]
    curvatures = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    for (b, i), loss in run_losses(forward_of(twin), batch).items():
        first = torch.autograd.grad(
            loss, list(parameters.values()), create_graph=True, materialize_grads=True
        )
        # <grad l_k, -D>
        slope = torch.stack([(g * m).sum() for g, m in zip(first, along, strict=True)]).sum()
        # d <grad l_k, -D> / d theta = -H_k D
        second = torch.autograd.grad(
            slope, list(parameters.values()), retain_graph=True, materialize_grads=True
        )
        for m, hm in zip(along, second, strict=True):
            # (-D) . (-H_k D) = D^T H_k D: the two signs cancel
            curvatures[b, i] += (m.double() * hm.double()).sum().cpu()
    return curvatures
