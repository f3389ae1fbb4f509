"""Preconditioners from an optimizer's second moment: what Adam does to a token's gradient.

Adam steps along ``m^ / (sqrt(v^) + eps)``. The derivative of that step with respect to the weight
of one token, per parameter, is its gradient times

    c / (sqrt(v^) + eps)  -  m^ (1 - beta2) g / ((1 - beta2^s) sqrt(v^) (sqrt(v^) + eps)^2)

with ``c = (1 - beta1) / (1 - beta1^s)``, s the number of the step, g the current summed gradient,
and v^, m^ including g. Momentum and decoupled decay are constants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from alphatoken.precision import wide

__all__ = ["AdamMoments", "frozen_preconditioner", "full_preconditioner"]


@dataclass(frozen=True)
class AdamMoments:
    """State of one parameter before a step: steps taken, raw moments, and hyper-parameters."""

    step: int
    first: Tensor | None
    second: Tensor
    beta1: float
    beta2: float
    eps: float
    bias_correction: bool = True


def frozen_preconditioner(moments: AdamMoments, *, floor: float = 1e-16) -> Tensor:
    """``P = c / (sqrt(v^) + eps)`` with the state before the step.

    First-order exact for a step whose denominator is held fixed; approximate otherwise (large
    error in the first steps: at step 1 the update is sign(g) and no frozen P is valid).

    Args:
        moments: state before the step; ``step`` steps were taken.
        floor: lower limit of v^. A LoRA A factor and unrouted experts have v^ = 0 early on, and P
            would explode.

    Returns:
        P in the parameter's shape. Oracle: ``alphatoken.oracle.utility.adam_step_derivative``.
    """
    number = moments.step + 1
    v = moments.second.to(wide(moments.second.dtype))
    c = 1 - moments.beta1
    if moments.bias_correction:
        v = v / (1 - moments.beta2**moments.step) if moments.step else v
        c = c / (1 - moments.beta1**number)
    return c / (v.clamp(min=floor).sqrt() + moments.eps)


def full_preconditioner(moments: AdamMoments, gradient: Tensor, *, floor: float = 1e-16) -> Tensor:
    """``P`` with both terms: the exact derivative of the step at the current summed gradient.

    Args:
        moments: state before the step, first moment included.
        gradient: the gradient that the step will see, with the training loss's normalisation.
        floor: lower limit of v^.

    Exactness: exact to first order in the token's weight.
    Oracle: ``alphatoken.oracle.utility.adam_step_derivative``.
    """
    number = moments.step + 1
    dtype = wide(moments.second.dtype, gradient.dtype)
    g = gradient.to(dtype)
    second = moments.beta2 * moments.second.to(dtype) + (1 - moments.beta2) * g.square()
    first = (1 - moments.beta1) * g
    if moments.first is not None:
        first = first + moments.beta1 * moments.first.to(dtype)
    c, share = 1 - moments.beta1, 1 - moments.beta2
    if moments.bias_correction:
        second = second / (1 - moments.beta2**number)
        first = first / (1 - moments.beta1**number)
        c, share = c / (1 - moments.beta1**number), share / (1 - moments.beta2**number)
    root = second.clamp(min=floor).sqrt()
    curvature = first * share * g / (root * (root + moments.eps).square())
    return c / (root + moments.eps) - torch.where(second > floor, curvature, 0.0)
