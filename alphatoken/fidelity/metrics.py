"""Agreement between two rankings of the same tokens."""

from __future__ import annotations

import math

import torch
from scipy import stats
from torch import Tensor

from alphatoken.errors import InputError
from alphatoken.selection import select_top

__all__ = ["sign_agreement", "spearman", "top_overlap"]


def _pair(a: Tensor, b: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    if a.shape != b.shape or a.shape != mask.shape:
        raise InputError(
            "both values and the mask must have one shape",
            got=f"{tuple(a.shape)}, {tuple(b.shape)}, {tuple(mask.shape)}",
        )
    return a[mask].detach().double().cpu(), b[mask].detach().double().cpu()


def spearman(a: Tensor, b: Tensor, mask: Tensor) -> float:
    """Spearman rank correlation over the tokens in ``mask``; NaN below 3 tokens or if constant."""
    x, y = _pair(a, b, mask)
    if len(x) < 3 or bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return math.nan
    return float(stats.spearmanr(x.numpy(), y.numpy()).statistic)


def sign_agreement(a: Tensor, b: Tensor, mask: Tensor) -> float:
    """Share of tokens on whose sign both agree."""
    x, y = _pair(a, b, mask)
    return float((torch.sign(x) == torch.sign(y)).double().mean()) if len(x) else math.nan


def top_overlap(a: Tensor, b: Tensor, mask: Tensor, ratio: float = 0.5) -> float:
    """Share of the tokens kept by ``a`` that ``b`` keeps too, both at ``ratio``.

    A random ranking scores ``ratio`` in the mean.
    """
    kept_a, kept_b = select_top(a, mask, ratio), select_top(b, mask, ratio)
    return float((kept_a & kept_b).sum() / kept_a.sum().clamp(min=1))
