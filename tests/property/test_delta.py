"""The gated delta rule and its convolution: backward, coefficients, propagation, bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken.model.delta_rule import DeltaStatistics, self_terms
from alphatoken.oracle import delta_net
from tests.property import properties_delta as claims
from tests.property.profiles import budget
from tests.property.properties_delta import DeltaCase, chunks_of, delta_cases

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


def test_statistics_of_narrow_tensors_are_wide() -> None:
    """bfloat16 queries, keys, values and strengths, as a model in it has them, float32 decays."""
    case = DeltaCase(g=2, r=2, t=11, chunk=4, strong=False, seed=3)
    made = case.call()
    names = ("query", "key", "value", "beta")
    narrow = {name: getattr(made, name).detach().bfloat16() for name in names}
    call = replace(made, **narrow, decay=made.decay.detach().float())
    exact = replace(made, **{n: x.double() for n, x in narrow.items()}, decay=call.decay.double())
    error = case.error().bfloat16()
    found = self_terms(DeltaStatistics(call), error)
    wanted = self_terms(DeltaStatistics(exact), error.double())
    dtypes = [getattr(call, n).dtype for n in ("query", "key", "value", "decay", "beta")]
    assert [one.dtype for one in found] == dtypes
    for one, other in zip(found, wanted, strict=True):
        # The result is rounded to its dtype, once: 8 bits, and nothing on the way is.
        near = 2.0**-8 if one.dtype == torch.bfloat16 else 1e-5
        assert float((one.double() - other).abs().max()) <= near * float(other.abs().max())
    (carried,) = DeltaStatistics(call).carried(error, [(1, None)])
    (truth,) = DeltaStatistics(exact).carried(error.double(), [(1, None)])
    assert carried.dtype == torch.float32
    assert float((carried.double() - truth).abs().max()) <= 1e-5 * float(truth.abs().max())


@pytest.mark.parametrize("last", [1, 2, 3, 4, 5])
def test_a_window_alone_reaches_as_far_as_it_says(last: int) -> None:
    """Without a wider span beside it: over the ends of chunks, and no block less."""
    case = DeltaCase(t=11, strong=False, seed=5)
    call, error = case.call(), case.error()
    distance = torch.arange(11)[:, None] - torch.arange(11)
    kept = delta_net.coefficients(call) * ((distance >= 1) & (distance <= last))
    for chunk in (2, 3, 4):
        with chunks_of(chunk):
            (found,) = DeltaStatistics(call).carried(error, [(1, last)])
        torch.testing.assert_close(found, kept.mT @ error, rtol=1e-9, atol=1e-10)
