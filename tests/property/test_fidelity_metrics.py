"""Measures of agreement and detection: closed forms, brute force, cases with known answers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from alphatoken.certificate import metrics
from alphatoken.errors import InputError, NumericalError
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
    assert metrics.top_overlap(a, b, mask, ratio) == pytest.approx(wanted, abs=1e-7)


@given(COLUMNS)
@budget(1.0)
def test_spearman_is_pearson_of_mean_ranks(columns: tuple[list[int], list[int]]) -> None:
    a, b = columns
    found = metrics.spearman(a, b)
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert math.isnan(found)
    else:
        assert found == pytest.approx(float(stats.spearmanr(a, b).statistic), abs=1e-12)


@given(COLUMNS)
@budget(1.0)
def test_auc_counts_pairs_of_marked_and_unmarked(columns: tuple[list[int], list[int]]) -> None:
    score, drawn = columns
    marked = [d > 0 for d in drawn]
    high = [s for s, m in zip(score, marked, strict=True) if m]
    low = [s for s, m in zip(score, marked, strict=True) if not m]
    found = metrics.auc(score, marked)
    if not high or not low:
        assert math.isnan(found)
        return
    wins = sum((h > x) + 0.5 * (h == x) for h in high for x in low)
    assert found == pytest.approx(wins / (len(high) * len(low)), abs=1e-12)


def test_only_masked_tokens_count() -> None:
    a = torch.tensor([[0.0, 1.0, 2.0, 3.0, 99.0]])
    b = torch.tensor([[7.0, 1.0, 2.0, 3.0, -99.0]])
    mask = torch.tensor([[False, True, True, True, False]])
    assert metrics.spearman(a, b, mask) == pytest.approx(1.0)
    assert metrics.top_overlap(a, b, mask) == 1.0
    assert metrics.auc(a, torch.tensor([[1, 0, 0, 1, 0]]), mask) == 1.0


@pytest.mark.parametrize("name", ["spearman", "top_overlap", "auc"])
def test_columns_of_different_lengths_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="one shape"):
        getattr(metrics, name)([1.0, 2.0, 3.0], [1.0, 2.0])


def test_a_value_without_a_rank_is_refused() -> None:
    with pytest.raises(NumericalError, match="not finite"):
        metrics.top_overlap([1.0, math.nan, 2.0], [1.0, 2.0, 3.0])
