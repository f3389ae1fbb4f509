"""Walks: optimizer steps on the validation rows, and the decrease of token losses along them.

    theta + D    after n AdamW steps on the validation objective
    e_k  =  l_k(theta) - l_k(theta + D)  =  - integral_0^1 <grad l_k(theta + s D), D> ds

The value of a token along a walk is what its loss falls by: the label value along -D, averaged over
the way, and exact for the whole of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alphatoken.direction.age import weights_age
from alphatoken.direction.algebra import Direction
from alphatoken.direction.inputs import DirectionInputs
from alphatoken.direction.objective import forward_losses, objective_value
from alphatoken.errors import AlphaTokenWarning, warn_caller
from alphatoken.estimate.temporary_weights import TemporaryWeights
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.sharding import Sharding
from alphatoken.support.precision import wide
from alphatoken.support.progress import Tracker

__all__ = [
    "LEARNING_RATE",
    "end_of_walk",
    "losses_at",
    "losses_of_reference",
    "walk",
    "walk_age",
    "way_of",
]

LEARNING_RATE = 5e-5
"""Learning rate of a walk by default: a usual one of full fine-tuning."""

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def walk(
    model: nn.Module,
    names: Iterable[str],
    gradient: Callable[[int], dict[str, Tensor]],
    steps: int,
    optimizer: MakeOptimizer,
    sharding: Sharding | None = None,
) -> dict[str, Tensor]:
    """Weights after ``steps`` optimizer steps; those of the model are restored bitwise.

    Weights in 16 bits walk in float32 and are rounded for each forward, since most steps are
    smaller than their rounding. Memory beside the model: the weights that walk twice, and what the
    optimizer keeps.

    Args:
        model: where the walk starts.
        names: of the parameters that walk; a tied one once.
        gradient: from the number of a step to the gradient by name, where the weights then are;
            under ``sharding`` this process's part of it.
        steps: n.
        optimizer: from parameters to what steps them.
        sharding: of the weights.

    Returns:
        name -> weight in the parameter's dtype; under ``sharding`` this process's part of it.

    Raises:
        NumericalError: a NaN or Inf on the way.

    Exactness: that of float32 training. Source: ours; Rho-1 and CoLoR-Filter take such models as
    given. Oracle: ``alphatoken.oracle.walk.walked``.
    """
    moved = TemporaryWeights(model, names, sharding)
    with moved.open():
        start = moved.parts()
        weights = {n: part.to(wide(part.dtype), copy=True) for n, part in start.items()}
        stepper = optimizer(weights.values())
        with Tracker("Walk", steps, None, delay=1.0) as tracker:  # many walks are shorter
            for number in range(steps):
                gradients = gradient(number)
                for name, weight in weights.items():
                    weight.grad = gradients.pop(name).to(weight)
                stepper.step()
                stepper.zero_grad()
                moved.place(weights)
                tracker.report(number + 1)
    return {name: weight.to(start[name].dtype) for name, weight in weights.items()}


# --- of a scorer ----------------------------------------------------------------------------------


def walk_age(inputs: DirectionInputs) -> tuple[object, ...]:
    """Numbers of all weights, which a walk starts from; always another one under sharding."""
    sharded = inputs.scored.sharding is not None
    return (object() if sharded else weights_age(inputs.adapter.model),)


def end_of_walk(inputs: DirectionInputs) -> dict[str, Tensor]:
    """Weights after the walk that the options describe, from the weights as they are.

    Warns where the mean loss of the validation rows has risen.
    """
    config, model, scored = inputs.config, inputs.adapter.model, inputs.scored
    rate = LEARNING_RATE if config.walk_learning_rate is None else config.walk_learning_rate
    adamw = partial(torch.optim.AdamW, lr=rate, weight_decay=0.0)
    weights = walk(
        model,
        scored.parameters,
        inputs.gradient_of_step,
        config.walk_steps,
        adamw,
        scored.sharding,
    )
    before = _mean_objective(inputs, "validation batch")
    with _moved_to(inputs, weights):
        after = _mean_objective(inputs, "batch at the end of the walk")
    if after > before:
        warn_caller(
            f"a walk of {config.walk_steps} AdamW steps at rate {rate:g} raised the mean loss "
            f"of its validation rows from {before:.4g} to {after:.4g}: values along it point "
            "away from them. Lower walk_learning_rate.",
            AlphaTokenWarning,
        )
    return weights


def way_of(inputs: DirectionInputs, end: Mapping[str, Tensor]) -> Direction:
    """``M = -D = theta - end``, along which values are averages over the way."""
    parts = TemporaryWeights(inputs.adapter.model, end, inputs.scored.sharding).parts()
    m = {n: p.to(wide(p.dtype)) - end[n].to(wide(p.dtype)) for n, p in parts.items()}
    return Direction(m, None, 0.0)


@contextmanager
def _moved_to(inputs: DirectionInputs, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model has these weights inside; its own are restored bitwise, also after an exception."""
    moved = TemporaryWeights(inputs.adapter.model, weights, inputs.scored.sharding)
    with moved.open():
        moved.place(weights)
        yield


def losses_at(
    inputs: DirectionInputs, weights: Mapping[str, Tensor], batch: LabelledBatch
) -> Float[Tensor, "b t"]:
    """Token losses of the model at these weights, without a graph and without dropout."""
    model = inputs.adapter.model
    with torch.no_grad(), evaluation_mode(model), _moved_to(inputs, weights):
        return forward_losses(inputs.adapter, batch, "batch at the end of the walk")


def losses_of_reference(reference: DecoderAdapter, batch: LabelledBatch) -> Float[Tensor, "b t"]:
    """Token losses of a second model, whose embedding may have another number of rows."""
    role = "batch under the reference model"
    read_batch(
        {**batch.inputs, "labels": batch.labels},
        max_length=reference.max_positions(),
        role=role,
        model=reference.model,
    )
    with torch.no_grad(), evaluation_mode(reference.model):
        return forward_losses(reference, batch, role)


def _mean_objective(inputs: DirectionInputs, role: str) -> float:
    """The mean objective of the validation batches."""
    sums = [objective_value(inputs.adapter, item, role) for item in inputs.validation]
    return sum(total for total, _ in sums) / max(sum(count for _, count in sums), 1)
