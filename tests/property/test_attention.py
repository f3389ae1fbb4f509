"""The switchable backward, attention weights in blocks, forward mode, and what they allocate."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from alphatoken.errors import InputError
from alphatoken.model import attention
from alphatoken.model.protocol import AttentionCall
from alphatoken.model.switch import BackwardSwitch
from alphatoken.oracle.readouts import split_attention
from tests.property.decoder import dense_mask, explicit_attention
from tests.property.profiles import budget
from tests.property.setups import CONTRACTION, attention_weights
from tests.property.strategies import SEEDS
from tests.property.tolerance import close

MASKS = ("none", "causal", "window", "left", "packed", "broadcast", "blind", "additive", "by_head")
STRUCTURES = ("documents", "holes", "sliding", "sliding documents", "sliding holes")
"""What kernels are told that take no mask; "holes": documents with padding in and around them."""


@dataclass(frozen=True)
class AttentionCase:
    """Shapes and options of one attention call, and a seed for its numbers.

    Letters: b batch, g key/value heads, r query heads for each, t length, d and v widths.
    """

    b: int = 1
    g: int = 1
    r: int = 1
    t: int = 4
    d: int = 3
    v: int = 2
    mask: str = "none"
    softcap: float | None = None
    sinks: bool = False
    scale: float = 0.7
    chunk: int = 256
    seed: int = 0

    @property
    def h(self) -> int:
        return self.g * self.r

    def numbers(self, *shape: int, salt: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 2**16 * salt)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def call(self) -> AttentionCall:
        """The call; query, key and value are leaves."""
        shapes = ((self.h, self.d), (self.g, self.d), (self.g, self.v))
        q, k, v = (
            self.numbers(self.b, n, self.t, w, salt=i).requires_grad_()
            for i, (n, w) in enumerate(shapes)
        )
        sinks = self.numbers(self.h, salt=3) if self.sinks else None
        call = AttentionCall(nn.Identity(), q, k, v, None, self.scale, self.softcap, sinks)
        if self.mask not in STRUCTURES:
            return replace(call, mask=self.build_mask())
        window = 2 + self.seed % 2 if "sliding" in self.mask else None
        return replace(call, documents=self.build_documents(), window=window)

    def build_documents(self) -> Tensor | None:
        """(b, t): two or three documents a row, all numbers different."""
        if self.mask == "sliding":
            return None
        draw = torch.Generator().manual_seed(self.seed + 7)
        starts = torch.rand(self.b, self.t, generator=draw) < 0.3
        documents = starts.long().flatten().cumsum(0).view(self.b, self.t)
        documents += torch.arange(self.b)[:, None]
        if "holes" in self.mask:
            padding = torch.rand(self.b, self.t, generator=draw) < 0.3
            documents = documents.masked_fill(padding, -1)
        return documents

    def build_mask(self) -> Tensor | None:
        if self.mask == "none":
            return None
        t = self.t
        k, j = torch.arange(t).unsqueeze(-1), torch.arange(t)
        causal = (j <= k).expand(self.b, 1, t, t)
        pads = torch.tensor([(self.seed + 3 * b) % t for b in range(self.b)])
        real = j >= pads[:, None, None, None]
        if self.mask == "window":
            return causal & (k - j < 2)
        if self.mask == "left":  # padding reads itself, as a model that avoids NaN has it
            return (causal & real) | ((j == k) & ~real)
        if self.mask == "blind":  # padding attends to nothing
            return causal & real
        if self.mask == "packed":
            return causal & ((k < t // 2) == (j < t // 2))
        if self.mask == "broadcast":  # (b, 1, 1, t): not causal, padding keys only
            return real.clone()
        if self.mask == "by_head":
            cut = torch.arange(self.h)[:, None, None] + 1
            return (causal & (k - j < cut)).clone()
        if self.mask == "additive":
            lowest = torch.finfo(torch.float64).min
            allowed = (causal & real) | ((j == k) & ~real)
            bias = self.numbers(self.b, 1, t, t, salt=4)  # ALiBi-like terms are legal too
            return bias.masked_fill(~allowed, lowest)
        return causal.clone()

    def error(self) -> Tensor:
        return self.numbers(self.b, self.h, self.t, self.v, salt=5)


def attention_cases(**pins: Any) -> st.SearchStrategy[AttentionCase]:
    drawn: dict[str, st.SearchStrategy[Any]] = {
        "b": st.integers(1, 2),
        "g": st.integers(1, 3),
        "r": st.integers(1, 3),
        "t": st.integers(1, 9),
        "d": st.integers(1, 4),
        "v": st.integers(1, 3),
        "mask": st.sampled_from(MASKS + STRUCTURES),
        "softcap": st.sampled_from([None, 1.5]),
        "sinks": st.booleans(),
        "scale": st.sampled_from([1.0, 0.6]),
        "chunk": st.sampled_from([2, 3, 4, 256]),
        "seed": SEEDS,
    }
    fixed = {n: p if isinstance(p, st.SearchStrategy) else st.just(p) for n, p in pins.items()}
    return st.builds(AttentionCase, **drawn | fixed)


def blocks_of(chunk: int) -> AbstractContextManager[Any]:
    """Let the library work in blocks of this many queries."""
    return mock.patch.object(attention, "_CHUNK", chunk)


def native_of(call: AttentionCall) -> Any:
    return lambda q, k, v: explicit_attention(call, q, k, v)


Gradients = tuple[Tensor, Tensor, Tensor]


def switched(call: AttentionCall, error: Tensor, mode: str) -> Gradients:
    """Gradients of query, key and value through the switchable backward."""
    switch = BackwardSwitch()
    output, _ = attention.switchable_attention(call, native_of(call), switch)
    with switch.to(mode):
        dq, dk, dv = torch.autograd.grad(
            output, (call.query, call.key, call.value), error, materialize_grads=True
        )
    return dq, dk, dv


def position_by_position(call: AttentionCall, error: Tensor) -> Gradients:
    """Self-only gradients: each query's error sent back alone; key and value at t = k."""
    output = native_of(call)(call.query, call.key, call.value)
    own = [torch.zeros_like(x) for x in (call.query, call.key, call.value)]
    for k in range(call.query.shape[2]):
        alone = torch.zeros_like(error)
        alone[:, :, k] = error[:, :, k]
        dq, dk, dv = torch.autograd.grad(
            output, (call.query, call.key, call.value), alone, retain_graph=True
        )
        own[0] += dq
        for slot, part in ((1, dk), (2, dv)):
            here = torch.zeros_like(part)
            here[:, :, k] = part[:, :, k]
            own[slot] += here
    return own[0], own[1], own[2]


def gradient_scales(call: AttentionCall, error: Tensor) -> Gradients:
    """Sums of absolute terms of the ordinary gradients: what both modes round relative to."""
    repeats = call.query.shape[1] // call.key.shape[1]
    alpha = attention_weights(call)
    q, e = call.query.detach().abs(), error.abs()
    k, v = (x.detach().abs().repeat_interleave(repeats, dim=1) for x in (call.key, call.value))
    pull = torch.einsum("bhkv,bhtv->bhkt", e, v)
    slope = alpha * (pull + (alpha * pull).sum(-1, keepdim=True)) * call.scale
    dk = torch.einsum("bhkt,bhkd->bhtd", slope, q)
    dv = torch.einsum("bhkt,bhkv->bhtv", alpha, e)
    dq = torch.einsum("bhkt,bhtd->bhkd", slope, k)
    grouped = (x.unflatten(1, (-1, repeats)).sum(2) for x in (dk, dv))
    return dq, *grouped  # type: ignore[return-value]


def explicit_logits(call: AttentionCall) -> Tensor:
    """(b, h, k, t) capped and masked; -inf where not attended."""
    repeats = call.query.shape[1] // call.key.shape[1]
    key = call.key.detach().repeat_interleave(repeats, dim=1)
    logits = call.query.detach() @ key.mT * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    mask = dense_mask(call)
    return logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask


def tangents_of(case: AttentionCase) -> dict[str, Tensor]:
    names, call = ("query", "key", "value", "sinks"), case.call()
    return {
        name: case.numbers(*tensor.shape, salt=6 + i)
        for i, name in enumerate(names)
        if (tensor := getattr(call, name)) is not None
    }


def dual_attention(
    case: AttentionCase, call: AttentionCall, tangents: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), forward_ad.dual_level(), blocks_of(case.chunk):
        duals = {n: forward_ad.make_dual(getattr(call, n).detach(), t) for n, t in tangents.items()}
        output = attention.forward_mode_attention(replace(call, **duals))
        plain, tangent = forward_ad.unpack_dual(output)
        return plain.clone(), tangent.clone()


def _forward_scale(call: AttentionCall, tangents: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Sums of absolute terms: of alpha dv, of alpha v, and twice the largest |ds| of a row."""
    repeats = call.query.shape[1] // call.key.shape[1]
    q, dq = call.query.detach().abs(), tangents["query"].abs()
    k, dk, v, dv = (
        x.detach().abs().repeat_interleave(repeats, dim=1)
        for x in (call.key, tangents["key"], call.value, tangents["value"])
    )
    ds = (dq @ k.mT + q @ dk.mT) * call.scale
    if "sinks" in tangents:
        ds = ds + tangents["sinks"].abs().view(1, -1, 1, 1)
    alpha = attention_weights(call)
    return alpha @ dv, alpha @ v, 2 * ds.amax(-1, keepdim=True)


class Shapes(TorchDispatchMode):
    """Remembers every tensor with two axes of at least ``length`` that an operation makes."""

    def __init__(self, length: int, mask: Tensor | None = None) -> None:
        super().__init__()
        self.length, self.large = length, set[tuple[str, tuple[int, ...]]]()
        self.storage = None if mask is None else mask.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if (
                isinstance(tensor, Tensor)
                and sum(n >= self.length for n in tensor.shape) > 1
                and tensor.untyped_storage().data_ptr() != self.storage
            ):
                self.large.add((str(func), tuple(tensor.shape)))
        return result


ALL = MASKS + STRUCTURES
BLOCKS = attention.AttentionStatistics.row_blocks
HARD = AttentionCase(b=2, g=2, r=3, t=7, mask="left", softcap=1.5, sinks=True, chunk=3)
BLIND = AttentionCase(b=2, g=1, r=2, t=5, mask="blind", chunk=2, seed=3)
HOLES = AttentionCase(b=2, g=2, r=2, t=9, mask="sliding holes", softcap=1.5, chunk=2, seed=1)


@given(attention_cases())
@example(HARD)
@example(BLIND)
@example(HOLES)
def test_self_backward_is_the_diagonal(case: AttentionCase) -> None:
    """Self mode: dq in full, dk and dv from the query at the same position only.

    Proves: self backward is the diagonal (exact), against explicit attention.
    """
    call, error = case.call(), case.error()
    expected = position_by_position(call, error)
    with blocks_of(case.chunk):
        own = switched(call, error, "self")
    scales = gradient_scales(call, error)
    for name, *sides in zip(("dq", "dk", "dv"), own, expected, scales, strict=True):
        close(*sides, CONTRACTION, name=f"self-only {name}")


@given(attention_cases())
@example(HARD)
@budget(0.5)
def test_the_mode_is_read_at_backward_time(case: AttentionCase) -> None:
    """One forward: self-only, then ordinary, then self-only again, each as if it were alone.

    Forward values and ordinary gradients are the kernel's own, bit by bit.

    Proves: the mode is read at backward time (exact), against the model's kernel, bit by bit.
    """
    call, error = case.call(), case.error()
    leaves = (call.query, call.key, call.value)
    plain = native_of(call)(*leaves)
    switch = BackwardSwitch()
    with blocks_of(case.chunk):
        output, _ = attention.switchable_attention(call, native_of(call), switch)
        alone = switched(call, error, "self")
        assert torch.equal(output, plain)
        expected = {"self": alone, "ordinary": torch.autograd.grad(plain, leaves, error)}
        for mode in ("self", "ordinary", "self"):
            with switch.to(mode):
                own = torch.autograd.grad(output, leaves, error, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(own, expected[mode], strict=True))
            # The training step's own backward, outside of any mode, is ordinary again.
            after = torch.autograd.grad(output, leaves, error, retain_graph=True)
            assert all(torch.equal(a, b) for a, b in zip(after, expected["ordinary"], strict=True))


@given(attention_cases())
@example(HARD)
@example(BLIND)
@example(HOLES)
def test_log_sum_exp_and_weights(case: AttentionCase) -> None:
    """lse, every block of alpha, and alpha_tt, against explicit softmax with sinks and masks.

    Proves: log sum exp and weights (exact), against explicit softmax.
    """
    call = case.call()
    logits, alpha = explicit_logits(call), attention_weights(call)
    if call.sinks is not None:
        sinks = call.sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        expected = torch.cat([logits, sinks], -1).logsumexp(-1)
    else:
        expected = logits.logsumexp(-1)
    with blocks_of(case.chunk):
        statistics = attention.AttentionStatistics(call)
        lse = statistics.lse.flatten(1, 2)
        assert torch.equal(lse.isinf(), expected.isinf())
        finite = ~expected.isinf()
        close(lse[finite], expected[finite], 1.0 + expected[finite].abs(), CONTRACTION, name="lse")
        rows = 0
        for block in statistics.row_blocks():
            assert block.rows.start == rows
            rows = block.rows.stop
            found = statistics.weights(block).flatten(1, 2)
            part = alpha[:, :, block.rows]
            # exp is as exact as its argument is small: a relative error of eps |logit|.
            size = part * (1.0 + logits[:, :, block.rows].abs().nan_to_num(posinf=0.0))
            size = size.masked_fill(part == 0, 0.0)
            close(
                found, part[..., block.columns], size[..., block.columns], CONTRACTION, name="alpha"
            )
            assert not bool(part[..., block.columns.stop :].any())
            assert not bool(part[..., : block.columns.start].any())
        assert rows == case.t
        own, slope = statistics.diagonal()
    own_alpha = alpha.diagonal(dim1=2, dim2=3)
    size = 1.0 + logits.diagonal(dim1=2, dim2=3).abs().nan_to_num(posinf=0.0)
    close(
        own.flatten(1, 2), own_alpha, (own_alpha * size).nan_to_num(), CONTRACTION, name="alpha_tt"
    )
    if case.softcap is None:
        assert slope is None
    else:
        assert slope is not None
        raw = replace(call, softcap=None, mask=torch.zeros(1, 1, 1, 1, dtype=torch.float64))
        x = explicit_logits(raw).diagonal(dim1=2, dim2=3) / case.softcap
        close(slope.flatten(1, 2), 1 - torch.tanh(x).square(), 1.0, CONTRACTION, name="slope")


@given(attention_cases())
@example(HARD)
@example(BLIND)
@example(HOLES)
@budget(0.5)
def test_the_oracle_attends_as_the_call_says(case: AttentionCase) -> None:
    """Its weights and outputs, whether a mask says who attends to whom, or window and documents.

    Proves: the oracle attends as the call says (exact), against explicit softmax.
    """
    call = case.call()
    alpha, (output, found) = attention_weights(call), split_attention(call)
    # exp is as exact as its argument is small: a relative error of eps |logit|. What an additive
    # mask sends to the least number is left out, or all of its row is, and then all are equal.
    logits = explicit_logits(call).abs()
    size = 1.0 + logits.where(logits < 1e30, 0.0).amax(-1, keepdim=True)
    close(found, alpha, size, CONTRACTION, name="alpha of the oracle")
    values = call.value.detach().repeat_interleave(case.r, dim=1)
    scale = size * (alpha @ values.abs() + values.abs().amax())
    close(output.detach(), alpha @ values, scale, CONTRACTION, name="output of the oracle")


@given(attention_cases(mask=st.sampled_from(["causal", "by_head"]), b=2), st.booleans())
@budget(0.3)
def test_a_mask_may_leave_out_leading_axes(case: AttentionCase, additive: bool) -> None:
    """(t, t), (1, t, t) and (h, t, t) mean what they broadcast to; documents (t,) likewise.

    Proves: a mask may leave out leading axes (exact), against the mask with all of them.
    """
    whole, error = case.call(), case.error()
    assert whole.mask is not None
    mask = whole.mask[0]  # of every row alike
    if additive:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9)
    expected = switched(replace(whole, mask=mask[None]), error, "self")
    for short in (mask, mask[0]) if case.mask == "causal" else (mask,):
        call = replace(whole, mask=short)
        assert all(map(torch.equal, switched(call, error, "self"), expected))
        close(split_attention(call)[1], attention_weights(call), 1.0, CONTRACTION, name="alpha")
    documents = torch.arange(case.t) // 2
    one, all_rows = (
        switched(replace(whole, mask=None, documents=of), error, "self")
        for of in (documents, documents.expand(2, -1))
    )
    assert all(map(torch.equal, one, all_rows))


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("mask", torch.ones(4, 3, dtype=torch.bool)),
        ("mask", torch.ones(3, 4, 4, dtype=torch.bool)),
        ("mask", torch.ones(1, 1, 1, 4, 4, dtype=torch.bool)),
        ("mask", torch.ones(4, 4, dtype=torch.long)),
        ("documents", torch.zeros(2, 3, dtype=torch.long)),
        ("documents", torch.zeros(2, 4)),
    ],
)
def test_a_call_that_states_no_attention_is_refused(name: str, stated: Tensor) -> None:
    """Where an adapter makes it, and not in the arithmetic behind."""
    call = AttentionCase(b=2, g=1, r=2, t=4).call()
    with pytest.raises(InputError, match=f"{name} of an AttentionCall") as raised:
        replace(call, **{name: stated})
    assert str(tuple(stated.shape)) in str(raised.value)


def fused_of(call: AttentionCall, mask: Tensor) -> Any:
    """torch's fused kernel, which keeps the log-sum-exp of each row, under this mask."""
    repeats = call.query.shape[1] // call.key.shape[1]

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale)

    return fused


@given(attention_cases(softcap=None, sinks=False, d=4, v=4, t=st.integers(1, 20)), st.booleans())
@example(replace(BLIND, d=4, v=4), True)
def test_log_sum_exp_of_the_kernel(case: AttentionCase, as_called: bool) -> None:
    """The one that a fused kernel kept, if it attends as the call says; else it is computed.

    Proves: log sum exp of the kernel (exact), against explicit softmax.
    """
    call = case.call()
    mask = dense_mask(call)
    other = torch.ones_like(mask) if mask.dtype == torch.bool else torch.zeros_like(mask)
    if not as_called:
        assume(not torch.equal(other, mask))
    kernel = fused_of(call, mask if as_called else other)
    attention._ATTENDED_AS_CALLED.clear()  # else not each call is compared
    computed = mock.Mock(side_effect=BLOCKS)
    blocks = mock.patch.object(attention.AttentionStatistics, "row_blocks", lambda s: computed(s))
    with blocks_of(case.chunk), blocks:
        _, statistics = attention.switchable_attention(call, kernel, BackwardSwitch())
        lse = statistics.lse.flatten(1, 2)
        own, _ = statistics.diagonal()
    assert computed.called != as_called
    expected, alpha = explicit_logits(call).logsumexp(-1), attention_weights(call)
    finite = ~expected.isinf()
    close(lse[finite], expected[finite], 1.0 + expected[finite].abs(), CONTRACTION, name="lse")
    own_alpha = alpha.diagonal(dim1=2, dim2=3)
    close(own.flatten(1, 2), own_alpha, 1.0 + own_alpha, CONTRACTION, name="alpha_tt")


@given(attention_cases(softcap=None, sinks=False, mask="none", d=4, v=4, t=st.integers(2, 20)))
@budget(0.3)
def test_log_sum_exp_of_a_kernel_that_rounds_its_inputs(case: AttentionCase) -> None:
    """Under autocast a kernel may round its inputs; the logits here do not, whatever ran before.

    Proves: log sum exp of the kernel (exact), against explicit softmax.
    """
    call = case.call()
    call = replace(call, **{n: getattr(call, n).float() for n in ("query", "key", "value")})
    exact = fused_of(call, dense_mask(call))

    def rounding(*tensors: Tensor) -> Tensor:
        return exact(*(tensor.bfloat16() for tensor in tensors))

    attention._ATTENDED_AS_CALLED.clear()
    for kernel in (exact, exact, exact, rounding):  # the fourth call is not compared
        _, statistics = attention.switchable_attention(call, kernel, BackwardSwitch())
        lse = statistics.lse.flatten(1, 2)
    expected = explicit_logits(call).logsumexp(-1)
    close(lse, expected, 1.0 + expected.abs(), 1e-5, name="lse")


@given(attention_cases(), st.frozensets(st.sampled_from(["query", "key", "value", "sinks"])))
@example(HARD, frozenset({"query", "key", "value", "sinks"}))
@example(HARD, frozenset({"sinks"}))
@example(BLIND, frozenset({"query", "key", "value"}))
def test_forward_mode_is_the_jvp(case: AttentionCase, moving: frozenset[str]) -> None:
    """Output and tangent equal those of explicit attention; tangents may be absent.

    Proves: forward mode is the jvp (exact), against explicit attention.
    """
    call = case.call()
    tangents = {n: t for n, t in tangents_of(case).items() if n in moving}
    if not tangents:
        return
    plain, tangent = dual_attention(case, call, tangents)

    def explicit(*tensors: Tensor) -> Tensor:
        moved = replace(call, **dict(zip(tangents, tensors, strict=True)))
        return explicit_attention(moved, moved.query, moved.key, moved.value)

    primals = tuple(getattr(call, n).detach() for n in tangents)
    expected = torch.func.jvp(explicit, primals, tuple(tangents.values()))
    alpha, output, speed = _forward_scale(call, tangents_of(case))
    close(plain, expected[0], output, CONTRACTION, name="forward mode, output")
    close(tangent, expected[1], output * speed + alpha, CONTRACTION, name="forward mode, tangent")


@pytest.mark.parametrize("mask", ["none", "window", "left"])
@pytest.mark.parametrize("window", [None, 16])
def test_no_square_of_the_length(mask: str, window: int | None) -> None:
    """No tensor with two axes of T anywhere but in the mask: band, self-only and forward mode.

    Proves: no square of the length (exact), against shapes of every tensor.
    """
    case = AttentionCase(b=1, g=2, r=1, t=200, d=4, v=4, mask=mask, chunk=32)
    call, error = case.call(), case.error()
    hidden = call.mask
    additive = hidden  # the kernel would turn a boolean mask into this one
    if hidden is not None and hidden.dtype == torch.bool:
        additive = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(~hidden, -torch.inf)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, additive, is_causal=hidden is None, scale=call.scale
        )

    with blocks_of(case.chunk), Shapes(case.t, hidden) as seen:
        switch = BackwardSwitch()
        output, statistics = attention.switchable_attention(call, fused, switch)
        with switch.to("self"):
            torch.autograd.grad(output, (call.query, call.key, call.value), error)
        for head_mean in (False, True):
            attention.propagate_values(statistics, error, window=window, head_mean=head_mean)
    assert not seen.large, f"T x T outside the kernel: {sorted(seen.large)}"
    tangents = tangents_of(case)
    with Shapes(case.t, hidden) as seen:
        dual_attention(case, call, tangents)
    assert not seen.large, f"T x T in forward mode: {sorted(seen.large)}"


def test_the_switch_falls_back_to_ordinary_after_an_exception() -> None:
    switch = BackwardSwitch()
    with pytest.raises(RuntimeError, match="stop"), switch.to("self"):
        raise RuntimeError("stop")
    assert switch.mode == "ordinary"
    with switch.to("self"):
        with switch.to("ordinary"):
            assert switch.mode == "ordinary"
        assert switch.mode == "self"


def test_statistics_hold_no_graph_and_copy_nothing() -> None:
    call = HARD.call()
    statistics = attention.AttentionStatistics(call)
    for kept, original in ((statistics.query, call.query), (statistics.key, call.key)):
        assert not kept.requires_grad
        assert kept.data_ptr() == original.data_ptr()
    assert not statistics.lse.requires_grad


def test_narrow_queries_are_attended_in_float32() -> None:
    call = AttentionCase(t=6).call()
    tensors = {n: getattr(call, n).detach().to(torch.bfloat16) for n in ("query", "key", "value")}
    narrow = replace(call, **tensors)
    statistics = attention.AttentionStatistics(narrow)
    assert statistics.lse.dtype == torch.float32
    wide = replace(narrow, query=narrow.query.float(), key=narrow.key.float())
    assert torch.equal(statistics.lse, attention.AttentionStatistics(wide).lse)
