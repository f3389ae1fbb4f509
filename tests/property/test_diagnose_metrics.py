"""Measures of agreement: closed forms, brute force, cases with known answers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from alphatoken.diagnose import statistics
from alphatoken.errors import NumericalError
from alphatoken.select.masks import select_top
from tests.property.profiles import budget

# Few different values: ties are the hard case.
COLUMNS = st.integers(4, 14).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(-3, 3), min_size=n, max_size=n),
        st.lists(st.integers(-3, 3), min_size=n, max_size=n),
    )
)


@given(COLUMNS, st.sampled_from([0.1, 0.5, 0.55, 1.0]))
@budget(1.0)
def test_overlap_keeps_what_selection_keeps(
    columns: tuple[list[int], list[int]], ratio: float
) -> None:
    """Ties by place, exactly ceil(ratio n)."""
    a, b = (torch.tensor([c], dtype=torch.float64) for c in columns)
    mask = torch.ones_like(a, dtype=torch.bool)
    kept = [select_top(x, mask, ratio) for x in (a, b)]
    wanted = float((kept[0] & kept[1]).sum() / kept[0].sum())
    assert statistics.top_overlap(a[0], b[0], ratio) == pytest.approx(wanted, abs=1e-7)


@given(COLUMNS)
@budget(1.0)
def test_spearman_is_pearson_of_mean_ranks(columns: tuple[list[int], list[int]]) -> None:
    a, b = columns
    found = statistics.spearman(a, b)
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(float(stats.spearmanr(a, b).statistic), abs=1e-12)


def test_a_value_without_a_rank_is_refused() -> None:
    with pytest.raises(NumericalError, match="not finite"):
        statistics.top_overlap([1.0, math.nan, 2.0], [1.0, 2.0, 3.0])
