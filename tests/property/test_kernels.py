"""Values on flash attention are those on eager attention."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from alphatoken import AlphaTokenWarning, Scorer, ScorerConfig, UnsupportedError
from alphatoken.config import ESTIMATORS, READ_BY
from alphatoken.model.protocol import AttentionCall, NativeAttention, find_adapter
from tests.property.architectures import BY_NAME, VOCABULARY
from tests.property.decoder import explicit_attention
from tests.property.profiles import budget
from tests.property.tolerance import allowed, close

PACKING = ("bounds", "positions", "mask")
CAST = 5e-6  # transformers computes norms and rotary tables in float32


def packed_batch(how: str, seed: int) -> dict[str, Any]:
    """Three documents in one row (or two padded rows), told apart as ``how`` says."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([4, 1, 6]) + seed % 3
    total = int(lengths.sum())
    if how == "mask":
        mask = torch.ones(2, total, dtype=torch.long)
        mask[0, :3], mask[1, -2:] = 0, 0
        return {
            "input_ids": torch.randint(VOCABULARY, (2, total), generator=draw),
            "attention_mask": mask,
        }
    batch: dict[str, Any] = {
        "input_ids": torch.randint(VOCABULARY, (1, total), generator=draw),
        "position_ids": torch.cat([torch.arange(int(n)) for n in lengths])[None],
    }
    if how == "bounds":
        bounds, longest = F.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())
        batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        batch |= {"max_length_q": longest, "max_length_k": longest}
    return batch


def labelled(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch whose every token but a row's or document's first is a response token."""
    ids, positions = batch["input_ids"], batch.get("position_ids")
    labels = ids.clone()
    labels[:, 0] = -100
    if positions is not None:
        labels[positions == 0] = -100
    if "attention_mask" in batch:
        real = batch["attention_mask"] != 0
        labels[~(real & F.pad(real[:, :-1], (1, 0), value=False))] = -100
    return {**batch, "labels": labels}


def scorer_of(model: Any, estimator: str, window: int | None) -> Scorer:
    """With two validation rows whose every token but the first is a response token."""
    rows = torch.arange(12).view(2, 6) % VOCABULARY
    validation = {"input_ids": rows, "labels": rows.clone()}
    validation["labels"][:, 0] = -100
    config = ScorerConfig(estimator=estimator, layers=2, window=window, uncovered="skip")
    return Scorer(model, [validation], config=config)


def values_of(
    name: str, implementation: str, batch: Mapping[str, Any], dtype: torch.dtype, estimator: str
) -> Tensor:
    """Values of a batch whose every token but a row's or document's first is a response token."""
    model = BY_NAME[name].build(3, implementation=implementation, dtype=dtype)
    window = 3 if estimator in READ_BY["window"] else None
    return scorer_of(model, estimator, window).score(labelled(batch)).total


pytestmark = pytest.mark.filterwarnings("ignore:label values replace flash attention")

FLASH = [name for name in BY_NAME if name not in ("qwen3_5",)]


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("how", PACKING)
@pytest.mark.parametrize("name", FLASH)
def test_a_flash_call_is_what_the_model_computes(name: str, how: str, seed: int) -> None:
    """Attention written out from the call alone is the kernel's output, packed and padded.

    Proves: a flash call is what the model computes (exact), against explicit attention.
    """
    model = BY_NAME[name].build(seed, implementation="flash")
    adapter, batch = find_adapter(model), packed_batch(how, seed)
    calls: list[tuple[AttentionCall, Tensor]] = []

    def see(call: AttentionCall, native: NativeAttention) -> Tensor:
        calls.append((call, native(call.query, call.key, call.value)))
        return calls[-1][1]

    depth = len(adapter.layers())
    modules = [m for layer in range(depth) for m in adapter.attention_modules(layer)]
    with torch.no_grad(), adapter.override_attention(modules, see):
        adapter.forward(batch)
    assert len(calls) == depth
    for call, output in calls:
        assert call.mask is None
        written = explicit_attention(call, call.query, call.key, call.value).double()
        size = call.value.abs().max().double()
        close(written, output.double(), size, CAST, name=f"{name}, {how}")


# How documents are told apart means the same to every family, estimator and arithmetic: each of
# them is met once in a quick run.
ON_FLASH: list[Any] = [
    *product(["llama"], ["bounds"], sorted(ESTIMATORS), [torch.float32], [1]),
    ("gemma2", "positions", "alphatoken", torch.float32, 2),
    ("mistral", "mask", "alphatoken", torch.float32, 2),
    ("llama", "mask", "alphatoken", torch.float64, 2),
    ("llama", "positions", "alphatoken", torch.bfloat16, 0),
    ("qwen3", "positions", "alphatoken", torch.float32, 3),
]
ON_FLASH += [
    pytest.param(*case, marks=pytest.mark.slow)
    for case in product(["gemma2", "mistral"], PACKING, ["alphatoken"], [torch.float64], [2])
]


@pytest.mark.parametrize(("name", "how", "estimator", "dtype", "seed"), ON_FLASH)
def test_flash_values_are_eager_ones(
    name: str, how: str, estimator: str, dtype: torch.dtype, seed: int
) -> None:
    """Values on flash kernels are those on eager attention, as far as the arithmetic goes.

    Proves: flash values are eager ones (exact), against values on eager attention.
    """
    batch = packed_batch(how, seed)
    plain = {k: v for k, v in batch.items() if not k.startswith(("cu_seq", "max_length"))}
    found = values_of(name, "flash", batch, dtype, estimator).double()
    expected = values_of(name, "eager", plain, torch.float32, estimator).double()
    kind = torch.float32 if dtype == torch.float64 else dtype
    error = float((found - expected).norm() / expected.norm())
    zero = torch.zeros(())
    close(zero + error, zero, 1.0, allowed("norm", kind), name=f"flash, {estimator}, {dtype}")


@given(
    how=st.sampled_from(PACKING),
    window=st.sampled_from([None, 2, 3]),
    heads=st.sampled_from([1, 2, 4]),
    estimator=st.sampled_from(["alphatoken", "direct", "paper_literal"]),
    seed=st.integers(0, 2),
)
@example(how="mask", window=3, heads=2, estimator="alphatoken", seed=0)
@example(how="mask", window=None, heads=1, estimator="direct", seed=1)
@budget(0.1, least=4)
def test_values_on_flash_are_certified(
    how: str, window: int | None, heads: int, estimator: str, seed: int
) -> None:
    """Windows, packed rows, padding on either side, and heads that share keys.

    Proves: values on flash are certified (exact), against every component anew.
    """
    model = BY_NAME["mistral"].build(
        seed,
        implementation="flash",
        dtype=torch.float32,
        sliding_window=window,
        num_key_value_heads=heads,
    )
    batch = labelled(packed_batch(how, seed))
    found = scorer_of(model, estimator, None).verify(batch, tokens=2, progress=False)
    assert found.passed, str(found)


def test_a_document_over_two_rows_is_refused() -> None:
    batch = {"input_ids": torch.arange(10).view(2, 5)}
    bounds = torch.tensor([0, 3, 10], dtype=torch.int32)
    batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    batch |= {"max_length_q": 7, "max_length_k": 7}  # type: ignore[dict-item]
    with pytest.raises(UnsupportedError, match="reaches over two rows"):
        values_of("llama", "flash", batch, torch.float32, "direct")


@pytest.mark.filterwarnings("default:label values replace flash attention")
def test_label_values_say_what_they_do_to_flash() -> None:
    with pytest.warns(AlphaTokenWarning, match="label values replace flash attention"):
        values_of("llama", "flash", packed_batch("bounds", 0), torch.float32, "label")
