"""Models with gated delta nets: direct part, Value-Propagation, certificate, dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken.errors import UnsupportedError
from alphatoken.model import delta_dispatch
from alphatoken.model.protocol import find_adapter
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


@pytest.mark.parametrize("name", ["seq_idx", "cu_seqlens", "cu_seq_lens_q"])
def test_bounds_of_packed_documents_are_refused(name: str) -> None:
    """By convolution and rule, before the kernel: that of torch takes none, faster ones do."""
    case = HybridCase(pattern=LAST)
    (net,) = find_adapter(case.build()).delta_nets(0)  # type: ignore[attr-defined]
    x, gates, bounds = torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2), {name: torch.tensor([0, 3])}
    with pytest.raises(UnsupportedError, match=f"packed documents.*{name}"):
        delta_dispatch._step(net, pytest.fail, x, x, x, gates, gates, **bounds)
    with pytest.raises(UnsupportedError, match=f"packed documents.*{name}"):
        delta_dispatch._convolve(net, pytest.fail, x[0], x[0], **bounds)


@pytest.mark.parametrize("normalised", [True, False])
def test_a_rule_is_told_whether_its_kernel_normalises(normalised: bool) -> None:
    """All models of transformers ask for it; a kernel of one's own need not."""
    case = HybridCase(pattern=LAST)
    adapter: Any = find_adapter(case.build())
    (net,) = adapter.delta_nets(0)
    told, given = [], []

    def rule(call: Any, native: Any) -> Any:
        told.append(call.normalised)
        return native(call.query, call.key, call.value, call.decay, call.beta)

    def kernel(q: Any, k: Any, v: Any, **options: Any) -> Any:
        given.append(options["use_qk_l2norm_in_kernel"])
        return v, None

    x, gates = torch.ones(1, 3, 2, 4), torch.ones(1, 3, 2)
    with adapter.override_delta_nets([net], lambda c, native: native(c.x), rule):
        delta_dispatch._step(net, kernel, x, x, x, gates, gates, use_qk_l2norm_in_kernel=normalised)
    assert told == given == [normalised]


@pytest.mark.parametrize("train", [("pr",), ("prrr", "prr.")])
@pytest.mark.parametrize("estimator", ["alphatoken", "direct"])
def test_a_cache_that_begins_changes_no_value(train: Rows, estimator: str) -> None:
    claims.check_a_cache_that_begins_changes_no_value(train, estimator)
