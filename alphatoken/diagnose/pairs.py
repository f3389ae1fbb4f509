"""Pairs of positions as attention sees them: weight and value-output deviation.

For query position k, token position t < k and the input x_t of the layer's projections:

    d o_k / d x_t  =  alpha d v_t / d x_t  +  score path, which Value-Propagation leaves out
    ||score path|| <= c f alpha ||v_t - o_k|| ||q_k|| ||d k_t / d s_t|| ||W_K||

so that alpha ||v_t - o_k|| says where little is left out (eq. app_value_path_bound; the bound has
its oracle, ``alphatoken.oracle.jacobian``). alpha comes from the queries, keys and log-sum-exp of
the real forward.

Pairs are counted in fixed cells: the logarithms (base 10) of the weight, of the deviation
``d = ||v_t - o_k|| / sqrt(d_h)`` and of the risk ``alpha d`` have 16 cells a power of ten, the same
for every step and run. So counts add up, a run of any length takes a fixed number of bytes a look,
and shares above powers of ten of the risk are exact.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.errors import DataError, UnsupportedError
from alphatoken.model.attention import AttentionStatistics
from alphatoken.model.batch import LabelledBatch
from alphatoken.model.forward import evaluation_mode
from alphatoken.model.protocol import (
    AttentionCall,
    DecoderAdapter,
    NativeAttention,
    attention_overridden,
)
from alphatoken.model.scope import resolve_layers
from alphatoken.support.storage import read_tensors, write_tensors

__all__ = [
    "ALPHA",
    "DEVIATION",
    "RISK",
    "CollectedPairs",
    "PairCounts",
    "attention_calls",
    "choose_positions",
    "pair_counts",
    "softmax_layers",
    "weigh_pairs",
]

Numbers = NDArray[Any]
_MASKED = -1e30  # additive masks hold the most negative number of some dtype
_WORKSPACE = 2**24


def softmax_layers(
    adapter: DecoderAdapter, layers: int | str | Sequence[int], remedy: str
) -> tuple[tuple[int, ...], dict[str, str]]:
    """The scored layers that mix positions by softmax attention alone, and the others by name.

    Raises:
        UnsupportedError: there is none.
    """
    scored = resolve_layers(adapter, layers)
    softmax = tuple(layer for layer in scored if not adapter.other_mixers([layer]))
    others = adapter.other_mixers(scored)
    if not softmax:
        raise UnsupportedError(
            "Value-Propagation has no attention weights to propagate along",
            got="; ".join(f"{name}: {kind}" for name, kind in others.items()),
            why="every scored layer mixes positions in another way than softmax attention",
            remedy=f"score layers with softmax attention, or {remedy}",
        )
    return softmax, others


def attention_calls(
    adapter: DecoderAdapter, layers: Sequence[int], batch: LabelledBatch
) -> list[tuple[int, AttentionCall, Tensor]]:
    """The softmax-attention calls of ``layers`` in one forward (dropout off, no graph).

    The model's own kernel runs, and afterwards attention is routed as before.

    Returns:
        Of each call its layer; queries, keys, values, mask and scale; head outputs (b, h, t, d_v).
    """
    owners = {m: layer for layer in layers for m in adapter.attention_modules(layer)}
    calls: list[tuple[int, AttentionCall, Tensor]] = []

    def record(call: AttentionCall, native: NativeAttention) -> Tensor:
        output = native(call.query, call.key, call.value)
        calls.append((owners[call.module], call, output))
        return output

    with ExitStack() as stack:
        stack.enter_context(adapter.pause_checkpointing(adapter.layers()[min(layers) :]))
        stack.enter_context(attention_overridden(adapter, list(owners), record))
        stack.enter_context(evaluation_mode(adapter.model))
        stack.enter_context(torch.no_grad())
        adapter.forward(batch.inputs)
    return calls


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
    """Draw the token positions t whose pairs are looked at, one (b, t) mask a batch.

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


def weigh_pairs(
    call: AttentionCall, output: Tensor, used: Tensor, chosen: Tensor, window: int | None
) -> tuple[Numbers, Numbers]:
    """Weight and deviation of all pairs (k, t), t chosen, k used, t < k <= t + window: (n, h) each.

        alpha_{t->k}     and     ||v_t - o_k||_2 / sqrt(d_v)

    Pairs that the mask hides from all heads are left out.

    Args:
        call: one attention call.
        output: its head outputs, (b, h, t, d_v).
        used: (b, t) positions that take part.
        chosen: (b, t) token positions to look at.
        window: W; None for no limit.

    Exactness: exact up to rounding in the model's dtype. Oracle: ``alphatoken.oracle.jacobian``
    (``attend``).
    """
    *places, alpha = _select(AttentionStatistics(call), used, chosen, window)
    heads, width = call.query.shape[1], call.value.shape[3]
    size = max(1, _WORKSPACE // max(1, heads * width))
    with torch.no_grad():
        output = output.to(alpha)
        blocks = zip(*(column.split(size) for column in places), strict=True)
        deviation = torch.cat([_deviation(call, output, *block) for block in blocks])
    return alpha.double().cpu().numpy(), deviation.double().cpu().numpy()


@torch.no_grad()
def _select(
    statistics: AttentionStatistics, used: Tensor, chosen: Tensor, window: int | None
) -> list[Tensor]:
    parts: list[tuple[Tensor, ...]] = []
    every = torch.arange(used.shape[1], device=used.device)
    for block in statistics.row_blocks():
        k, t = every[block.rows].unsqueeze(-1), every[block.columns]
        near = (t < k) if window is None else (t < k) & (k <= t + window)
        wanted = near & used[:, block.rows, None] & chosen[:, None, block.columns]
        logits = block.logits.flatten(1, 2)
        row, at, column = (wanted & (logits > _MASKED).any(1)).nonzero().unbind(1)
        alpha = statistics.weights(block).flatten(1, 2)[row, :, at, column]
        parts.append((row, k[at, 0], t[column], alpha))
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def _deviation(call: AttentionCall, output: Tensor, row: Tensor, k: Tensor, t: Tensor) -> Tensor:
    groups, width = call.value.shape[1], call.value.shape[3]
    at_query = output[row, :, k].unflatten(1, (groups, -1))
    # Heads of one group read one value.
    value = call.value[row, :, t].to(output).unsqueeze(2)
    deviation: Tensor = torch.linalg.vector_norm(value - at_query, dim=-1).flatten(1) / width**0.5
    return deviation


# --- counts -------------------------------------------------------------------------------------

Counts = NDArray[np.int64]
_KIND, _FORMAT = "alphatoken collected pairs", "1"
_CELLS = 16  # a power of ten


def _edges(low: int, high: int) -> NDArray[np.float64]:
    return np.linspace(low, high, (high - low) * _CELLS + 1)


ALPHA, DEVIATION, RISK = _edges(-8, 0), _edges(-4, 4), _edges(-12, 4)
"""Edges of the cells, in powers of ten; what lies beyond is counted in the cell at that end."""


@dataclass(frozen=True)
class PairCounts:
    """Counts of pairs in one layer, all heads.

    Attributes:
        joint: (alpha, deviation) cells.
        risk: cells of alpha times deviation.
    """

    joint: Counts
    risk: Counts

    @classmethod
    def of(cls, alpha: NDArray[Any], deviation: NDArray[Any]) -> PairCounts:
        """Count pairs; those that a mask hides (weight exactly 0) are left out.

        Args:
            alpha: attention weights, of any shape.
            deviation: ``||v_t - o_k|| / sqrt(d_h)``, of the same shape.
        """
        visible = alpha > 0
        weight, away = (x[visible].astype(np.float64) for x in (alpha, deviation))
        columns = [
            np.clip(np.log10(np.maximum(x, 1e-300)), edges[0], edges[-1])
            for x, edges in ((weight, ALPHA), (away, DEVIATION), (weight * away, RISK))
        ]
        joint, _, _ = np.histogram2d(columns[0], columns[1], bins=(ALPHA, DEVIATION))
        risk, _ = np.histogram(columns[2], bins=RISK)
        return cls(joint.astype(np.int64), risk.astype(np.int64))

    @classmethod
    def total(cls, counts: Iterable[PairCounts]) -> PairCounts:
        """Counts of all together; of none, zeros."""
        joint = np.zeros((len(ALPHA) - 1, len(DEVIATION) - 1), np.int64)
        return sum(counts, cls(joint, np.zeros(len(RISK) - 1, np.int64)))

    def __add__(self, other: PairCounts) -> PairCounts:
        """Counts of both together."""
        return PairCounts(self.joint + other.joint, self.risk + other.risk)

    @property
    def pairs(self) -> int:
        """The number of pairs counted."""
        return int(self.risk.sum())

    def share_above(self, level: float) -> float:
        """Share of the pairs with alpha times deviation at or above ``level``.

        Exact for powers of ten; between them the level is moved to the next edge of a cell.
        """
        # Rounded first: log10 of a power of ten may miss the edge by its last bit.
        first = math.ceil(round((math.log10(level) - RISK[0]) * _CELLS, 6))
        above = int(self.risk[max(first, 0) :].sum())
        return above / self.pairs if self.pairs else math.nan


@dataclass
class CollectedPairs:
    """Counts by step and layer, and what they are of.

    Attributes:
        about: probe and settings: plain JSON values, the same for all steps.
        steps: optimizer step -> layer -> counts.
    """

    about: dict[str, Any]
    steps: dict[int, dict[int, PairCounts]] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        """Layers that were looked at."""
        return sorted({layer for by_layer in self.steps.values() for layer in by_layer})

    def total(self, steps: Iterable[int] | None = None) -> PairCounts:
        """Counts of all layers over these steps, or over all."""
        chosen = self.steps if steps is None else steps
        return PairCounts.total(counts for s in chosen for counts in self.steps[s].values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all.

        Raises:
            DataError: it could not be written.
        """
        tensors = {
            f"{step}/{layer}/{name}": torch.from_numpy(getattr(counts, name))
            for step, by_layer in sorted(self.steps.items())
            for layer, counts in sorted(by_layer.items())
            for name in ("joint", "risk")
        }
        metadata = {"kind": _KIND, "format": _FORMAT, "about": json.dumps(self.about)}
        write_tensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CollectedPairs:
        """Read what ``save`` wrote.

        Raises:
            DataError: no such file, damaged, or of another kind.
        """
        tensors, metadata = read_tensors(path)
        if (metadata.get("kind"), metadata.get("format")) != (_KIND, _FORMAT):
            raise DataError(
                "the file holds no collected pairs",
                got=f"{path}: {metadata.get('kind', 'another kind of file')}",
                remedy="the file that the callback watch_pairs of the lab writes",
            )
        pairs = cls(json.loads(metadata["about"]))
        for name in (one for one in tensors if one.endswith("/joint")):
            step, layer, _ = name.split("/")
            counts = PairCounts(tensors[name].numpy(), tensors[f"{step}/{layer}/risk"].numpy())
            pairs.steps.setdefault(int(step), {})[int(layer)] = counts
        return pairs
