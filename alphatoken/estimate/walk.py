"""Walks: optimizer steps on the validation rows, and the decrease of token losses along them.

    theta + D    after n AdamW steps on the validation objective
    e_k  =  l_k(theta) - l_k(theta + D)  =  - integral_0^1 <grad l_k(theta + s D), D> ds

The value of a token along a walk is what its loss falls by: the label value along -D, averaged over
the way, and exact for the whole of it. A second model may stand at the walk's end.

    central:  e_k  =  (l_k(theta - D) - l_k(theta + D)) / 2  =  - <grad l_k(theta), D> + O(|D|^3)

``walk_form="central"`` goes as far back as the walk went forth, and D' H_k D / 2, by which the two
forms differ, cancels. Both ends belong to the start of the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from alphatoken.config import WALK
from alphatoken.direction.algebra import Direction
from alphatoken.direction.cache import (
    DirectionCache,
    require_gradients,
    validation_age,
    weights_age,
)
from alphatoken.direction.inputs import DirectionInputs
from alphatoken.direction.objective import forward_losses, objective_value
from alphatoken.errors import (
    AlphaTokenWarning,
    ConfigError,
    UnsupportedError,
    warn_caller,
)
from alphatoken.estimate.differences import CHECKED_EVERY
from alphatoken.estimate.estimator import Estimator, Recording, Side
from alphatoken.estimate.temporary_weights import TemporaryWeights
from alphatoken.estimate.token_values import combine, undivided
from alphatoken.model.batch import LabelledBatch, read_batch
from alphatoken.model.forward import draws, evaluation_mode
from alphatoken.model.protocol import find_adapter
from alphatoken.model.sharding import Sharding
from alphatoken.support.precision import wide
from alphatoken.support.progress import Tracker
from alphatoken.values import TokenValues

End = dict[str, Tensor]
"""Parameter name -> weight at the end of the walk; empty of a second model. Of the central form
also, under ``BEHIND`` and the name, its weight as far behind the start."""

BEHIND = "behind:"

LEARNED, LEARNED_SHARE = 0.05, 0.05
"""Mean loss at the end of a walk, in nats and as a share of that before it, below both of which its
rows are known by heart."""


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
    smaller than their rounding. Memory beside the model: the weights that walk, their gradient, and
    what the optimizer keeps; of weights in 16 bits, and under ``sharding``, a copy in float32 more.

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
    given. Oracle: ``alphatoken.oracle.run.walked``.
    """
    moved = TemporaryWeights(model, names, sharding)
    with moved.open():
        start = {name: part.dtype for name, part in moved.parts().items()}
        weights = moved.walking()
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
    return {name: weight.to(start[name]) for name, weight in weights.items()}


def walk_age(inputs: DirectionInputs) -> tuple[object, ...]:
    """Numbers of all weights, which a walk starts from, and of the rows that it is taken on.

    Under sharding the first is always another one, and rows are set by the trainer.
    """
    if inputs.scored.sharding is not None:
        return (object(),)
    return weights_age(inputs.adapter.model), validation_age(inputs)


def end_of_walk(inputs: DirectionInputs) -> dict[str, Tensor]:
    """Weights after the walk that the options describe, from the weights as they are.

    Warns where the mean loss of the validation rows has risen, and where it has fallen below
    ``LEARNED`` nats and below ``LEARNED_SHARE`` of what it was: rows that are known by heart lead
    away from all others, of their own kind too.
    """
    config, model, scored = inputs.config, inputs.adapter.model, inputs.scored
    rate = config.walk_rate
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
    elif after < min(LEARNED, LEARNED_SHARE * before):
        warn_caller(
            f"a walk of {config.walk_steps} AdamW steps at rate {rate:g} learned its rows by "
            f"heart: their mean loss fell from {before:.3g} to {after:.3g}. Good rows may then "
            "have negative values too: compare ranks, not signs. More trusted rows, or fewer "
            "walk_steps.",
            AlphaTokenWarning,
        )
    return weights if config.walk_form == "one_sided" else {**weights, **_behind(inputs, weights)}


def _behind(inputs: DirectionInputs, end: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``theta - D`` under ``BEHIND`` and the names; weights in 16 bits are rounded once."""
    start = TemporaryWeights(inputs.adapter.model, end, inputs.scored.sharding).parts()
    return {
        f"{BEHIND}{name}": (2 * p.to(wide(p.dtype)) - end[name].to(wide(p.dtype))).to(p.dtype)
        for name, p in start.items()
    }


def _ends(end: End) -> tuple[End, End]:
    """(weights ahead, weights behind), by parameter name."""
    behind = {n.removeprefix(BEHIND): p for n, p in end.items() if n.startswith(BEHIND)}
    return {n: p for n, p in end.items() if not n.startswith(BEHIND)}, behind


@contextmanager
def _moved_to(inputs: DirectionInputs, weights: Mapping[str, Tensor]) -> Iterator[None]:
    moved = TemporaryWeights(inputs.adapter.model, weights, inputs.scored.sharding)
    with moved.open():
        moved.place(weights)
        yield


def _mean_objective(inputs: DirectionInputs, role: str) -> float:
    sums = [objective_value(inputs.adapter, item, role) for item in inputs.validation]
    return sum(total for total, _ in sums) / max(sum(count for _, count in sums), 1)


class Walk(Estimator[End]):
    """``e_k = l_k(theta) - l_k(end)`` for every response token k, in nats, times its weight.

    One forward at the end, and one of the model as it is where the recording has no losses, or has
    drawn random numbers. Of the central form one at each end.

    Exactness: exact, up to the rounding of two forwards. Source: Rho-1 (excess loss);
    CoLoR-Filter. Oracle: ``alphatoken.oracle.run.walk_values``, ``central_walk_values``.
    """

    def __init__(self, cache: DirectionCache[End]) -> None:
        super().__init__(cache)
        reference = self.inputs.arguments.reference
        if reference is not None and self.inputs.config.walk_form != "one_sided":
            raise ConfigError(
                "a second model has nothing behind it",
                got=f"walk_form={self.inputs.config.walk_form!r}, Scorer(reference=...)",
                why="the central form goes back from the start of a walk as far as the walk went",
                remedy="walk_form='one_sided', or leave reference out",
            )
        self._reference = None if reference is None else find_adapter(reference)
        self._compared = 0  # recordings whose losses came with them
        self._prepared = 0  # uses of a second model
        # Whether the loss is known to depend on what walks: another setting may have switched it
        # off, and each value would be 0.
        self._depends = True

    @property
    def shares_head(self) -> bool:
        """False: a walk reads losses alone."""
        return False

    def prepare(self, batch: LabelledBatch | None = None) -> End:
        """The end of the walk; a walk is taken where one is due. Empty of a second model."""
        if self._reference is not None:
            require_gradients(self.adapter.model)
            self._prepared += 1
            self.proofs.see_version(self._prepared)
            return {}
        builds = self.cache.builds  # a number, since the former end would stay in memory
        end = super().prepare(batch)
        if self.cache.builds != builds:
            self._warned = False
        elif not self._depends:
            self.inputs.gradient_of_step(0)
        self._depends = True
        # A forward that is observed is a training loop's, in which the weights are to move.
        if batch is not None and self.warn and not self._warned and not self.config.walk_refresh:
            self._warn_if_outdated()
        self.proofs.see_version(self.cache.version)
        return end

    def _warn_if_outdated(self) -> None:
        if self.cache.outdated:
            self._warned = True
            warn_caller(
                "This walk began at other weights than the model has now, and is kept, as a "
                "training run needs it: values are relative to its old end. scorer.refresh() takes "
                "a new walk from here.",
                AlphaTokenWarning,
            )

    def prove(self, batch: LabelledBatch, sides: Sequence[Side] = ()) -> None:
        """Nothing but how the model reads the batch: losses are subtracted as they are."""
        self.proofs.see_arguments(batch)

    def carry_over(self, former: Estimator[End], *, same_parameters: bool) -> None:
        """Go on with the walk of the former estimator, where the same weights walk."""
        super().carry_over(former, same_parameters=same_parameters)
        if same_parameters:
            self.cache.follow(former.cache)
            self._depends = self.cache.kept is None

    def forget(self) -> None:
        """Compare losses of the next recording again."""
        self._compared = 0

    def _values(self, recording: Recording, direction: End, *, components: bool) -> TokenValues:
        ahead, behind = _ends(direction)
        there = self._losses_at_end(ahead, recording.batch)
        here = self._losses(recording).to(there.device)
        self._compared += recording.losses is not None
        dtype = wide(here.dtype)
        values = here.to(dtype) - there.to(dtype)
        if behind:
            before = self._losses_at_end(behind, recording.batch)
            values = (before.to(dtype) - there.to(dtype)) / 2
        values = values.masked_fill(~recording.batch.mask, 0.0)
        if recording.token_weights is not None:
            values = values * recording.token_weights.to(values)
        whole = combine(undivided(values), None, mask=recording.batch.mask, estimator=WALK)
        whole = replace(whole, losses=here)
        return whole if components else whole.total_alone()

    def _losses_at_end(self, end: End, batch: LabelledBatch) -> Float[Tensor, "b t"]:
        """Losses at the end of the walk, or of the second model, without a graph or dropout."""
        adapter = self._reference or self.adapter
        with torch.no_grad(), evaluation_mode(adapter.model):
            if self._reference is None:
                with _moved_to(self.inputs, end):
                    return forward_losses(adapter, batch, "batch at the end of the walk")
            role = "batch under the reference model"
            # Read again, since its embedding may have another number of rows.
            read_batch(
                {**batch.inputs, "labels": batch.labels},
                max_length=adapter.max_positions(),
                role=role,
                model=adapter.model,
            )
            return forward_losses(adapter, batch, role)

    def _losses(self, recording: Recording) -> Tensor:
        """Losses (b, t) of the model as it is, without dropout: the recording's if it has any."""
        draws_numbers = draws(self.adapter.model)
        own = None if draws_numbers or recording.losses is None else recording.losses.detach()
        # Now and then, since it takes a forward, they are compared with one of our own.
        if own is not None and self._compared % CHECKED_EVERY != 0:
            return own
        with torch.no_grad(), evaluation_mode(self.adapter.model):
            again = forward_losses(self.adapter, recording.batch, "batch")
        if own is None:
            return again
        recording.require_losses(again)
        return own

    def way(self) -> Direction:
        """M = -D, along which values are averages over the way; from the weights as they are.

        Raises:
            UnsupportedError: values are relative to a second model.
        """
        if self._reference is not None:
            raise UnsupportedError(
                "a second model gives no direction",
                got="Scorer(reference=...)",
                why="its parameters need not be those of the model",
                remedy="take score(); or walk there: leave reference out, with walk_steps",
            )
        end, _ = _ends(self.prepare())
        start = TemporaryWeights(self.adapter.model, end, self.scored.sharding).parts()
        m = {n: p.to(wide(p.dtype)) - end[n].to(wide(p.dtype)) for n, p in start.items()}
        return Direction(m, None, 0.0)
