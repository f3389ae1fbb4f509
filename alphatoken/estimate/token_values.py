"""Conversion of columns by position of use to values by token, and of both sides to one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec

import torch
from torch import Tensor

from alphatoken.estimate.columns import Columns
from alphatoken.model.batch import to_token_index
from alphatoken.support.finite import refuse_first
from alphatoken.values import TokenValues

__all__ = [
    "DirectCausal",
    "assign_columns",
    "combine",
    "finite",
    "require_finite_numbers",
    "require_finite_values",
    "undivided",
]


class DirectCausal(NamedTuple):
    """Values along one side of M by token.

    The direct part (b, t), which is the whole value of an estimator without a split; the causal
    part (b, t); and the sum (b,) of what belongs to no response token, of both parts.
    """

    direct: Tensor
    causal: Tensor
    unassigned: Tensor


def undivided(values: Tensor) -> DirectCausal:
    """Values (b, t) of an estimator that has neither a split nor columns of prompt positions."""
    return DirectCausal(values, torch.zeros_like(values), torch.zeros_like(values[:, 0]))


def assign_columns(columns: Columns, mask: Tensor) -> DirectCausal:
    """Columns by position to values by token.

    Both columns of token i are those of position i - 1, where it is predicted. What belongs to no
    response token is summed per row into ``unassigned``.
    """
    direct, causal = (
        to_token_index(column).masked_fill(~mask, 0.0)
        for column in (columns.direct, columns.causal)
    )
    # Causal columns of prompt positions belong to no response token. They are reported and not
    # dropped, so that values and ``unassigned`` together are <grad L, M> for the path estimator.
    everything = columns.direct.sum(-1) + columns.causal.sum(-1)
    unassigned = everything - direct.sum(-1) - causal.sum(-1)
    return DirectCausal(direct, causal, unassigned)


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
    """The values themselves, of whichever estimator, once none of them is NaN or infinite.

    Raises:
        NumericalError: one is not; names the first one's row and token.
    """
    # What is not finite in a component is not finite in the sum of all, ``total``.
    if all(bool(torch.isfinite(x).all()) for x in (values.total, values.unassigned)):
        return values
    for kind in (*values.components(), "total"):
        require_finite_numbers(getattr(values, kind), f"the {kind.replace('_', ' ')} of a token")
    require_finite_numbers(values.unassigned[:, None], "the sum over a prompt")
    return values


_P = ParamSpec("_P")


def finite(values: Callable[_P, TokenValues]) -> Callable[_P, TokenValues]:
    """``require_finite_values`` of whatever a function returns."""

    @functools.wraps(values)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> TokenValues:
        return require_finite_values(values(*args, **kwargs))

    return checked


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
