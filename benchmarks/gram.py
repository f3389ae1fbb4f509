"""The gram form of a contraction: what the projected one of the library is compared with.

The library contracts errors and inputs with a matrix M. Where M is the sum of outer products of
validation errors and inputs, products between tokens give the same number, and M is never built
(the paper's activation-activation ghost dot-product). Letters: b batch, t token position, o d_out,
i d_in, v validation token.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from alphatoken.support.precision import full_precision, wide


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

    Exactness: exact up to rounding. Source: eq. app_aa_direct.
    """
    dtype = wide(delta.dtype, x.dtype)
    delta, x = delta.to(dtype), x.to(dtype)
    total = torch.zeros(delta.shape[:2], dtype=dtype, device=delta.device)
    for start in range(0, delta_v.shape[0], chunk):
        errors = torch.einsum("bto,vo->btv", delta, delta_v[start : start + chunk].to(dtype))
        inputs = torch.einsum("bti,vi->btv", x, x_v[start : start + chunk].to(dtype))
        total += torch.einsum("btv,btv->bt", errors, inputs)
    return total


def projected_flops(tokens: int, validation_tokens: int, d_out: int, d_in: int) -> int:
    """FLOPs of building M from the validation tokens and contracting the tokens with it."""
    return 2 * (tokens + validation_tokens) * d_out * d_in


def gram_flops(tokens: int, validation_tokens: int, d_out: int, d_in: int) -> int:
    """FLOPs of the gram form; fewer iff ``N N_v / (N + N_v) < d_out d_in / (d_out + d_in)``."""
    return 2 * tokens * validation_tokens * (d_out + d_in)
