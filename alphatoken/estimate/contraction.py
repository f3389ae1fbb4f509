"""Ghost dot-products: inner products of per-token weight gradients with a direction, never formed.

Pure functions, no autograd, no state. Letters: b batch, t token position, o d_out, i d_in,
v validation token.

The part of a loss gradient that passes through one use of a linear map s = W x at position t is
the rank-1 matrix delta_t (x) x_t. Its inner product with a direction M is

    <delta_t (x) x_t, M> = delta_t^T M x_t                        (activation-parameter)
    <delta_t (x) x_t, sum_v w_v delta_v (x) x_v>
        = sum_v w_v (delta_t . delta_v)(x_t . x_v)                (activation-activation)

The first form is the *projected* route, the second the *gram* route. They are the same number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from alphatoken.support.precision import full_precision, wide

__all__ = ["ContractionPlan", "contract", "contract_gram", "outer_sum", "plan_contraction"]


@full_precision
def contract(
    delta: Float[Tensor, "b t o"],
    x: Float[Tensor, "b t i"],
    m: Float[Tensor, "o i"],
    m_bias: Float[Tensor, " o"] | None = None,
) -> Float[Tensor, "b t"]:
    """Projected contraction: ``sum_o delta[b,t,o] (x M^T + m_b)[b,t,o]``.

    Args:
        delta: output errors dL/ds at every position.
        x: inputs of the linear map at the same positions.
        m: direction, (d_out, d_in).
        m_bias: direction of the bias; None leaves the bias out (the paper's convention).

    Returns:
        One value a position, in float32 or wider; unit: loss times (loss gradient per weight).

    Exactness: exact up to rounding, relative to ``sum_o |delta_o| |(M x)_o|``.
    Source: eq. app_ap_gdp. Oracle: ``alphatoken.oracle.influence``.
    """
    dtype = wide(delta.dtype, x.dtype, m.dtype)
    projected = x.to(dtype) @ m.to(dtype).mT
    if m_bias is not None:
        projected = projected + m_bias.to(dtype)
    return torch.einsum("bto,bto->bt", delta.to(dtype), projected)


@full_precision
def contract_gram(
    delta: Float[Tensor, "b t o"],
    x: Float[Tensor, "b t i"],
    delta_v: Float[Tensor, "v o"],
    x_v: Float[Tensor, "v i"],
    *,
    chunk: int = 4096,
) -> Float[Tensor, "b t"]:
    """Gram contraction: ``sum_v (delta_t . delta_v)(x_t . x_v)``, the direction never built.

    Equal to ``contract(delta, x, outer_sum(delta_v, x_v))``. Weights of validation tokens belong
    in ``delta_v``. The bias takes no part: its gradient is a vector, and contracted as one.

    Args:
        delta: training errors.
        x: training inputs.
        delta_v: validation errors, all positions of all sequences in one axis.
        x_v: validation inputs at the same positions.
        chunk: validation tokens per block; bounds the workspace to b*t*chunk.

    Exactness: exact up to rounding. Source: eq. app_aa_direct. Oracle: ``contract``.
    """
    dtype = wide(delta.dtype, x.dtype)
    delta, x = delta.to(dtype), x.to(dtype)
    total = torch.zeros(delta.shape[:2], dtype=dtype, device=delta.device)
    for start in range(0, delta_v.shape[0], chunk):
        errors = torch.einsum("bto,vo->btv", delta, delta_v[start : start + chunk].to(dtype))
        inputs = torch.einsum("bti,vi->btv", x, x_v[start : start + chunk].to(dtype))
        total += torch.einsum("btv,btv->bt", errors, inputs)
    return total


@full_precision
def outer_sum(delta: Float[Tensor, "b t o"], x: Float[Tensor, "b t i"]) -> Float[Tensor, "o i"]:
    """Weight gradient from its factors: ``sum_{b,t} delta_{bt} (x) x_{bt}``.

    The outer product comes first, the sum second: summing inputs and errors over examples before
    the product is right for one example and wrong from two on.

    Exactness: exact up to rounding. Oracle: autograd's gradient of the weight.
    """
    dtype = wide(delta.dtype, x.dtype)
    return torch.einsum("bto,bti->oi", delta.to(dtype), x.to(dtype))


@dataclass(frozen=True)
class ContractionPlan:
    """Which route is cheaper for one linear map, and the multiply-adds (times two) of both."""

    route: str
    projected_flops: int
    gram_flops: int


def plan_contraction(tokens: int, validation_tokens: int, d_out: int, d_in: int) -> ContractionPlan:
    """Choose the cheaper route; the value never changes.

    Projected: build M once, ``2 N_v d_out d_in``, then ``2 N d_out d_in``. Gram:
    ``2 N N_v (d_out + d_in)``. Hence gram wins iff
    ``N N_v / (N + N_v) < d_out d_in / (d_out + d_in)``. Under a preconditioner there is no choice:
    P o G has no rank-1 factors, so only the projected route exists.

    Args:
        tokens: training positions contracted per refresh of M (N).
        validation_tokens: validation positions (N_v), prompt included.
        d_out: output width of the linear map.
        d_in: input width.
    """
    projected = 2 * (tokens + validation_tokens) * d_out * d_in
    gram = 2 * tokens * validation_tokens * (d_out + d_in)
    route = "gram" if gram < projected else "projected"
    return ContractionPlan(route, projected, gram)
