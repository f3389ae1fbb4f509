"""Label values over all parameters by differences: their error by length of the shift, and price.

What they are compared with is forward mode of the same model in float64. Counted in forwards: two
for central differences; one beside a training step, whose forward is the other side, for one-sided
ones. Copying and moving the weights is no product, and is seen in ``benchmarks.run`` alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from alphatoken.config import FORMS
from alphatoken.data import Example
from alphatoken.diagnose.subject import Subject, places_of
from alphatoken.diagnose.valuing import full_gradient
from alphatoken.estimate.differences import Differences
from alphatoken.estimate.forward_mode import label_values
from alphatoken.estimate.temporary_weights import ShiftedWeights
from alphatoken.model.batch import read_batch
from alphatoken.model.forward import evaluation_mode, response_losses
from alphatoken.model.protocol import find_adapter
from benchmarks.floors import Shape
from benchmarks.frontier.draws import VALUED
from benchmarks.frontier.measure import Shares
from benchmarks.frontier.settings import all_parameters
from benchmarks.frontier.tables import Draws, measured

LENGTHS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 0.1, 1.0)
"""Norms of h M over all parameters; ``None`` beside them is the library's own h."""

_FORWARDS = {"central": 2, "one_sided": 1}


def differences(model: Any, valued: Sequence[Example], validation: Sequence[Example]) -> Shares:
    """Values of one draw: ``total`` in float64, each form at the library's own h and ``LENGTHS``.

    Facts hold the stated error of each form beside the sizes of the batches.
    """
    subject = Subject(model, valued, validation, batch_size=VALUED)
    adapter, along = subject.adapter, full_gradient(subject)
    batches = [read_batch(batch) for batch in subject.batches(valued)]
    double = find_adapter(copy.deepcopy(model).double())
    exact = {name: m.double() for name, m in along.items()}
    columns = {"total": [label_values(double, batch, exact)[batch.mask] for batch in batches]}
    del double, exact
    facts: dict[str, Any] = {}
    for form in FORMS:
        method = Differences(adapter)
        results = [method.values(batch, along, form) for batch in batches]
        columns[form] = [one.values[b.mask] for b, one in zip(batches, results, strict=True)]
        facts[form] = max(one.error for one in results)
    shift = ShiftedWeights(model, along)
    norm = shift.direction_norm()
    with torch.no_grad(), evaluation_mode(model), shift.open():
        for length in LENGTHS:
            columns |= {f"{form} {length:g}": [] for form in FORMS}
            h = length / norm
            for batch in batches:
                losses = {}
                for side in (h, -h, 0.0):
                    shift.to(side)
                    losses[side] = response_losses(adapter, batch.inputs, batch.labels)[batch.mask]
                columns[f"central {length:g}"].append((losses[h] - losses[-h]) / (2 * h))
                columns[f"one_sided {length:g}"].append((losses[0.0] - losses[-h]) / h)
    values = {name: torch.cat(parts).double().numpy() for name, parts in columns.items()}
    values["row"] = places_of(valued)[:, 0].astype(np.float64)
    sizes = [[*batch.labels.shape, int(batch.mask.sum())] for batch in batches]
    return Shares(values, facts | {"batches": sizes})


def records_of(draws: Draws) -> list[dict[str, Any]]:
    """As records of other settings, with ``length``, ``error`` and ``stated`` (None at a length).

    Errors are relative, in norm over a draw's tokens, of the draw in which they are largest.
    """
    truths = [shares.columns["total"] for shares in draws.shares]
    records = []
    for form in FORMS:
        price = _FORWARDS[form] * _forward(draws)
        name = f"label, all parameters, {form.replace('_', '-')}"
        name += " beside a step" if form == "one_sided" else ""
        setting = all_parameters(name, "label, differences", draws.depth)
        for length in (None, *LENGTHS):
            column = form if length is None else f"{form} {length:g}"
            values = [shares.columns[column] for shares in draws.shares]
            record = measured(draws, setting, values, price)
            stated = max(s.facts[form] for s in draws.shares) if length is None else None
            error = max(
                float(np.linalg.norm(v - t) / np.linalg.norm(t))
                for v, t in zip(values, truths, strict=True)
            )
            further = {"usable": length is None, "length": length, "error": error, "stated": stated}
            records.append(record | further)
    return records


def _forward(draws: Draws) -> float:
    """A forward of all batches in their training steps."""
    batches = [batch for shares in draws.shares for batch in shares.facts["batches"]]
    shapes = [Shape.of(draws.model, rows, t).with_responses(count) for rows, t, count in batches]
    return sum(shape.forward for shape in shapes) / sum(shape.step for shape in shapes)
