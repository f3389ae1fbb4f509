"""What an optimizer does to a token's gradient, against the exact derivative of its real step."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken.direction import optimizers
from alphatoken.support import precision
from tests.property import optimizer_steps as steps
from tests.property import properties_algebra as algebra
from tests.property import properties_optimizers as real
from tests.property import properties_scorer as claims
from tests.property.optimizer_steps import Case, Kind
from tests.property.profiles import budget
from tests.property.properties import Setup, setups
from tests.property.properties_algebra import AdamCase, adam_cases


@given(adam_cases())
@example(AdamCase(0, 0.9, 0.999, 1e-8, 0))  # step 1: the update is sign(g)
@example(AdamCase(3, 0.9, 0.999, 1e-8, 0, zeros=True))
def test_full_is_the_derivative_of_the_step(case: AdamCase) -> None:
    algebra.check_full_preconditioner(case)


@given(adam_cases(least=1))
@budget(0.5)
def test_frozen_is_the_derivative_with_a_fixed_denominator(case: AdamCase) -> None:
    algebra.check_frozen_preconditioner(case)


@given(adam_cases(least=1), st.sampled_from([1e-16, 1e-6]))
def test_a_second_moment_of_zero_does_not_explode(case: AdamCase, floor: float) -> None:
    algebra.check_floor_bounds_the_preconditioners(case, floor)


@given(setups(), st.sampled_from([1, 3]))
@budget(0.1)
def test_frozen_from_a_real_optimizer_scales_the_direction_once(setup: Setup, steps: int) -> None:
    claims.check_adam_preconditioner(setup, steps)


@given(setups())
@budget(0.1)
def test_a_given_preconditioner_scales_the_direction_once(setup: Setup) -> None:
    claims.check_given_preconditioner(setup)


# --- every optimizer, by its own step ------------------------------------------------------------


@pytest.mark.parametrize("taken", [1, 2, 5, 6, 29])
@pytest.mark.parametrize("kind", [*steps.TORCH, *steps.OTHERS], ids=str)
def test_full_of_every_optimizer_is_the_derivative_of_its_step(kind: Kind, taken: int) -> None:
    """Pinned steps: 5 and 6 lie on both sides of the rectification, 2 and 5 on a look-ahead."""
    real.check_full_is_the_derivative_of_a_real_step(Case(kind, taken, 7))


@given(real.cases())
def test_full_is_the_derivative_of_a_real_step(case: Case) -> None:
    real.check_full_is_the_derivative_of_a_real_step(case)


@given(real.cases(real.ADAMS))
@budget(0.5)
def test_full_of_torchs_adam_is_the_oracles_derivative(case: Case) -> None:
    real.check_adam_of_torch_is_the_oracles(case)


@given(real.cases(real.ADAMS), st.sampled_from([1.0, 0.5, 0.03]))
@budget(0.5)
def test_a_constant_clip_factor_is_in_P(case: Case, factor: float) -> None:
    real.check_a_constant_clip_factor(case, factor)


@given(real.cases(real.HELD, least=6))
@budget(0.5)
def test_frozen_is_full_where_the_denominator_stays(case: Case) -> None:
    real.check_frozen_is_full_where_the_denominator_stays(case)


# --- where P is approximate: the error is stated --------------------------------------------------


LAMB = Kind("Lamb", steps.other("Lamb"), {"lr": 0.1, "weight_decay": 0.1})
ADAMP = Kind("AdamP", steps.other("AdamP"), {"lr": 0.1, "delta": 9.0})


@pytest.mark.parametrize(
    ("kind", "shape", "least", "most"),
    [
        # Without the trust ratio's own derivative: one direction of many, so less in more entries.
        (LAMB, (4, 4), 0.01, 0.5),
        (LAMB, (32, 32), 1e-4, 0.05),
        # Without the projection: one direction a row.
        (ADAMP, (4, 4), 0.05, 0.9),
        (ADAMP, (32, 32), 0.01, 0.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_error_of_tensorwide_factors(
    kind: Kind, shape: tuple[int, int], least: float, most: float, seed: int
) -> None:
    case = Case(kind, 20, seed, shape)
    error = real.relative_error(real.full(case), case.derivative())
    assert least < error < most


@pytest.mark.parametrize("kind", real.HELD, ids=str)
def test_frozen_nears_the_derivative_with_the_steps(kind: Kind) -> None:
    errors = {}
    for taken in (7, 100):
        case = Case(kind, taken, 3, (16, 16))
        errors[taken] = real.relative_error(real.frozen(case), case.derivative())
    assert errors[100] < 0.1 < errors[7]


def test_the_full_form_is_a_negative_scaling_where_more_gradient_shortens_the_step() -> None:
    """Early on, an entry whose momentum opposes ... has du/dg < 0; frozen P is always positive."""
    case = Case(steps.TORCH[0], 1, 7, (16, 16))
    one = case.token.abs()
    assert bool((real.full(case) * case.token.sign() / one < 0).any())
    assert bool((real.frozen(case) * case.token.sign() / one > 0).all())


@pytest.mark.parametrize("frozen", [True, False])
def test_one_update_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    """An update has three tensors of its parameter's size: of all parameters, three models."""
    parameters = {str(i): torch.nn.Parameter(torch.randn(4, 4)) for i in range(5)}
    adam = torch.optim.Adam(parameters.values())
    for parameter in parameters.values():
        parameter.grad = torch.randn(4, 4)
    adam.step()
    live: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0
    read = optimizers.read_update

    def counting(*arguments: Any) -> Any:
        nonlocal most
        update, gradient = read(*arguments)  # type: ignore[misc] # every parameter has stepped
        live.add(update.before)
        most = max(most, len(live))
        return update, gradient

    monkeypatch.setattr(optimizers, "read_update", counting)
    gradients = {name: torch.randn(4, 4) for name in parameters}
    if frozen:
        found = optimizers.frozen_preconditioners(adam, parameters)
    else:
        found = optimizers.full_preconditioners(adam, parameters, gradients)
    assert found is not None
    assert list(found) == list(parameters)
    assert most <= 2  # the one before lives until its successor is read


@pytest.mark.parametrize("kind", [*steps.TORCH, *steps.OTHERS], ids=str)
def test_full_is_the_same_in_blocks(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of more numbers than a block holds, the last block not full: the same bits."""
    case = Case(kind, 6, 7, (4, 7))
    whole = real.full(case)
    monkeypatch.setattr(precision, "_BLOCK", 5)
    assert torch.equal(real.full(case), whole)
