"""Bootstrap intervals: they cover what they claim, and refuse samples that are too small."""

from __future__ import annotations

import math

import numpy as np
import pytest

from alphatoken.diagnose.statistics import FEWEST, Estimate, bootstrap
from alphatoken.errors import InputError


def mean(x: np.ndarray) -> float:
    return float(x.mean())


def test_covers_the_truth_about_as_often_as_it_says() -> None:
    # 200 experiments of 60 normal numbers: 95 % +- 4 standard errors of that share (0.0154).
    generator = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        found = bootstrap(mean, generator.normal(size=60), draws=200, seed=trial)
        hits += found.low <= 0.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.995


def test_tokens_of_one_row_are_drawn_together() -> None:
    # 20 rows whose 10 tokens are all equal carry 20 numbers, not 200: the interval must be about
    # sqrt(10) times as wide as that of independent tokens.
    by_row = np.random.default_rng(1).normal(size=20)
    values, rows = np.repeat(by_row, 10), np.repeat(np.arange(20), 10)
    alone, together = bootstrap(mean, values), bootstrap(mean, values, groups=rows)
    widths = [found.high - found.low for found in (alone, together)]
    assert 2.0 <= widths[1] / widths[0] <= 4.5
    assert alone.value == together.value


@pytest.mark.parametrize("count", [0, 1, FEWEST - 1])
def test_too_few_items_give_no_number(count: int) -> None:
    found = bootstrap(mean, np.ones(count))
    assert not found.defined
    assert math.isnan(found.value)
    assert found.count == count
    assert f"{count} tokens, {FEWEST} needed" in str(found)


def test_a_statistic_that_is_not_defined_gives_no_number() -> None:
    found = bootstrap(lambda x: math.nan, np.ones(20))
    assert not found.defined
    assert "all values are equal" in str(found)


def test_pairs_stay_paired_and_resamples_without_a_number_are_left_out() -> None:
    # One item in 10 differs: many resamples miss it, and have no correlation.
    x = np.array([0.0] * 9 + [1.0])

    def correlation(a: np.ndarray, b: np.ndarray) -> float:
        return math.nan if a.std() == 0 else float(np.corrcoef(a, b)[0, 1])

    found = bootstrap(correlation, x, x)
    assert (found.value, found.low, found.high) == pytest.approx((1, 1, 1))


def test_the_same_seed_gives_the_same_interval() -> None:
    x = np.random.default_rng(2).normal(size=40)
    assert bootstrap(mean, x, seed=3) == bootstrap(mean, x, seed=3)
    assert bootstrap(mean, x, seed=3) != bootstrap(mean, x, seed=4)


def test_columns_of_different_lengths_are_refused() -> None:
    with pytest.raises(InputError, match="equally long"):
        bootstrap(lambda a, b: 0.0, np.ones(9), np.ones(10))


def test_the_interval_holds_its_number() -> None:
    # The maximum of a resample is never above the sample's: the interval still reaches it.
    x = np.random.default_rng(5).normal(size=50)
    found = bootstrap(lambda a: float(a.max()), x)
    assert found.low <= found.value <= found.high
    assert isinstance(found, Estimate)
