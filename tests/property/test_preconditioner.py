"""What Adam does to a token's gradient, against the exact derivative of its step."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tests.property import properties_algebra as algebra
from tests.property import properties_scorer as claims
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
