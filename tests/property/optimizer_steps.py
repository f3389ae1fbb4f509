"""Real optimizer steps on one parameter, and what a token's weight does to them.

The token k enters the summed gradient as ``g + (w - 1) g_k``. The derivative of the new parameter
with respect to w, at w = 1, is measured by central differences through the optimizer's own
``step``, on a second optimizer that has taken the same steps (several optimizers lose attributes
when they are copied), so it knows nothing of the library's formulas.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

SHAPE = (3, 4)


@dataclass(frozen=True)
class Kind:
    """An optimizer with its options, and how the test treats it.

    ``tolerance`` bounds the full form's error, relative to the largest entry: rounding of the
    differences, larger where the optimizer computes in ``single`` precision.
    """

    name: str
    make: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-6
    single: bool = False

    def __str__(self) -> str:
        return self.name


def other(name: str) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer of ``torch_optimizer``; the test skips where that is not installed."""

    def make(*arguments: Any, **options: Any) -> torch.optim.Optimizer:
        package = pytest.importorskip("torch_optimizer", reason="torch_optimizer is not installed")
        result: torch.optim.Optimizer = getattr(package, name)(*arguments, **options)
        return result

    return make


TORCH = (
    Kind("Adam", torch.optim.Adam, {"lr": 0.1}),
    Kind("Adam, coupled decay", torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.3}),
    Kind(
        "Adam, decoupled flag",
        torch.optim.Adam,
        {"lr": 0.1, "weight_decay": 0.3, "decoupled_weight_decay": True},
    ),
    Kind("Adam, tensor lr", torch.optim.Adam, {"lr": torch.tensor(0.1, dtype=torch.float64)}),
    Kind("Adam, betas", torch.optim.Adam, {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-2}),
    Kind("Adam, amsgrad", torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "betas": (0.9, 0.7)}),
    Kind("AdamW", torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.3}),
    Kind("AdamW, amsgrad", torch.optim.AdamW, {"lr": 0.1, "amsgrad": True, "betas": (0.9, 0.7)}),
    Kind("RAdam", torch.optim.RAdam, {"lr": 0.1, "eps": 1e-2}),
    Kind("RAdam, decay", torch.optim.RAdam, {"lr": 0.1, "weight_decay": 0.3}),
    Kind("RMSprop", torch.optim.RMSprop, {"lr": 0.1, "alpha": 0.9}),
    Kind("RMSprop, decay", torch.optim.RMSprop, {"lr": 0.1, "weight_decay": 0.3}),
    Kind(
        "RMSprop, centered, momentum",
        torch.optim.RMSprop,
        {"lr": 0.1, "alpha": 0.8, "centered": True, "momentum": 0.9},
    ),
    Kind("Adagrad", torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.3}),
)

OTHERS = (
    Kind("AdaBelief", other("AdaBelief"), {"lr": 0.1, "eps": 1e-4}),
    Kind("AdaBelief, decay", other("AdaBelief"), {"lr": 0.1, "weight_decay": 0.3}),
    Kind(
        "AdaBelief, decoupled, amsgrad",
        other("AdaBelief"),
        {
            "lr": 0.1,
            "weight_decay": 0.3,
            "weight_decouple": True,
            "amsgrad": True,
            "betas": (0.9, 0.7),
            "eps": 1e-4,
        },
    ),
    Kind("AdaBelief, rectified", other("AdaBelief"), {"lr": 0.1, "rectify": True}),
    Kind("Yogi", other("Yogi"), {"lr": 0.1}),
    Kind("Yogi, decay", other("Yogi"), {"lr": 0.1, "weight_decay": 0.3}),
    # This one steps in float32, whatever the parameter is.
    Kind("RAdam of torch_optimizer", other("RAdam"), {"lr": 0.1}, tolerance=1e-2, single=True),
)

INSTALLED = (*TORCH, *(OTHERS if importlib.util.find_spec("torch_optimizer") else ()))
"""What can be drawn here."""


def numbers(seed: int, salt: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Standard normal numbers, the same for the same seed and salt."""
    generator = torch.Generator().manual_seed(seed * 1009 + salt)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def build(kind: Kind, parameter: Tensor) -> torch.optim.Optimizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_optimizer is old
        return kind.make([parameter], **copy.deepcopy(kind.options))


def step(parameter: Tensor, optimizer: torch.optim.Optimizer, gradient: Tensor) -> None:
    """One real step on a given gradient."""
    parameter.grad = gradient.detach().to(parameter.dtype, copy=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated overloads, likewise
        optimizer.step()
    parameter.grad = None


@dataclass(frozen=True)
class Case:
    """So many real steps on gradients with a common part, as training's have, and the next one."""

    kind: Kind
    steps: int
    seed: int
    shape: tuple[int, ...] = SHAPE

    def tensor(self, salt: int) -> Tensor:
        return numbers(self.seed, salt, self.shape)

    @property
    def gradient(self) -> Tensor:
        """The next step's."""
        return (0.5 * self.tensor(1) + self.tensor(2)).to(self.kind.dtype)

    @property
    def token(self) -> Tensor:
        """One token's part of it."""
        return self.tensor(3).to(self.kind.dtype)

    def run(self) -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        """Parameter and optimizer after the steps."""
        parameter = torch.nn.Parameter(self.tensor(0).to(self.kind.dtype))
        optimizer = build(self.kind, parameter)
        for number in range(self.steps):
            step(parameter, optimizer, 0.5 * self.tensor(1) + self.tensor(10 + number))
        return parameter, optimizer

    def moved(self, weight: float) -> Tensor:
        """The parameter after the next step, with the token's weight shifted by ``weight``."""
        parameter, optimizer = self.run()
        step(parameter, optimizer, self.gradient + weight * self.token)
        return parameter.detach().double()

    def derivative(self) -> Tensor:
        """``-(dtheta'/dw) / lr`` by central differences: what ``P o g_k`` has to be."""
        h = 1e-2 if self.kind.single else 1e-5
        lr = float(self.run()[1].param_groups[0]["lr"])
        return -(self.moved(h) - self.moved(-h)) / (2 * h * lr)
