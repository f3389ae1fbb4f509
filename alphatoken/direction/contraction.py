"""Ghost dot-products: inner products of per-token weight gradients with a direction, never formed.

Pure functions, no autograd, no state. Letters: b batch, t token position, o d_out, i d_in,
v validation token. Of mixtures of experts: c the experts that a token was sent to, e expert.

The part of a loss gradient that passes through one use of a linear map s = W x at position t is
the rank-1 matrix delta_t (x) x_t. Its inner product with a direction M is

    <delta_t (x) x_t, M> = delta_t^T M x_t                        (activation-parameter)

Where M is itself a sum of rank-1 matrices, M need not be built (activation-activation,
`benchmarks.gram`). Scorers keep M, because it serves every batch until the weights change.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from alphatoken.model.experts import rows_by_expert
from alphatoken.support.precision import full_precision, wide


@full_precision
def contract(
    delta: Float[Tensor, "b t o"],
    x: Float[Tensor, "b t i"],
    m: Float[Tensor, "o i"],
) -> Float[Tensor, "b t"]:
    """Projected contraction: ``sum_o delta[b,t,o] (x M^T)[b,t,o]``, delta = dL/ds.

    Returns:
        One value a position, in float32 or wider; unit: loss times (loss gradient per weight).

    Exactness: exact up to rounding, relative to ``sum_o |delta_o| |(M x)_o|``.
    Source: eq. app_ap_gdp. Oracle: ``alphatoken.oracle.influence``.
    """
    dtype = wide(delta.dtype, x.dtype, m.dtype)
    # delta^T (M x) per position: one matrix product for all positions. The gradients delta (x) x,
    # d_out d_in numbers a position, are never formed.
    projected = x.to(dtype) @ m.to(dtype).mT
    return torch.einsum("bto,bto->bt", delta.to(dtype), projected)


@full_precision
def outer_sum(delta: Float[Tensor, "b t o"], x: Float[Tensor, "b t i"]) -> Float[Tensor, "o i"]:
    """Weight gradient from its factors: ``sum_{b,t} delta_{bt} (x) x_{bt}``.

    The outer product comes first, the sum second: summing inputs and errors over examples before
    the product is right for one example and wrong from two on.

    Exactness: exact up to rounding. Oracle: autograd's gradient of the weight.
    """
    dtype = wide(delta.dtype, x.dtype)
    return torch.einsum("bto,bti->oi", delta.to(dtype), x.to(dtype))


@full_precision
def contract_experts(
    delta: Float[Tensor, "b t c o"],
    x: Float[Tensor, "b t c i"],
    experts: Int[Tensor, "b t c"],
    m: Float[Tensor, "e o i"],
) -> Float[Tensor, "b t"]:
    """``contract`` for a mixture: ``sum_{c, o} delta[b,t,c,o] (M_e x)[b,t,c,o]``.

    e is ``experts[b,t,c]``, the expert that a row was sent to; delta are the errors at the experts'
    outputs, before the router weighs them. Unit and exactness as of ``contract``.
    Source: eq. app_ap_gdp. Oracle: ``alphatoken.oracle.influence``.
    """
    dtype = wide(delta.dtype, x.dtype, m.dtype)
    errors, inputs = delta.flatten(0, 2), x.flatten(0, 2)
    values = errors.new_zeros(len(errors), dtype=dtype)
    for expert, rows in rows_by_expert(experts, len(m)):
        projected = inputs[rows].to(dtype) @ m[expert].to(dtype).mT
        values[rows] = (errors[rows].to(dtype) * projected).sum(-1)
    return values.view(experts.shape).sum(-1)


@full_precision
def expert_outer_sums(
    delta: Float[Tensor, "b t c o"],
    x: Float[Tensor, "b t c i"],
    experts: Int[Tensor, "b t c"],
    count: int,
) -> Float[Tensor, "e o i"]:
    """``outer_sum`` of each expert's rows; zero for an expert that no token was sent to.

    Exactness: exact up to rounding. Oracle: autograd's gradient of the 3-D tensor.
    """
    dtype = wide(delta.dtype, x.dtype)
    sums = delta.new_zeros(count, delta.shape[-1], x.shape[-1], dtype=dtype)
    errors, inputs = delta.flatten(0, 2), x.flatten(0, 2)
    for expert, rows in rows_by_expert(experts, count):
        sums[expert] = errors[rows].to(dtype).mT @ inputs[rows].to(dtype)
    return sums
