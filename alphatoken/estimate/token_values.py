"""Values along the sides of M by token, both sides added with lambda, and every one finite."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from alphatoken.support.devices import refuse
from alphatoken.support.precision import refuse_first
from alphatoken.values import TokenValues


class DirectCausal(NamedTuple):
    """Values along one side of M by token.

    The direct part (b, t), which is the whole value of an estimator without a split; the causal
    part (b, t); and the sum (b,) of what belongs to no response token, of both parts.
    """

    direct: Tensor
    causal: Tensor
    unassigned: Tensor


def undivided(values: Tensor) -> DirectCausal:
    """Values (b, t) without a split, and without columns of prompt positions."""
    return DirectCausal(values, torch.zeros_like(values), torch.zeros_like(values[:, 0]))


def combine(
    adaptation: DirectCausal | None,
    stability: DirectCausal | None,
    *,
    mask: Tensor,
    estimator: str,
    split: bool = False,
    stability_weight: float = 0.0,
    balance: dict[str, float] | None = None,
) -> TokenValues:
    """TokenValues from the values along both sides of M; a side that is None is zero."""
    either = adaptation or stability
    assert either is not None
    zeros = DirectCausal(*(torch.zeros_like(part) for part in either))
    g_direct, g_causal, g_rest = adaptation or zeros
    v_direct, v_causal, v_rest = stability or zeros
    g, v = g_direct + g_causal, v_direct + v_causal
    return TokenValues(
        total=g + stability_weight * v,
        mask=mask,
        adaptation=g,
        stability=v,
        adaptation_direct=g_direct if split else None,
        adaptation_causal=g_causal if split else None,
        stability_direct=v_direct if split else None,
        stability_causal=v_causal if split else None,
        unassigned=g_rest + stability_weight * v_rest,
        estimator=estimator,
        stability_weight=stability_weight,
        balance=balance or {},
    )


def require_finite_values(values: TokenValues) -> TokenValues:
    """The values themselves, once none of them is NaN or infinite.

    Raises:
        NumericalError: one is; names its row and token.
    """
    # What is not finite in a component is not finite in the sum of all, ``total``.
    finite = torch.isfinite(values.total).all() & torch.isfinite(values.unassigned).all()

    def raise_first() -> None:
        for kind in (*values.components(), "total"):
            what = f"the {kind.replace('_', ' ')} of a token"
            require_finite_numbers(getattr(values, kind), what)
        require_finite_numbers(values.unassigned[:, None], "the sum over a prompt")

    refuse(~finite, raise_first)
    return values


def require_finite_numbers(numbers: Tensor, what: str) -> None:
    """Raise NumericalError for the first (b, t) number that was lost between finite ones."""
    refuse_first(
        ~torch.isfinite(numbers),
        numbers,
        f"{what} is not finite",
        why="its loss is, and a number on the way is beyond the number format's range; one NaN "
        "spreads to every sum",
        remedy="check the weights (a diverged run?); a wider format (float32, float64; --dtype), "
        "and token_weights of a size that it holds",
    )
