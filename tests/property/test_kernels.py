"""Fused attention kernels: what they save, and values on flash attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from alphatoken import AlphaTokenWarning, UnsupportedError
from alphatoken.estimate.estimators import ESTIMATORS
from tests.property import properties_kernels as claims
from tests.property.architectures import BY_NAME
from tests.property.profiles import budget
from tests.property.properties_kernels import KernelCase, kernel_cases
from tests.property.strategies import SEEDS

pytestmark = pytest.mark.filterwarnings("ignore:label values replace flash attention")

FLASH = [name for name in BY_NAME if name not in ("qwen3_5",)]
PADDED = KernelCase("padding", b=3, r=3, t=7, window=2, softcap=1.5, seed=5)
PACKED = KernelCase("documents", b=2, g=2, t=8, window=3, sinks=True, double=False, seed=4)


@given(kernel_cases())
@example(PADDED)
@example(PACKED)
def test_a_kernels_log_sum_exp_is_found(case: KernelCase) -> None:
    claims.check_the_kernels_log_sum_exp(case)


@given(kernel_cases())
@example(PADDED)
@example(PACKED)
@example(KernelCase("padding", b=1, r=1, t=2, d=2, sinks=True, double=False))
@budget(0.5)
def test_it_spares_the_pass_over_all_logits(case: KernelCase) -> None:
    claims.check_what_is_saved_spares_the_pass(case)


@given(SEEDS)
@budget(0.1)
def test_a_kernel_is_not_believed_unseen(seed: int) -> None:
    claims.check_a_kernel_is_not_believed_unseen(seed)


@given(SEEDS)
@budget(0.1)
def test_what_another_layer_saved_is_not_taken(seed: int) -> None:
    claims.check_other_calls_are_not_taken(seed)


@pytest.mark.parametrize("how", claims.PACKING)
@pytest.mark.parametrize("name", FLASH)
def test_a_flash_call_is_understood(name: str, how: str) -> None:
    claims.check_a_flash_call_is_what_the_model_computes(name, how, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", claims.PACKING)
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_default_values_on_flash_are_those_on_eager(
    name: str, how: str, dtype: torch.dtype
) -> None:
    claims.check_flash_values_are_eager_ones(name, how, "alphatoken", dtype, 2)


@pytest.mark.parametrize("how", claims.PACKING)
@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_every_estimator_on_flash(estimator: str, how: str) -> None:
    claims.check_flash_values_are_eager_ones("llama", how, estimator, torch.float32, 1)


@pytest.mark.parametrize("how", claims.PACKING)
def test_flash_in_sixteen_bits(how: str) -> None:
    claims.check_flash_values_are_eager_ones("llama", how, "alphatoken", torch.bfloat16, 0)


@given(st.sampled_from(["bounds", "positions"]), SEEDS)
@budget(0.1, least=4)
def test_drawn_packings(how: str, seed: int) -> None:
    claims.check_flash_values_are_eager_ones("qwen3", how, "alphatoken", torch.float32, seed)


def test_a_document_over_two_rows_is_refused() -> None:
    batch = {"input_ids": torch.arange(10).view(2, 5)}
    bounds = torch.tensor([0, 3, 10], dtype=torch.int32)
    batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    batch |= {"max_length_q": 7, "max_length_k": 7}  # type: ignore[dict-item]
    with pytest.raises(UnsupportedError, match="reaches over two rows"):
        claims.values_of("llama", "flash", batch, torch.float32, "direct")


def test_attention_that_is_not_causal_is_refused() -> None:
    model = BY_NAME["llama"].build(3, implementation="flash")
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    adapter = claims.find_adapter(model)
    with (
        adapter.override_attention(adapter.attention_modules(0), lambda call, native: call.value),
        pytest.raises(UnsupportedError, match="not causal"),
    ):
        adapter.forward({"input_ids": torch.arange(5)[None]})


@pytest.mark.filterwarnings("default:label values replace flash attention")
def test_label_values_say_what_they_do_to_flash() -> None:
    with pytest.warns(AlphaTokenWarning, match="label values replace flash attention"):
        claims.check_flash_values_are_eager_ones("llama", "bounds", "label", torch.float32, 0)
