"""The gated delta rule and its convolution: backward, coefficients, propagation, bound."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tests.property import properties_delta as claims
from tests.property.profiles import budget
from tests.property.properties_delta import DeltaCase, delta_cases

HARD = DeltaCase(b=2, g=2, r=3, t=11, d=4, v=3, w=4, chunk=3, silent=3, strong=False, bias=True)
SHORT = DeltaCase(b=1, g=1, r=2, t=1, w=4)
SPANS = st.sampled_from([(0, None), (1, None), (1, 2), (0, 1), (1, 0), (0, -1), (1, 7), (0, 3)])
WINDOWS = st.sampled_from([None, 0, 1, 2, 3, 5, 32])
REDUCTIONS = st.sampled_from(["per_head", "mean"])


@given(delta_cases())
@example(HARD)
@example(SHORT)
def test_the_self_only_backward_of_the_rule_holds_the_incoming_state(case: DeltaCase) -> None:
    claims.check_the_self_backward_holds_the_incoming_state(case)


@given(delta_cases())
@example(HARD)
@budget(0.25)
def test_the_ordinary_backward_of_the_rule_is_the_kernels(case: DeltaCase) -> None:
    claims.check_the_ordinary_backward_is_the_kernels(case)


@given(delta_cases())
@example(HARD)
@budget(0.25)
def test_one_forward_of_the_rule_serves_both_backwards(case: DeltaCase) -> None:
    claims.check_one_forward_serves_both_backwards(case)


@given(delta_cases())
@example(HARD)
@example(SHORT)
@budget(0.5)
def test_the_convolution_keeps_its_last_tap(case: DeltaCase) -> None:
    claims.check_the_convolution_alone(case)


@given(delta_cases(), SPANS, st.booleans())
@example(HARD, (1, 4), False)
@example(HARD, (0, None), True)
@example(SHORT, (0, None), False)
def test_carried_errors_are_products_of_decays_and_projections(
    case: DeltaCase, span: tuple[int, int | None], mean: bool
) -> None:
    claims.check_carried_errors_are_the_coefficients(case, span, mean)


@given(delta_cases(), WINDOWS, REDUCTIONS)
@example(HARD, None, "per_head")
@example(HARD, 2, "mean")
@example(SHORT, 2, "per_head")
def test_propagation_goes_through_the_taps(
    case: DeltaCase, window: int | None, reduction: str
) -> None:
    claims.check_propagation_goes_through_the_taps(case, window, reduction)


@given(delta_cases(t=st.sampled_from([1, 2, 4, 6])))
@budget(0.5)
def test_what_propagation_leaves_out_is_bounded(case: DeltaCase) -> None:
    claims.check_what_is_left_out_is_bounded(case)
