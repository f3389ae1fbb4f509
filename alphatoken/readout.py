"""From errors to values: contraction over all uses, and columns by position to values by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from alphatoken import contraction
from alphatoken.adapter import ScoredLinear
from alphatoken.batch import to_token_index
from alphatoken.capture import Recorder
from alphatoken.estimators import TokenErrors
from alphatoken.precision import full_precision
from alphatoken.values import TokenValues

__all__ = ["Columns", "assign_columns", "combine", "contract_columns"]


@dataclass(frozen=True)
class Columns:
    """Values by position of use (b, t): the direct and the causal columns for one direction."""

    direct: Tensor
    causal: Tensor


def assign_columns(
    columns: Columns, mask: Tensor, causal_position: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Columns by position to values by token: (direct, causal, unassigned).

    The direct column of token i is position i - 1, where it is predicted. The causal one is the
    same position ("label") or position i, where the token is read ("context"). What belongs to no
    response token is summed per row into ``unassigned``.
    """
    shifted = columns.causal if causal_position == "context" else to_token_index(columns.causal)
    direct = to_token_index(columns.direct).masked_fill(~mask, 0.0)
    causal = shifted.masked_fill(~mask, 0.0)
    everything = columns.direct.sum(-1) + columns.causal.sum(-1)
    unassigned = everything - direct.sum(-1) - causal.sum(-1)
    return direct, causal, unassigned


def combine(
    adaptation: tuple[Tensor, Tensor, Tensor],
    stability: tuple[Tensor, Tensor, Tensor] | None,
    *,
    mask: Tensor,
    split: bool,
    estimator: str,
    stability_weight: float,
    balance: dict[str, float],
) -> TokenValues:
    """TokenValues from (direct, causal, unassigned) of both sides."""
    zero = torch.zeros_like(adaptation[0])
    if stability is None:
        stability = (zero, zero, torch.zeros_like(adaptation[2]))
    gain, keep = adaptation[0] + adaptation[1], stability[0] + stability[1]
    return TokenValues(
        total=gain + stability_weight * keep,
        mask=mask,
        adaptation=gain,
        stability=keep,
        adaptation_direct=adaptation[0] if split else None,
        adaptation_causal=adaptation[1] if split else None,
        stability_direct=stability[0] if split else None,
        stability_causal=stability[1] if split else None,
        unassigned=adaptation[2] + stability_weight * stability[2],
        estimator=estimator,
        stability_weight=stability_weight,
        balance=balance,
    )


@full_precision
def contract_columns(
    recorder: Recorder,
    errors: TokenErrors,
    direction: Mapping[str, Tensor],
    names: Mapping[int, str],
    factors: Mapping[str, list[tuple[Tensor, Tensor]]] | None = None,
) -> Columns:
    """Contract both parts with one direction, summed over all uses of all scored linears.

    Args:
        recorder: the recorded forward.
        errors: direct and causal errors at its linear uses.
        direction: parameter name -> M (projected route).
        names: id of a parameter -> its name.
        factors: the gram route's validation side of the weights; ``direction`` then has the
            biases only.
    """
    sums: list[Tensor | None] = [None, None]
    for slot, part in enumerate((errors.direct, errors.causal)):
        for use, error in zip(recorder.linears, part, strict=True):
            if error is not None:
                found = _contract_use(use.linear, error, use.x, direction, names, factors)
                before = sums[slot]
                sums[slot] = found if before is None else before + found
    x = recorder.linears[0].x
    zero = torch.zeros(x.shape[:2], dtype=torch.float32, device=x.device)
    direct, causal = (zero if s is None else s for s in sums)
    return Columns(direct, causal.to(direct.dtype))


def _contract_use(
    linear: ScoredLinear,
    error: Tensor,
    x: Tensor,
    direction: Mapping[str, Tensor],
    names: Mapping[int, str],
    factors: Mapping[str, list[tuple[Tensor, Tensor]]] | None,
) -> Tensor:
    name = names[id(linear.weight)]
    bias = names.get(id(linear.bias)) if linear.bias is not None else None
    if factors is None:
        m = direction[name]
        m_bias = None if bias is None else direction[bias]
        return contraction.contract(error, x, m.mT if linear.transposed else m, m_bias)
    total = torch.zeros(error.shape[:2], dtype=torch.float32, device=error.device)
    for e, v in factors.get(name, []):
        total = total + contraction.contract_gram(error, x, e, v)
    if bias is not None and bias in direction:
        m_bias = direction[bias]
        total = total + torch.einsum("bto,o->bt", error.to(m_bias.dtype), m_bias)
    return total
