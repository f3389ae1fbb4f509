"""The log-sum-exp that a fused attention kernel saved for its own backward.

Fused kernels return the head outputs only. Their backward needs the log-sum-exp of each row too, so
their node in the autograd graph keeps it: PyTorch's (flash on CPU and CUDA, memory-efficient,
cuDNN) under a name, those of the flash-attn packages (2, 3 and 4, and the hub's builds of them)
among the tensors that a ``torch.autograd.Function`` saves. Reading it there costs nothing and
leaves the kernel's call as it is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alphatoken.model.protocol import AttentionCall

__all__ = ["SavedLse", "agrees", "saved_log_sum_exp"]

_NODES = 64  # between a kernel and the tensor that the model's function returns lie some ten
_NAMES = ("_saved_logsumexp", "_saved_log_sumexp")
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
_NARROW = 2e-2  # 16-bit inputs; another base, or a scale left out, is further away


@dataclass(frozen=True)
class SavedLse:
    """Log-sum-exp that a kernel saved.

    Attributes:
        lse: (b, h, t), natural logarithm if the kernel's kind has it; -inf at padding.
        kind: of the kernel and of the call: what two calls must share for one to speak for the
            other.
    """

    lse: Tensor
    kind: Hashable


@torch.no_grad()
def saved_log_sum_exp(output: Tensor, call: AttentionCall) -> SavedLse | None:
    """The log-sum-exp saved by the kernel that made ``output``; None if none is found.

    Args:
        output: of the kernel, within the graph; nodes above ``call.query`` are not looked at.
        call: the attention call.
    """
    for node in _nodes(output, (call.query, call.key, call.value)):
        found = _of_pytorch(node, call)
        if found is None:
            found = _of_function(node, call)
        if found is not None:
            return SavedLse(found.detach(), _kind(node, call))
    return None


def agrees(
    saved: Tensor, computed: Tensor, dtype: torch.dtype, padding: Tensor | None = None
) -> bool | None:
    """True if a saved log-sum-exp is the computed one, as far as ``dtype`` of the inputs goes.

    Rows that attend to nothing have none: kernels put 0 or a very negative number there, and their
    weights are zero in any case. None if there are no others.

    Args:
        saved: (b, g, r, t).
        computed: likewise.
        dtype: of the inputs.
        padding: (b, t) True where there is no token: sinks alone may stand there.
    """
    real = computed.isfinite() & (computed.abs() < 1e30)
    if padding is not None:
        real = real & ~padding[:, None, None]
    allowed = _TOLERANCE.get(dtype, _NARROW) * (1 + computed.abs())
    return bool(((saved - computed).abs() <= allowed)[real].all()) if bool(real.any()) else None


def _nodes(output: Tensor, inputs: tuple[Tensor, ...]) -> Iterator[Any]:
    """The graph's nodes from ``output`` back to the inputs, nearest first.

    Beyond the inputs lie the calls of other layers, which saved what is theirs.
    """
    stop = {x.grad_fn for x in inputs}
    queue, seen = deque([output.grad_fn]), set(stop)
    while queue and len(seen) < _NODES:
        node = queue.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        queue.extend(before for before, _ in node.next_functions)


def _of_pytorch(node: Any, call: AttentionCall) -> Tensor | None:
    for name in _NAMES:
        found = getattr(node, name, None)
        if isinstance(found, Tensor):
            return _dense(found, call)
    return None


def _of_function(node: Any, call: AttentionCall) -> Tensor | None:
    """State of a ``torch.autograd.Function``: its one saved tensor of log-sum-exps' shape."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return None
    for saved in node.saved_tensors:
        if not isinstance(saved, Tensor) or not saved.is_floating_point():
            continue
        found = _dense(saved, call) if call.documents is None else _of_documents(saved, call)
        if found is not None:
            return found
    return None


def _dense(saved: Tensor, call: AttentionCall) -> Tensor | None:
    """(b, h, t or more) or (b, h, t, 1): kernels round the length up to their tiles."""
    batch, heads, length, _ = call.query.shape
    if saved.dim() == 4 and saved.shape[-1] == 1:
        saved = saved.squeeze(-1)
    if saved.dim() != 3 or saved.shape[:2] != (batch, heads) or saved.shape[2] < length:
        return None
    return saved[..., :length]


def _of_documents(saved: Tensor, call: AttentionCall) -> Tensor | None:
    """(h, tokens or more) of all documents in a row, put at the tokens of (b, h, t)."""
    assert call.documents is not None
    token = call.documents >= 0
    heads, count = call.query.shape[1], int(token.sum())
    if saved.dim() != 2 or saved.shape[0] != heads or saved.shape[1] < count:
        return None
    found = saved.new_full((*token.shape, heads), -torch.inf)
    found[token] = saved[:, :count].mT
    return found.movedim(-1, 1)


def _kind(node: Any, call: AttentionCall) -> Hashable:
    parts = (call.mask, call.documents, call.window, call.softcap, call.sinks)
    given = tuple(part is not None for part in parts)
    return (type(node), call.query.device.type, call.query.dtype, given)
