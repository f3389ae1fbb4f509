"""The switchable backward, attention weights in blocks, forward mode, and what they allocate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from alphatoken.model import attention
from alphatoken.model.switch import BackwardSwitch
from tests.property import properties_attention as claims
from tests.property.profiles import budget
from tests.property.properties_attention import AttentionCase, attention_cases

ALL = claims.MASKS + claims.STRUCTURES
HARD = AttentionCase(b=2, g=2, r=3, t=7, mask="left", softcap=1.5, sinks=True, chunk=3)
BLIND = AttentionCase(b=2, g=1, r=2, t=5, mask="blind", chunk=2, seed=3)
HOLES = AttentionCase(b=2, g=2, r=2, t=9, mask="sliding holes", softcap=1.5, chunk=2, seed=1)


@given(attention_cases())
@example(HARD)
@example(BLIND)
@example(HOLES)
def test_the_self_only_backward_is_the_diagonal(case: AttentionCase) -> None:
    claims.check_self_backward_is_the_diagonal(case)


@given(attention_cases())
@example(HARD)
@budget(0.5)
def test_the_cross_backward_is_everything_else(case: AttentionCase) -> None:
    claims.check_cross_backward_is_the_rest(case)


@given(attention_cases())
@example(HARD)
@budget(0.5)
def test_the_ordinary_backward_is_the_kernels_bit_by_bit(case: AttentionCase) -> None:
    claims.check_ordinary_backward_is_the_kernels(case)


@given(attention_cases())
@example(HARD)
@budget(0.5)
def test_self_and_cross_add_up_to_ordinary(case: AttentionCase) -> None:
    claims.check_self_and_cross_add_up(case)


@given(attention_cases())
@budget(0.25)
def test_one_forward_serves_both_backwards(case: AttentionCase) -> None:
    claims.check_the_mode_is_read_at_backward_time(case)


@given(attention_cases())
@example(HARD)
@example(BLIND)
@example(HOLES)
def test_log_sum_exp_and_weights_are_the_models(case: AttentionCase) -> None:
    claims.check_log_sum_exp_and_weights(case)


@given(attention_cases(), st.frozensets(st.sampled_from(["query", "key", "value", "sinks"])))
@example(HARD, frozenset({"query", "key", "value", "sinks"}))
@example(HARD, frozenset({"sinks"}))
@example(BLIND, frozenset({"query", "key", "value"}))
def test_forward_mode_is_the_jvp(case: AttentionCase, moving: frozenset[str]) -> None:
    claims.check_forward_mode_is_the_jvp(case, moving)


@given(attention_cases(mask=st.sampled_from([m for m in ALL if m != "additive"])))
@example(HARD)
@budget(0.5)
def test_forward_mode_agrees_with_finite_differences(case: AttentionCase) -> None:
    claims.check_forward_mode_by_finite_differences(case)


@pytest.mark.parametrize("mask", ["none", "window", "left"])
@pytest.mark.parametrize("window", [None, 16])
def test_nothing_is_as_large_as_the_square_of_the_length(mask: str, window: int | None) -> None:
    case = AttentionCase(b=1, g=2, r=1, t=200, d=4, v=4, mask=mask, chunk=32)
    claims.check_no_square_of_the_length(case, window)


def test_the_recorder_of_shapes_sees_a_square() -> None:
    """The test above can fail: explicit attention is caught."""
    case = AttentionCase(t=40, chunk=8)
    call = case.call()
    with claims.Shapes(case.t) as seen:
        claims.native_of(call)(call.query, call.key, call.value)
    assert seen.large


def test_the_switch_falls_back_to_ordinary_after_an_exception() -> None:
    switch = BackwardSwitch()
    with pytest.raises(RuntimeError, match="stop"), switch.to("self"):
        raise RuntimeError("stop")
    assert switch.mode == "ordinary"
    with switch.to("self"):
        with switch.to("cross"):
            assert switch.mode == "cross"
        assert switch.mode == "self"


def test_statistics_hold_no_graph_and_copy_nothing() -> None:
    call = HARD.call()
    statistics = attention.AttentionStatistics(call)
    for kept, given_ in ((statistics.query, call.query), (statistics.key, call.key)):
        assert isinstance(kept, Tensor)
        assert not kept.requires_grad
        assert kept.data_ptr() == given_.data_ptr()
    assert not statistics.lse.requires_grad


def test_narrow_queries_are_attended_in_float32() -> None:
    call = AttentionCase(t=6).call()
    narrow = claims.replace(
        call,
        query=call.query.detach().to(torch.bfloat16),
        key=call.key.detach().to(torch.bfloat16),
        value=call.value.detach().to(torch.bfloat16),
    )
    statistics = attention.AttentionStatistics(narrow)
    assert statistics.lse.dtype == torch.float32
    wide = claims.replace(narrow, query=narrow.query.float(), key=narrow.key.float())
    assert torch.equal(statistics.lse, attention.AttentionStatistics(wide).lse)
