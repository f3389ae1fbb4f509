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
from alphatoken.direction.build import Ingredients
from alphatoken.direction.current import DirectionBuilder, Frame
from alphatoken.direction.objective import forward_losses, objective_value
from alphatoken.errors import AlphaTokenWarning, UnsupportedError, warn_caller
from alphatoken.estimate.shift import Moved
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.sharding import Sharding
from alphatoken.support.precision import wide
from alphatoken.support.progress import Tracker

__all__ = ["LEARNING_RATE", "WalkBuilder", "walk"]

LEARNING_RATE = 5e-5
"""Learning rate of a walk by default: a usual one of full fine-tuning."""

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@contextmanager
def _placed(made_of: Ingredients, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the model have these weights inside; its own come back to the bit, come what may."""
    moved = Moved(made_of.adapter.model, weights, made_of.scored.sharding)
    with moved.open():
        moved.place(weights)
        yield


def _losses_there(
    made_of: Ingredients, weights: Mapping[str, Tensor], batch: LabelledBatch
) -> Float[Tensor, "b t"]:
    """Token losses at the end of the walk."""
    with torch.no_grad(), evaluation_mode(made_of.adapter.model), _placed(made_of, weights):
        return forward_losses(made_of.adapter, batch, "batch at the end of the walk")


def _reference_losses(reference: DecoderAdapter, batch: LabelledBatch) -> Float[Tensor, "b t"]:
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


def walk(
    model: nn.Module,
    names: Iterable[str],
    gradient: Callable[[int], dict[str, Tensor]],
    steps: int,
    optimizer: MakeOptimizer,
    sharding: Sharding | None = None,
) -> dict[str, Tensor]:
    """Weights after ``steps`` optimizer steps; the model is afterwards to the bit what it was.

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
    moved = Moved(model, names, sharding)
    with moved.open():
        start = moved.parts()
        weights = {n: part.to(wide(part.dtype), copy=True) for n, part in start.items()}
        stepper = optimizer(weights.values())
        with Tracker("Walk", steps, None, delay=1.0) as tracker:  # many walks are shorter
            for number in range(steps):
                found = gradient(number)
                for name, weight in weights.items():
                    weight.grad = found.pop(name).to(weight)
                stepper.step()
                stepper.zero_grad()
                moved.place(weights)
                tracker.report(number + 1)
    return {name: weight.to(start[name].dtype) for name, weight in weights.items()}


class WalkBuilder(DirectionBuilder):
    """Keeps the end of a walk: from the first use on, or for some steps of the run.

    Args:
        made_of: model, validation batches and options.
        reference: a second model that stands where no walk is needed.
    """

    def __init__(self, made_of: Ingredients, reference: DecoderAdapter | None = None) -> None:
        super().__init__(made_of)
        self._reference = reference
        self._weights: dict[str, Tensor] | None = None
        self._passed = 0
        # Whether the loss is known to depend on what walks: another setting may have switched it
        # off, and each value would be 0.
        self._shown = True

    def invalidate(self) -> None:
        """Forget the walk; the next ``prepare`` takes a new one from the weights as they are."""
        super().invalidate()
        self._weights = None

    def follow(self, former: DirectionBuilder) -> None:
        """Go on with the walk of another builder of the same weights."""
        assert isinstance(former, WalkBuilder)
        self._shown = self._shown and former._weights is None
        self._weights, self._passed, self._age = former._weights, former._passed, former._age

    def _current_age(self) -> object:
        if self.pinned is not None:
            return "pinned", self.pinned
        sharded = self.made_of.scored.sharding is not None
        return (object() if sharded else weights_age(self.made_of.adapter.model),)

    def prepare(self) -> Frame:
        """Take a walk where one is due, and hand out its end."""
        held, made_of = Direction({}, None, 0.0), self.made_of
        if self._reference is not None:
            return Frame(held, made_of, partial(_reference_losses, self._reference))
        age, refresh = self._current_age(), made_of.config.walk_refresh
        self._passed += self._age is not None and age != self._age
        if self._weights is None or (refresh and self._passed >= refresh):
            self._weights = None  # if the walk fails, nothing of it may pass for one
            self._weights, self._passed = self._walked(), 0
        elif not self._shown:
            made_of.gradient_of_step(0)
        self._age, self._shown = age, True
        return Frame(held, made_of, partial(_losses_there, made_of, self._weights))

    def _walked(self) -> dict[str, Tensor]:
        made_of, config = self.made_of, self.made_of.config
        rate = LEARNING_RATE if config.walk_learning_rate is None else config.walk_learning_rate
        adamw = partial(torch.optim.AdamW, lr=rate, weight_decay=0.0)
        model, scored = made_of.adapter.model, made_of.scored
        weights = walk(
            model,
            scored.parameters,
            made_of.gradient_of_step,
            config.walk_steps,
            adamw,
            scored.sharding,
        )
        before = _mean(made_of, "validation batch")
        with _placed(made_of, weights):
            after = _mean(made_of, "batch at the end of the walk")
        if after > before:
            warn_caller(
                f"a walk of {config.walk_steps} AdamW steps at rate {rate:g} raised the mean loss "
                f"of its validation rows from {before:.4g} to {after:.4g}: values along it point "
                "away from them. Lower walk_learning_rate.",
                AlphaTokenWarning,
            )
        return weights

    def direction(self) -> Direction:
        """M = -D, along which values are averages over the way; from the weights as they are.

        Raises:
            UnsupportedError: values are taken to a second model.
        """
        if self._reference is not None:
            raise UnsupportedError(
                "a second model gives no direction",
                got="Scorer(reference=...)",
                why="its parameters need not be those of the model",
                remedy="take score(); or walk there: leave reference out, with walk_steps",
            )
        end, made_of = self.end_weights(), self.made_of
        parts = Moved(made_of.adapter.model, end, made_of.scored.sharding).parts()
        m = {n: p.to(wide(p.dtype)) - end[n].to(wide(p.dtype)) for n, p in parts.items()}
        return Direction(m, None, 0.0)

    def end_weights(self) -> dict[str, Tensor]:
        """The weights at the end of the walk."""
        self.prepare()
        assert self._weights is not None
        return self._weights

    def keep(self, weights: dict[str, Tensor]) -> None:
        """Take these weights for the end of the walk."""
        self.invalidate()
        self._weights, self._passed, self._age = weights, 0, None


def _mean(made_of: Ingredients, role: str) -> float:
    """The mean objective of the validation batches."""
    found = [objective_value(made_of.adapter, item, role) for item in made_of.validation]
    return sum(total for total, _ in found) / max(sum(count for _, count in found), 1)
