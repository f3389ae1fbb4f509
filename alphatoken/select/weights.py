"""Values to weights of token losses: 1 at the tokens that a policy keeps, 0 elsewhere."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphatoken.errors import InputError, require_choice
from alphatoken.select.masks import (
    check_values,
    keep_count,
    select_bottom,
    select_random,
    select_top,
)
from alphatoken.support.precision import wide

__all__ = ["POLICIES", "token_weights"]

POLICIES = ("top", "bottom", "random", "all")


def token_weights(
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    ratio: float,
    *,
    policy: str = "top",
    scope: str = "batch",
    generator: torch.Generator | None = None,
) -> Float[Tensor, "b t"]:
    """Weight of each token's loss: 1 at the ceil(ratio * n) that are kept per scope, 0 elsewhere.

    Args:
        values: one value a token.
        mask: True at response tokens.
        ratio: share of the tokens, in (0, 1].
        policy: "top"; "bottom"; "random", the control; "all", weight 1 at every response token,
            whatever the ratio.
        scope: "batch", or "sequence" for every row by itself.
        generator: of "random"; a CPU generator, None for torch's own.

    Returns:
        Weights in float32, or float64 for float64 values.

    Exactness: exact; see ``alphatoken.select.masks``.

    Raises:
        InputError: unknown policy or scope; ratio out of range; other shapes.
        NumericalError: a NaN or Inf value, naming row and token.

    Source: the mask of eq. sft_masked_loss. Oracle: a sort of tuples, in the tests.
    """
    require_choice("policy", policy, POLICIES, InputError)
    require_choice("scope", scope, ("batch", "sequence"), InputError)
    keep_count(ratio, 0)
    dtype = wide(values.dtype)
    # Before the values are checked: a random mask reads none of them.
    if policy == "random":
        return select_random(mask, ratio, generator=generator, scope=scope).to(dtype)
    check_values(values, mask)
    if policy == "all":
        return mask.to(dtype)
    select = select_top if policy == "top" else select_bottom
    return select(values, mask, ratio, scope=scope).to(dtype)
