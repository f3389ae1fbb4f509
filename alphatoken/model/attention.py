"""Softmax attention with a switchable backward, banded weights, Value-Propagation, forward mode.

Letters: b batch, k query (loss) position, t key (token) position, h query head, g key/value head,
r query heads per key/value head, d head dim. Query head h reads key/value head ``h // r``.

Per head and query k, with logits ``s_kt = c q_k . k_t`` (soft-capped and masked as the model
does), weights ``alpha_kt = exp(s_kt - lse_k)`` and output ``o_k = sum_t alpha_kt v_t``, an output
error ``e_k`` gives

    dv_t += alpha_kt e_k
    ds_kt = alpha_kt (v_t - o_k) . e_k        dk_t += ds_kt s'_kt c q_k,   dq_k += ds_kt s'_kt c k_t

with ``s' = 1 - (s/cap)^2`` under soft-capping, else 1. The *ordinary* backward sums over all
pairs; the *self-only* one keeps dq in full and, of dk and dv, only ``k = t``. Which one runs is
read from a ``BackwardSwitch`` at backward time, so a single forward serves scoring and training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad

from alphatoken.errors import ModelError
from alphatoken.model.protocol import AttentionCall, NativeAttention
from alphatoken.model.switch import BackwardSwitch, around
from alphatoken.support.devices import holds
from alphatoken.support.precision import full_precision, wide

# Blocks bound the memory, and smaller ones are faster as well, since they fit the processor's
# caches (measured, docs/log.yaml).
_CHUNK = 256  # queries per block, at most
_WORKSPACE = 2**22  # numbers per block, b * h * queries * keys: long rows get smaller blocks


def _group(heads: Tensor, groups: int) -> Tensor:
    """(b, h, ...) -> (b, g, r, ...): query head h belongs to key/value head h // r."""
    batch, count, *rest = heads.shape
    return heads.reshape(batch, groups, count // groups, *rest)


def _block(mask: Tensor, rows: slice, columns: slice) -> Tensor:
    """Rows and columns of a mask that may be broadcast along either axis."""
    if mask.shape[-2] != 1:
        mask = mask[..., rows, :]
    return mask[..., columns] if mask.shape[-1] != 1 else mask


class CausalStructure:
    """The mask of a call without one, made block by block and never as a whole.

    Position k attends to t <= k of its own document, if both are tokens, and with a window w only
    to those fewer than w tokens back: the distance is counted in tokens, since kernels that take
    documents leave padding out before they count.
    """

    def __init__(self, call: AttentionCall) -> None:
        self.window, self.documents = call.window, call.documents
        self.device = call.query.device
        self._places: Tensor | None = None
        self._begins: list[int] | None = None

    @property
    def padding(self) -> Tensor | None:
        """(b, t) True at padding; None without documents."""
        return None if self.documents is None else self.documents < 0

    def block(self, rows: slice, columns: slice) -> Tensor:
        """True where a query of ``rows`` attends to a key of ``columns``: (b or 1, 1, 1, k, t)."""
        k = torch.arange(rows.start, rows.stop, device=self.device).unsqueeze(-1)
        t = torch.arange(columns.start, columns.stop, device=self.device)
        allowed = t <= k
        if self.documents is None:
            if self.window is not None:
                allowed &= k - t < self.window
            return allowed[None, None, None]
        own, other = self.documents[:, rows, None], self.documents[:, None, columns]
        allowed = allowed & (own == other) & (own >= 0)
        if self.window is not None:
            places = self._tokens_before()
            allowed &= places[:, rows, None] - places[:, None, columns] < self.window
        return allowed[:, None, None]

    def first_key(self, rows: slice) -> int:
        """No query of ``rows`` attends to a key before this one."""
        if self.documents is None:
            return 0 if self.window is None else max(0, rows.start - self.window + 1)
        if self._begins is None:
            self._begins = self._document_begins(self.documents)
        return min(self._begins[rows])

    def _tokens_before(self) -> Tensor:
        if self._places is None:
            assert self.documents is not None
            self._places = (self.documents >= 0).long().cumsum(-1)
        return self._places

    @staticmethod
    def _document_begins(documents: Tensor) -> list[int]:
        """Earliest begin, over the rows, of the document at each position."""
        places = torch.arange(documents.shape[1], device=documents.device)
        token = documents >= 0
        # Padding may lie inside a document, so a token is compared with the token before it.
        latest = torch.where(token, places, -1).cummax(-1).values
        before = nn.functional.pad(latest[:, :-1], (1, 0), value=-1)
        other = documents.gather(1, before.clamp(min=0)) != documents
        begins = torch.where(token & (other | (before < 0)), places, 0).cummax(-1).values
        return [int(begin) for begin in begins.amin(0).tolist()]


@dataclass(frozen=True)
class _Block:
    """Logits of one block of queries against one block of keys.

    ``logits`` (b, g, r, k, t) are capped and masked (-inf where not attended); ``slope`` is the
    derivative of the soft-cap, None without one.
    """

    logits: Tensor
    slope: Tensor | None
    rows: slice
    columns: slice


_SAVED_NAMES = ("_saved_logsumexp", "_saved_log_sumexp")
_ATTENDED_AS_CALLED: Counter[tuple[object, ...]] = Counter()
"""Kinds of calls whose kernel's log-sum-exp was that of the call, with the number of calls."""
_COMPARED_EVERY = 64
"""Calls of a kind between two comparisons; at first sooner: the 1st, 2nd, 4th, 8th, ..."""
_COMPARED = 8
"""Queries at either end of a call whose log-sum-exp is compared."""


def saved_log_sum_exp(output: Tensor, shape: torch.Size) -> tuple[str, Tensor] | None:
    """(name of the kernel's node, (b, h, t) log-sum-exp that it kept for its backward), or None.

    Args:
        output: of the kernel, or a view or copy of it.
        shape: of the queries, (b, h, t, d).
    """
    hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    # Where saved tensors pass through hooks, as under checkpointing, reading one runs a block anew.
    if hooks is None or hooks(True) is not None:
        return None
    node: Any = output.grad_fn
    for _ in range(4):
        if node is None:
            return None
        for name in _SAVED_NAMES:
            saved = getattr(node, name, None)
            if isinstance(saved, Tensor) and saved.dim() == 3 and saved.shape[:2] == shape[:2]:
                # Some kernels fill up the last axis.
                return (node.name(), saved[..., : shape[2]]) if saved.shape[2] >= shape[2] else None
        above = [parent for parent, _ in node.next_functions if parent is not None]
        node = above[0] if len(above) == 1 else None
    return None


class AttentionStatistics:
    """Logits, log-sum-exp and weights of one attention call, recomputed in blocks, never T x T.

    The model's fused kernel returns no weights, so they are computed again from the queries and
    keys. Their log-sum-exp, which takes all T x T logits, is the one that the kernel kept for its
    backward, where it kept one and that is of this call; else it is computed as well. Queries and
    keys are kept detached, which costs no memory because the graph holds the same storage.
    Everything is computed without a graph, in float32 or wider, as fused kernels accumulate in
    float32 for 16-bit inputs too.
    """

    def __init__(self, call: AttentionCall) -> None:
        self.groups = call.key.shape[1]
        self.query = _group(call.query.detach(), self.groups)
        self.key = call.key.detach()
        self.scale, self.softcap, self.mask = call.scale, call.softcap, call.mask
        self.sinks = None if call.sinks is None else call.sinks.detach()
        self.dtype = wide(self.query.dtype)
        self.length = self.key.shape[2]
        self._causal = CausalStructure(call)  # read where there is no mask
        self._lse: Tensor | None = None
        self._saved: tuple[str, Tensor] | None = None

    def take_saved(self, output: Tensor) -> None:
        """Take the log-sum-exp that the kernel kept, from its output."""
        # No kernel that keeps one caps its logits or has sinks. Under autocast it may have rounded
        # queries and keys before their products, which are formed again here without that.
        rounded = output.dtype != self.query.dtype
        if self.softcap is None and self.sinks is None and not rounded:
            self._saved = saved_log_sum_exp(output, self.query.flatten(1, 2).shape)

    @full_precision
    def _saved_lse(self) -> Tensor | None:
        """(b, g, r, k) log-sum-exp of the kernel; None without one, or if the call says otherwise.

        That it attends to what the call says is compared now and then, at the first and the last
        queries, where masks, windows, documents and padding show.
        """
        if self._saved is None:
            return None
        name, saved = self._saved
        self._saved, lse = None, _group(saved.detach().to(self.dtype), self.groups)
        kind = (
            name, self.dtype, self.query.device.type, self.mask is None, self._causal.window,
            self._causal.documents is None,
        )  # fmt: skip
        calls = _ATTENDED_AS_CALLED[kind]
        if calls.bit_count() == 1 or calls % _COMPARED_EVERY == 0:
            otherwise = self._otherwise(lse, saved.dtype)
            if not holds(otherwise, _refuse_kernel, before=calls > 0):
                return None
        _ATTENDED_AS_CALLED[kind] += 1
        return lse

    def _otherwise(self, lse: Tensor, dtype: torch.dtype) -> Tensor:
        """Whether (b, g, r, k) is not the log-sum-exp of this call at the first or last queries.

        ``dtype``: that it was kept in.
        """
        bad, few = [], min(_COMPARED, self.length)
        for rows in (slice(0, few), slice(self.length - few, self.length)):
            last = rows.stop if self.mask is None else self.length
            expected = torch.logsumexp(self.block(rows, slice(0, last)).logits, -1)
            size = 1e-3 if self.query.element_size() < 4 else 30 * torch.finfo(dtype).eps
            apart = (lse[..., rows] - expected).abs() > size * (1 + expected.abs())
            # Of a row that attends to nothing each kernel keeps something else.
            bad.append(((apart | ~lse[..., rows].isfinite()) & expected.isfinite()).any())
        return torch.stack(bad).any()

    @full_precision
    def block(self, rows: slice, columns: slice) -> _Block:
        """Capped, masked logits of the queries in ``rows`` against the keys in ``columns``."""
        q = self.query[..., rows, :].to(self.dtype)
        k = self.key[..., columns, :].to(self.dtype)
        logits, slope = _cap(torch.einsum("bgrkd,bgtd->bgrkt", q, k) * self.scale, self.softcap)
        if self.mask is None:
            logits = logits.masked_fill(~self._causal.block(rows, columns), -torch.inf)
        else:
            logits = _apply(logits, _grouped_mask(_block(self.mask, rows, columns), self.groups))
        return _Block(logits, slope, rows, columns)

    def first_key(self, rows: slice) -> int:
        """No query of ``rows`` attends to a key before this one."""
        return self._causal.first_key(rows) if self.mask is None else 0

    def row_blocks(self) -> Iterator[_Block]:
        """Blocks that cover every query once, with all the keys that it can attend to."""
        heads = self.query.shape[0] * self.query.shape[1] * self.query.shape[2]
        size = min(_CHUNK, max(16, _WORKSPACE // max(1, heads * self.length)))
        for start in range(0, self.length, size):
            rows = slice(start, min(start + size, self.length))
            # Without a mask attention is causal, and keys after the block's last query drop out.
            last = rows.stop if self.mask is None else self.length
            yield self.block(rows, slice(self.first_key(rows), last))

    @property
    def lse(self) -> Tensor:
        """(b, g, r, k) log-sum-exp of each row, sinks included.

        -inf for a row that attends to nothing.
        """
        # This is the one quantity that needs all T x T logits. It is kept, because the self-only
        # backward (``diagonal``) and Value-Propagation (``weights``) of a call both need it.
        if self._lse is None:
            with torch.no_grad():
                self._lse = self._saved_lse()
        if self._lse is None:
            with torch.no_grad():
                rows = [torch.logsumexp(block.logits, -1) for block in self.row_blocks()]
                lse = torch.cat(rows, -1)
                if self.sinks is not None:  # they take probability: part of the denominator
                    sinks = self.sinks.to(self.dtype).view(self.groups, -1)
                    lse = torch.logaddexp(lse, sinks[None, :, :, None])
                self._lse = lse
        return self._lse

    def weights(self, block: _Block) -> Tensor:
        """alpha (b, g, r, k, t) of one block."""
        # A query that may attend to nothing has lse = -inf, and -inf - (-inf) would be NaN. With 0
        # in its place all its weights are exp(-inf) = 0.
        lse = self.lse[..., block.rows].unsqueeze(-1)
        return torch.exp(block.logits - lse.masked_fill(lse == -torch.inf, 0.0))

    def softmax(self, block: _Block) -> tuple[Tensor, Tensor | None]:
        """alpha (b, g, r, k, t) of a block with all keys of its queries, and the sinks' share.

        The same as ``weights``, without a pass for the log-sum-exp. The share is (b, g, r, k, 1),
        None without sinks.
        """
        logits, share = block.logits, None
        if self.sinks is None:
            alpha = torch.softmax(logits, -1)
        else:
            sinks = self.sinks.to(self.dtype).view(self.groups, -1)[None, :, :, None, None]
            column = sinks.expand(*logits.shape[:-1], 1)
            alpha, share = torch.softmax(torch.cat([logits, column], -1), -1).split(
                [logits.shape[-1], 1], -1
            )
        # A query that may attend to nothing: softmax gives NaN there. In causal attention every
        # query attends to itself at least, if it is no padding.
        if self.mask is not None or self._causal.documents is not None:
            alpha = alpha.masked_fill(logits.amax(-1, keepdim=True) == -torch.inf, 0.0)
        return alpha, share

    @full_precision
    def diagonal(self) -> tuple[Tensor, Tensor | None]:
        """alpha_tt (b, g, r, t), and the soft-cap's slope there (None without one)."""
        dots = torch.einsum("bgrtd,bgtd->bgrt", self.query.to(self.dtype), self.key.to(self.dtype))
        logits, slope = _cap(dots * self.scale, self.softcap)
        if self.mask is not None:
            every = torch.arange(self.length, device=logits.device)
            mask = self.mask
            # Indexing the diagonal needs both axes in full; ``expand`` makes no copy.
            if mask.shape[-2] == 1 or mask.shape[-1] == 1:
                mask = mask.expand(*mask.shape[:-2], self.length, self.length)
            logits = _apply(logits, _grouped_mask(mask[..., every, every], self.groups))
        elif self._causal.padding is not None:
            logits = logits.masked_fill(self._causal.padding[:, None, None], -torch.inf)
        lse = self.lse
        return torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)), slope


def _refuse_kernel() -> None:
    _ATTENDED_AS_CALLED.clear()
    raise ModelError(
        "an attention kernel attends to other keys than its call says",
        got="another log-sum-exp than that of the call's mask, window and documents",
        why="values weigh later tokens by what the call says",
        remedy="take the values, or the step, once more: weights are computed in full from here on",
    )


def _cap(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    if softcap is None:
        return logits, None
    capped = torch.tanh(logits / softcap)
    return capped * softcap, 1 - capped.square()


def _grouped_mask(mask: Tensor, groups: int) -> Tensor:
    """(b, 1 or h, ...) -> (b, 1, 1, ...) or (b, g, r, ...)."""
    return mask.unsqueeze(1) if mask.shape[1] == 1 else _group(mask, groups)


def _apply(logits: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return logits.masked_fill(~mask, -torch.inf)
    # Additive masks carry the dtype's most negative number, not -inf. They are added as they are: a
    # row in which everything is masked (padding) then gets the same equal weights as in the model.
    return logits + mask.to(logits.dtype)


@full_precision
def self_terms(
    statistics: AttentionStatistics, output: Tensor, value: Tensor, error: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients that reach a key and a value from the query at the same position.

    ``dv_t = alpha_tt e_t`` and ``dk_t = alpha_tt ((v_t - o_t) . e_t) s'_tt c q_t``, summed over
    the query heads of each key/value head.

    Args:
        statistics: of the attention call.
        output: head outputs (b, h, t, d_v).
        value: values (b, g, t, d_v).
        error: errors at the head outputs (b, h, t, d_v).

    Returns:
        (dk, dv), shaped as key and value. Exact up to rounding.
    """
    dtype, groups = statistics.dtype, statistics.groups
    alpha, slope = statistics.diagonal()
    o, e = (_group(x.to(dtype), groups) for x in (output, error))
    # The sum over r is that over the query heads which share a key/value head.
    dv = torch.einsum("bgrt,bgrtd->bgtd", alpha, e)
    # The gradient of the diagonal logit, through softmax: ds_tt = alpha_tt (v_t - o_t) . e_t.
    pull = torch.einsum("bgrtd,bgrtd->bgrt", value.to(dtype).unsqueeze(2) - o, e) * alpha
    if slope is not None:
        pull = pull * slope
    dk = torch.einsum("bgrt,bgrtd->bgtd", pull * statistics.scale, statistics.query.to(dtype))
    return dk.to(statistics.key.dtype), dv.to(value.dtype)


def switchable_attention(
    call: AttentionCall, native: NativeAttention, switch: BackwardSwitch
) -> tuple[Tensor, AttentionStatistics]:
    """Run the model's own attention kernel inside a graph whose backward obeys ``switch``.

    The gradient of a query belongs to the query's own position, so it is the kernel's in self mode
    too; the ``k = t`` terms of key and value are added in closed form (see ``around``). Forward
    values, and gradients in ordinary mode, are the kernel's own.

    Args:
        call: the attention call; query, key and value belong to the graph.
        native: the model's kernel.
        switch: read at backward time.

    Returns:
        The head outputs (b, h, t, d_v), and the call's statistics.

    Exactness: self mode equals the diagonal of the cross-position Jacobian exactly. Oracle:
    ``alphatoken.oracle.influence`` and ``alphatoken.oracle.jacobian``.
    """
    statistics = AttentionStatistics(call)

    def kernel(*tensors: Tensor) -> Tensor:
        output = native(*tensors)
        statistics.take_saved(output)
        return output

    def own(error: Tensor, output: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return self_terms(statistics, output, value, error)

    inputs = (call.query, call.key, call.value)
    return around(kernel, inputs, switch, own, passing=1), statistics


def _band(block: _Block, window: int | None) -> Tensor:
    """(k, t) True where t < k <= t + window."""
    k = torch.arange(block.rows.start, block.rows.stop, device=block.logits.device).unsqueeze(-1)
    t = torch.arange(block.columns.start, block.columns.stop, device=block.logits.device)
    later = t < k
    return later if window is None else later & (k <= t + window)


@full_precision
def propagate_values(
    statistics: AttentionStatistics,
    error: Float[Tensor, "b h t d"],
    *,
    window: int | None,
    head_mean: bool = False,
) -> Float[Tensor, "b g t d"]:
    """Value-Propagation: errors that reach the value at t from later queries within a window.

        e~_t^g = sum_{k in (t, t+W]} sum_{h in g} alpha_{k,t}^h e_k^h

    Args:
        statistics: of the attention call.
        error: errors e_k^h at the head outputs (self-only ones for the paper's term).
        window: W; None means no limit. W = 0 gives zero.
        head_mean: the paper's scalar alpha instead of each head's own: averaged over all query
            heads, errors summed over the query heads of each key/value head.

    Returns:
        (b, g, t, d_v): the error at the value states, in float32 or wider.

    Exactness: approximates the causal part (column minus diagonal) of the influence matrix;
    exact for the value projection of the last decoder layer with W = T and per-head weights.
    Cost: O(T (W + block)) with a window. The log-sum-exp, which the self-only backward of the same
    call needs too, takes all T x T logits once, in blocks, never T x T in memory.
    Source: eqs. app_causal_rank1, phi_tgt_causal. Oracle: ``alphatoken.oracle.propagation``.
    """
    length = statistics.length
    e = _group(error.to(statistics.dtype), statistics.groups)
    e_sum = e.sum(2)
    result = torch.zeros_like(e_sum)
    if window == 0:
        return result
    # A block of ``size`` queries reads ``size + window`` keys, so blocks much shorter than the
    # window would read most keys many times.
    size = _CHUNK if window is None else max(64, min(window, _CHUNK))
    for start in range(0, length, size):
        rows = slice(start, min(start + size, length))
        # The block's first query sees back the farthest, and t >= k - W.
        first = max(statistics.first_key(rows), 0 if window is None else start - window)
        block = statistics.block(rows, slice(first, rows.stop))
        alpha = statistics.weights(block).masked_fill(~_band(block, window), 0.0)
        if head_mean:
            part = torch.einsum("bkt,bgkd->bgtd", alpha.mean((1, 2)), e_sum[..., rows, :])
        else:
            # Head h's weight meets head h's own error before the heads of a group are summed.
            part = torch.einsum("bgrkt,bgrkd->bgtd", alpha, e[..., rows, :])
        result[..., block.columns, :] += part
    return result


@dataclass(frozen=True)
class AttentionUse:
    """One attention call: value states and head outputs (in the graph), and its statistics.

    Errors are taken at ``output``; Value-Propagation sends them on from ``value``.
    """

    module: nn.Module
    value: Tensor
    output: Tensor
    statistics: AttentionStatistics
    dropout: float
    execution: int

    def propagated(
        self, error: Tensor, window: int | None, *, head_mean: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Value-Propagation of errors at ``output``: a tensor of the graph, and the error there."""
        carried = propagate_values(self.statistics, error, window=window, head_mean=head_mean)
        return self.value, carried.to(self.value.dtype)


@full_precision
def forward_mode_attention(call: AttentionCall) -> Tensor:
    """Attention on dual tensors, in blocks of queries: output and tangent, no T x T matrix.

    PyTorch's fused kernels have no forward-mode rule. With tangents q', k', v':

        s' = c (q'.k + q.k') slope,   o' = sum_t alpha_t (s'_t - sum_u alpha_u s'_u) v_t
                                           + sum_t alpha_t v'_t

    and a sink only takes probability (its own tangent, when given, enters the mean of s').

    Args:
        call: the attention call; query, key, value (and sinks) may be dual tensors.

    Returns:
        (b, h, t, d_v) dual tensor. Exact up to rounding.
        Oracle: ``alphatoken.oracle.gradients`` (per-token reverse mode).
    """
    plain, tangent = {}, {}
    # The closed form needs values and tangents side by side, as the factors of one wider product
    # (below), so the dual tensors are taken apart here.
    for name in ("query", "key", "value", "sinks"):
        tensor = getattr(call, name)
        if tensor is not None:
            plain[name], tangent[name] = forward_ad.unpack_dual(tensor)
        else:
            plain[name], tangent[name] = None, None
    groups = plain["key"].shape[1]
    statistics = AttentionStatistics(replace(call, **plain))
    dtype = statistics.dtype

    def zero_or(name: str) -> Tensor:
        own = tangent[name]
        return torch.zeros_like(plain[name]) if own is None else own

    # s' = c (q'.k + q.k') is one product of twice the width, o and alpha v' are another: two passes
    # over T x T numbers where four products would make four.
    queries = torch.cat([_group(zero_or("query"), groups).to(dtype), statistics.query], -1)
    queries = queries * statistics.scale
    value = plain["value"].to(dtype)
    keys = torch.cat([plain["key"].to(dtype), zero_or("key").to(dtype)], -1)
    values = torch.cat([value, zero_or("value").to(dtype)], -1)
    outputs, tangents = [], []
    for block in statistics.row_blocks():
        columns = block.columns
        alpha, share = statistics.softmax(block)
        q, k = queries[..., block.rows, :], keys[..., columns, :]
        ds = torch.einsum("bgrkd,bgtd->bgrkt", q, k)
        if block.slope is not None:
            ds = ds * block.slope
        # d alpha_t = alpha_t (s'_t - sum_u alpha_u s'_u), the derivative of softmax; a sink takes
        # part in the sum over u, and only there.
        weighted = alpha * ds
        mean = weighted.sum(-1, keepdim=True)
        if share is not None and tangent["sinks"] is not None:
            moved = tangent["sinks"].to(dtype).view(groups, -1)[None, :, :, None, None]
            mean = mean + share * moved
        weighted = weighted.addcmul_(alpha, mean, value=-1)
        both = torch.einsum("bgrkt,bgtd->bgrkd", alpha, values[..., columns, :])
        output, moved_values = both.chunk(2, -1)
        outputs.append(output)
        moved_weights = torch.einsum("bgrkt,bgtd->bgrkd", weighted, value[..., columns, :])
        tangents.append(moved_weights + moved_values)
    kept = plain["value"].dtype
    output, output_tangent = (torch.cat(x, -2).flatten(1, 2).to(kept) for x in (outputs, tangents))
    dual: Tensor = forward_ad.make_dual(output, output_tangent)
    return dual
