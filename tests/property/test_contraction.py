"""Contraction with a matrix, and the gram form that it is compared with."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken.estimate import contraction
from tests.property import properties_algebra as algebra
from tests.property.devices import on_devices
from tests.property.profiles import budget
from tests.property.strategies import ContractionCase, contractions


@on_devices
@given(contractions(), st.booleans())
@budget(0.5)
def test_projected_is_the_explicit_outer_product(
    device: str, case: ContractionCase, bias: bool
) -> None:
    algebra.check_projected_is_the_loop(replace(case, device=device), bias)


@on_devices
@given(contractions(), st.integers(1, 13))
@budget(0.5)
def test_gram_is_the_explicit_double_loop(device: str, case: ContractionCase, chunk: int) -> None:
    algebra.check_gram_is_the_loop(replace(case, device=device), chunk)


@on_devices
@given(contractions())
@example(ContractionCase(1, 1, 1, 1, 1))
@budget(0.5)
def test_both_routes_give_one_number(device: str, case: ContractionCase) -> None:
    algebra.check_gram_is_projected(replace(case, device=device))


@on_devices
@given(contractions())
@budget(0.5)
def test_outer_sum_is_the_weight_gradient(device: str, case: ContractionCase) -> None:
    algebra.check_outer_sum_is_the_weight_gradient(replace(case, device=device))


@on_devices
@given(contractions())
@budget(0.25)
def test_narrow_inputs_are_contracted_in_float32(device: str, case: ContractionCase) -> None:
    algebra.check_narrow_inputs_are_widened(replace(case, device=device))


def test_summing_before_the_outer_product_is_right_for_one_example_only() -> None:
    one, two = (ContractionCase(b, 1, 3, 4, 1).factors(integers=True) for b in (1, 2))
    for factors, equal in ((one, True), (two, False)):
        swapped = torch.einsum("o,i->oi", factors.delta.sum((0, 1)), factors.x.sum((0, 1)))
        assert torch.equal(contraction.outer_sum(factors.delta, factors.x), swapped) == equal
