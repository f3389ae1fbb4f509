"""Preconditioners from a live optimizer: its groups and state are looked up here.

``preconditioner.RULES`` has the classes that are served. accelerate's wrapper is opened. Others are
refused by name, before any work: also those that are of such a class and step otherwise, by a
``step`` of their own or by hooks around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from alphatoken.direction.algebra import first_not_finite
from alphatoken.direction.preconditioner import (
    OptimizerState,
    Rule,
    Update,
    class_of,
    frozen_preconditioner,
    full_preconditioner,
    known_classes,
    rule_of,
)
from alphatoken.errors import ConfigError, InputError, NumericalError, UnsupportedError

_NO_PARAMETERS: Mapping[str, Tensor] = MappingProxyType({})


def check_optimizer(optimizer: Any, parameters: Mapping[str, Tensor] = _NO_PARAMETERS) -> None:
    """Raise unless P for these parameters can be read from this optimizer's kind of state.

    Raises:
        UnsupportedError: a class without a rule, which names those that have one; a step that is
            not the class's, hooks around it, or hooks on the gradients that it takes.
        ConfigError: DeepSpeed's partitions, or ``maximize``.
    """
    inner = _opened(optimizer)
    _rule(inner)
    _require_own_step(inner)
    for name, parameter in parameters.items():
        _require_gradient_as_it_is(name, parameter)
    if any(group.get("maximize") for group in inner.param_groups):
        raise ConfigError(
            "the optimizer maximises its objective",
            got=f"{type(inner).__qualname__}(maximize=True)",
            why="a value is the good that descent on the token's loss does",
            remedy="negate the loss and drop maximize, or preconditioner=None",
        )


def frozen_preconditioners(
    optimizer: Any, parameters: Mapping[str, Tensor], *, after: int = 1
) -> dict[str, Tensor] | None:
    """``P = c / (sqrt(v^) + eps)`` by parameter name, from the state before the step.

    Returns:
        P without the learning rate, in the shape of each parameter, or of its local shard; None
        (P = 1 everywhere) until every parameter has taken ``after`` steps.

    Exactness: of a step whose denominator is held; docs/optimizers.md has the error by step.

    Raises:
        ConfigError: state that cannot be read, or a parameter that the optimizer does not hold.
        NumericalError: a NaN or Inf in the state.
    """
    return _by_parameter(
        optimizer, parameters, None, after, lambda update, _: frozen_preconditioner(update)
    )


def full_preconditioners(
    optimizer: Any,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    *,
    after: int = 1,
) -> dict[str, Tensor] | None:
    """``P = du/dg`` by parameter name: the derivative of the next step, ``-lr u``.

    ``gradients`` are those that the step will see, by the same names: of the whole optimizer step
    (all micro-batches and ranks), unscaled, before clipping, without weight decay.

    Returns:
        As :func:`frozen_preconditioners`; entries may be negative.

    Exactness: exact to first order.
    Oracle: finite differences of the optimizer's own step.

    Raises:
        ConfigError: see :func:`frozen_preconditioners`.
        InputError: a parameter without a gradient, or one of another shape.
    """
    return _by_parameter(optimizer, parameters, gradients, after, full_preconditioner)


def read_update(
    optimizer: Any, parameter: Tensor, gradient: Tensor | None = None
) -> tuple[Update, Tensor | None] | None:
    """The next step of one parameter and the gradient it sees, decay included; None without state.

    Both are of the local shard for a sharded parameter.

    Raises:
        ConfigError: the optimizer's state cannot be read, or it does not hold the parameter.
        InputError: the gradient has another shape.
    """
    inner = _opened(optimizer)
    rule = _rule(inner)
    group, own = _place(inner, parameter)
    state: Mapping[str, Any] = inner.state.get(own, {})
    if rule.marker not in state:
        return None
    local = _local(parameter)
    g = None if gradient is None else _gradient(gradient, local)
    decay = float(group.get("weight_decay", 0.0))
    # Coupled decay is part of the gradient that the moments see, so the derivative is taken there.
    if g is not None and decay and rule.couples(inner, group):
        g = g + decay * local.detach().to(g)
    return rule.update(OptimizerState(inner, group, local, state, g)), g


def _by_parameter(
    optimizer: Any,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor] | None,
    after: int,
    make: Callable[[Update, Any], Tensor],
) -> dict[str, Tensor] | None:
    """P of each parameter's next step, or None where one has taken too few."""
    check_optimizer(optimizer, parameters)
    by_name: dict[str, Tensor] = {}
    # One update at a time: it holds several tensors of its parameter's size, and all of them
    # together would be several models.
    for name, parameter in parameters.items():
        if gradients is not None and name not in gradients:
            raise InputError(
                "a parameter has no gradient",
                got=name,
                why="the full preconditioner is the derivative at the step's own gradient",
                remedy="give every parameter's summed gradient, or preconditioner='frozen'",
            )
        read = read_update(optimizer, parameter, None if gradients is None else gradients[name])
        # All parameters or none: scaled and unscaled ones in one sum would mix two units.
        if read is None or read[0].steps < after:
            _require_finite(by_name)
            return None
        by_name[name] = make(*read)
    _require_finite(by_name)
    return by_name


def _opened(optimizer: Any) -> Any:
    while any(
        c.__name__ == "AcceleratedOptimizer" and c.__module__.startswith("accelerate.")
        for c in type(optimizer).__mro__
    ) and _written(optimizer.step)[0].startswith("accelerate."):
        optimizer = optimizer.optimizer
    return optimizer


_AROUND = ("torch.optim.optimizer", "torch.optim.lr_scheduler", "torch._dynamo")
"""Modules whose wrappers of a step run it as it is: hooks, a scheduler's count, compilation."""


def _written(function: Any) -> tuple[str, str]:
    """Module and name of the function that is run, as it was written, under torch's wrappers."""
    while True:
        function = function.func if isinstance(function, partial) else function
        function = getattr(function, "__func__", function)  # of a bound method
        # Not ``__module__``, which a wrapper of the user's may have copied from what it wraps.
        module = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
        if not (module.startswith(_AROUND) and hasattr(function, "__wrapped__")):
            return module, getattr(function, "__qualname__", type(function).__qualname__)
        function = function.__wrapped__


_WITHOUT_HOOK = (
    "remove() of the hook's handle, and do its work beside the step (what scales gradients belongs "
    "into step_weights); preconditioner=None; or a mapping of your own"
)


def _require_own_step(optimizer: Any) -> None:
    """Raise unless the optimizer steps as the class of its rule does, and nothing is beside it."""
    cls = class_of(optimizer)
    assert cls is not None
    for part in ("step", "_init_group"):  # torch's steps collect gradients and state in the second
        if not hasattr(optimizer, part):
            continue
        module, name = _written(getattr(optimizer, part))
        if (module, name) not in [(c.__module__, f"{c.__qualname__}.{part}") for c in cls.__mro__]:
            raise UnsupportedError(
                f"the optimizer is {cls.__name__} by its class, and steps otherwise",
                got=f"{module}.{name} in {type(optimizer).__qualname__}",
                why=f"P would be the derivative of a step of {cls.__name__}, which is not taken",
                remedy=f"{cls.__name__} itself, preconditioner=None, or a mapping of your own",
            )
    before = (*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values())
    after = (*_global_optimizer_post_hooks.values(), *optimizer._optimizer_step_post_hooks.values())
    hooks = [
        f"{kind}-hook {'.'.join(written)}"
        for kind, registered in (("pre", before), ("post", after))
        for hook in registered
        # Those of torch count steps, and accelerate's keeps scales of 8-bit products.
        if not (written := _written(hook))[0].startswith(("torch.", "accelerate."))
    ]
    if hooks:
        raise UnsupportedError(
            f"a hook runs with the steps of the optimizer ({type(optimizer).__qualname__})",
            got=", ".join(hooks),
            why="it may change gradients or weights, and P would be the derivative of another step",
            remedy=_WITHOUT_HOOK,
        )


def _require_gradient_as_it_is(name: str, parameter: Tensor) -> None:
    """Raise where a hook may change a parameter's gradient between the backward and the step."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    foreign = [
        ".".join(written)
        for hook in hooks.values()
        # Those of libraries that spread weights collect gradients.
        if not (written := _written(hook))[0].startswith(("torch.", "accelerate.", "deepspeed."))
    ]
    if foreign:
        raise UnsupportedError(
            "a hook runs on the accumulated gradient of a scored parameter",
            got=f"{name}: {', '.join(foreign)}",
            why="it may change the gradient, and P would be the derivative of another step",
            remedy=_WITHOUT_HOOK,
        )


def _rule(optimizer: Any) -> Rule:
    if type(optimizer).__module__.startswith("deepspeed.runtime"):
        raise ConfigError(
            "DeepSpeed keeps the optimizer's state in flat partitions",
            got=type(optimizer).__qualname__,
            why="a partition holds parts of many parameters, and belongs to one rank",
            remedy="DDP or FSDP2, whose state has the parameter's shape, or preconditioner=None",
        )
    rule = rule_of(optimizer)
    if rule is None:
        raise UnsupportedError(
            "P cannot be read from this optimizer's state",
            got=type(optimizer).__qualname__,
            why="no rule says by which second moment its step scales each entry of the gradient",
            remedy=f"preconditioner=None, a mapping of your own, or one of {known_classes()}",
        )
    return rule


def _place(optimizer: Any, parameter: Tensor) -> tuple[Mapping[str, Any], Tensor]:
    for group in optimizer.param_groups:
        for own in group["params"]:
            if own is parameter:  # ``==`` would compare the numbers
                return group, own
    raise ConfigError(
        "a scored parameter is not held by the optimizer",
        got=f"a parameter of shape {tuple(parameter.shape)}",
        remedy="hand over the optimizer that trains this model, or narrow the scored layers",
    )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradient(gradient: Tensor, local: Tensor) -> Tensor:
    gradient = _local(gradient)
    if gradient.shape != local.shape:
        raise InputError(
            "a gradient does not have its parameter's shape",
            got=f"{tuple(gradient.shape)} for {tuple(local.shape)}",
        )
    return gradient.detach().to(local.device)  # which may be a CPU's, of offloaded weights


def _require_finite(p: Mapping[str, Tensor]) -> None:
    name = first_not_finite(p)
    if name is not None:
        raise NumericalError(
            "a preconditioner is not finite",
            got=name,
            why="the optimizer's state or the step's gradient holds a NaN or Inf",
            remedy="look at the last training losses; preconditioner=None does without the state",
        )
