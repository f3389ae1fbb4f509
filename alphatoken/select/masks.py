"""Values to masks: exactly ceil (or floor) of ratio * n tokens, ties by (row, position)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.errors import InputError, NumericalError, require_choice
from alphatoken.support.devices import true_places
from alphatoken.support.precision import refuse_first

_ROUNDINGS = {"ceil": math.ceil, "floor": math.floor}


def keep_count(ratio: float, count: int, *, rounding: str = "ceil", name: str = "ratio") -> int:
    """``ceil(ratio * count)`` in exact arithmetic: 0.55 of 100 is 55, not 56.

    The ratio is read as the decimal number that it prints as. A ratio that is no decimal, as on
    the way of a schedule, has been rounded to a float: a product within that rounding of a whole
    number is that number, so 5/6 of 6 is 5. With ``rounding="floor"`` the largest whole number
    below, which may be 0. ``name`` is what the message calls the ratio.

    Raises:
        InputError: ratio outside (0, 1], unknown rounding.
    """
    require_choice("rounding", rounding, _ROUNDINGS, InputError)
    if not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise InputError(
            f"{name} must lie in (0, 1]",
            got=repr(ratio),
            why="0 would keep nothing, more than 1 has no meaning",
            remedy="pass the share of response tokens to keep, such as 0.5",
        )
    # 0.55 as a float is a little more than 0.55, and ceil of 100 times it would be 56. Its printed
    # form is the decimal that was meant.
    exact = Fraction(str(ratio)) * count
    whole = round(exact)
    return whole if abs(exact - whole) <= exact / 2**52 else _ROUNDINGS[rounding](exact)


def check_values(values: Tensor, mask: Tensor) -> None:
    """Raise unless values and boolean mask have one shape and every masked value is finite."""
    if values.shape != mask.shape or mask.dtype != torch.bool:
        raise InputError(
            "values and mask must have one shape, and the mask must be boolean",
            got=f"{tuple(values.shape)}, {tuple(mask.shape)} {mask.dtype}",
        )
    refuse_first(
        ~torch.isfinite(values) & mask,
        values,
        "a token value is not finite",
        why="a NaN has no rank; the mask would be arbitrary",
        remedy="look at the loss of that token and at the weights",
    )


def response_values(
    values: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, "b t"]:
    """Each response's mean value, at all of its tokens, to keep or drop whole responses by.

        u_bt = (1 / |R_b|) sum over s in R_b of v_bs          t in R_b;  0 elsewhere

    The gradient of a response is the sum of its tokens' gradients, so ``u`` is its value per token
    of the budget. ``select_top`` of it keeps the best responses whole and, at the edge of the
    budget, the first tokens of one more.

    Args:
        values: one value a token.
        mask: True at response tokens; a row is one response, all its turns together.

    Returns:
        As wide as ``values``, of its dtype; summed in float64.

    Raises:
        InputError: shapes that differ. NumericalError: a NaN or Inf value, naming row and token.

    Oracle: sums by loops, in the tests.
    """
    check_values(values, mask)
    # ``where`` and not a product: what stands outside the mask may be NaN, and 0 NaN is NaN.
    total = torch.where(mask, values, 0.0).double().sum(-1, keepdim=True)
    mean = total / mask.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask, mean, 0.0).to(values.dtype)


def _top_of(values: Tensor, mask: Tensor, ratio: float, rounding: str) -> Tensor:
    """Keep the first ``keep_count`` of the tokens in ``mask``, by value, then by index."""
    candidates = true_places(mask)
    # Candidates are in (batch index, position) order, and a stable sort keeps it within ties.
    order = torch.sort(values.flatten()[candidates], descending=True, stable=True).indices
    keep = torch.zeros_like(mask.flatten())
    count = keep_count(ratio, len(candidates), rounding=rounding)
    keep[candidates[order[:count]]] = True
    return keep.view_as(mask)


def select_top(
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    ratio: float,
    *,
    scope: str = "batch",
    rounding: str = "ceil",
) -> Bool[Tensor, "b t"]:
    """Keep the top ``ratio`` of the response tokens by value.

    Args:
        values: one value a token.
        mask: True at response tokens; nothing else is ranked or kept.
        ratio: share to keep, in (0, 1].
        scope: "batch" ranks all tokens of the batch together (the paper), "sequence" each row by
            itself. For preference pairs call it once per branch.
        rounding: "ceil", or "floor" of ratio * n (which may keep nothing).

    Example:
        >>> values = torch.tensor([[0.0, 3.0, -1.0, 2.0]])
        >>> select_top(values, torch.tensor([[False, True, True, True]]), ratio=0.5)
        tensor([[False,  True, False,  True]])

    Returns:
        Boolean mask with exactly ``keep_count(ratio, n)`` True entries per scope; among equal
        values the lower (batch index, position) wins. The paper's ``>= tau`` would keep all ties.

    Raises:
        InputError: ratio outside (0, 1], shapes that differ, unknown scope or rounding.
        NumericalError: a NaN or Inf value, naming row and token.
    """
    check_values(values, mask)
    require_choice("scope", scope, ("batch", "sequence"), InputError)
    if scope == "batch":
        return _top_of(values, mask, ratio, rounding)
    keep_count(ratio, 0, rounding=rounding)  # refuses a bad ratio also where there are no rows
    pairs = zip(values, mask, strict=True)
    rows = [_top_of(v[None], m[None], ratio, rounding) for v, m in pairs]
    return torch.cat(rows) if rows else mask.clone()


def select_bottom(
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    ratio: float,
    *,
    scope: str = "batch",
) -> Bool[Tensor, "b t"]:
    """Keep the bottom ``ratio``: ``select_top`` of the negated values (a control)."""
    return select_top(-values, mask, ratio, scope=scope)


def select_random(
    mask: Bool[Tensor, "b t"],
    ratio: float,
    *,
    generator: torch.Generator | None = None,
    scope: str = "batch",
) -> Bool[Tensor, "b t"]:
    """Keep a uniformly random ``ratio`` of the response tokens (a control of equal budget)."""
    values = torch.rand(mask.shape, generator=generator).to(mask.device)
    return select_top(values, mask, ratio, scope=scope)


def top_mask(values: NDArray[np.float64], ratio: float) -> NDArray[np.bool_]:
    """``select_top`` of one long array: two passes and one copy, where that sorts indices too.

    Args:
        values: (n,).
        ratio: share to keep, in (0, 1].

    Returns:
        (n,), True for the best ``keep_count(ratio, n)``; of equal values the first are kept. Exact.

    Raises:
        InputError: ratio outside (0, 1].
        NumericalError: a NaN or Inf value.

    Oracle: ``select_top``, in the tests.
    """
    count = keep_count(ratio, len(values))
    if not (finite := np.isfinite(values)).all():
        raise NumericalError(
            "a token value is not finite",
            got=str(values[~finite][0]),
            why="a NaN has no rank; the selection would be arbitrary",
            remedy="score again; the value files hold what the scorer refuses to return",
        )
    if not count:
        return np.zeros(0, bool)
    edge = np.partition(values, -count)[-count]
    kept: NDArray[np.bool_] = values > edge
    kept[np.flatnonzero(values == edge)[: count - kept.sum()]] = True
    return kept


def fill_tokens(
    order: NDArray[np.int64], tokens: NDArray[np.int64], ratio: float
) -> NDArray[np.int64]:
    """The fewest rows with at least ``ceil(ratio N)`` of all N tokens, in the order given.

    Args:
        order: numbers of rows, the first one taken first.
        tokens: (R,) tokens of each row; N is their sum.
        ratio: in (0, 1].
    """
    budget = keep_count(ratio, int(tokens.sum()))
    filled = np.cumsum(tokens[order])
    return order[: int(np.searchsorted(filled, budget, side="left")) + 1]
