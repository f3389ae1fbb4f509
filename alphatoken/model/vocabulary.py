"""Losses of chosen tokens over a large vocabulary, a block of positions at a time.

    l_p = lse_p - z_p[y_p],   lse_p = log sum_v exp z_p[v],   dl_p / dz_p = softmax(z_p) - e_{y_p}

Only positions that predict a response token are looked at, and nothing of the logits' size is kept
beside the logits: the backward forms ``softmax`` again from ``lse``. Log-softmax over the whole
tensor would keep its output, and in narrow dtypes a wide copy of the logits as well.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from alphatoken.model.head import watched_head
from alphatoken.support.devices import on_host
from alphatoken.support.precision import wide

# Numbers of one block, positions times vocabulary, of a processor and of an accelerator.
_WORKSPACE, _WORKSPACE_OF_ACCELERATOR = 2**22, 2**27


def chosen_losses(
    logits: Float[Tensor, "b t vocabulary"],
    positions: Int[Tensor, " n"],
    targets: Int[Tensor, " n"],
) -> Float[Tensor, " n"]:
    """``-log softmax(logits)[target]`` at the given positions.

    Args:
        logits: contiguous or not; rows are counted over the first two axes together.
        positions: indices of rows.
        targets: the token predicted at each.

    Returns:
        (n,) losses in float32 or wider, differentiable once in reverse mode, and in forward mode.
        Exact up to rounding. Oracle: ``alphatoken.oracle.gradients.token_losses``.
    """
    # The function below has no forward-mode rule. Forward mode keeps nothing for a backward, so
    # torch's own operations cost no more memory there.
    if forward_ad.unpack_dual(logits).tangent is not None:
        return _in_blocks(logits.flatten(0, 1), positions, targets)
    use = watched_head(logits)
    if use is not None:
        return use.losses(logits, positions, targets)
    losses: Tensor = _ChosenLosses.apply(logits, positions, targets)  # type: ignore[no-untyped-call]
    return losses


def _blocks(positions: Tensor, vocabulary: int) -> list[slice]:
    workspace = _WORKSPACE if on_host(positions) else _WORKSPACE_OF_ACCELERATOR
    size = max(1, workspace // vocabulary)
    return [slice(i, i + size) for i in range(0, len(positions), size)]


def _in_blocks(rows: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
    """The same losses by torch's own operations, which know every kind of differentiation."""
    dtype = wide(rows.dtype)
    blocks = [
        F.cross_entropy(rows[positions[s]].to(dtype), targets[s], reduction="none")
        for s in _blocks(positions, rows.shape[-1])
    ]
    return torch.cat(blocks) if blocks else rows.new_zeros(0, dtype=dtype)


class _ChosenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, positions: Tensor, targets: Tensor) -> Tensor:
        rows, dtype = logits.flatten(0, 1), wide(logits.dtype)
        lse = logits.new_empty(len(positions), dtype=dtype)
        chosen = torch.empty_like(lse)
        for block in _blocks(positions, logits.shape[-1]):
            z = rows[positions[block]].to(dtype)
            lse[block] = torch.logsumexp(z, -1)
            chosen[block] = z.gather(-1, targets[block].unsqueeze(-1)).squeeze(-1)
        ctx.save_for_backward(logits, positions, targets, lse)
        return lse - chosen

    @staticmethod
    @once_differentiable  # lse counts as a constant here
    def backward(ctx: Any, error: Tensor) -> tuple[Tensor, None, None]:
        logits, positions, targets, lse = ctx.saved_tensors
        # Contiguous, so that ``flatten`` below is a view and what is written to it arrives here.
        gradient = torch.zeros_like(logits, memory_format=torch.contiguous_format)
        rows, errors = logits.flatten(0, 1), gradient.flatten(0, 1)
        for block in _blocks(positions, logits.shape[-1]):
            at, scale = positions[block], error[block].unsqueeze(-1)
            p = torch.exp(rows[at].to(lse.dtype).sub_(lse[block].unsqueeze(-1))).mul_(scale)
            p.scatter_add_(-1, targets[block].unsqueeze(-1), -scale)
            errors[at] = p.to(gradient.dtype)  # no two targets share a position: nothing is lost
        return gradient, None, None
