"""Values along a walk: losses of a pass, less the losses at the end of the walk."""

from __future__ import annotations

import torch
from torch import Tensor

from alphatoken.direction.current import End
from alphatoken.direction.objective import forward_losses
from alphatoken.estimate.estimators import WALK
from alphatoken.estimate.token_values import combine, undivided
from alphatoken.model.modes import draws, evaluation_mode
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.scoring.passes import Pass
from alphatoken.support.precision import wide
from alphatoken.values import TokenValues

__all__ = ["along_walk"]


def along_walk(
    adapter: DecoderAdapter, end: End, seen: Pass, *, compare: bool = False
) -> TokenValues:
    """``e_k = l_k(theta) - l_k(end)`` for every response token k, in nats, times its weight.

    One forward at the end, and one of the model as it is where the pass has no losses, or has drawn
    random numbers.

    Args:
        adapter: of the model.
        end: losses at the end of the walk.
        seen: the pass, its losses (b, t).
        compare: those losses with a forward of the model as it is, without dropout.

    Raises:
        InputError: they are others.

    Exactness: exact, up to the rounding of two forwards. Source: Rho-1 (excess loss);
    CoLoR-Filter. Oracle: ``alphatoken.oracle.walk.walk_values``.
    """
    there = end(seen.batch)
    here = _losses(adapter, seen, compare=compare).to(there.device)
    dtype = wide(here.dtype)
    values = (here.to(dtype) - there.to(dtype)).masked_fill(~seen.batch.mask, 0.0)
    if seen.weights.token is not None:
        values = values * seen.weights.token.to(values)
    return combine(undivided(values), None, mask=seen.batch.mask, estimator=WALK)


def _losses(adapter: DecoderAdapter, seen: Pass, *, compare: bool) -> Tensor:
    """Losses of the current model, without dropout."""
    known = None if seen.losses is None or draws(adapter.model) else seen.losses.detach()
    if known is not None and not compare:
        return known
    with torch.no_grad(), evaluation_mode(adapter.model):
        own = forward_losses(adapter, seen.batch, "batch")
    if known is None:
        return own
    seen.require_losses(own)
    return known
