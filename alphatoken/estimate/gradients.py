"""Gradients of whole parameters: by autograd, and summed from captured uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from alphatoken.estimate import contraction
from alphatoken.estimate.columns import uses_by_weight
from alphatoken.model.capture import Recorder
from alphatoken.model.protocol import ScoredExperts
from alphatoken.model.uses import LinearUse
from alphatoken.support.precision import full_precision

__all__ = ["captured_gradients", "gradient_of"]


def gradient_of(
    loss: Tensor, parameters: Sequence[Tensor], *, retain_graph: bool = False
) -> list[Tensor | None]:
    """d(loss)/d(parameter), by autograd, touching no .grad; None where there is no path.

    Unless ``retain_graph`` is set, the graph is freed: nothing can be asked of the forward
    afterwards.
    """
    if not loss.requires_grad:  # all of them lie where the forward does not pass, as when merged
        return [None] * len(parameters)
    return list(
        torch.autograd.grad(loss, list(parameters), allow_unused=True, retain_graph=retain_graph)
    )


def captured_gradients(
    recorder: Recorder, errors: Sequence[Tensor | None], names: Mapping[str, str]
) -> Iterator[tuple[str, Tensor | None, Tensor | float]]:
    """Weight gradients from captured uses, one parameter at a time: sums of delta (x) x.

    Args:
        recorder: one recorded forward.
        errors: ordinary errors at its linear uses.
        names: as in ``columns.ColumnSums``; tied parameters gather in one entry.

    Yields:
        (name, gradient as stored, sum of the norms of its terms) of every scored weight in scope,
        in one order on every process; None where no use was seen.
    """
    for name, uses in uses_by_weight(recorder, names):
        total: Tensor | None = None
        size: Tensor | float = 0.0
        for index in uses:
            error = errors[index]
            if error is not None:
                part, norms = _term(recorder.linears[index], error)
                total, size = part if total is None else total + part, size + norms
        # Every name is handed over, used or not: under sharded weights what follows is collective.
        yield name, total, size


@full_precision
def _term(use: LinearUse, error: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of a use's weight, and the sum of the norms of its terms."""
    linear, experts = use.linear, use.experts
    if not isinstance(linear, ScoredExperts) or experts is None:
        gradient = contraction.outer_sum(error, use.x)
    else:
        gradient = contraction.expert_outer_sums(error, use.x, experts, linear.count)
    # A term delta (x) x has rank 1, so its Frobenius norm is ||delta|| ||x||.
    size = (error.to(gradient).norm(dim=-1) * use.x.to(gradient).norm(dim=-1)).sum()
    return gradient.mT if linear.transposed else gradient, size
