"""One draw on one model: every response token's value, by part of the parameters."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.data import Example
from alphatoken.diagnose.subject import Subject, places_of
from alphatoken.diagnose.valuing import Setting, full_gradient, read
from alphatoken.direction.objective import objective_gradient
from alphatoken.direction.optimizers import frozen_preconditioners, full_preconditioners
from alphatoken.errors import NumericalError
from alphatoken.estimate.forward_mode import label_values
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.support.storage import replacing
from benchmarks.frontier.draws import VALUED, draw_rows, formats_of
from benchmarks.frontier.parts import part_names, part_values

CAPTURED = ("alphatoken", "direct", "path")
STEPS, RATE = 8, 5e-5  # of AdamW, before its next step is looked at
_TOLERANCE = 1e-3  # of float32 sums of a thousand terms, against the size of all values

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Shares:
    """Values of one draw's response tokens, column by column.

    Attributes:
        columns: name -> a number a token: ``label/PART``, ``ESTIMATOR/layer i`` over the linears
            of one layer, ``total`` (all parameters, by the library), and ``row``.
        facts: sizes of the batch, which prices are computed from.
    """

    columns: Mapping[str, Numbers]
    facts: Mapping[str, Any]

    def save(self, path: Path) -> None:
        """Write whole or not at all."""
        with replacing(path) as temporary, temporary.open("wb") as file:
            facts = np.array(json.dumps(self.facts))
            np.savez_compressed(file, facts=facts, **self.columns)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Shares:
        """As they were saved."""
        with np.load(path) as file:
            columns = {name: file[name] for name in file.files if name != "facts"}
            return cls(columns, json.loads(str(file["facts"])))


def measure(
    model: Any,
    valued: Sequence[Example],
    validation: Sequence[Example],
    optimizer: torch.optim.Optimizer | None,
) -> Shares:
    """The shares of one draw, along G or along G as the optimizer's next step has it.

    Args:
        model: in float32.
        valued: rows of the draw.
        validation: rows to value them against.
        optimizer: None for gradient descent; else what P is read from, exactly (the derivative of
            its step at the valued rows' own gradient).

    Raises:
        NumericalError: the parts do not sum to the label value over all parameters.
    """
    subject = Subject(model, valued, validation, batch_size=VALUED)
    plain = full_gradient(subject)
    depth = len(subject.adapter.layers())
    batches = [read_batch(batch) for batch in subject.batches(valued)]
    along = plain if optimizer is None else _scaled(subject, optimizer, plain)
    settings = {
        f"{name}/layer {i}": Setting(name, (i,), 32) for name in CAPTURED for i in range(depth)
    }
    values = read(subject, valued, along, list(settings.values()))
    columns = {name: values[setting] for name, setting in settings.items()}
    columns["row"] = places_of(valued)[:, 0].astype(np.float64)
    columns["total"] = _label(subject, batches, along)
    if optimizer is not None:
        named = {n: p for n, p in model.named_parameters() if n in plain}
        frozen = frozen_preconditioners(optimizer, named)
        assert frozen is not None
        scaled = {n: p * plain[n] for n, p in frozen.items()}
        columns["frozen"] = _label(subject, batches, scaled)
        columns["plain"] = _label(subject, batches, plain)
        last = [Setting("alphatoken", (i,), 32) for i in range(depth)[-3:]]
        paper = read(subject, valued, plain, last)
        columns["plain alphatoken K=3"] = np.sum([paper[s] for s in last], axis=0)
    parts = torch.cat([part_values(subject.adapter, batch, along) for batch in batches])
    columns |= zip(
        (f"label/{name}" for name in part_names(depth)), parts.double().numpy().T, strict=True
    )
    facts = {
        "tokens": sum(int(batch.mask.sum()) for batch in batches),
        "batches": [[*batch.labels.shape, int(batch.mask.sum())] for batch in batches],
        "sum_error": _sum_error(columns, depth),
    }
    return Shares(columns, facts)


def _label(subject: Subject, batches: list[LabelledBatch], along: Mapping[str, Tensor]) -> Numbers:
    """Label values along a direction, by the library."""
    parts = [label_values(subject.adapter, batch, along)[batch.mask] for batch in batches]
    values: Numbers = torch.cat(parts).double().numpy()
    return values


def _sum_error(columns: Mapping[str, Numbers], depth: int) -> float:
    """Largest difference of the parts' sum from the whole, in mean sizes of the parts' sum.

    Raises:
        NumericalError: they are two things.
    """
    names = [name for name in part_names(depth) if name not in ("attention", "MLP")]
    parts = [columns[f"label/{name}"] for name in names]
    size = np.abs(parts).sum(0).mean()
    error = float(np.abs(np.sum(parts, axis=0) - columns["total"]).max() / size)
    if not error <= _TOLERANCE:
        raise NumericalError(
            "the parts of the values do not sum to them",
            got=f"a difference of {error:.1e} of the parts' mean size",
            why="every figure of the frontier is a sum of parts",
            remedy="look at the model's structure (benchmarks/frontier/parts.py)",
        )
    return error


# --- Adam ----------------------------------------------------------------------------------------


def trained(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """A copy after a few steps of AdamW on rows of every format, and its optimizer."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    formats = formats_of(tokenizer)
    for step in range(STEPS):
        name = formats[step % len(formats)]
        # Draws that are not measured: there are at most three of them.
        rows = draw_rows(name, 5 - step // len(formats) % 3, tokenizer)[0]
        (batch,) = Subject(model, rows, rows, batch_size=VALUED).batches(rows)
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval(), optimizer


def _scaled(
    subject: Subject, optimizer: torch.optim.Optimizer, plain: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """``P o G`` with the derivative of the step that the valued rows would make."""
    named = {n: p for n, p in subject.model.named_parameters() if n in plain}
    batches = subject.batches(subject.train)
    own = objective_gradient(subject.adapter, named, batches, first=None)
    p = full_preconditioners(optimizer, named, own)
    assert p is not None
    return {name: p[name] * g for name, g in plain.items()}
