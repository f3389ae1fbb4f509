"""Win rates at equal length: against a slow way, and the cases in which the answer is known."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken.errors import DataError
from alphatoken_lab.compare.length_control import length_controlled_rate
from tests.lab import properties_length as claims
from tests.property.profiles import budget

QUARTERS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=1, max_size=4)


@given(claims.comparisons())
@example(claims.Comparisons((1.0, 1.0, 0.0, 0.0), (9, 8, 1, 2), (1, 2, 9, 8)))  # length separates
@budget(0.3)
def test_the_rate_is_the_maximum(found: claims.Comparisons) -> None:
    claims.check_against_bisection(found)


@given(claims.lengths, QUARTERS)
@budget(0.3)
def test_without_covariance_it_is_plain(pairs: list[tuple[int, int]], won: list[float]) -> None:
    claims.check_without_covariance_it_is_plain(pairs, won)


@given(claims.lengths, st.floats(-1.5, 1.5))
@budget(0.3)
def test_length_alone_is_even(pairs: list[tuple[int, int]], phi: float) -> None:
    claims.check_length_alone_is_even(pairs, phi)


@given(claims.comparisons())
@budget(0.3)
def test_exchange_of_models(found: claims.Comparisons) -> None:
    claims.check_exchange_of_models(found)


def test_a_longer_answer_that_wins_more_is_taken_down() -> None:
    """Wins 3 of 4 where it is longer, 1 of 4 where it is shorter, and is longer in most."""
    won = [1.0, 1.0, 1.0, 0.0] * 3 + [1.0, 0.0, 0.0, 0.0]
    longer = ["long answer"] * 12 + ["x"] * 4
    shorter = ["x"] * 12 + ["long answer"] * 4
    assert sum(won) / len(won) == 0.625
    assert length_controlled_rate(won, longer, shorter) == pytest.approx(50.0, abs=0.2)


def test_what_cannot_be_told_apart_is_plain() -> None:
    equal = length_controlled_rate([1.0, 0.0, 1.0], ["ab"] * 3, ["a"] * 3)
    assert equal == pytest.approx(100 * 2 / 3)
    assert length_controlled_rate([1.0, 1.0], ["abc", "a"], ["a", "a"]) == 100.0
    assert length_controlled_rate([0.0, 0.0], ["abc", "a"], ["a", "a"]) == 0.0
    assert length_controlled_rate([0.25], ["abc"], ["a"]) == 25.0
    with pytest.raises(DataError, match="one answer of each side"):
        length_controlled_rate([1.0, 0.0], ["a"], ["b", "c"])
    with pytest.raises(DataError, match="one answer of each side"):
        length_controlled_rate([], [], [])
