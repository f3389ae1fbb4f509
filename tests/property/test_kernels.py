"""Fused attention kernels: what they save, and values on flash attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from alphatoken import AlphaTokenWarning, Scorer, ScorerConfig, UnsupportedError
from alphatoken.estimate.estimators import ESTIMATORS
from alphatoken.model import attention, kernel_state
from alphatoken.model.protocol import AttentionCall, NativeAttention, find_adapter
from alphatoken.model.switch import BackwardSwitch
from tests import flash_standin
from tests.property.architectures import BY_NAME, VOCABULARY
from tests.property.decoder import dense_mask, explicit_attention
from tests.property.profiles import budget
from tests.property.strategies import SEEDS
from tests.property.tolerance import allowed, close

KINDS = ("sdpa", "sdpa, mask", "rows", "documents", "padding")
PACKING = ("bounds", "positions", "mask")
EXACT = {torch.float64: 1e-12, torch.float32: 1e-5}
CAST = 5e-6  # transformers computes norms and rotary tables in float32


@dataclass(frozen=True)
class KernelCase:
    """One call of a fused kernel: ``kind`` says of which, and how it learns who sees whom."""

    kind: str = "sdpa"
    b: int = 2
    g: int = 1
    r: int = 2
    t: int = 6
    d: int = 4
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    double: bool = True
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    @property
    def flash(self) -> bool:
        return not self.kind.startswith("sdpa")

    def call(self) -> AttentionCall:
        """The call; query, key and value are made by an operation, as a model's are."""
        draw = torch.Generator().manual_seed(self.seed)

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64).to(self.dtype)

        h = self.g * self.r
        q, k, v = (
            numbers(self.b, n, self.t, self.d).requires_grad_() * 1.0 for n in (h, self.g, self.g)
        )
        sinks = numbers(h) if self.sinks and self.flash else None
        call = AttentionCall(
            nn.Identity(), q, k, v, None, 0.7, self.softcap if self.flash else None, sinks
        )
        places = torch.arange(self.t)
        pads = torch.randint(self.t, (self.b,), generator=draw)
        real = places >= pads[:, None]
        parts: dict[str, Any] = {}
        if self.kind == "sdpa, mask":
            causal = places <= places[:, None]
            parts["mask"] = causal & (real[:, None, None] | (places == places[:, None]))
        elif self.kind == "documents":
            starts = torch.rand(self.b, self.t, generator=draw) < 0.4
            starts[:, 0] = True
            parts["documents"] = starts.long().flatten().cumsum(0).view(self.b, self.t) - 1
        elif self.kind == "padding":
            parts["documents"] = real.long() - 1
        if self.flash:
            parts["window"] = self.window
        return AttentionCall(**{**vars(call), **parts})

    def native(self, call: AttentionCall) -> NativeAttention:
        """The kernel, (b, h, t, d) in and out."""
        if not self.flash:
            return lambda q, k, v: F.scaled_dot_product_attention(
                q, k, v, call.mask, is_causal=call.mask is None, scale=call.scale, enable_gqa=True
            ).transpose(1, 2).contiguous().transpose(1, 2)  # fmt: skip
        return lambda q, k, v: _flash(call, q, k, v)


def _flash(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    options = {
        "softmax_scale": call.scale,
        "causal": True,
        "window_size": (-1, -1) if call.window is None else (call.window - 1, call.window - 1),
        "softcap": call.softcap or 0.0,
        "s_aux": call.sinks,
    }
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if call.documents is None:
        return flash_standin.rows(q, k, v, **options).transpose(1, 2)
    token = call.documents >= 0
    ids = call.documents[token] + (torch.arange(len(token))[:, None] * 1000).expand_as(token)[token]
    lengths = ids.unique_consecutive(return_counts=True)[1]
    bounds, longest = F.pad(lengths.cumsum(0), (1, 0)).int(), int(lengths.max())
    found = flash_standin.documents(
        q[token], k[token], v[token], bounds, bounds, longest, longest, **options
    )
    out = torch.zeros_like(q)
    out[token] = found
    return out.transpose(1, 2)


@st.composite
def kernel_cases(draw: st.DrawFn, **pins: Any) -> KernelCase:
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "kind": st.sampled_from(KINDS),
        "b": st.integers(1, 3),
        "g": st.integers(1, 2),
        "r": st.integers(1, 3),
        "t": st.integers(2, 8),
        "d": st.integers(2, 5),
        "window": st.sampled_from([None, 1, 2, 3]),
        "softcap": st.sampled_from([None, 1.5]),
        "sinks": st.booleans(),
        "double": st.booleans(),
        "seed": SEEDS,
    }
    chosen = {}
    for name, strategy in drawn.items():
        pinned = pins.get(name, strategy)
        chosen[name] = draw(pinned) if isinstance(pinned, st.SearchStrategy) else pinned
    return KernelCase(**chosen)


def explicit_lse(call: AttentionCall) -> Tensor:
    """(b, h, t), sinks included; -inf where nothing is attended to."""
    repeats = call.query.shape[1] // call.key.shape[1]
    key = call.key.detach().double().repeat_interleave(repeats, dim=1)
    logits = call.query.detach().double() @ key.mT * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    lse = logits.masked_fill(~dense_mask(call), -torch.inf).logsumexp(-1)
    if call.sinks is not None:
        beside = torch.logaddexp(lse, call.sinks.double().view(1, -1, 1))
        lse = torch.where(lse == -torch.inf, lse, beside)
    return lse


@contextmanager
def counted_passes() -> Iterator[list[int]]:
    """Each pass over all T x T logits adds an entry."""
    count: list[int] = []
    blocks = attention.AttentionStatistics.row_blocks

    def counting(self: attention.AttentionStatistics) -> Any:
        count.append(1)
        return blocks(self)

    with patch.object(attention.AttentionStatistics, "row_blocks", counting):
        yield count


class _Lying(torch.autograd.Function):
    """Explicit causal attention that saves its log-sum-exp to the base of two."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        ctx.save_for_backward(q, k, v, explicit_lse(call).to(q.dtype) / torch.tensor(2.0).log())
        return explicit_attention(call, q, k, v)

    @staticmethod
    def backward(ctx: Any, error: Tensor) -> Any:
        raise NotImplementedError


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


def values_of(
    name: str, implementation: str, batch: Mapping[str, Any], dtype: torch.dtype, estimator: str
) -> Tensor:
    """Values of a batch whose every token but a row's or document's first is a response token."""
    model = BY_NAME[name].build(3, implementation=implementation, dtype=dtype)
    ids, positions = batch["input_ids"], batch.get("position_ids")
    labels = ids.clone()
    labels[:, 0] = -100
    if positions is not None:
        labels[positions == 0] = -100
    if "attention_mask" in batch:
        real = batch["attention_mask"] != 0
        labels[~(real & F.pad(real[:, :-1], (1, 0), value=False))] = -100
    rows = torch.arange(12).view(2, 6) % VOCABULARY
    validation = {"input_ids": rows, "labels": rows.clone()}
    validation["labels"][:, 0] = -100
    config = ScorerConfig(estimator=estimator, layers=2, window=3, uncovered="skip")
    return Scorer(model, [validation], config=config).score({**batch, "labels": labels}).total


pytestmark = pytest.mark.filterwarnings("ignore:label values replace flash attention")

FLASH = [name for name in BY_NAME if name not in ("qwen3_5",)]
PADDED = KernelCase("padding", b=3, r=3, t=7, window=2, softcap=1.5, seed=5)
PACKED = KernelCase("documents", b=2, g=2, t=8, window=3, sinks=True, double=False, seed=4)


@given(kernel_cases())
@example(PADDED)
@example(PACKED)
def test_the_kernels_log_sum_exp(case: KernelCase) -> None:
    """What the kernel saved is each row's log-sum-exp, sinks included, wherever there are keys."""
    call = case.call()
    output = case.native(call)(call.query, call.key, call.value)
    saved = kernel_state.saved_log_sum_exp(output, call)
    assert saved is not None, f"{case.kind}: nothing found"
    expected = explicit_lse(call)
    real = expected.isfinite()
    assert saved.lse.shape == expected.shape
    found = saved.lse.double()[real]
    close(found, expected[real], 1 + expected[real].abs(), EXACT[case.dtype], name="saved lse")


@given(kernel_cases())
@example(PADDED)
@example(PACKED)
@example(KernelCase("padding", b=1, r=1, t=2, d=2, sinks=True, double=False))
@budget(0.5)
def test_what_is_saved_spares_the_pass(case: KernelCase) -> None:
    """Once a kind of kernel is confirmed, the self-only terms take no pass over all logits; its
    weights are those of explicit attention."""
    call, error = case.call(), torch.ones(case.b, case.g * case.r, case.t, case.d, dtype=case.dtype)
    with patch.dict(attention._CONFIRMED, clear=True):
        for passes in (True, False):
            with counted_passes() as count:
                _, statistics = attention.switchable_attention(
                    call, case.native(call), BackwardSwitch()
                )
                attention.self_terms(statistics, error, call.value.detach(), error)
            real = bool(explicit_lse(call).isfinite().any())
            assert bool(count) == (passes or not real), f"{len(count)} passes"
        assert all(attention._CONFIRMED.values())
    exact = AttentionCall(**{**vars(call), "mask": dense_mask(call), "documents": None})
    eye = torch.eye(case.t, dtype=case.dtype).expand(case.b, case.g, case.t, case.t)
    alpha = explicit_attention(exact, call.query.detach(), call.key.detach(), eye)
    own = statistics.diagonal()[0].flatten(1, 2)
    close(own, alpha.diagonal(dim1=2, dim2=3), 1.0, EXACT[case.dtype], name="alpha_tt")


@given(SEEDS)
@budget(0.1)
def test_a_kernel_is_not_believed_unseen(seed: int) -> None:
    """A log-sum-exp by another convention is noticed, and the library's own is used."""
    call = KernelCase("rows", seed=seed).call()
    with patch.dict(attention._CONFIRMED, clear=True):
        for _ in range(2):
            _, statistics = attention.switchable_attention(
                call, lambda q, k, v: _Lying.apply(q, k, v, call), BackwardSwitch()
            )
            expected = explicit_lse(call)
            found = statistics.lse.flatten(1, 2)
            close(found, expected, 1 + expected.abs(), 1e-12, name="lse")
        assert list(attention._CONFIRMED.values()) == [False]


@given(SEEDS)
@budget(0.1)
def test_other_calls_are_not_taken(seed: int) -> None:
    """Attention without a fused kernel, whose query another layer's fused kernel made."""
    case = KernelCase("sdpa", r=1, seed=seed)
    below = case.call()
    hidden = case.native(below)(below.query, below.key, below.value)
    call = AttentionCall(**{**vars(case.call()), "query": hidden, "key": hidden, "value": hidden})
    output = explicit_attention(call, hidden, hidden, hidden)
    assert kernel_state.saved_log_sum_exp(output, call) is None


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("how", PACKING)
@pytest.mark.parametrize("name", FLASH)
def test_a_flash_call_is_what_the_model_computes(name: str, how: str, seed: int) -> None:
    """Attention written out from the call alone is the kernel's output, packed and padded."""
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


ON_FLASH = [
    *product(
        ["llama", "gemma2", "mistral"], PACKING, ["alphatoken"], [torch.float32, torch.float64], [2]
    ),
    *product(["llama"], PACKING, sorted(ESTIMATORS), [torch.float32], [1]),
    *product(["llama"], PACKING, ["alphatoken"], [torch.bfloat16], [0]),
    *product(["qwen3"], ["bounds", "positions"], ["alphatoken"], [torch.float32], [3, 4]),
]


@pytest.mark.parametrize(("name", "how", "estimator", "dtype", "seed"), ON_FLASH)
def test_flash_values_are_eager_ones(
    name: str, how: str, estimator: str, dtype: torch.dtype, seed: int
) -> None:
    """Values on flash kernels are those on eager attention, as far as the arithmetic goes."""
    batch = packed_batch(how, seed)
    plain = {k: v for k, v in batch.items() if not k.startswith(("cu_seq", "max_length"))}
    found = values_of(name, "flash", batch, dtype, estimator).double()
    expected = values_of(name, "eager", plain, torch.float32, estimator).double()
    kind = torch.float32 if dtype == torch.float64 else dtype
    error = float((found - expected).norm() / expected.norm())
    zero = torch.zeros(())
    close(zero + error, zero, 1.0, allowed("norm", kind), name=f"flash, {estimator}, {dtype}")


def test_a_document_over_two_rows_is_refused() -> None:
    batch = {"input_ids": torch.arange(10).view(2, 5)}
    bounds = torch.tensor([0, 3, 10], dtype=torch.int32)
    batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
    batch |= {"max_length_q": 7, "max_length_k": 7}  # type: ignore[dict-item]
    with pytest.raises(UnsupportedError, match="reaches over two rows"):
        values_of("llama", "flash", batch, torch.float32, "direct")


def test_attention_that_is_not_causal_is_refused() -> None:
    model = BY_NAME["llama"].build(3, implementation="flash")
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    adapter = find_adapter(model)
    with (
        adapter.override_attention(adapter.attention_modules(0), lambda call, native: call.value),
        pytest.raises(UnsupportedError, match="not causal"),
    ):
        adapter.forward({"input_ids": torch.arange(5)[None]})


@pytest.mark.filterwarnings("default:label values replace flash attention")
def test_label_values_say_what_they_do_to_flash() -> None:
    with pytest.warns(AlphaTokenWarning, match="label values replace flash attention"):
        values_of("llama", "flash", packed_batch("bounds", 0), torch.float32, "label")
