"""The next step of each known optimizer, from its state: one short function a family.

The keys of state and group, and the quirks of each implementation, are here and nowhere else.
docs/optimizers.md says how exact each one is; the tests take a real step of every one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from alphatoken.direction.preconditioner import Update, adam_update
from alphatoken.errors import ConfigError
from alphatoken.support.precision import wide

__all__ = ["RULES", "OptimizerState", "Rule", "class_of", "known_classes", "rule_of"]


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
        # Factored or flattened state has another shape. Broadcast to the parameter's it would give
        # numbers, and wrong ones.
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


# --- torch.optim --------------------------------------------------------------------------------


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
    """RAdam's rectification of step s, or None while the variance is not tractable.

    ``length`` is the approximated length of the average from which an implementation rectifies:
    5 in both RAdams, 4 in AdaBelief.
    """
    beta2, number = state.betas[1], state.steps + 1
    limit = 2 / (1 - beta2) - 1
    now = limit - 2 * number * beta2**number / (1 - beta2**number)
    if now <= length:
        return None
    return math.sqrt((now - 4) * (now - 2) * limit / ((limit - 4) * (limit - 2) * now))


def _plain(update: Update, offset: float = 1.0) -> Update:
    """The update with its denominator replaced by 1, as in a rectified optimizer's early steps."""
    ones = torch.ones_like(update.before)
    scaled = offset * update.slope, offset * update.offset
    return replace(
        update, slope=scaled[0], offset=scaled[1], rest=ones, share=0.0, before=ones, eps=0.0
    )


def _radam(state: OptimizerState) -> Update:
    """Adam with rectification, a factor without g; in the early steps the numerator m^ only."""
    update = _adam(state, raw_eps=True)  # both RAdams add eps before they correct the bias of v
    factor = _rectified(state, 5.0)
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


# --- torch_optimizer ----------------------------------------------------------------------------


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


# --- who is served by what ----------------------------------------------------------------------


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
    # Along the bases, because libraries wrap torch's optimizers in subclasses that keep state and
    # step as they are.
    return next((cls for cls in type(optimizer).__mro__ if _key(cls) in RULES), None)


def rule_of(optimizer: object) -> Rule | None:
    """The rule of an optimizer's class, or None."""
    cls = class_of(optimizer)
    return None if cls is None else RULES[_key(cls)]


def _key(cls: type) -> tuple[str, str]:
    """Package and class: by name, so that no optional package is imported to ask."""
    return cls.__module__.partition(".")[0], cls.__name__


def known_classes() -> str:
    """The classes that have a rule, by package, as an error names them."""
    packages = {
        package: ", ".join(name for origin, name in RULES if origin == package)
        for package in ("torch", "torch_optimizer")
    }
    return "; ".join(f"{names} of {package}" for package, names in packages.items())
