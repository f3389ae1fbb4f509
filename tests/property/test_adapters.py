"""What the transformers adapter tells the core, on every architecture."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alphatoken.estimate.estimators import SELF_ONLY
from tests.property import properties_adapters as claims
from tests.property.architectures import ARCHITECTURES, BY_NAME, MIXTURES, SOFTMAX
from tests.property.profiles import budget
from tests.property.strategies import SEEDS

CALLS = [
    (a.name, implementation, side)
    for a in ARCHITECTURES
    if a.name in SOFTMAX
    for implementation in a.implementations
    for side in ("none", "right", "left")
    # transformers' eager masks overflow in float64 on rows that see nothing
    if not (side == "left" and implementation == "eager")
]


@pytest.mark.parametrize("name", [a.name for a in ARCHITECTURES])
def test_scored_linears(name: str) -> None:
    depth = BY_NAME[name].depth
    for layers in ((depth - 1,), tuple(range(depth)), (0, depth - 1)):
        claims.check_scored_linears_are_the_linears_of_these_layers(name, layers)


@pytest.mark.parametrize("name", SOFTMAX)
def test_what_is_not_scored(name: str) -> None:
    claims.check_what_is_not_scored_is_named(name)
    if name not in MIXTURES:
        adapter = claims.find_adapter(claims.model_of(name))
        assert adapter.uncovered(range(BY_NAME[name].depth)) == {}


@pytest.mark.parametrize(("name", "implementation", "side"), CALLS)
def test_calls(name: str, implementation: str, side: str) -> None:
    claims.check_a_call_is_what_the_model_computes(name, implementation, side, 1)


def test_scale_and_dropout_of_a_call() -> None:
    claims.check_a_call_is_what_the_model_computes("llama", "sdpa", "none", 2, 0.5)
    claims.check_a_call_is_what_the_model_computes(
        "gemma3", "sdpa", "left", 2, query_pre_attn_scalar=9
    )


@given(name=st.sampled_from(["llama", "gemma2", "gpt2", "qwen3"]), seed=SEEDS)
@budget(0.2, least=4)
def test_overrides(name: str, seed: int) -> None:
    claims.check_overrides_leave_nothing_behind(name, seed)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "phi3", "mixtral"])
def test_decoding(name: str) -> None:
    claims.check_decoding_is_the_forward(name, 1)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_limits(name: str) -> None:
    claims.check_rows_beyond_the_limit_are_refused(name)


@pytest.mark.parametrize("estimator", SELF_ONLY)
def test_mixers(estimator: str) -> None:
    claims.check_layers_without_softmax_are_named(estimator)
