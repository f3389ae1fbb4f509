"""Contraction with a matrix, and the gram form that it is compared with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken.direction import contraction
from benchmarks.gram import contract_gram
from tests.property.profiles import budget
from tests.property.setups import CONTRACTION
from tests.property.strategies import ContractionCase, Factors, contractions
from tests.property.tolerance import close


def loop(
    case: ContractionCase, integers: bool, matrices: Callable[[Factors], list[Tensor]]
) -> tuple[Tensor, Tensor]:
    """Sum over matrices of <delta_t (x) x_t, matrix>, one token a time, and of absolute terms."""
    f = case.factors(integers=integers)
    value = torch.zeros(case.b, case.t, dtype=torch.float64, device=case.device)
    scale = torch.zeros_like(value)
    for b in range(case.b):
        for t in range(case.t):
            for matrix in matrices(f):
                terms = torch.outer(f.delta[b, t], f.x[b, t]) * matrix
                value[b, t] += terms.sum()
                scale[b, t] += terms.abs().sum()
    return value, scale


def loop_values(case: ContractionCase, integers: bool) -> tuple[Tensor, Tensor]:
    return loop(case, integers, lambda f: [f.m])


def loop_gram(case: ContractionCase, integers: bool) -> tuple[Tensor, Tensor]:
    """Each validation token is a matrix of its own."""
    return loop(case, integers, lambda f: [*map(torch.outer, f.delta_v, f.x_v)])


def agree(found: Tensor, expected: Tensor, scale: Tensor, exact: bool, name: str) -> None:
    """Equal to the last bit where all sums are exact, else to rounding."""
    close(found, expected, 0 * scale if exact else scale, CONTRACTION, name=name)


@given(contractions())
@budget(0.5)
def test_projected_is_the_loop(case: ContractionCase) -> None:
    """Projected contraction equals the explicit rank-1 matrices; exactly so for small integers.

    Proves: eqs. ap_gdp, app_ap_gdp (exact), against loops over rank-1 matrices.
    """
    for integers in (False, True):
        f = case.factors(integers=integers)
        found = contraction.contract(f.delta, f.x, f.m)
        expected, scale = loop_values(case, integers)
        assert found.dtype == torch.float64
        agree(found, expected, scale, integers, "projected")


@given(contractions(), st.integers(1, 13))
@budget(0.5)
def test_gram_is_the_loop(case: ContractionCase, chunk: int) -> None:
    """Gram contraction equals the explicit double loop, whatever the block of validation tokens.

    Proves: eqs. app_rank1_factor, app_aa_direct (exact), against loops over pairs of tokens.
    """
    for integers in (False, True):
        f = case.factors(integers=integers)
        found = contract_gram(f.delta, f.x, f.delta_v, f.x_v, chunk=chunk)
        expected, scale = loop_gram(case, integers)
        assert found.dtype == torch.float64
        agree(found, expected, scale, integers, "gram")


@given(contractions())
@example(ContractionCase(1, 1, 1, 1, 1))
@budget(0.5)
def test_gram_is_projected(case: ContractionCase) -> None:
    """The gram form is the library's contraction where M is the outer sum of validation factors.

    Proves: eqs. phi_tgt_dir, app_aa_direct (exact), against the other route.
    """
    for integers in (False, True):
        f = case.factors(integers=integers)
        m = contraction.outer_sum(f.delta_v[None], f.x_v[None])
        projected = contraction.contract(f.delta, f.x, m)
        gram = contract_gram(f.delta, f.x, f.delta_v, f.x_v)
        agree(gram, projected, loop_gram(case, integers)[1], integers, "gram, projected")


@given(contractions())
@budget(0.5)
def test_outer_sum_is_the_weight_gradient(case: ContractionCase) -> None:
    """Outer product first, sum second: autograd's gradient of the weight, over all sequences.

    Proves: outer sum is the weight gradient (exact), against autograd.
    """
    for integers in (False, True):
        f = case.factors(integers=integers)
        weight = f.m.clone().requires_grad_()
        output = torch.einsum("oi,bti->bto", weight, f.x)
        (expected,) = torch.autograd.grad(output, weight, f.delta)
        found = contraction.outer_sum(f.delta, f.x)
        scale = torch.einsum("bto,bti->oi", f.delta.abs(), f.x.abs())
        agree(found, expected, scale, integers, "outer sum")


@given(contractions())
@budget(0.25)
def test_narrow_inputs_are_widened(case: ContractionCase) -> None:
    """bfloat16 factors are contracted in float32: equal to the float32 copies, bit by bit.

    Proves: narrow inputs are widened (exact), against float32 copies, bit by bit.
    """
    f = case.factors(integers=True)
    narrow = [x.to(torch.bfloat16) for x in (f.delta, f.x, f.m)]
    found = contraction.contract(*narrow)
    assert found.dtype == torch.float32
    assert torch.equal(found.double(), loop_values(case, True)[0])
    validation = [x.to(torch.bfloat16) for x in (f.delta_v, f.x_v)]
    gram = contract_gram(*narrow[:2], *validation)
    assert gram.dtype == torch.float32
    assert torch.equal(gram.double(), loop_gram(case, True)[0])
