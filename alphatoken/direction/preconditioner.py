"""Preconditioners from an optimizer's state: its next step as a function of the gradient.

An adaptive optimizer does not step along the gradient g, so a token's weight moves the parameters
by ``-lr P o g_k``, not ``-lr g_k``. Per entry, each optimizer served here takes the step ``-lr u``,

    u(g) = factor * n / d,    n = offset + slope g,    d = sqrt(w) + eps,
    w = max(largest, rest + share (g - center)^2),

and P is du/dg. For Adam, with s the number of the step and v^, m^ including g,

    P = c / (sqrt(v^) + eps)  -  m^ (1 - beta2) g / ((1 - beta2^s) sqrt(v^) (sqrt(v^) + eps)^2)

with ``c = (1 - beta1) / (1 - beta1^s)``. Momentum and decoupled decay do not depend on g: they are
constants, and have no part in P. docs/optimizers.md says how exact each optimizer's form is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from alphatoken.errors import ConfigError
from alphatoken.support.precision import blocks, wide

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
    ``first`` and ``second`` are m and v before the step (None for m = 0), ``largest`` amsgrad's raw
    maximum of v. Under ``raw_eps`` the root is ``(sqrt(v_s) + eps) / sqrt(1 - beta2^s)``.
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

    Returns:
        P in the parameter's shape, without the learning rate; positive.

    Exactness: exact to first order for a step whose denominator is held fixed; approximate
    otherwise (at step 1 Adam's update is sign(g), and no frozen P is valid). Oracle:
    ``alphatoken.oracle.utility.adam_preconditioner``.
    """
    # A LoRA A factor and unrouted experts have v^ = 0 early on, and P would explode.
    scale = 1 / (update.before.clamp(min=floor) ** 0.5 + update.eps)
    return update.factor * update.slope * scale


def full_preconditioner(update: Update, gradient: Tensor, *, floor: float = 1e-16) -> Tensor:
    """``P = du/dg``: the derivative of the step at the gradient that it will see.

    ``gradient`` has the training loss's normalisation and, where the optimizer couples it,
    ``weight_decay * parameter`` added; ``floor`` is the lower limit of v^.

    Returns:
        P in the parameter's shape, without the learning rate; negative where a longer gradient
        shortens the step.

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


# --- the step of each known optimizer, from its state -------------------------------------------

# Keys of state and group, and the quirks of each implementation, are here and nowhere else.


@dataclass(frozen=True)
class OptimizerState:
    """A parameter as its optimizer holds it: group, state, and the gradient of the next step.

    Tensors are the local shards under FSDP2. ``gradient`` is None for the frozen form; else it
    includes the weight decay that the optimizer couples.
    """

    optimizer: Any
    group: Mapping[str, Any]
    parameter: Tensor
    state: Mapping[str, Any]
    gradient: Tensor | None = None

    @property
    def betas(self) -> tuple[float, float]:
        """Decay of the first and the second moment."""
        one, two = self.group["betas"][:2]
        return float(one), float(two)

    @property
    def eps(self) -> float:
        """The constant that the optimizer adds to the root."""
        return float(self.group["eps"])

    @property
    def steps(self) -> int:
        """Number of steps that the optimizer has taken on this parameter."""
        return int(self.state.get("step", 0))

    def number(self, key: str) -> float:
        """An option of the parameter's group, as a number."""
        return float(self.group[key])

    def tensor(self, key: str) -> Tensor:
        """A state tensor in the parameter's shape: local shard, widened."""
        entry = self.state.get(key)
        if isinstance(entry, DTensor):
            entry = entry.to_local()
        # Factored or flattened state, broadcast to the parameter's shape, would give wrong numbers.
        if (
            not isinstance(entry, Tensor)
            or entry.shape != self.parameter.shape
            or not entry.is_floating_point()
        ):
            kind = type(entry).__name__
            if isinstance(entry, Tensor):
                kind = f"{tuple(entry.shape)} {entry.dtype}"
            raise ConfigError(
                "the optimizer's state does not have the parameter's shape",
                got=f"{key} of {type(self.optimizer).__qualname__}: {kind}",
                why="a factored, flattened or quantised state cannot be read entry by entry",
                remedy="use an optimizer with full-size state, or preconditioner=None",
            )
        return entry.detach().to(self.parameter.device, wide(entry.dtype))


def _adam(state: OptimizerState, **options: Any) -> Update:
    """Adam, AdamW; with amsgrad, largest is the running maximum."""
    if state.group.get("amsgrad"):
        options["largest"] = state.tensor("max_exp_avg_sq")
    return adam_update(
        state.steps,
        state.tensor("exp_avg"),
        state.tensor("exp_avg_sq"),
        *state.betas,
        state.eps,
        **options,
    )


def _rectified(state: OptimizerState, length: float) -> float | None:
    """RAdam's rectification of step s; None while its average is no longer than ``length``."""
    beta2, number = state.betas[1], state.steps + 1
    limit = 2 / (1 - beta2) - 1
    now = limit - 2 * number * beta2**number / (1 - beta2**number)
    if now <= length:
        return None
    return math.sqrt((now - 4) * (now - 2) * limit / ((limit - 4) * (limit - 2) * now))


def _plain(update: Update, offset: float = 1.0) -> Update:
    """The update with its denominator replaced by 1, as before a rectification."""
    ones = torch.ones_like(update.before)
    scaled = offset * update.slope, offset * update.offset
    return replace(
        update, slope=scaled[0], offset=scaled[1], rest=ones, share=0.0, before=ones, eps=0.0
    )


def _radam(state: OptimizerState) -> Update:
    """Adam with rectification, a factor without g; in the early steps the numerator m^ only."""
    update = _adam(state, raw_eps=True)  # both RAdams add eps before they correct the bias of v
    factor = _rectified(state, 5.0)  # AdaBelief rectifies from 4 on
    return _plain(update) if factor is None else replace(update, factor=factor)


def _rmsprop(state: OptimizerState) -> Update:
    """``g / (sqrt(w) + eps)``, w = v - mean^2 if centered; momentum adds a constant."""
    alpha, v = state.number("alpha"), state.tensor("square_avg")
    rest, share, center, before = alpha * v, 1 - alpha, 0.0, v
    mean: Tensor | float = center
    if state.group.get("centered"):
        mean = state.tensor("grad_avg")
        before = v - mean.square()
        # v_s - mean_s^2, with the square completed.
        rest, share = alpha * before, alpha * (1 - alpha)
    return Update(state.steps, 1.0, rest, share, before, state.eps, center=mean)


def _adagrad(state: OptimizerState) -> Update:
    total = state.tensor("sum")
    factor = 1 / (1 + state.steps * state.number("lr_decay"))
    return Update(state.steps, 1.0, total, 1.0, total, state.eps, factor=factor)


def _adabelief(state: OptimizerState) -> Update:
    """Adam with the variance around the mean: w = ``beta2 v + (1 - beta2) (g - m_s)^2 + eps``."""
    (beta1, beta2), number = state.betas, state.steps + 1
    m, v, two = state.tensor("exp_avg"), state.tensor("exp_avg_var"), 1 - beta2**number
    old = 1 - beta2**state.steps if state.steps else 1.0
    # Adam's numerator; the second moment of g itself is then replaced by that of g - m_s.
    update = adam_update(state.steps, m, v, beta1, beta2, state.eps)
    # g - m_s = beta1 (g - m). Without amsgrad the state keeps the eps that every step adds.
    update = replace(
        update, rest=(beta2 * v + state.eps) / two, center=m, share=beta1**2 * update.share
    )
    if state.group["amsgrad"]:
        largest = state.tensor("max_exp_avg_var") + state.eps
        update = replace(update, largest=largest / two, before=largest / old)
    if not state.optimizer._rectify:
        return update
    factor = _rectified(state, 4.0)
    # The early step is m_s, without bias correction.
    return _plain(update, 1 - beta1**number) if factor is None else replace(update, factor=factor)


def _yogi(state: OptimizerState) -> Update:
    """``v_s = v - (1 - beta2) sign(v - g^2) g^2``."""
    update, v, g = _adam(state), state.tensor("exp_avg_sq"), state.gradient
    two = 1 - state.betas[1] ** (state.steps + 1)
    # The sign counts as constant, since its derivative is 0 almost everywhere. The frozen form has
    # no g and reads ``before`` only.
    sign = torch.zeros_like(v) if g is None else (v - g.square()).sign()
    return replace(update, rest=v / two, share=(state.betas[1] - 1) * sign / two)


@dataclass(frozen=True)
class Rule:
    """Instructions for reading one class of optimizers.

    Attributes:
        update: builds the next step of one parameter.
        marker: the state key without which the parameter has not been stepped.
        coupled: weight decay is added to the gradient; a flag of the group or class may say else.
    """

    update: Callable[[OptimizerState], Update]
    marker: str = "exp_avg_sq"
    coupled: bool = True

    def couples(self, optimizer: object, group: Mapping[str, Any]) -> bool:
        """True if weight decay is part of the gradient that the moments see."""
        # torch writes this flag into the group. AdaBelief keeps its own on the optimizer.
        if "decoupled_weight_decay" in group:
            return not group["decoupled_weight_decay"]
        return not getattr(optimizer, "_weight_decouple", not self.coupled)


RULES: dict[tuple[str, str], Rule] = {
    ("torch", "Adam"): Rule(_adam),
    ("torch", "AdamW"): Rule(_adam, coupled=False),
    ("torch", "RAdam"): Rule(_radam),
    ("torch", "RMSprop"): Rule(_rmsprop, "square_avg"),
    ("torch", "Adagrad"): Rule(_adagrad, "sum"),
    ("torch_optimizer", "AdaBelief"): Rule(_adabelief, "exp_avg_var"),
    ("torch_optimizer", "RAdam"): Rule(_radam, coupled=False),
    ("torch_optimizer", "Yogi"): Rule(_yogi),
}
"""(package, class) -> rule. Of a subclass, the first known base counts."""


def class_of(optimizer: object) -> type | None:
    """The class of the table that an optimizer is of, itself or by a base; or None."""
    # Libraries wrap torch's optimizers in subclasses that keep state and step as they are.
    return next((cls for cls in type(optimizer).__mro__ if _key(cls) in RULES), None)


def rule_of(optimizer: object) -> Rule | None:
    """The rule of an optimizer's class, or None."""
    cls = class_of(optimizer)
    return None if cls is None else RULES[_key(cls)]


def _key(cls: type) -> tuple[str, str]:
    # By name, so that no optional package is imported to ask.
    return cls.__module__.partition(".")[0], cls.__name__


def known_classes() -> str:
    """The classes that have a rule, by package, for an error."""
    packages = {
        package: ", ".join(name for origin, name in RULES if origin == package)
        for package in ("torch", "torch_optimizer")
    }
    return "; ".join(f"{names} of {package}" for package, names in packages.items())
