"""A kernel with the signature, the layouts and the reticence of the flash-attn package, on a CPU.

Like the package's it takes (batch, length, heads, width), or documents one after the other with
their bounds; knows causality, windows, soft-caps and sinks by its own arguments and takes no mask;
returns the head outputs alone; keeps the log-sum-exp for a backward that it does itself; and has no
rule for forward mode. Models reach it as they reach a kernel of the hub: transformers loads a
module with these two functions, and its own wrapper prepares the arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.integrations import hub_kernels

NAME = "kernels-community/vllm-flash-attn3"
"""``attn_implementation`` of the hub's kernel that it stands in for, which takes sinks as well."""


@contextmanager
def standin() -> Iterator[None]:
    """Within the context ``set_attn_implementation(NAME)`` loads the kernel, for good."""

    def found(name: str, **_: Any) -> Any:
        assert name == NAME
        return SimpleNamespace(flash_attn_func=rows, flash_attn_varlen_func=documents)

    with (
        patch.object(hub_kernels, "is_kernels_available", lambda: True),
        patch.object(hub_kernels, "get_kernel", found),
    ):
        yield


def rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    assert causal
    batch, length, heads, _ = q.shape
    bounds = torch.arange(batch + 1) * length
    flat = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    out, _ = _Kernel.apply(*flat, bounds, softmax_scale, window_size[0], softcap, s_aux, batch)
    return out.view(batch, length, heads, -1)  # type: ignore[no-any-return]


def documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    assert causal
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    out, _ = _Kernel.apply(q, k, v, cu_seqlens_q, softmax_scale, window_size[0], softcap, s_aux, 0)
    return out  # type: ignore[no-any-return]


class _Kernel(torch.autograd.Function):
    """Documents one after the other: (tokens, heads, width)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bounds: Tensor,
        scale: float | None,
        left: int,
        softcap: float,
        sinks: Tensor | None,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.bounds, ctx.left, ctx.softcap = [int(x) for x in bounds], left, softcap
        ctx.scale = q.shape[-1] ** -0.5 if scale is None else scale
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        # What no document covers is whatever was in memory.
        out = torch.full((*q.shape[:2], v.shape[-1]), torch.nan, dtype=wide)
        lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=wide)
        for start, stop in zip(ctx.bounds[:-1], ctx.bounds[1:], strict=True):
            part = slice(start, stop)
            logits, _ = _logits(ctx, q[part].to(wide), k[part].to(wide))
            if sinks is not None:
                column = sinks.to(wide)[:, None, None].expand(-1, stop - start, 1)
                logits = torch.cat([logits, column], -1)
            lse[:, part] = logits.logsumexp(-1)
            alpha = (logits - lse[:, part, None]).exp()[..., : stop - start]
            out[part] = torch.einsum("hkt,thd->khd", alpha, _heads(v[part].to(wide), q.shape[1]))
        out = out.to(q.dtype)
        # A batch of equal rows saves (rows, heads, length), as the package does.
        kept = lse if rows == 0 else lse.view(q.shape[1], rows, -1).movedim(1, 0).contiguous()
        ctx.save_for_backward(q, k, v, out, kept, sinks, torch.zeros(2, dtype=torch.int64))
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, error: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, _ = ctx.saved_tensors
        wide, heads = lse.dtype, q.shape[1]
        if lse.dim() == 3:
            lse = lse.movedim(0, 1).reshape(heads, -1)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
        ds_sinks = None if sinks is None else torch.zeros(heads, dtype=wide)
        for start, stop in zip(ctx.bounds[:-1], ctx.bounds[1:], strict=True):
            part = slice(start, stop)
            qs, ks, vs, e, o = (x[part].to(wide) for x in (q, k, v, error, out))
            logits, slope = _logits(ctx, qs, ks)
            alpha = (logits - lse[:, part, None]).exp()
            delta = (e * o).sum(-1).mT
            ds = alpha * (torch.einsum("khd,thd->hkt", e, _heads(vs, heads)) - delta[..., None])
            if ds_sinks is not None:
                ds_sinks -= ((sinks.to(wide)[:, None] - lse[:, part]).exp() * delta).sum(-1)
            ds = ds * slope * ctx.scale
            dq[part] = torch.einsum("hkt,thd->khd", ds, _heads(ks, heads))
            dk[part] = _summed(torch.einsum("hkt,khd->thd", ds, qs), k.shape[1])
            dv[part] = _summed(torch.einsum("hkt,khd->thd", alpha, e), v.shape[1])
        found = (dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))
        sunk = None if ds_sinks is None else ds_sinks.to(sinks.dtype)
        return *found, None, None, None, None, sunk, None


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _summed(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(1, (groups, -1)).sum(2)


def _logits(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """(h, k, t), and the slope of the soft-cap."""
    logits = torch.einsum("khd,thd->hkt", q, _heads(k, q.shape[1])) * ctx.scale
    slope = torch.ones_like(logits)
    if ctx.softcap:
        capped = torch.tanh(logits / ctx.softcap)
        logits, slope = capped * ctx.softcap, 1 - capped.square()
    places = torch.arange(len(q))
    apart = places[:, None] - places
    seen = apart >= 0
    if ctx.left >= 0:
        seen = seen & (apart <= ctx.left)
    return logits.masked_fill(~seen, -torch.inf), slope
