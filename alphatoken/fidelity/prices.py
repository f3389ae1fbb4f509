"""What a unit of a diagnostic's work costs here: seconds, measured once a run on a real row.

    KIND pass, KIND position    of a ``forward``, of a ``backward`` over all trainable parameters,
                                of a ``dual`` forward (label values): t = pass + n * position
    sweep                       one product of two sets of numbers, as many as the model has
    draw                        a rank statistic of 1,000 tokens, drawn anew

Two batches of one row give the two parts of a time: the row once, and three times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alphatoken.certificate.metrics import spearman
from alphatoken.data import Example
from alphatoken.estimate.forward_mode import label_values
from alphatoken.fidelity.budget import Units, together
from alphatoken.fidelity.subject import Subject
from alphatoken.fidelity.tokenwise import inner
from alphatoken.model.batch import LabelledBatch, read_batch, token_losses
from alphatoken.model.capture import evaluation_mode, resolve_layers
from alphatoken.support.machine import timed

__all__ = ["Counts", "Prices", "measured"]

_TIMES = 3
"""Copies of the row in the larger of the two batches."""
_QUICK = 0.2
"""Seconds below which a computation is timed again, and the least of three taken."""


@dataclass(frozen=True)
class Prices:
    """Seconds a unit, and bytes.

    Attributes:
        seconds: by unit.
        graph: bytes that autograd keeps of a forward, a position.
        weights: bytes of the trainable parameters: one copy of the model.
        length: positions of the row they were measured on.
    """

    seconds: dict[str, float]
    graph: float
    weights: float
    length: int


def _price_row(rows: Sequence[Example]) -> Example:
    """The row that prices are measured on: a tenth of the rows are shorter.

    Short, so that measuring takes seconds; not the shortest, which may be an odd one.
    """
    usable = sorted((r for r in rows if r.response_tokens), key=lambda row: len(row.input_ids))
    return usable[len(usable) // 10]


def measured(subject: Subject) -> Prices:
    """Prices of the subject's model on its own rows; nothing of the model is changed."""
    row = _price_row(subject.train)
    small, large = (_batch(subject, [row] * count) for count in (1, _TIMES))
    named = {n: p for n, p in subject.model.named_parameters() if p.requires_grad}
    ones = {name: torch.ones_like(p, dtype=torch.float32) for name, p in named.items()}
    length = len(row.input_ids)
    seconds: dict[str, float] = {}
    timers: Mapping[str, Callable[[LabelledBatch], Callable[[], object]]] = {
        "forward": lambda batch: lambda: _forward(subject, batch),
        "step": lambda batch: lambda: _step(subject, batch, list(named.values())),
        "dual": lambda batch: lambda: _dual(subject, batch, ones),
    }
    for kind, timer in timers.items():
        timer(small)()  # kernels are loaded, and rules of forward mode scripted, on first use
        once, thrice = (_seconds(timer(batch)) for batch in (small, large))
        each = max(thrice - once, 0.05 * once) / (length * (_TIMES - 1))
        seconds[f"{kind} position"] = each
        seconds[f"{kind} pass"] = max(once - length * each, 0.0)
    for part in ("pass", "position"):
        whole = seconds.pop(f"step {part}")
        seconds[f"backward {part}"] = max(whole - seconds[f"forward {part}"], 0.0)
    seconds["sweep"] = _seconds(lambda: inner(ones, ones))
    seconds["draw"] = _seconds(_draw)
    weights = float(sum(p.numel() * p.element_size() for p in named.values()))
    return Prices(seconds, _graph(subject, small) / length, weights, length)


def _batch(subject: Subject, rows: Sequence[Example]) -> LabelledBatch:
    return read_batch(*subject.batches(rows, len(rows)), max_length=subject.adapter.max_positions())


def _seconds(work: Callable[[], object]) -> float:
    """Of one run, or the least of three where one is quick."""
    taken: list[float] = []
    while not taken or (taken[0] < _QUICK and len(taken) < 3):
        taken.append(timed(work))
    return min(taken)


@torch.no_grad()
def _forward(subject: Subject, batch: LabelledBatch) -> None:
    with evaluation_mode(subject.model):
        token_losses(subject.adapter.forward(batch.inputs), batch.labels)


def _loss(subject: Subject, batch: LabelledBatch) -> Tensor:
    with evaluation_mode(subject.model), torch.enable_grad():
        return token_losses(subject.adapter.forward(batch.inputs), batch.labels).sum()


def _step(subject: Subject, batch: LabelledBatch, parameters: Sequence[Tensor]) -> None:
    torch.autograd.grad(_loss(subject, batch), parameters, allow_unused=True)


def _dual(subject: Subject, batch: LabelledBatch, direction: Mapping[str, Tensor]) -> None:
    label_values(subject.adapter, batch, direction, first=0)


def _draw() -> None:
    generator = np.random.default_rng(0)
    one, other = generator.random(1000), generator.random(1000)
    spearman(one, other)


def _graph(subject: Subject, batch: LabelledBatch) -> float:
    """Bytes of the tensors that autograd keeps of a forward, parameters apart, each once."""
    own = {p.untyped_storage().data_ptr() for p in subject.model.parameters()}
    kept: dict[int, int] = {}

    def seen(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
        _loss(subject, batch)
    return float(sum(kept.values()))


# --- counts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts:
    """Units of the passes that diagnostics are made of, for rows of a subject."""

    subject: Subject
    prices: Prices

    @property
    def depth(self) -> int:
        """Decoder layers."""
        return len(self.subject.adapter.layers())

    @property
    def scored(self) -> int:
        """Layers that the run scores."""
        return len(resolve_layers(self.subject.adapter, self.subject.config.layers))

    def positions(self, rows: Sequence[Example], size: int | None = None) -> tuple[int, int]:
        """(batches, positions with padding) of rows, ``size`` a batch."""
        size = size or self.subject.batch_size
        starts = range(0, len(rows), size)
        longest = [max(len(r.input_ids) for r in rows[s : s + size]) for s in starts]
        sizes = [len(rows[start : start + size]) for start in starts]
        return len(longest), sum(n * t for n, t in zip(sizes, longest, strict=True))

    def passes(
        self, kind: str, rows: Sequence[Example], times: int | float = 1, size: int | None = None
    ) -> Units:
        """All rows once, or ``times``, through passes of one kind."""
        count, positions = self.positions(rows, size)
        return {f"{kind} pass": float(times * count), f"{kind} position": float(times * positions)}

    def step(
        self, rows: Sequence[Example], times: int | float = 1, size: int | None = None
    ) -> Units:
        """Forward and backward over all trainable parameters."""
        forward, backward = (
            self.passes(kind, rows, times, size) for kind in ("forward", "backward")
        )
        return together(forward, backward)

    def share(self, layers: int | None = None) -> float:
        """What a backward into the last layers costs, of one into all parameters."""
        return min(1.0, 0.2 + (self.scored if layers is None else layers) / self.depth)

    def gradient(self, rows: Sequence[Example], layers: int | None = None) -> Units:
        """G over the scored layers (or ``layers`` of them): a forward and a backward into them."""
        return together(
            self.passes("forward", rows), self.passes("backward", rows, self.share(layers))
        )

    def values(
        self,
        rows: Sequence[Example],
        estimator: str | None = None,
        layers: int | None = None,
        times: int | float = 1,
    ) -> Units:
        """Scorings of rows: recorded forward, self-only backward, contraction; or dual forward."""
        estimator = estimator or self.subject.config.estimator
        # A dual forward takes the place of the upper layers' own.
        plain = 1 - self.share(layers) if estimator == "label" else 1.0
        return together(
            self.passes("forward", rows, times * plain),
            self.beyond_forward(rows, estimator, layers, times),
        )

    def beyond_forward(
        self,
        rows: Sequence[Example],
        estimator: str,
        layers: int | None,
        times: int | float = 1,
    ) -> Units:
        """Values of rows whose forward has run."""
        share = times * self.share(layers)
        if estimator == "label":
            return self.passes("dual", rows, share)
        return together(self.passes("forward", rows, share), self.passes("backward", rows, share))

    def scorer(
        self,
        validation: Sequence[Example],
        rows: Sequence[Example],
        estimator: str | None = None,
        layers: int | None = None,
    ) -> Units:
        """A new scorer that scores rows: its direction, its proofs on the first batch, values."""
        first = rows[: self.subject.batch_size]
        return together(
            self.gradient(validation, layers),
            self.gradient(first, layers),
            self.values(rows, estimator, layers),
        )

    def graph(self, rows: Sequence[Example], size: int | None = None) -> float:
        """Bytes that autograd keeps of the largest batch of rows."""
        size = size or self.subject.batch_size
        largest = max(
            (
                len(rows[s : s + size]) * max(len(r.input_ids) for r in rows[s : s + size])
                for s in range(0, len(rows), size)
            ),
            default=0,
        )
        return self.prices.graph * largest

    @property
    def largest(self) -> float:
        """Bytes of the largest trainable matrix."""
        trained = (p for p in self.subject.model.parameters() if p.requires_grad)
        return float(max(p.numel() * p.itemsize for p in trained))

    def memory(
        self, copies: int | float, rows: Sequence[Example] = (), size: int | None = None
    ) -> float:
        """Bytes: copies of the model, and the graph of the largest batch."""
        return copies * self.prices.weights + self.graph(rows, size)
