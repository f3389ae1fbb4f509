"""Preconditioners from an optimizer's state: its next step as a function of the gradient.

An adaptive optimizer does not step along the gradient g, so a token's weight moves the parameters
by ``-lr P o g_k``, not ``-lr g_k``. Per entry, each optimizer served here takes the step ``-lr u``,

    u(g) = factor * n / d,    n = offset + slope g,    d = sqrt(w) + eps,
    w = max(largest, rest + share (g - center)^2),

and P is du/dg. For Adam, with s the number of the step and v^, m^ including g,

    P = c / (sqrt(v^) + eps)  -  m^ (1 - beta2) g / ((1 - beta2^s) sqrt(v^) (sqrt(v^) + eps)^2)

with ``c = (1 - beta1) / (1 - beta1^s)``. Momentum and decoupled decay do not depend on g: they are
constants, and have no part in P.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from alphatoken.support.precision import blocks, wide

__all__ = ["Update", "adam_update", "frozen_preconditioner", "full_preconditioner"]

Number = float | Tensor


@dataclass(frozen=True)
class Update:
    """One parameter's next step as a function of its gradient g: u(g), the step being ``-lr u``.

    Attributes:
        steps: steps taken so far.
        slope: slope of the numerator n in g.
        rest: the part of w without g.
        share: coefficient of ``(g - center)^2`` in w.
        before: w of the state before the step; ``frozen`` holds the denominator there.
        eps: what is added to the root.
        offset: the numerator at g = 0 (momentum).
        center: where w is smallest: 0, or the mean that the gradient is compared with.
        largest: w never falls below it (amsgrad); None for no such memory.
        factor: a factor of the whole tensor: rectification, learning-rate decay.
    """

    steps: int
    slope: Number
    rest: Number
    share: Number
    before: Tensor
    eps: float
    offset: Number = 0.0
    center: Number = 0.0
    largest: Tensor | None = None
    factor: Number = 1.0


def adam_update(
    steps: int,
    first: Tensor | None,
    second: Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    *,
    largest: Tensor | None = None,
    raw_eps: bool = False,
) -> Update:
    """The step of Adam and its relatives, from their state as the optimizer stores it.

    ``u = m^ / (sqrt(v^) + eps)``, m^ = m_s / (1 - beta1^s), v^ = v_s / (1 - beta2^s), s = steps+1.

    Args:
        steps: steps taken.
        first: m before the step; None for zero.
        second: v before the step.
        beta1: decay of m.
        beta2: decay of v.
        eps: added to the root.
        largest: amsgrad's running maximum of v, raw.
        raw_eps: eps is added to sqrt(v_s), and the sum is divided by sqrt(1 - beta2^s).
    """
    v = second.to(wide(second.dtype))
    # Bias corrections: of m and v after this step (s = steps + 1), and of v as it stands (steps).
    one, two = 1 - beta1 ** (steps + 1), 1 - beta2 ** (steps + 1)
    old = 1 - beta2**steps if steps else 1.0
    # m_s = beta1 m + (1 - beta1) g is split into what g does (slope) and what is there (offset);
    # v_s likewise into share and rest.
    kept = None if largest is None else largest.to(v)
    return Update(
        steps=steps,
        slope=1 / one * (1 - beta1),
        offset=0.0 if first is None else 1 / one * beta1 * first.to(v),
        rest=beta2 * v / two,
        share=(1 - beta2) / two,
        before=(v if kept is None else kept) / old,
        largest=None if kept is None else kept / two,
        eps=eps / two**0.5 if raw_eps else eps,
    )


def frozen_preconditioner(update: Update, *, floor: float = 1e-16) -> Tensor:
    """``P = c / (sqrt(v^) + eps)``, the denominator held at the state before the step.

    First-order exact for a step whose denominator is held fixed; approximate otherwise (large
    error in the first steps: at step 1 Adam's update is sign(g) and no frozen P is valid).

    Args:
        update: the step to come.
        floor: lower limit of v^. A LoRA A factor and unrouted experts have v^ = 0 early on, and P
            would explode.

    Returns:
        P in the parameter's shape, without the learning rate; positive.
        Oracle: ``alphatoken.oracle.utility.adam_preconditioner``.
    """
    scale = 1 / (update.before.clamp(min=floor) ** 0.5 + update.eps)
    return update.factor * update.slope * scale


def full_preconditioner(update: Update, gradient: Tensor, *, floor: float = 1e-16) -> Tensor:
    """``P = du/dg``: the derivative of the step at the gradient that it will see.

    The sign is free: where a longer gradient shortens the step, P is negative.

    Args:
        update: the step to come.
        gradient: the gradient that the step will see, with the training loss's normalisation and,
            where the optimizer couples it, ``weight_decay * parameter`` added.
        floor: lower limit of v^.

    Returns:
        P in the parameter's shape, without the learning rate.

    Exactness: exact to first order in the token's weight; ``factor`` counts as constant.
    Oracle: ``alphatoken.oracle.utility.adam_step_derivative``.
    """
    values = {field.name: getattr(update, field.name) for field in fields(update)}
    entries = {n: x for n, x in values.items() if isinstance(x, Tensor) and x.dim()}
    if any(x.shape != gradient.shape for x in entries.values()):
        return _derivative(update, gradient, floor)
    # A dozen numbers an entry lie side by side: of a large embedding that would be several models.
    dtype = _dtype(update, gradient)
    result = torch.empty(gradient.shape, dtype=dtype, device=gradient.device)
    for into, g, *rest in blocks(result, gradient, *entries.values()):
        of_block: dict[str, Any] = dict(zip(entries, rest, strict=True))
        into.copy_(_derivative(replace(update, **of_block), g, floor))
    return result


def _dtype(update: Update, gradient: Tensor) -> torch.dtype:
    return torch.promote_types(update.before.dtype, wide(gradient.dtype))


def _derivative(update: Update, gradient: Tensor, floor: float) -> Tensor:
    """Result of ``full_preconditioner`` for all entries at once."""
    g = gradient.to(_dtype(update, gradient))
    away = g - update.center
    second = update.rest + update.share * away.square()
    # Where the floor or amsgrad's maximum holds w, w does not depend on g and has no slope.
    moving = second > floor
    if update.largest is not None:
        moving = moving & (second > update.largest)
        second = torch.maximum(second, update.largest)
    second = second.clamp(min=floor)
    root = second**0.5
    # d sqrt(w) / dg = share (g - center) / sqrt(w), and P = d(n / d)/dg by the product rule.
    root_slope = update.share * away * root / second
    root_slope = torch.where(moving, root_slope, torch.zeros_like(root_slope))
    scale = 1 / (root + update.eps)
    scale_slope = -root_slope * scale.square()
    n = update.offset + update.slope * g
    return update.factor * (update.slope * scale + n * scale_slope)
