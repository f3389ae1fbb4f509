"""Values to weights of token losses: a hard mask, weights in proportion, or unbiased ones.

A weight multiplies one token's loss. With n response tokens and m = ceil(ratio * n):

    mask          w in {0, 1}, sum m        the paper
    proportional  0 <= w <= cap, sum m      w = min(cap, s * max(value, 0))
    unbiased      w in {0, 1 / p}, m kept   p = P(kept) grows with the value; E[w] = 1

Everything but the ranking is integer arithmetic on the CPU, so that sums are exact and every
device, layout and number of threads gives the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

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

__all__ = ["CAP", "POLICIES", "WEIGHTINGS", "inclusion_probabilities", "token_weights"]

POLICIES = ("top", "bottom", "random", "all")
WEIGHTINGS = ("mask", "proportional", "unbiased")
CAP = 4.0
"""No proportional weight is larger than this; no unbiased one than this times n / m."""

# Powers of two, so that dividing by them is exact.
_SIZE = 2**52  # sizes are read to this part of the largest
_WEIGHT = 2**20  # proportional weights are multiples of 1 / _WEIGHT, which float32 holds exactly
_CHANCE = 2**40  # probabilities are multiples of 1 / _CHANCE


def token_weights(
    values: Float[Tensor, "b t"],
    mask: Bool[Tensor, "b t"],
    ratio: float,
    *,
    policy: str = "top",
    weighting: str = "mask",
    scope: str = "batch",
    generator: torch.Generator | None = None,
    cap: float = CAP,
) -> Float[Tensor, "b t"]:
    """Weight of each token's loss, 0 outside the response; m = ceil(ratio * n) per scope.

    "mask": 1 at the m tokens that ``select_top`` keeps.

    "proportional": ``w_k = min(cap, s max(v_k, 0))`` with the s that makes the total m. Where the
    tokens of positive value cannot take it all (each at the cap), the rest is shared equally by
    the others; so without any positive value all weights are m / n. Weights are multiples of
    2^-20, and their sum is m exactly, in float32 too.

    "unbiased": exactly m tokens are kept at random, token k with ``inclusion_probabilities``'s
    p_k, and weighs 1 / p_k. So E[w_k] = 1 for every token, and the gradient of the weighted loss
    is an unbiased estimate of that of the whole loss. Var[w_k] = 1 / p_k - 1 <= cap n / m - 1, and
    Var[sum_k w_k a_k] = sum_kl (p_kl / (p_k p_l) - 1) a_k a_l with p_kl the chance to keep both.
    The draw is systematic sampling in a random order: p_k is exact, p_kl has no closed form
    except for equal p (a simple random sample, p_kl = m (m - 1) / (n (n - 1))).

    Args:
        values: one value a token.
        mask: True at response tokens.
        ratio: share of the tokens, in (0, 1].
        policy: "top"; "bottom", the same for the negated values; "random", the control: a random
            mask, or the soft weights of the values in random order, so that only their assignment
            to tokens is lost; "all", weight 1 everywhere whatever ratio and weighting.
        weighting: see above.
        scope: "batch", or "sequence" for every row by itself.
        generator: of "random" and "unbiased"; a CPU generator, None for torch's own.
        cap: largest proportional weight; largest unbiased one in units of n / m. From 1 (nothing
            but equal chances, or weights of at most 1) to 1024.

    Returns:
        Weights in float32, or float64 for float64 values. Equal values have equal weights, up to
        one unit of 2^-20 that goes to the lower (row, position).

    Exactness: sums, kept counts and p_k are exact. The same generator state gives the same
    weights on every device.

    Raises:
        InputError: unknown policy, weighting or scope; ratio or cap out of range; other shapes.
        NumericalError: a NaN or Inf value, naming row and token.

    Source: ours (the paper has the mask). Oracle: enumeration of the draw's start, in the tests.
    """
    _check_options(policy, weighting, scope, cap)
    keep_count(ratio, 0)
    dtype = wide(values.dtype)
    # Before the values are checked: a random mask reads none of them.
    if policy == "random" and weighting == "mask":
        return select_random(mask, ratio, generator=generator, scope=scope).to(dtype)
    check_values(values, mask)
    if policy == "all":
        return mask.to(dtype)
    if weighting == "mask":
        select = select_top if policy == "top" else select_bottom
        return select(values, mask, ratio, scope=scope).to(dtype)

    def weigh(group: Tensor) -> Tensor:
        group = -group if policy == "bottom" else group
        if policy == "random":
            group = group[torch.randperm(len(group), generator=generator)]
        count = keep_count(ratio, len(group))
        if weighting == "proportional":
            return _proportional(group, count, cap)
        return _unbiased(group, count, cap, generator)

    return _per_scope(values, mask, scope, weigh).to(device=values.device, dtype=dtype)


def inclusion_probabilities(
    values: Float[Tensor, " n"], count: int, *, cap: float = CAP
) -> Float[Tensor, " n"]:
    """Chance of each token to be kept by "unbiased": they sum to ``count`` exactly.

    ``p_k = f + min(1 - f, s max(v_k, 0))`` with the floor ``f = count / (n cap)`` and the s that
    makes the sum ``count``; where the tokens of positive value cannot take it all (each at 1), the
    rest is shared equally by the others. So p is monotone in the value, at least f, and
    count / n for all where no value is positive.

    Args:
        values: finite, at least one.
        count: tokens to keep, from 1 to n.
        cap: ratio of the mean probability to the smallest one.

    Returns:
        Multiples of 2^-40, in float64.
    """
    return _chances(values.detach().cpu().double(), count, cap).double() / _CHANCE


def _check_options(policy: str, weighting: str, scope: str, cap: float) -> None:
    for name, given, allowed in (
        ("policy", policy, POLICIES),
        ("weighting", weighting, WEIGHTINGS),
        ("scope", scope, ("batch", "sequence")),
    ):
        require_choice(name, given, allowed, InputError)
    if not 1 <= cap <= 1024:
        raise InputError(
            "cap must lie in [1, 1024]",
            got=repr(cap),
            why="the weights average to ratio, which a smaller cap could forbid; a larger one "
            "bounds nothing",
        )


def _per_scope(
    values: Tensor, mask: Tensor, scope: str, weigh: Callable[[Tensor], Tensor]
) -> Tensor:
    """Weights (b, t) on the CPU: ``weigh`` on the response tokens of the batch or of each row."""
    values, mask = values.detach().cpu().double(), mask.cpu()
    weights = torch.zeros_like(values)
    rows = range(len(values)) if scope == "sequence" else [slice(None)]
    for row in rows:
        if bool(mask[row].any()):
            weights[row][mask[row]] = weigh(values[row][mask[row]])
    return weights


def _fill(sizes: list[int], total: int, cap: int) -> list[int]:
    """Share ``total`` out in proportion to descending sizes, each share at most ``cap``.

    Water-filling, in integers: the largest are held at the cap while the others share what is
    left. Sizes of 0 get something only when all others are at the cap, and then equally. Shares
    descend too; what rounding leaves over goes to the first. Needs ``total <= cap * len(sizes)``.
    """
    shares: list[int] = []
    rest = sum(sizes)
    # Descending sizes reach the cap in this order. The first that stays below it in proportion to
    # what is left ends the search, since all later ones are smaller.
    for size in sizes:
        if rest == 0 or total * size < cap * rest:
            break
        shares.append(cap)
        total, rest = total - cap, rest - size
    free = sizes[len(shares) :]
    if rest == 0:
        free, rest = [1] * len(free), len(free)
    # Python's integers do not overflow, and the remainder of the division is fewer than one each.
    parts = [total * size // rest for size in free]
    left = total - sum(parts)
    return shares + [part + (i < left) for i, part in enumerate(parts)]


def _shared(values: Tensor, total: int, cap: int) -> Tensor:
    """Share ``total`` out by the positive part of the values; shares in the values' order."""
    order = torch.sort(values, descending=True, stable=True).indices
    positive = values[order].clamp(min=0)
    # Relative to the largest, because only proportions matter and the scale of values is arbitrary.
    sizes = positive / positive[0] * _SIZE if bool(positive[0] > 0) else positive
    shares = torch.empty(len(values), dtype=torch.int64)
    shares[order] = torch.tensor(_fill(sizes.long().tolist(), total, cap))
    return shares


def _proportional(values: Tensor, count: int, cap: float) -> Tensor:
    return _shared(values, count * _WEIGHT, int(cap * _WEIGHT)).double() / _WEIGHT


def _chances(values: Tensor, count: int, cap: float) -> Tensor:
    """Inclusion probabilities as whole numbers of 1 / _CHANCE, with sum ``count * _CHANCE``."""
    # Each token gets the floor first, which bounds its weight 1 / p by cap n / m; only the rest is
    # shared out by value.
    total = count * _CHANCE
    floor = int(Fraction(total, len(values)) / Fraction(cap))
    return floor + _shared(values, total - len(values) * floor, _CHANCE - floor)


def _unbiased(values: Tensor, count: int, cap: float, generator: torch.Generator | None) -> Tensor:
    chances = _chances(values, count, cap)
    # In a fixed order two neighbours of small probability could never be kept together.
    order = torch.randperm(len(values), generator=generator)
    start = int(torch.randint(_CHANCE, (), generator=generator))
    keep = torch.zeros(len(values), dtype=torch.bool)
    keep[order] = _systematic(chances[order], start)
    # 1 / p for what is kept, so that the expectation of each weight is 1 (Horvitz-Thompson).
    return torch.where(keep, _CHANCE / chances.double(), 0.0)


def _systematic(chances: Tensor, start: int) -> Tensor:
    """Lay the chances end to end and keep whatever covers start, start + 1, ... (units of 1).

    No chance exceeds one unit, so none is hit twice, and a chance of c / _CHANCE is hit for
    exactly c of the _CHANCE possible starts.
    """
    # The number of marks start, start + 1, ... below x is -floor((start - x) / unit). A token is
    # kept if more of them lie before its end than before its beginning.
    ends = chances.cumsum(0)
    hits = [-torch.div(start - x, _CHANCE, rounding_mode="floor") for x in (ends, ends - chances)]
    return hits[0] > hits[1]
