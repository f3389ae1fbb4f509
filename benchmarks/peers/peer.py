"""What a peer is, and the work that each of them is given."""

from __future__ import annotations

import copy
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alphatoken.errors import ConfigError
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from benchmarks.models import decoder, random_batch

Batch = Mapping[str, Tensor]
Run = Callable[[], Tensor]

ESTIMANDS = ("label", "path", "sample")
REMEDY = 'pip install "alphatoken[bench]", or without touching torch: pip install --no-deps -r '
REMEDY += "benchmarks/peers/requirements.txt"

WIDTH, DEPTH, LAYERS, VOCABULARY = 256, 4, 3, 2048
ROWS, LENGTH = 4, 64
HELD_OUT_ROWS, HELD_OUT_LENGTH, HELD_OUT_BATCHES = 4, 128, 2

DESCRIPTION = (
    f"d={WIDTH}, {DEPTH} layers, K={LAYERS}, {ROWS} x {LENGTH} tokens, "
    f"{HELD_OUT_BATCHES} validation batches of {HELD_OUT_ROWS} x {HELD_OUT_LENGTH}"
)


@dataclass(frozen=True)
class Work:
    """One model, one training batch, validation batches, and the last K layers' linears.

    Attributes:
        model: a transformers decoder in evaluation mode.
        batch: ``input_ids``, ``attention_mask``, ``labels`` (b, t).
        validation: batches of the same form; J is the mean loss over all their response tokens.
        layers: K.
        disposable: a peer may change the model instead of a copy of it.
        scratch: an empty folder for a peer that writes files; see ``started``.
    """

    model: nn.Module
    batch: Batch
    validation: Sequence[Batch]
    layers: int
    disposable: bool = False
    scratch: Path | None = None

    @cached_property
    def adapter(self) -> DecoderAdapter:
        return find_adapter(self.model)

    @cached_property
    def places(self) -> list[str]:
        """Names of the scored linears, those of the last K decoder layers."""
        depth = len(self.adapter.layers())
        last = range(depth - self.layers, depth)
        return [linear.name for linear in self.adapter.scored_linears(list(last))]

    @property
    def weights(self) -> dict[str, Tensor]:
        """Name -> weight (d_out, d_in) of each scored linear, the parameter itself."""
        return {f"{p}.weight": self.model.get_parameter(f"{p}.weight") for p in self.places}

    @property
    def count(self) -> int:
        """Response tokens of all validation batches: what J divides by."""
        return sum(int((b["labels"][:, 1:] != -100).sum()) for b in self.validation)

    def own_model(self) -> Any:
        """A model that a peer may change."""
        return self.model if self.disposable else copy.deepcopy(self.model)


@dataclass(frozen=True)
class Peer:
    """Another way to value training data by inner products with the validation gradient G.

    Attributes:
        name: as it stands in the rows.
        computes: what it gives, in one sentence.
        estimand: "label": (b, t), row sums of Psi at the token index; "path": (b, t), column sums
            by position of use, prompt included; "sample": (b,), <gradient of the row's loss, G>.
        prepare: sets up once (copies, hooks, folders), outside of what is timed; what it returns
            does the whole work, validation side included.
        requires: packages that must be installed.
        tolerance: largest error, relative to the largest value, on a float64 and on a float32
            model. Not rounding in float64: transformers' norms and softmax run in float32 there.
    """

    name: str
    computes: str
    estimand: str
    prepare: Callable[[Work], Run]
    requires: tuple[str, ...] = ()
    tolerance: tuple[float, float] = (1e-6, 1e-4)

    def __post_init__(self) -> None:
        if self.estimand not in ESTIMANDS:
            raise ConfigError(
                f"estimand must be one of {', '.join(ESTIMANDS)}", got=repr(self.estimand)
            )

    def missing(self) -> str | None:
        """One line on the packages that are not installed; None if all are."""
        absent = [name for name in self.requires if importlib.util.find_spec(name) is None]
        if not absent:
            return None
        return (
            f"peer '{self.name}' not run: package {', '.join(absent)} is not installed, and the "
            f"comparison needs it. Remedy: {REMEDY}"
        )

    def allowed(self, dtype: torch.dtype) -> float:
        """The tolerance for a model of this dtype."""
        return self.tolerance[0] if dtype == torch.float64 else self.tolerance[1]


@contextmanager
def started(peer: Peer, work: Work) -> Iterator[Run]:
    """The peer set up for this work; its files are gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        yield peer.prepare(replace(work, scratch=Path(folder)))


def position_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(b, t - 1): at position p the loss of predicting token p + 1, 0 where it has no label."""
    return F.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none"
    )


def forward_losses(model: Any, batch: Batch) -> Tensor:
    """``position_losses`` of one forward."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return position_losses(model(**inputs, use_cache=False).logits, batch["labels"])


def unpadded(batch: Batch) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Token ids and labels of each row without padding, and where the row starts."""
    ids, labels, starts = [], [], []
    for row, wanted, real in zip(
        batch["input_ids"], batch["labels"], batch["attention_mask"].bool(), strict=True
    ):
        ids.append(row[real].tolist())
        labels.append(wanted[real].tolist())
        starts.append(int(real.nonzero()[0]))
    return ids, labels, starts


def right_padded(batch: Batch) -> tuple[Tensor, Tensor]:
    """``input_ids`` and ``labels`` with the padding moved behind, where causality hides it."""
    ids, labels, _ = unpadded(batch)
    length = max(map(len, ids))

    def stacked(rows: list[list[int]], filler: int) -> Tensor:
        return torch.tensor([row + [filler] * (length - len(row)) for row in rows])

    return stacked(ids, 0), stacked(labels, -100)


def validation_gradient(work: Work) -> list[Tensor]:
    """G of the scored weights: one ordinary backward a validation batch."""
    weights = list(work.weights.values())
    total = [torch.zeros_like(w, requires_grad=False) for w in weights]
    for batch in work.validation:
        loss = forward_losses(work.model, batch).sum()
        for sum_, part in zip(total, torch.autograd.grad(loss, weights), strict=True):
            sum_ += part
    return [t / work.count for t in total]


# --- the work whose time and memory are measured -------------------------------------------------


def random_rows(rows: int, length: int, seed: int) -> dict[str, Tensor]:
    """Random tokens without padding, the first quarter of each row prompt."""
    batch = random_batch(rows, length, VOCABULARY, seed=seed)
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def standard_model() -> torch.nn.Module:
    """The decoder, in evaluation mode."""
    made: torch.nn.Module = decoder(WIDTH, DEPTH, vocabulary=VOCABULARY)
    return made.eval()


def standard(own: torch.nn.Module | None = None, *, disposable: bool = False) -> Work:
    """The work whose time and memory are measured."""
    held_out = [random_rows(HELD_OUT_ROWS, HELD_OUT_LENGTH, 1 + i) for i in range(HELD_OUT_BATCHES)]
    train = random_rows(ROWS, LENGTH, 0)
    return Work(standard_model() if own is None else own, train, held_out, LAYERS, disposable)
