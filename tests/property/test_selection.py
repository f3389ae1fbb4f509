"""Values to masks: exact counts, ties, scopes, and nothing outside the response."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken import InputError, NumericalError
from alphatoken.select import masks as selection
from tests.property.profiles import budget
from tests.property.strategies import SEEDS


@dataclass(frozen=True)
class SelectionCase:
    """Values with many ties, and a mask."""

    rows: int
    length: int
    levels: int
    seed: int

    def draw(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.rows, self.length)
        values = torch.randint(self.levels, shape, generator=generator).double()
        return values, torch.rand(shape, generator=generator) < 0.7


def selection_cases() -> st.SearchStrategy[SelectionCase]:
    return st.builds(
        SelectionCase,
        rows=st.integers(1, 4),
        length=st.integers(1, 9),
        levels=st.sampled_from([1, 2, 5, 1000]),
        seed=SEEDS,
    )


def _best(tokens: list[tuple[float, int, int]], ratio: Fraction) -> set[tuple[int, int]]:
    """The first ceil(ratio n) by value, then batch index, then position."""
    count = -(-(ratio.numerator * len(tokens)) // ratio.denominator)
    ordered = sorted(tokens, key=lambda token: (-token[0], token[1], token[2]))
    return {(b, i) for _, b, i in ordered[:count]}


PERCENT = st.integers(1, 100)
SCOPES = st.sampled_from(["batch", "sequence"])


@st.composite
def ratios(draw: st.DrawFn) -> tuple[int, int, int]:
    """(part, whole, count): 5/6 as a float is above 5/6, and 6 of them are still 5."""
    whole = draw(st.just(100) | st.integers(1, 1000))
    count = draw(st.integers(0, 10**6)) * draw(st.sampled_from([1, whole]))
    return draw(st.integers(1, whole)), whole, count


@given(ratios())
@example((55, 100, 100))  # in floating point 0.55 * 100 is above 55
@example((7, 100, 100))
@example((29, 100, 100))
@budget(2.0)
def test_keep_count(ratio: tuple[int, int, int]) -> None:
    """ceil(ratio n) of the ratio that was rounded to a float, in exact arithmetic.

    Proves: keep count (exact), against decimal fractions.
    """
    part, whole, count = ratio
    assert selection.keep_count(part / whole, count) == -(-part * count // whole)


@given(case=selection_cases(), percent=PERCENT, scope=SCOPES, bottom=st.booleans())
@example(case=SelectionCase(3, 9, 1, 0), percent=50, scope="batch", bottom=False)
@example(case=SelectionCase(3, 9, 2, 0), percent=55, scope="batch", bottom=False)
@budget(2.0)
def test_selection(case: SelectionCase, percent: int, scope: str, *, bottom: bool) -> None:
    """Exactly ceil(ratio n) response tokens per scope, ties by (batch index, position).

    Proves: selection (exact), against a sort of tuples.
    """
    values, mask = case.draw()
    ratio = Fraction(percent, 100)
    select = selection.select_bottom if bottom else selection.select_top
    keep = select(values, mask, percent / 100, scope=scope)
    sign = -1.0 if bottom else 1.0
    tokens = [(sign * float(values[b, i]), b, i) for b, i in mask.nonzero().tolist()]
    if scope == "batch":
        expected = _best(tokens, ratio)
    else:
        rows = [[t for t in tokens if t[1] == b] for b in range(case.rows)]
        expected = set().union(*(_best(row, ratio) for row in rows))
    assert {(b, i) for b, i in keep.nonzero().tolist()} == expected
    assert keep.dtype == torch.bool
    assert not bool((keep & ~mask).any())


@given(selection_cases(), PERCENT)
@example(SelectionCase(4, 9, 1000, 3), 50)
def test_response_values(case: SelectionCase, percent: int) -> None:
    """The mean over each row's response by a loop; and top-ranked, whole responses but for one.

    Proves: response values (exact), against loops.
    """
    values, mask = case.draw()
    actual = selection.response_values(values, mask)
    for b in range(case.rows):
        own = [Fraction(float(values[b, i])) for i in range(case.length) if mask[b, i]]
        mean = float(sum(own) / len(own)) if own else 0.0
        for i in range(case.length):
            expected = mean if mask[b, i] else 0.0
            assert abs(float(actual[b, i]) - expected) <= 1e-6 * max(1.0, abs(mean))
    assert actual.dtype == values.dtype
    keep = selection.select_top(actual, mask, percent / 100)
    assert int(keep.sum()) == selection.keep_count(percent / 100, int(mask.sum()))
    rows = [(float(actual[b][mask[b]][0]), b) for b in range(case.rows) if bool(mask[b].any())]
    if len({mean for mean, _ in rows}) < len(rows):
        return  # equal means share the budget in order of rows
    cut = [b for _, b in rows if 0 < int(keep[b].sum()) < int(mask[b].sum())]
    assert len(cut) <= 1
    kept = [mean for mean, b in rows if bool(keep[b].any())]
    dropped = [mean for mean, b in rows if not bool(keep[b].any())]
    assert not dropped or max(dropped) < min(kept)
    for b in cut:  # the first tokens of the one at the edge
        places = mask[b].nonzero().squeeze(-1)
        count = int(keep[b].sum())
        assert bool(keep[b][places[:count]].all())


def test_means_of_responses_are_summed_wider_than_their_values() -> None:
    """Values that cancel, in float32: their mean is what is left, to the last digit.

    Proves: means of responses are summed wider than their values (exact), against numbers by hand.
    """
    values = torch.tensor([[1e8, 1.0, -1e8, 7.0], [3e38, 3e38, 3e38, 0.0]])
    mask = torch.tensor([[True, True, True, False], [True, True, True, False]])
    actual = selection.response_values(values, mask)
    assert actual.dtype == torch.float32
    expected = torch.tensor([[1 / 3] * 3 + [0.0], [3e38] * 3 + [0.0]])
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=0)


@given(selection_cases(), PERCENT)
def test_padding_never_ranks(case: SelectionCase, percent: int) -> None:
    """Whatever stands outside the mask, NaN included, changes nothing.

    Proves: padding never ranks (exact), against the same without padding.
    """
    values, mask = case.draw()
    keep = selection.select_top(values, mask, percent / 100)
    for filler in (1e30, -1e30, float("nan"), float("inf")):
        again = selection.select_top(values.masked_fill(~mask, filler), mask, percent / 100)
        assert torch.equal(again, keep)


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
    with pytest.raises(InputError, match="scope must be one of batch, sequence"):
        selection.select_top(values, mask, 0.5, scope="rank")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_is_named(bad: float) -> None:
    values, mask = torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.bool)
    values[1, 2] = bad
    for select in (selection.select_top, selection.select_bottom):
        with pytest.raises(NumericalError, match="row 1, token 2"):
            select(values, mask, 0.5)


def test_an_empty_mask_keeps_nothing() -> None:
    mask = torch.zeros(2, 4, dtype=torch.bool)
    for scope in ("batch", "sequence"):
        assert not bool(selection.select_top(torch.zeros(2, 4), mask, 0.5, scope=scope).any())
