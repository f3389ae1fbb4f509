"""Pairs of positions as attention sees them: weight, deviation, score-path residual and its bound.

For query position k, token position t < k, query head h of key/value head g, and the input x_t of
the layer's projections:

    d o_k / d x_t  =  alpha d v_t / d x_t  +  c f alpha (v_t - o_k) (x) (B_t^T q_k)
                      value path              score path, which Value-Propagation leaves out
    residual       =  c f alpha ||v_t - o_k|| ||B_t^T q_k||                 B_t = d k_t / d x_t
    bound          =  c f alpha ||v_t - o_k|| ||q_k|| ||d k_t / d s_t|| ||W_K||

alpha comes from the queries, keys and log-sum-exp of the real forward, B_t by autograd through
whatever the model puts between x_t and its key (bias, adapters, norm, rotation), so nothing is
assumed of it; s_t is the output of the key projection, W_K its rows that are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from alphatoken.direction.objective import scoring_forward
from alphatoken.model.attention import AttentionStatistics
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.capture import evaluation_mode, hidden_of
from alphatoken.model.protocol import AttentionCall, DecoderAdapter, NativeAttention
from alphatoken.support.precision import wide

__all__ = [
    "PairValues",
    "SeenCall",
    "choose_positions",
    "density",
    "measure_pairs",
    "pair_counts",
    "see_calls",
    "weigh_pairs",
]

Numbers = NDArray[Any]
_MASKED = -1e30  # additive masks hold the most negative number of some dtype
_WORKSPACE = 2**24


@dataclass(frozen=True)
class SeenCall:
    """One softmax-attention call of a real forward, in its graph.

    Attributes:
        layer: of the module that made it.
        call: queries, keys, values, mask, scale.
        output: head outputs (b, h, t, d_v).
        hidden: x, the input (b, t, m) of the attention module; None if it has none.
        projections: outputs of the module's parts that were called on x.
    """

    layer: int
    call: AttentionCall
    output: Tensor
    hidden: Tensor | None
    projections: tuple[Tensor, ...]


@dataclass
class _Watch:
    """Hooks of one forward: what each attention module got, what its parts made of it."""

    layers: dict[nn.Module, int]
    entered: dict[nn.Module, Any] = field(default_factory=dict)
    made: dict[nn.Module, list[Tensor]] = field(default_factory=dict)
    calls: list[SeenCall] = field(default_factory=list)

    def on_enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.entered[module], self.made[module] = hidden_of(args, kwargs), []

    def on_part(
        self, parent: nn.Module, part: nn.Module, args: tuple[Any, ...], output: Any
    ) -> None:
        if args and args[0] is self.entered.get(parent) and isinstance(output, Tensor):
            self.made[parent].append(output)

    def on_attention(self, call: AttentionCall, native: NativeAttention) -> Tensor:
        output = native(call.query, call.key, call.value)
        hidden = self.entered.get(call.module)
        self.calls.append(
            SeenCall(
                self.layers[call.module],
                call,
                output,
                hidden if isinstance(hidden, Tensor) else None,
                tuple(self.made.get(call.module, ())),
            )
        )
        return output


def see_calls(
    adapter: DecoderAdapter, layers: Sequence[int], batch: LabelledBatch, *, graph: bool = True
) -> list[SeenCall]:
    """The attention calls of ``layers`` in one forward (dropout off), with their graph.

    The model's own kernel runs; hooks and routing are gone afterwards. Without ``graph`` there is
    none: enough for weights and deviations (``weigh_pairs``).
    """
    first, blocks = min(layers), adapter.layers()
    owners = {m: layer for layer in layers for m in adapter.attention_modules(layer)}
    watch = _Watch(owners)
    with ExitStack() as stack:
        for module in owners:
            enter = module.register_forward_pre_hook(watch.on_enter, with_kwargs=True)
            stack.callback(enter.remove)
            for part in module.children():
                hook = part.register_forward_hook(partial(watch.on_part, module))
                stack.callback(hook.remove)
        stack.enter_context(adapter.pause_checkpointing(blocks[first:]))
        stack.enter_context(adapter.override_attention(list(owners), watch.on_attention))
        stack.enter_context(scoring_forward(adapter, first) if graph else _looking_on(adapter))
        adapter.forward(batch.inputs)
    return watch.calls


@contextmanager
def _looking_on(adapter: DecoderAdapter) -> Iterator[None]:
    """Evaluation mode, and no graph."""
    with evaluation_mode(adapter.model), torch.no_grad():
        yield


# --- which pairs -------------------------------------------------------------------------------


def pair_counts(used: Tensor, window: int | None) -> Tensor:
    """(b, t) number of used k in (t, t + window] for each used t; 0 where t is not used."""
    length = used.shape[1]
    total = torch.nn.functional.pad(used.long().cumsum(1), (1, 0))
    every = torch.arange(length, device=used.device)
    last = torch.full_like(every, length) if window is None else (every + window + 1)
    counts = total[:, last.clamp(max=length)] - total[:, every + 1]
    return counts.masked_fill(~used, 0)


def choose_positions(
    used: Sequence[Tensor], window: int | None, budget: int, seed: int
) -> list[Tensor]:
    """Token positions t whose pairs are looked at, one (b, t) mask a batch.

    All that have a pair where their pairs fit the budget; else random ones, at least one, until
    it is reached.
    """
    counts = [pair_counts(mask, window).cpu() for mask in used]
    places = [
        (batch, int(row), int(t), int(count[row, t]))
        for batch, count in enumerate(counts)
        for row, t in count.nonzero().tolist()
    ]
    chosen = [torch.zeros_like(count, dtype=torch.bool) for count in counts]
    spent = 0
    for place in np.random.default_rng(seed).permutation(len(places)):
        batch, row, t, count = places[place]
        if spent == 0 or spent + count <= budget:
            chosen[batch][row, t] = True
            spent += count
    return [mask.to(one.device) for mask, one in zip(chosen, used, strict=True)]


# --- what is measured of them ------------------------------------------------------------------


@dataclass(frozen=True)
class PairValues:
    """Numbers of n pairs in one layer, float64; one column a query head unless said otherwise.

    Attributes:
        layer: of the attention.
        row: (n,) row of the batch.
        k: (n,) query position.
        t: (n,) token position.
        alpha: (n, h) attention weight.
        deviation: (n, h) ``||v_t - o_k|| / sqrt(d_v)``.
        residual: (n, h) operator norm of the score path; NaN where the keys are not made from the
            module's input.
        bound: (n, h) the bound of it; NaN where no single projection makes the keys.
        value_path: (n, h) operator norm of the value path.
    """

    layer: int
    row: Numbers
    k: Numbers
    t: Numbers
    alpha: Numbers
    deviation: Numbers
    residual: Numbers
    bound: Numbers
    value_path: Numbers


def weigh_pairs(
    seen: SeenCall, used: Tensor, chosen: Tensor, window: int | None
) -> tuple[Numbers, Numbers]:
    """Weight and deviation of the same pairs as ``measure_pairs``, (n, h) each, and no more.

        alpha_{t->k}     and     ||v_t - o_k||_2 / sqrt(d_v)

    Exactness and oracle as there; no graph is needed, and no norm of a Jacobian is taken.
    """
    found = _select(AttentionStatistics(seen.call), used, chosen, window)
    parts = []
    size = max(1, _WORKSPACE // max(1, seen.call.query.shape[1] * seen.call.value.shape[3]))
    with torch.no_grad():
        for start in range(0, len(found.row), size):
            parts.append(_deviation(seen, found.part(slice(start, start + size))))
    heads = seen.call.query.shape[1]
    deviation = torch.cat(parts) if parts else found.alpha.new_zeros(0, heads)
    return found.alpha.double().cpu().numpy(), deviation.double().cpu().numpy()


def measure_pairs(seen: SeenCall, used: Tensor, chosen: Tensor, window: int | None) -> PairValues:
    """All pairs (k, t), t chosen, k used, t < k <= t + window, that the mask allows.

    Args:
        seen: one attention call.
        used: (b, t) positions that take part.
        chosen: (b, t) token positions to look at.
        window: W; None for no limit.

    Exactness: exact up to rounding in the model's dtype. Oracle: ``alphatoken.oracle.jacobian``
    (``score_residual_norm``, ``value_path_bound``).
    """
    found = _select(AttentionStatistics(seen.call), used, chosen, window)
    places = chosen.nonzero()
    number = torch.full(chosen.shape, -1, dtype=torch.long, device=chosen.device)
    number[places[:, 0], places[:, 1]] = torch.arange(len(places), device=chosen.device)
    maps = _token_maps(seen, places)
    rows: list[tuple[Tensor, ...]] = []
    groups, width = seen.call.key.shape[1], seen.call.key.shape[3]
    size = max(1, _WORKSPACE // (groups * width * width))
    with torch.no_grad():
        for part in range(0, len(found.row), size):
            rows.append(_norms(seen, found.part(slice(part, part + size)), maps, number))
    heads = seen.call.query.shape[1]
    empty = tuple(found.alpha.new_zeros(0, heads) for _ in range(4))
    deviation, residual, bound, value_path = (
        torch.cat(column).double().cpu().numpy() for column in zip(*(rows or [empty]), strict=True)
    )
    return PairValues(
        seen.layer,
        found.row.cpu().numpy(),
        found.k.cpu().numpy(),
        found.t.cpu().numpy(),
        found.alpha.double().cpu().numpy(),
        deviation,
        residual,
        bound,
        value_path,
    )


@dataclass(frozen=True)
class _Selected:
    """Pairs with their weight and the slope of the soft-cap, (n, h)."""

    row: Tensor
    k: Tensor
    t: Tensor
    alpha: Tensor
    slope: Tensor

    def part(self, which: slice) -> _Selected:
        return _Selected(
            self.row[which], self.k[which], self.t[which], self.alpha[which], self.slope[which]
        )


@torch.no_grad()
def _select(
    statistics: AttentionStatistics, used: Tensor, chosen: Tensor, window: int | None
) -> _Selected:
    parts: list[tuple[Tensor, ...]] = []
    every = torch.arange(used.shape[1], device=used.device)
    for block in statistics.row_blocks():
        k, t = every[block.rows].unsqueeze(-1), every[block.columns]
        near = (t < k) if window is None else (t < k) & (k <= t + window)
        wanted = near & used[:, block.rows, None] & chosen[:, None, block.columns]
        logits = block.logits.flatten(1, 2)
        row, at, column = (wanted & (logits > _MASKED).any(1)).nonzero().unbind(1)
        alpha = statistics.weights(block).flatten(1, 2)[row, :, at, column]
        slope = torch.ones_like(alpha)
        if block.slope is not None:
            slope = block.slope.flatten(1, 2)[row, :, at, column]
        parts.append((row, k[at, 0], t[column], alpha, slope))
    return _Selected(*(torch.cat(column) for column in zip(*parts, strict=True)))


@dataclass(frozen=True)
class _TokenMaps:
    """Of each chosen position n and key/value head g.

    Attributes:
        pull: (n, g, j, d), ``||pull q|| = ||B_t^T q||``: the triangular factor of B_t^T.
        key: (n, g) ``||dk/ds|| ||W_K||``.
        value: (n, g) ``||dv/dx||``.
    """

    pull: Tensor
    key: Tensor
    value: Tensor


def _token_maps(seen: SeenCall, places: Tensor) -> _TokenMaps:
    key, value = seen.call.key, seen.call.value
    parts = []
    for group in range(key.shape[1]):
        to_input, to_projection = _jacobians(key, group, [seen.hidden, *seen.projections], places)
        value_map, _ = _jacobians(value, group, [seen.hidden], places)
        parts.append(
            (
                _triangle(to_input),
                _projection_bound(seen, to_projection, len(places)),
                torch.linalg.matrix_norm(_triangle(value_map), ord=2),
            )
        )
    return _TokenMaps(*(torch.stack(column, 1) for column in zip(*parts, strict=True)))


def _jacobians(
    states: Tensor, group: int, sources: Sequence[Tensor | None], places: Tensor
) -> tuple[Tensor, dict[int, Tensor]]:
    """d (state of one head at t) / d (each source at t) at the places, (n, d, width).

    States at t depend on the sources at t alone, so one backward serves all positions. The first
    is NaN where it does not reach the states; of the others, those that do, by their number.
    """
    asked = {i: s for i, s in enumerate(sources) if s is not None and s.requires_grad}
    found: dict[int, list[Tensor]] = {}
    for d in range(states.shape[3] if asked and states.requires_grad else 0):
        one = torch.zeros_like(states)
        one[:, group, :, d] = 1.0
        gradients = torch.autograd.grad(
            states, list(asked.values()), one, retain_graph=True, allow_unused=True
        )
        for i, gradient in zip(asked, gradients, strict=True):
            if gradient is not None:
                found.setdefault(i, []).append(gradient[places[:, 0], places[:, 1]])
    dtype = wide(states.dtype)
    maps = {i: torch.stack(rows, 1).to(dtype) for i, rows in found.items()}
    nothing = torch.full((len(places), states.shape[3], 1), torch.nan, dtype=dtype)
    return maps.pop(0, nothing.to(states.device)), maps


def _triangle(jacobian: Tensor) -> Tensor:
    """R (n, j, d) of ``J^T = Q R``: ``||R q|| = ||J^T q||`` without the digits a square would cost.

    NaN where J is.
    """
    if bool(jacobian.isnan().any()):
        width = jacobian.shape[1]
        return jacobian.new_full((len(jacobian), width, width), torch.nan)
    triangle: Tensor = torch.linalg.qr(jacobian.mT, mode="r").R
    return triangle


def _projection_bound(seen: SeenCall, to_projection: dict[int, Tensor], count: int) -> Tensor:
    """(n,) ``||dk/ds|| ||W||``, W the rows of the key projection that are read.

    NaN unless one projection alone makes the keys.
    """
    dtype = wide(seen.call.key.dtype)
    if len(to_projection) != 1 or seen.hidden is None:
        return torch.full((count,), torch.nan, dtype=dtype, device=seen.call.key.device)
    ((which, inner),) = to_projection.items()
    read = (inner != 0).any(1).any(0).nonzero().flatten()
    weight = _rows_of(seen.projections[which - 1], seen.hidden, read).to(dtype)
    norm = torch.linalg.matrix_norm(weight, ord=2) if len(read) else weight.new_zeros(())
    bound: Tensor = torch.linalg.matrix_norm(_triangle(inner), ord=2) * norm
    return bound


def _rows_of(projected: Tensor, hidden: Tensor, rows: Tensor) -> Tensor:
    """Rows (r, m) of the linear map from ``hidden`` to ``projected``, adapters included.

    It is the same at every position, so each backward brings one row a position.
    """
    flat = projected.shape[0] * projected.shape[1]
    found = []
    for start in range(0, len(rows), flat):
        part = rows[start : start + flat]
        one = torch.zeros(projected.shape, dtype=projected.dtype, device=projected.device)
        one.view(flat, -1)[torch.arange(len(part), device=part.device), part] = 1.0
        (gradient,) = torch.autograd.grad(projected, hidden, one, retain_graph=True)
        found.append(gradient.reshape(flat, -1)[: len(part)])
    return torch.cat(found) if found else hidden.new_zeros(0, hidden.shape[-1])


def _deviation(seen: SeenCall, pairs: _Selected) -> Tensor:
    """``||v_t - o_k||_2 / sqrt(d_v)`` of some pairs, (n, h)."""
    call, dtype = seen.call, pairs.alpha.dtype
    groups, width = call.value.shape[1], call.value.shape[3]
    output = seen.output[pairs.row, :, pairs.k].to(dtype).unflatten(1, (groups, -1))
    value = call.value[pairs.row, :, pairs.t].to(dtype).unsqueeze(2)
    found: Tensor = torch.linalg.vector_norm(value - output, dim=-1).flatten(1) / width**0.5
    return found


def _norms(
    seen: SeenCall, pairs: _Selected, maps: _TokenMaps, number: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(deviation, residual, bound, value path) of some pairs, each (n, h)."""
    call, dtype = seen.call, pairs.alpha.dtype
    groups, heads = call.key.shape[1], call.query.shape[1]
    query = call.query[pairs.row, :, pairs.k].to(dtype).unflatten(1, (groups, -1))
    n = number[pairs.row, pairs.t]
    deviation = _deviation(seen, pairs)
    away = deviation * call.value.shape[3] ** 0.5
    pulled = torch.einsum("ngjd,ngrd->ngrj", maps.pull[n], query).norm(dim=-1).flatten(1)
    most = (maps.key[n].unsqueeze(2) * query.norm(dim=-1)).flatten(1)
    factor = abs(call.scale) * pairs.slope * pairs.alpha * away
    value_norm = maps.value[n].repeat_interleave(heads // groups, 1)
    return deviation, factor * pulled, factor * most, pairs.alpha * value_norm


def density(pairs: Sequence[PairValues], bins: int) -> tuple[Numbers, Numbers, Numbers]:
    """Counts (alpha, deviation) over all layers and heads, and both edges, in powers of ten.

    Weights below 1e-8 and deviations below 1e-6 of the largest are counted in the lowest cells;
    pairs that a head's mask hides (weight exactly 0) are left out.
    """
    alpha = np.concatenate([one.alpha.ravel() for one in pairs]).astype(np.float64)
    deviation = np.concatenate([one.deviation.ravel() for one in pairs]).astype(np.float64)
    seen = alpha > 0
    alpha, deviation = np.maximum(alpha[seen], 1e-8), deviation[seen]
    top = float(deviation.max()) if len(deviation) and deviation.max() > 0 else 1.0
    deviation = np.maximum(deviation, 1e-6 * top)
    low = math.floor(math.log10(alpha.min())) if len(alpha) else -1
    bottom = math.floor(4 * math.log10(np.quantile(deviation, 0.001))) / 4 if len(alpha) else -1
    edges_a = np.linspace(min(low, -1), 0.0, bins + 1)
    edges_d = np.linspace(bottom, math.log10(top) + 1e-6, bins + 1)
    counts, _, _ = np.histogram2d(
        np.minimum(np.log10(alpha), 0.0),
        np.clip(np.log10(deviation), edges_d[0], edges_d[-1]),
        bins=(edges_a, edges_d),
    )
    return counts, edges_a, edges_d
