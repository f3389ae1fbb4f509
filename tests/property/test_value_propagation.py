"""Value-Propagation: the banded sum itself, and the paper's causal part through the scorer."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tests.property import properties_attention as attention
from tests.property import properties_estimators as claims
from tests.property.profiles import budget
from tests.property.properties import Setup, setups
from tests.property.properties_attention import AttentionCase, attention_cases
from tests.property.strategies import make_case

WINDOWS = st.sampled_from([None, 0, 1, 2, 3, 5, 9])
REDUCTIONS = st.sampled_from(["per_head", "mean"])
POSITIONS = st.sampled_from(["label", "context"])
GROUPED = Setup(
    make_case(
        ("pprrrrr.", "..pprrrr"), (("pprr",), ("prrr.", "..prr")), layers=3, heads=6, kv_heads=2,
        value_dim=3, softcap=2.0, sinks=True, windows=(None, 3, None), bias=True,
    ),
    "all",
    True,
)  # fmt: skip


@given(attention_cases(), WINDOWS, REDUCTIONS)
def test_the_banded_sum(case: AttentionCase, window: int | None, reduction: str) -> None:
    attention.check_value_propagation(case, window, reduction)


@given(
    attention_cases(t=st.integers(60, 150), b=1, d=2, v=1),
    st.sampled_from([None, 1, 3, 63, 64, 65, 100]),
    REDUCTIONS,
)
@budget(0.25)
def test_the_banded_sum_across_blocks(
    case: AttentionCase, window: int | None, reduction: str
) -> None:
    attention.check_value_propagation(case, window, reduction)


@given(attention_cases(g=1, r=1), WINDOWS)
@budget(0.25)
def test_with_one_head_both_reductions_are_equal(case: AttentionCase, window: int | None) -> None:
    attention.check_one_head_makes_both_reductions_equal(case, window)


@given(setups(), WINDOWS, REDUCTIONS, POSITIONS)
@example(GROUPED, 2, "per_head", "label")
@example(GROUPED, 3, "mean", "context")
@example(GROUPED, None, "per_head", "context")
@budget(0.25)
def test_alphatoken_is_the_diagonal_plus_value_propagation(
    setup: Setup, window: int | None, reduction: str, position: str
) -> None:
    claims.check_alphatoken_is_direct_plus_propagation(setup, window, reduction, position)


@given(setups(), WINDOWS, POSITIONS)
@example(GROUPED, 2, "label")
@budget(0.15)
def test_paper_literal_is_columns_plus_propagation_of_aggregated_errors(
    setup: Setup, window: int | None, position: str
) -> None:
    claims.check_paper_literal(setup, window, position)


@given(setups())
@budget(0.1)
def test_without_a_window_there_is_no_causal_part(setup: Setup) -> None:
    claims.check_no_window_no_causal_part(setup)


@given(setups())
@budget(0.1)
def test_a_window_of_the_length_is_no_window(setup: Setup) -> None:
    claims.check_a_window_as_long_as_the_row_is_no_window(setup)


@given(setups(last=True, repeated_block=False))
@example(Setup(GROUPED.case, 1, True))
@budget(0.2)
def test_it_is_exact_for_the_value_projection_of_the_last_layer(setup: Setup) -> None:
    claims.check_propagation_is_exact_for_the_last_value_projection(setup)
