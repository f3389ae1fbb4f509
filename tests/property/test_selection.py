"""Values to masks: exact counts, ties, scopes, and nothing outside the response."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken import InputError, NumericalError
from alphatoken.select import masks as selection
from tests.property import properties_algebra as claims
from tests.property.properties_algebra import SelectionCase, selection_cases

PERCENT = st.integers(1, 100)
SCOPES = st.sampled_from(["batch", "sequence"])


@given(PERCENT, st.just(100), st.integers(0, 10**6))
@example(55, 100, 100)  # in floating point 0.55 * 100 is above 55
@example(7, 100, 100)
@example(29, 100, 100)
def test_the_count_is_an_exact_ceiling(part: int, whole: int, count: int) -> None:
    claims.check_keep_count(part, whole, count)


@given(st.data())
def test_so_it_is_of_a_ratio_that_is_no_decimal(data: st.DataObject) -> None:
    """As on the way of a schedule: 5/6 as a float is above 5/6, and 6 of them are still 5."""
    whole = data.draw(st.integers(1, 1000), label="whole")
    part = data.draw(st.integers(1, whole), label="part")
    count = data.draw(st.integers(0, 1000), label="count") * data.draw(st.sampled_from([1, whole]))
    claims.check_keep_count(part, whole, count)


@given(st.decimals("0.0001", "1", places=4), st.integers(0, 10**6))
def test_any_decimal_ratio_is_read_as_printed(ratio: object, count: int) -> None:
    exact = Fraction(str(ratio)) * count
    assert selection.keep_count(float(str(ratio)), count) == -(
        -exact.numerator // exact.denominator
    )


@given(selection_cases(), PERCENT, SCOPES)
@example(SelectionCase(3, 9, 1, 0), 50, "batch")  # all tied
def test_top_is_exact_with_ties_by_index(case: SelectionCase, percent: int, scope: str) -> None:
    claims.check_selection(case, percent, scope, bottom=False)


@given(selection_cases(), PERCENT, SCOPES)
def test_bottom_is_exact_with_ties_by_index(case: SelectionCase, percent: int, scope: str) -> None:
    claims.check_selection(case, percent, scope, bottom=True)


@given(selection_cases(), PERCENT)
@example(SelectionCase(4, 9, 1000, 3), 50)
def test_responses_are_kept_whole(case: SelectionCase, percent: int) -> None:
    claims.check_response_values(case, percent)


def test_response_values_by_hand() -> None:
    values = torch.tensor([[9.0, 1.0, 3.0, 9.0], [4.0, 5.0, 0.0, -1.0], [7.0, 7.0, 7.0, 7.0]])
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    found = selection.response_values(values, mask)
    assert found.tolist() == [[0, 2, 2, 0], [2, 2, 2, 2], [0, 0, 0, 0]]
    other = torch.tensor([[9.0, 1.0, 3.5, 9.0], [4.0, 5.0, 0.0, -1.0], [0.0] * 4])
    keep = selection.select_top(selection.response_values(other, mask), mask, 0.5)
    assert keep.tolist() == [
        [False, True, True, False], [True, False, False, False], [False] * 4
    ]  # fmt: skip
    with pytest.raises(NumericalError, match="row 0, token 1"):
        selection.response_values(torch.full((3, 4), float("nan")), mask)


@given(selection_cases(), PERCENT)
def test_padding_is_never_ranked(case: SelectionCase, percent: int) -> None:
    claims.check_padding_never_ranks(case, percent)


@given(selection_cases(), PERCENT, SCOPES, st.integers(0, 99))
def test_random_keeps_as_many(case: SelectionCase, percent: int, scope: str, seed: int) -> None:
    values, mask = case.draw()
    generator = torch.Generator().manual_seed(seed)
    keep = selection.select_random(mask, percent / 100, generator=generator, scope=scope)
    top = selection.select_top(values, mask, percent / 100, scope=scope)
    assert torch.equal(keep.sum(-1) if scope == "sequence" else keep.sum(),
                       top.sum(-1) if scope == "sequence" else top.sum())  # fmt: skip
    assert not bool((keep & ~mask).any())
    again = selection.select_random(
        mask, percent / 100, generator=torch.Generator().manual_seed(seed), scope=scope
    )
    assert torch.equal(keep, again)


@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.0001, 2.0, float("nan"), float("inf")])
def test_a_ratio_outside_its_interval_is_refused(ratio: float) -> None:
    values, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    for scope in ("batch", "sequence"):
        with pytest.raises(InputError, match=r"ratio must lie in \(0, 1\]"):
            selection.select_top(values, mask, ratio, scope=scope)
    with pytest.raises(InputError, match="ratio"):
        selection.select_top(values[:0], mask[:0], ratio, scope="sequence")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_named(bad: float) -> None:
    values, mask = torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool)
    values[1, 2] = bad
    for select in (selection.select_top, selection.select_bottom):
        with pytest.raises(NumericalError, match="row 1, token 2"):
            select(values, mask, 0.5)


def test_an_unknown_scope_is_refused() -> None:
    values, mask = torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool)
    with pytest.raises(InputError, match="scope must be one of batch, sequence"):
        selection.select_top(values, mask, 0.5, scope="rank")


def test_an_empty_mask_keeps_nothing() -> None:
    mask = torch.zeros(2, 4, dtype=torch.bool)
    for scope in ("batch", "sequence"):
        assert not bool(selection.select_top(torch.zeros(2, 4), mask, 0.5, scope=scope).any())
