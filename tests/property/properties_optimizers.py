"""Claims about optimizers: P, read from live state, against the optimizer's own next step."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from alphatoken.direction import optimizers
from alphatoken.oracle import utility
from tests.property import optimizer_steps as steps
from tests.property.optimizer_steps import Case, Kind
from tests.property.tolerance import close

DOUBLE = tuple(kind for kind in steps.INSTALLED if not kind.single)
SINGLE = tuple(kind for kind in steps.INSTALLED if kind.single)
ADAMS = tuple(k for k in steps.TORCH if k.name.startswith("Adam") and "amsgrad" not in k.name)
ADAMS = tuple(k for k in ADAMS if k.name not in ("Adamax", "Adadelta"))
HELD = tuple(k for k in DOUBLE if k.name in ("Adam", "AdamW", "NAdam", "RAdam", "Yogi"))


def cases(kinds: tuple[Kind, ...] = DOUBLE, least: int = 1) -> st.SearchStrategy[Case]:
    return st.builds(
        Case,
        kind=st.sampled_from(kinds),
        steps=st.integers(least, 12),
        seed=st.integers(0, 2**20),
    )


def full(case: Case, **options: float) -> Tensor:
    """``P o g_k`` in the full form."""
    parameter, optimizer = case.run()
    p = optimizers.full_preconditioners(
        optimizer, {"w": parameter}, {"w": case.gradient}, **options
    )
    assert p is not None
    return (p["w"] * case.token).double()


def frozen(case: Case) -> Tensor:
    parameter, optimizer = case.run()
    p = optimizers.frozen_preconditioners(optimizer, {"w": parameter})
    assert p is not None
    return (p["w"] * case.token).double()


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def check_full_is_the_derivative_of_a_real_step(case: Case) -> None:
    """Full P o g_k = -(dtheta'/dw_k) / lr, measured on the optimizer's own step."""
    exact = case.derivative()
    # Both terms of P may nearly cancel (step 1 of Adam is a sign): the frozen form has one.
    scale = exact.abs().max() + frozen(case).abs().max().clamp(max=1e3)
    tolerance = case.kind.tolerance
    close(full(case), exact, scale, tolerance, name=f"derivative of a step, {case.kind.dtype}")


def check_adam_of_torch_is_the_oracles(case: Case) -> None:
    """The oracle's derivative from the optimizer's state, decay included: the third way."""
    parameter, optimizer = case.run()
    group, state = optimizer.param_groups[0], optimizer.state[parameter]
    before = utility.AdamState(
        int(state["step"]),
        {"w": state["exp_avg"]},
        {"w": state["exp_avg_sq"]},
        group["betas"],
        float(group["eps"]),
        float(group["weight_decay"]),
        decoupled=group["decoupled_weight_decay"],
    )
    values = {"w": parameter.detach()}
    g, token = {"w": case.gradient}, {"w": case.token}
    expected = utility.adam_step_derivative(g, token, before, values)["w"]
    scale = utility.adam_preconditioner(g, before, "frozen", values)["w"] * case.token
    close(full(case), expected, scale.abs() + expected.abs() + 1, 1e-11, name="Adam's oracle")


def check_a_constant_clip_factor(case: Case, factor: float) -> None:
    """A gradient scaled by a constant before the step: P carries the factor once more."""
    scaled = Scaled(case.kind, case.steps, case.seed, case.shape, factor)
    exact = scaled.derivative()
    found = full(case, gradient_scale=factor)
    scale = exact.abs().max() + frozen(case).abs().max().clamp(max=1e3)
    close(found, exact, scale, 1e-6, name="constant clip factor")


class Scaled(Case):
    """The next gradient, the token's part included, times a constant."""

    factor: float

    def __init__(
        self, kind: Kind, steps: int, seed: int, shape: tuple[int, ...], factor: float
    ) -> None:
        super().__init__(kind, steps, seed, shape)
        object.__setattr__(self, "factor", factor)

    @property
    def gradient(self) -> Tensor:
        return super().gradient * self.factor

    @property
    def token(self) -> Tensor:
        return super().token * self.factor


def check_frozen_is_full_where_the_denominator_stays(case: Case) -> None:
    """With g = 0 the denominator moves by decay alone, and its slope in g is 0: one term is left.

    frozen / full is then the known ratio of the two roots.
    """
    parameter, optimizer = case.run()
    update = optimizers.read_update(optimizer, parameter, torch.zeros_like(parameter))
    assert update is not None
    u, _ = update
    zero = {"w": torch.zeros_like(parameter)}
    found = optimizers.frozen_preconditioners(optimizer, {"w": parameter})
    whole = optimizers.full_preconditioners(optimizer, {"w": parameter}, zero)
    assert found is not None
    assert whole is not None
    ratio = (torch.as_tensor(u.rest).sqrt() + u.eps) / (u.before.sqrt() + u.eps)
    close(found["w"], whole["w"] * ratio, found["w"].abs(), 1e-10, name="frozen at g = 0")
