"""Second moments of optimizers: the only place that knows their state keys.

torch.optim's Adam family, RMSprop and Adagrad, and those optimizers of torch_optimizer whose
second moment has the parameter's shape. Others have none to read and are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from alphatoken.errors import ConfigError
from alphatoken.preconditioner import AdamMoments, frozen_preconditioner

__all__ = ["frozen_preconditioners", "read_moments"]

_ADAM = ("exp_avg", "exp_avg_sq")
_STATE: dict[str, tuple[str | None, str]] = {
    **dict.fromkeys(
        (
            "Adam", "AdamW", "NAdam", "RAdam", "AdaBound", "AdaMod", "AdamP", "DiffGrad", "Lamb",
            "QHAdam", "Ranger", "RangerQH", "RangerVA", "SWATS", "Yogi",
        ),
        _ADAM,
    ),
    "AdaBelief": ("exp_avg", "exp_avg_var"),
    "Adahessian": ("exp_avg", "exp_hessian_diag_sq"),
    "RMSprop": (None, "square_avg"),
    "Adagrad": (None, "sum"),
}  # fmt: skip
"""Optimizer class name -> state keys of the first and second moment."""


def _keys(optimizer: torch.optim.Optimizer) -> tuple[str | None, str]:
    for cls in type(optimizer).__mro__:
        if cls.__name__ in _STATE:
            return _STATE[cls.__name__]
    raise ConfigError(
        "this optimizer has no second moment of the parameter's shape",
        got=type(optimizer).__qualname__,
        why="its step is not a per-parameter scaling of the gradient that could be read",
        remedy="preconditioner=None, an Adam-like optimizer, or a mapping of your own",
    )


def read_moments(optimizer: torch.optim.Optimizer, parameter: Tensor) -> AdamMoments | None:
    """Moments of one parameter before the next step; None if it has no state yet.

    Raises:
        ConfigError: the optimizer has no readable second moment, it does not hold the parameter,
            or its state is not of the parameter's shape (quantised, factored or sharded).
    """
    first_key, second_key = _keys(optimizer)
    group = next(
        (g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None
    )
    if group is None:
        raise ConfigError(
            "a scored parameter is not held by the optimizer",
            got=f"a parameter of shape {tuple(parameter.shape)}",
            remedy="hand over the optimizer that trains this model, or narrow the scored layers",
        )
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    if group.get("amsgrad") and "max_exp_avg_sq" in state:
        second_key = "max_exp_avg_sq"
    second = state.get(second_key)
    if second is None:
        return None
    if not isinstance(second, Tensor) or second.shape != parameter.shape:
        raise ConfigError(
            "the optimizer's second moment does not have the parameter's shape",
            got=f"{second_key} of {type(optimizer).__qualname__}: "
            f"{tuple(second.shape) if isinstance(second, Tensor) else type(second).__name__}",
            why="a quantised, factored or sharded state cannot be read entry by entry",
            remedy="use an optimizer with full-size state, or preconditioner=None",
        )
    step = state.get("step", 0)
    beta1, beta2 = group.get("betas", (0.0, group.get("alpha", 0.0)))
    return AdamMoments(
        step=int(step.item() if isinstance(step, Tensor) else step),
        first=state.get(first_key) if first_key else None,
        second=second,
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group.get("eps", 1e-8)),
        bias_correction=first_key is not None and bool(group.get("debias", True)),
    )


def frozen_preconditioners(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], *, after: int = 1
) -> dict[str, Tensor] | None:
    """``P = c / (sqrt(v^) + eps)`` by parameter name, from the state before the step.

    None (P = 1 everywhere) until every parameter has taken ``after`` steps: mixing plain and
    scaled parameters would compare numbers of different units. Factors that an optimizer applies
    to whole tensors (RAdam's rectification, Lamb's trust ratio) are not included.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        moments = read_moments(optimizer, parameter)
        if moments is None or moments.step < after:
            return None
        found[name] = frozen_preconditioner(moments)
    return found
