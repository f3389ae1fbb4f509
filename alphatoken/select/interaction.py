"""Kept tokens that repeat each other: inner products of token gradients, and selection with them.

One gradient step of size eta along -sum_{k kept} g_k changes the objective J, to second order, by

    -eta sum_k <g_k, grad J>  +  eta^2 / 2 (sum_k g_k)^T H (sum_k g_k)

The first term is minus eta times the sum of values. Ranking by value alone drops the second, and
so keeps tokens whose gradients say the same thing over and over. With the Hessian H of J replaced
by a multiple of one, h I, the decrease of J is eta times

    sum_k v_k  -  w / 2 || sum_k g_k ||^2            w = eta h

which needs no more than the tokens' values and the Gram matrix G_kl = <g_k, g_l>.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphatoken.errors import InputError, NumericalError, require_choice
from alphatoken.model.protocol import ScoredExperts
from alphatoken.model.uses import LinearUse
from alphatoken.select.masks import check_values, keep_count
from alphatoken.support.precision import full_precision, wide

__all__ = ["UNITS", "absolute_weight", "select_diverse", "token_gram"]

UNITS = ("absolute", "relative")


# --- inner products of token gradients -----------------------------------------------------------


@full_precision
def token_gram(
    uses: Sequence[LinearUse],
    errors: Sequence[Tensor | None],
    mask: Bool[Tensor, "b t"],
    *,
    score_bias: bool = False,
    block: int = 512,
) -> Float[Tensor, "n n"]:
    """Inner products of the direct gradients of all response tokens, over all scored linears.

    The direct gradient of a token is the part of its loss gradient that passes through the use of
    the weights at the position that predicts it. For a weight used once it is delta_k (x) x_k, and

        G_kl = sum over weights (delta_k . delta_l)(x_k . x_l)

    The rows of a token that meet one expert of a mixture are uses of that expert's matrix: products
    of rows that met different experts are zero.

    A weight that is used several times (a shared block, a linear called twice, tied linears) has
    the sum over its uses for gradient, so products between its uses belong to it:
    ``sum_{a, b} (delta^a_k . delta^b_l)(x^a_k . x^b_l)``.

    Args:
        uses: of one recorded forward (``recorder.linears``).
        errors: self-only errors (b, t, d_out) at these uses, parallel to them
            (``TokenErrors.direct``), of experts (b, t, c, d_out); None where a use has none.
            Scaled losses scale them: under DPO they carry +-omega.
        mask: True at response tokens; token i is predicted at position i - 1.
        score_bias: the bias gradients (sum of delta over uses) take part.
        block: rows computed at a time; the workspace is 4 block * n numbers and 2 n (d_out + d_in)
            for one weight's factors.

    Returns:
        Symmetric (n, n) in float32 or wider, tokens in (row, position) order, n = ``mask.sum()``:
        quadratic memory, 64 MiB for 4,096 tokens. Unit: squared loss gradient per weight.

    Exactness: exact up to rounding where the errors are the exact self-only ones.

    Raises:
        InputError: uses and errors differ in number; a response token at index 0, which no
            position predicts.

    Oracle: outer products per token and use, summed per parameter, in the tests.
    """
    live = _live(uses, errors, mask)
    n = int(mask.sum())
    gram = torch.zeros(n, n, dtype=_dtype(live), device=mask.device)
    for factors in _factors(live, mask, gram, score_bias=score_bias):
        _add_products(gram, factors, block)
    return gram


_Live = list[tuple[LinearUse, Tensor]]
_Factors = list[tuple[Tensor, ...]]
"""Of each use, tensors (n, .): a gradient's inner product is the product of theirs."""


def _live(uses: Sequence[LinearUse], errors: Sequence[Tensor | None], mask: Tensor) -> _Live:
    """Uses that have an error, once all is checked."""
    if len(uses) != len(errors):
        raise InputError(
            "there must be one error a use", got=f"{len(uses)} uses, {len(errors)} errors"
        )
    if bool(mask[:, 0].any()):
        raise InputError(
            "no position predicts the first token of a row",
            got=f"mask is True at row {int(mask[:, 0].nonzero()[0])}, token 0",
            remedy="make the mask from the labels after the shift",
        )
    return [(use, error) for use, error in zip(uses, errors, strict=True) if error is not None]


def _dtype(live: _Live) -> torch.dtype:
    return wide(*(x.dtype for use, error in live for x in (use.x, error)))


def _factors(live: _Live, mask: Tensor, like: Tensor, *, score_bias: bool) -> Iterator[_Factors]:
    """Parameter by parameter, the factors of the tokens' gradients at each of its uses."""
    # Uses of one weight are grouped first: gradients add over uses, and products of them do not.
    for group in _by_identity(live, "weight"):
        yield [f for use, error in group for f in _weight_factors(use, error, mask, like)]
    for group in _by_identity(live, "bias") if score_bias else []:
        yield _bias_factors(group, mask, like)


def _by_identity(live: _Live, kind: str) -> list[_Live]:
    """Uses and errors grouped by the parameter that they use: tied ones share it by identity."""
    groups: dict[int, _Live] = {}
    alive = []  # an id means something only while its object lives
    for use, error in live:
        parameter = getattr(use.linear, kind)
        if parameter is not None and parameter.requires_grad:
            alive.append(parameter)
            groups.setdefault(id(parameter), []).append((use, error))
    return list(groups.values())


def _predicting(by_position: Tensor, mask: Tensor, like: Tensor) -> Tensor:
    """(n, d): rows of the positions that predict the response tokens."""
    # Token i is predicted at position i - 1: the last position and index 0 of the mask drop out.
    return by_position.detach()[:, :-1][mask[:, 1:]].to(like)


def _weight_factors(use: LinearUse, error: Tensor, mask: Tensor, like: Tensor) -> _Factors:
    """Both factors of the tokens' gradients, in the order in which the weight is stored.

    Of experts, a pair for each row of a token, and the expert that it met as a third factor.
    """
    one, other = (error, use.x)[:: -1 if use.linear.transposed else 1]
    factors = _predicting(one, mask, like), _predicting(other, mask, like)
    if use.experts is None:
        return [factors]
    met = _experts_met(use, mask, like)
    return list(zip(*(factor.unbind(1) for factor in (*factors, met)), strict=True))


def _experts_met(use: LinearUse, mask: Tensor, like: Tensor) -> Tensor:
    """(n, c, e): 1 at the expert that each row of a token was sent to."""
    assert isinstance(use.linear, ScoredExperts)
    assert use.experts is not None
    one_hot = torch.nn.functional.one_hot(use.experts, use.linear.count)
    return _predicting(one_hot, mask, like)


def _bias_factors(group: _Live, mask: Tensor, like: Tensor) -> _Factors:
    if all(use.experts is None for use, _ in group):
        total = torch.stack([_predicting(error, mask, like) for _, error in group]).sum(0)
        return [(total,)]
    rows = [(_predicting(e, mask, like), _experts_met(use, mask, like)) for use, e in group]
    return [f for pair in rows for f in zip(*(one.unbind(1) for one in pair), strict=True)]


def _product(factors: Iterable[Tensor]) -> Tensor:
    return reduce(torch.mul, factors)


def _add_products(gram: Tensor, factors: _Factors, block: int) -> None:
    """Add one parameter's inner products: blocks of the upper triangle, and their mirror."""
    # <a x^T, b y^T> = (a . b)(x . y): two small products in place of d_out d_in numbers a token.
    for start in range(0, len(gram), block):
        rows = slice(start, start + block)
        part = torch.zeros_like(gram[rows, start:])
        for one in factors:
            for other in factors:
                pairs = zip(one, other, strict=True)
                part += _product(left[rows] @ right[start:].T for left, right in pairs)
        corner = part[:, : len(part)]
        corner.copy_((corner + corner.T) / 2)  # products of one pair may round differently
        gram[rows, start:] += part
        gram[start + block :, rows] += part[:, block:].T


# --- selection with them -------------------------------------------------------------------------


def select_diverse(
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    ratio: float,
    gram: Float[Tensor, "n n"],
    weight: float,
    *,
    scope: str = "batch",
    units: str = "absolute",
) -> Bool[Tensor, "b t"]:
    """Keep exactly ``ceil(ratio * n)`` tokens, greedily, for ``sum v - w / 2 || sum g ||^2``.

    Starting from none, the token k with the largest gain is added, until m tokens are kept:

        gain(k | S) = v_k - w / 2 G_kk - w sum_{l in S} G_kl

    also when that gain is negative: the budget is kept. Among equal gains the lower (row,
    position) wins. At weight 0 this is ``select_top``, bit for bit.

    Args:
        values: one value a token; the unit of v is that of G.
        mask: True at response tokens.
        ratio: share to keep, in (0, 1].
        gram: (n, n), symmetric, tokens in (row, position) order (``token_gram``).
        weight: not negative. "absolute": w itself. For a step of size eta on the summed loss and
            an objective of curvature h, w = eta h; for a mean over n tokens, eta h / n; a stable
            step has eta h < 2. "relative": ``absolute_weight`` makes w of it.
        scope: "batch" or "sequence".
        units: "absolute" or "relative".

    Exactness: greedy, not optimal. If no product is negative and no gain ever is (as for a small
    weight), the sum reached is at least 1 - 1/e of the best; with gradients that oppose each other
    no such bound holds.

    Raises:
        InputError: ratio, weight, scope, units or shapes.
        NumericalError: a value or a product that is not finite.

    Cost: m n additions and n^2 numbers, on the CPU.
    """
    check_values(values, mask)
    n = int(mask.sum())
    _check_interaction(gram, n, weight, scope, units)
    flat, products = values.detach().cpu().double()[mask.cpu()], gram.detach().cpu()
    # One row and one whole batch are both a stretch of tokens in (row, position) order, whose
    # products are a square block on the diagonal of the Gram matrix.
    lengths = mask.cpu().sum(1).tolist() if scope == "sequence" else [n]
    keep, start = torch.zeros(n, dtype=torch.bool), 0
    for length in lengths:
        part = slice(start, start + length)
        count = keep_count(ratio, length)
        w = float(weight)
        if units == "relative":
            w = absolute_weight(flat[part], products[part, part], count, w)
        keep[part] = _greedy(flat[part], products[part, part], count, w)
        start += length
    kept = torch.zeros_like(mask)
    kept[mask] = keep.to(mask.device)
    return kept


def absolute_weight(
    values: Float[Tensor, " n"], gram: Float[Tensor, "n n"], count: int, weight: float
) -> float:
    """w from a weight without unit: ``weight * sum_{k in top} v_k / || sum_{k in top} g_k ||^2``.

    Along the gradient of the ``count`` top tokens, a step of size a gains ``a sum v`` and loses
    ``a^2 h / 2 ||sum g||^2``; the best size is ``sum v / (h ||sum g||^2)``. So ``weight`` is the
    size of the step that is taken, in units of that best one: 1 at the best step, 2 where the step
    gains nothing any more. It depends neither on the scale of values or gradients nor on how the
    loss is normalised. 0 where the top values sum to nothing positive, or their gradients cancel.
    """
    top = torch.sort(values, descending=True, stable=True).indices[:count]
    # The sum of all entries of the block is || sum g ||^2.
    gain = float(values[top].double().sum())
    square = float(gram[top][:, top].double().sum())
    return weight * gain / square if gain > 0 and square > 0 else 0.0


def _greedy(values: Tensor, gram: Tensor, count: int, weight: float) -> Tensor:
    # The gain of every token is kept up to date: keeping one more lowers that of all others by w
    # G_kl, one row of the matrix, instead of a sum over all that are kept.
    gains = values - weight / 2 * gram.diagonal().double()
    keep = torch.zeros(len(values), dtype=torch.bool)
    for _ in range(count):
        best = int(gains.argmax())  # the first of equals
        keep[best] = True
        gains -= weight * gram[best].double()
        gains[best] = -torch.inf  # and stays so
    return keep


def _check_interaction(gram: Tensor, n: int, weight: float, scope: str, units: str) -> None:
    require_choice("scope", scope, ("batch", "sequence"), InputError)
    require_choice("units", units, UNITS, InputError)
    if not 0 <= weight < float("inf"):
        raise InputError(
            "the interaction weight must be finite and not negative",
            got=repr(weight),
            why="a negative one would look for tokens that repeat each other",
        )
    if gram.shape != (n, n):
        raise InputError(
            "the Gram matrix must have one row and column a response token",
            got=f"{tuple(gram.shape)} for {n} tokens",
        )
    if not bool(torch.isfinite(gram).all()):
        token = int((~torch.isfinite(gram)).any(1).nonzero()[0])
        raise NumericalError(
            "an inner product of token gradients is not finite",
            got=f"response token {token}, in (row, position) order",
            remedy="look at the loss of that token and at the weights",
        )
