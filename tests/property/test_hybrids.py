"""Models with gated delta nets: direct part, Value-Propagation, certificate, dispatch."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.property import properties_hybrids as claims
from tests.property.profiles import budget
from tests.property.properties_hybrids import FAMILIES, FULL, LINEAR, HybridCase, hybrid_cases
from tests.property.strategies import Rows

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The (adaptation|stability) side alone decides"),
]
LAST = (LINEAR, FULL, LINEAR)
SHARES = {"pattern": st.sampled_from([LAST, (FULL, LINEAR, LINEAR)]), "layers": st.just((2,))}


@given(hybrid_cases())
@example(HybridCase())
@example(HybridCase("qwen3_next", layers=(0, 2), ratio=1, taps=4))
@example(HybridCase("olmo_hybrid", LAST, (2,), train=("prrrrrr",)))
@budget(0.4, least=3)
def test_direct_is_the_diagonal_of_a_hybrid(case: HybridCase) -> None:
    claims.check_direct_is_the_diagonal_of_a_hybrid(case)


@given(hybrid_cases(**SHARES))
@example(HybridCase(pattern=LAST, layers=(2,)))
@example(HybridCase("qwen3_next", LAST, (2,), taps=4))
@example(HybridCase("olmo_hybrid", LAST, (2,)))
@budget(0.4, least=3)
def test_propagation_is_exact_for_the_value_rows_of_the_last_layer(case: HybridCase) -> None:
    claims.check_propagation_is_exact_for_the_value_rows(case)


CERTIFIED = [
    ("qwen3_5", "alphatoken", {"window": None, "head_reduction": "mean"}),
    ("qwen3_5", "same_layer_hop", {}),
    ("qwen3_5", "paper_literal", {"window": 3}),
    ("qwen3_5", "label", {}),
    *((family, "alphatoken", {"window": 2}) for family in FAMILIES),
]


@pytest.mark.parametrize(("family", "estimator", "options"), CERTIFIED)
def test_the_certificate_of_a_hybrid_passes(
    family: str, estimator: str, options: dict[str, object]
) -> None:
    case = HybridCase(family, LAST, (1, 2), ratio=3, seed=4)
    claims.check_the_certificate_of_a_hybrid(case, estimator, options)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_one_forward_of_a_hybrid_serves_scoring_and_training(family: str) -> None:
    claims.check_one_forward_of_a_hybrid_serves_both(HybridCase(family, layers=(1, 2), seed=2))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_overrides_of_delta_nets_leave_nothing_behind(family: str) -> None:
    claims.check_overrides_of_delta_nets_leave_nothing_behind(family)


@pytest.mark.parametrize("estimator", ["alphatoken", "direct"])
def test_a_pass_that_goes_on_from_a_cache_is_refused(estimator: str) -> None:
    claims.check_a_cached_pass_is_refused(estimator)


@pytest.mark.parametrize("stop", [3, 5])
def test_a_state_to_begin_with_is_told(stop: int) -> None:
    """By chunks of several positions, and by a step of one."""
    claims.check_a_state_to_begin_with_is_told(stop)


@pytest.mark.parametrize("train", [("pr",), ("prrr", "prr.")])
@pytest.mark.parametrize("estimator", ["alphatoken", "direct"])
def test_a_cache_that_begins_changes_no_value(train: Rows, estimator: str) -> None:
    claims.check_a_cache_that_begins_changes_no_value(train, estimator)
