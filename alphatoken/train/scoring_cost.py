"""What ``alphatoken score`` and ``alphatoken fisher`` cost: FLOPs and bytes, from shapes alone.

Beside :mod:`alphatoken.train.cost`, which tells the same of training. FLOPs are those of the matrix
products; the proofs of a first pass, which run on a few short rows, are left out, and so are
norms, softmax and the band of attention weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from alphatoken.config import ScorerConfig
from alphatoken.direction.drift import FisherDrift
from alphatoken.model.capture import Scope
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.train.activations import Shape
from alphatoken.train.cost import (
    Memory,
    Work,
    activations_of,
    dual_bytes,
    fisher_sums,
    loss_bytes,
    scored_numbers,
    scored_work,
)

__all__ = [
    "Batches",
    "fisher_flops",
    "fisher_memory",
    "scoring_flops",
    "scoring_memory",
]


@dataclass(frozen=True)
class Batches:
    """Sequences in batches of one size, each padded to its longest.

    Attributes:
        rows: of the largest batch.
        length: tokens of a row of it.
        count: batches.
        tokens: of all batches, padding included.
    """

    rows: int
    length: int
    count: int
    tokens: int

    @classmethod
    def of(cls, lengths: Sequence[int], size: int) -> Batches:
        """Of rows with these lengths, ``size`` a batch, in order.

        >>> Batches.of([3, 5, 4], 2)
        Batches(rows=2, length=5, count=2, tokens=14)
        """
        parts = [lengths[start : start + size] for start in range(0, len(lengths), size)]
        rows, length = max(((len(p), max(p)) for p in parts), key=lambda one: one[0] * one[1])
        return cls(rows, length, len(parts), sum(len(part) * max(part) for part in parts))


# --- time -----------------------------------------------------------------------------------------


def scoring_flops(
    work: Work, scope: Scope, config: ScorerConfig, train: Batches, validation: Batches
) -> float:
    """FLOPs of the values of all rows, G included.

    A token costs a forward, and errors through the scored layers with their contraction; or for
    label values one more forward for the tangents of activations, and one for those of weights.
    A validation token costs a forward, errors, and their gradient. With standard errors each
    validation batch is contracted, or sent forward, by itself.
    """
    parts = validation.count if config.standard_errors else 1
    layers = tuple(range(scope.first, len(work.linear)))
    # Of all parameters the embeddings are looked up, which is no product.
    scored = work.weights if config.parameters == "all" else 2.0 * scored_work(scope)
    gradient = work.forward + work.errors(layers) + work.head + scored
    values = gradient + (parts - 1) * scored
    if config.estimator == "label":
        below = sum(work.linear[i] + 3 * work.attention[i] for i in layers)
        # Each further tangent takes its own forward of the scored layers along.
        again = sum(work.linear[i] + work.attention[i] for i in layers) + work.head
        values = work.forward + parts * (below + work.head + scored) + (parts - 1) * again
    objective = 0.0 if config.objective == "stability" else gradient
    return values * train.tokens + objective * validation.tokens


def fisher_flops(work: Work, scope: Scope, tokens: int) -> float:
    """FLOPs of the gradients of all samples, ``tokens`` in all; drawing them comes beside."""
    layers = tuple(range(scope.first, len(work.linear)))
    scored = 2.0 * scored_work(scope)
    return tokens * (work.forward + work.errors(layers) + work.head + scored)


# --- memory ---------------------------------------------------------------------------------------


def scoring_memory(
    adapter: DecoderAdapter,
    scope: Scope,
    config: ScorerConfig,
    train: Batches,
    validation: Batches,
    fisher: FisherDrift | None,
) -> Memory:
    """Predict what a process holds at most while it scores, the libraries apart.

    Exactness: within 10 % of measured processes on SmolLM2-135M and Gemma 3 270M, 4 rows of 160
    tokens, one CPU (``python -m benchmarks.memory_model --commands``); elsewhere an estimate.
    """
    values = float(scored_numbers(scope))
    width = _head(adapter).element_size()
    matrix = 4.0 * values
    adapts = config.objective != "stability"
    streamed = config.offload == "stream"
    held = 0.0 if fisher is None or streamed else _bytes(fisher)
    sides = adapts + (fisher is not None and not streamed)
    sides += validation.count if config.standard_errors else 0
    building = 0.0
    if adapts:
        graph = _graph(adapter, scope, validation)
        losses = loss_bytes(adapter, validation.rows * validation.length, width)
        others = matrix if validation.count > 1 else 0.0
        # The sums of the batches before lie beside the graph; those of this one come as it goes.
        building = max(others + graph + losses, matrix)
    positions = train.rows * train.length
    if config.estimator == "label":
        valuing = dual_bytes(adapter, positions, width)
    else:
        valuing = _graph(adapter, scope, train) + loss_bytes(adapter, positions, width)
    return Memory(
        weights=_weight_bytes(adapter),
        fisher=held,
        directions=matrix * sides,
        validation=building - matrix if adapts else 0.0,  # in place of what it becomes
        valuing=valuing,
    )


def fisher_memory(
    adapter: DecoderAdapter, scope: Scope, longest: int, response: int, structure: str
) -> Memory:
    """Predict what a process holds at most while it fits a Fisher, the libraries apart.

    Args:
        adapter: of the model.
        scope: what the Fisher is of.
        longest: tokens of the longest sequence whose gradient is taken.
        response: tokens of it that are drawn, at most.
        structure: "diagonal" or "kronecker".
    """
    one = Batches(1, longest, 1, longest)
    vocabulary, width = _head(adapter).shape[0], _head(adapter).element_size()
    # Logits of the whole sequence and their gradient; of the response, in wide numbers: a copy,
    # their log-softmax, and its gradient.
    copies = 3.0 + (width < 4)
    logits = 2.0 * longest * vocabulary * width + copies * 4.0 * response * vocabulary
    return Memory(
        weights=_weight_bytes(adapter),
        fisher=fisher_sums(scope, structure),
        valuing=max(_graph(adapter, scope, one) + logits, 8.0 * scored_numbers(scope)),
    )


def _head(adapter: DecoderAdapter) -> Tensor:
    """Weight of the output projection, (V, d)."""
    weight: Tensor = adapter.model.get_output_embeddings().weight  # type: ignore[operator]
    return weight


def _graph(adapter: DecoderAdapter, scope: Scope, batches: Batches) -> float:
    """Bytes that the graph of a batch keeps from the first scored layer on, logits apart."""
    dtype = next(adapter.model.parameters()).dtype
    shape = Shape(0, batches.rows, batches.length, dtype)
    return activations_of(adapter, scope, shape).validation


def _weight_bytes(adapter: DecoderAdapter) -> float:
    return float(sum(p.numel() * p.element_size() for p in adapter.model.parameters()))


def _bytes(fisher: FisherDrift) -> float:
    factors = fisher.factors or {}
    held = [*fisher.fisher.values(), *fisher.reference.values()]
    held += [factor for pair in factors.values() for factor in pair]
    return float(sum(t.numel() * t.element_size() for t in held))
