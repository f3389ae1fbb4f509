"""Construction of M from its ingredients, which stay unchanged, at the current weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from alphatoken.config import ScorerConfig
from alphatoken.direction.algebra import Direction, first_not_finite, precondition
from alphatoken.direction.drift import FisherDrift, ShardedDrift
from alphatoken.direction.influence import InfluenceFactors
from alphatoken.direction.objective import (
    GradientReducer,
    captured_parts,
    mean_gradient,
    objective_sums,
    require_finite_gradient,
    stream_losses,
)
from alphatoken.direction.scored import ScoredParameters
from alphatoken.errors import ConfigError, InputError, NumericalError, UnsupportedError
from alphatoken.estimate.gradients import gradient_of
from alphatoken.model.batch import LabelledBatch, PreferenceBatch, as_batches, read_batch
from alphatoken.model.capture import Recorder, record
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.sharding import MasterWeights
from alphatoken.support.precision import wide
from alphatoken.support.progress import Tracker

__all__ = ["Ingredients", "Retention"]

Retention = FisherDrift | Mapping[str, Any] | Sequence[Any] | None
"""A Fisher drift, or labelled batches whose mean loss is to be kept, or nothing."""


@dataclass(frozen=True, eq=False)
class Ingredients:
    """All that M is made of; under sharded weights every matrix is this process's part of it.

    Attributes:
        adapter: of the model.
        scored: the parameters.
        config: the options.
        optimizer: that P is read from.
        reduce: makes the mean of a summed gradient; None divides.
        masters: the weights as the optimizer keeps them; None for the model's own.
        validation: batches or pairs.
        retention: what V is taken of.
        parts: of a Fisher drift, under sharded weights.
        to_reference: values are taken to a second model, which stands for the validation rows.
        influence: K, for ``preconditioner="kronecker"``.
    """

    adapter: DecoderAdapter
    scored: ScoredParameters
    config: ScorerConfig
    optimizer: torch.optim.Optimizer | None
    reduce: GradientReducer | None
    masters: MasterWeights | None
    validation: Sequence[Any] = ()
    retention: Retention = None
    parts: ShardedDrift | None = None
    to_reference: bool = False
    influence: InfluenceFactors | None = None

    # --- what is valued against what -------------------------------------------------------------

    def against(self, validation: Sequence[Any]) -> Ingredients:
        """The same with another validation set, once it is checked."""
        if self.config.adapts and not validation and not self.to_reference:
            raise InputError(
                "no validation tokens",
                got="an empty validation set",
                why="the adaptation value is measured against the validation gradient",
                remedy="pass at least one batch with response tokens, or objective='stability'",
            )
        if self.config.standard_errors and len(validation) < 2:
            raise InputError(
                "standard errors need at least two validation batches",
                got=f"{len(validation)}",
                why="they are taken from the spread of the values between the batches",
                remedy="hand the validation rows over in several batches; in a trainer set "
                "validation_micro_batch_size",
            )
        return replace(self, validation=validation)

    def retaining(self, retention: Retention) -> Ingredients:
        """The same with another retention term, once it is checked."""
        if retention is not None and self.config.estimator == "walk":
            raise ConfigError(
                "a walk has no stability side",
                got=f"retention of type {type(retention).__name__}",
                why="it is steps on the validation rows, and V would take no part",
                remedy="retention=None, or estimator='label'",
            )
        if retention is None and self.config.objective == "stability":
            raise ConfigError(
                "objective='stability' needs a retention term",
                got="retention=None",
                why="every value would be zero",
                remedy="pass a FisherDrift or retention batches",
            )
        parts = None
        if isinstance(retention, FisherDrift) and self.config.objective != "adaptation":
            parts = self._checked_drift(retention)
        return replace(self, retention=retention, parts=parts)

    def _checked_drift(self, drift: FisherDrift) -> ShardedDrift | None:
        """Raise unless the drift fits the model; under sharded weights return its parts."""
        limit, scored = self.config.max_relative_drift, self.scored
        if scored.sharding is None:
            drift.check(self.adapter, list(scored.parameters), max_relative_drift=limit)
            return None
        # ``drift.check`` compares whole weights, which no process has here.
        drift.check_identity(self.adapter.identity())
        sharded = ShardedDrift(drift, scored.sharding, scored.parameters, self.masters)
        sharded.check(limit)
        return sharded

    def check_preconditioner(self) -> None:
        """Raise unless P can be had: from this optimizer, or from matrices that fit."""
        kind = self.config.preconditioner
        if (kind == "kronecker") != (self.influence is not None):
            raise ConfigError(
                "preconditioner='kronecker' and influence factors go together",
                got=f"preconditioner={kind!r:.40}, influence={self.influence!r:.40}",
                remedy="Scorer(..., influence=fit_influence(model, rows)) with "
                "ScorerConfig(preconditioner='kronecker')",
            )
        if self.influence is not None:
            if self.scored.sharding is not None:
                raise UnsupportedError(
                    "preconditioner='kronecker' cannot be had on sharded weights",
                    why="eigenvectors mix all rows and columns of G, and no process has them",
                    remedy="a layout in which each process has the weights (DDP, ZeRO-1 or 2)",
                )
            self.influence.check(self.scored.shapes(), self.adapter.identity())
        elif isinstance(kind, str):
            if self.optimizer is None:
                raise ConfigError(
                    f"preconditioner={kind!r} needs the optimizer",
                    remedy="Scorer(..., optimizer=optimizer)",
                )
            _optimizers().check_optimizer(self.optimizer, self.scored.parameters)
        if isinstance(kind, Mapping):
            shapes = self.scored.shapes()
            for name, p in kind.items():
                if shapes.get(name) != p.shape:
                    raise ConfigError(
                        "a preconditioner fits no parameter in scope",
                        got=f"{name} {tuple(p.shape)}",
                        remedy="key it by parameter name, in the parameter's own shape",
                    )
            if (bad := first_not_finite(kind)) is not None:
                raise NumericalError(
                    "a preconditioner is not finite",
                    got=bad,
                    why="every value would be NaN",
                    remedy="finite factors for each entry",
                )

    @property
    def retains(self) -> bool:
        """True if V is built."""
        return self.config.objective != "adaptation" and self.retention is not None

    def first_batch(self) -> LabelledBatch | None:
        """The batch that the first forward of a build runs; None where M is built from none.

        Of preference pairs it is the chosen branch.
        """
        batches: Sequence[Any] = ()
        if self.config.adapts:
            batches, role = self.validation, "validation batch"
        elif not isinstance(self.retention, FisherDrift):
            role = "retention batch"
            batches = as_batches(self.retention, role)
        if not batches:
            return None
        item = batches[0].chosen if isinstance(batches[0], PreferenceBatch) else batches[0]
        limit, model = self.adapter.max_positions(), self.adapter.model
        return read_batch(item, max_length=limit, role=role, model=model)

    # --- M ---------------------------------------------------------------------------------------

    def direction(self) -> Direction:
        """Both sides of M at the weights as they are; P = 1 for "full"."""
        parts, shares = self._parts() if self.config.standard_errors else ((), ())
        if parts:
            gradient = {n: reduce(torch.add, [part[n] for part in parts]) for n in parts[0]}
        else:
            adapts = self.config.adapts
            rows = _told("validation", self.validation)
            gradient = self._gradient("validation", rows) if adapts else {}
        built = Direction(gradient, self._stability(), self.config.stability_weight, parts, shares)
        # One P for all of it, since it scales M as a whole.
        return _preconditioned(built, self._scaling())

    def gradient_of_step(self, number: int) -> dict[str, Tensor]:
        """The gradient of one validation batch, which each step of a walk takes in turn."""
        turn = number % max(len(self.validation), 1)
        return self._gradient("validation", self.validation[turn : turn + 1])

    def _parts(self) -> tuple[tuple[dict[str, Tensor], ...], tuple[float, ...]]:
        """``S_h / n`` of each validation batch h, and its share ``n_h / n`` of the tokens.

        S_h is the summed gradient of the n_h tokens (pairs) of batch h, and n the number of all, so
        that the parts sum to G.
        """
        parameters, first = self.scored.parameters, self.scored.first
        found = [
            objective_sums(self.adapter, parameters, [batch], first=first, role="validation")
            for batch in _told("validation", self.validation)
        ]
        whole = sum(count for _, count in found)
        parts, shares = [], []
        for sums, count in found:
            # Among the sums, so that it is summed over processes as they are.
            sums[_COUNT] = next(iter(sums.values())).new_tensor(count)
            mean = self._mean("validation", sums, whole)
            shares.append(float(mean.pop(_COUNT)))
            parts.append(mean)
        return tuple(parts), tuple(shares)

    def _gradient(self, role: str, batches: Iterable[Any]) -> dict[str, Tensor]:
        """Mean gradient of one objective, by autograd; of sharded linears from captured errors."""
        adapter, scored = self.adapter, self.scored
        first, sharding = scored.first, scored.sharding
        if sharding is None or not self.config.captured:
            return self._mean(
                role,
                *objective_sums(
                    adapter, scored.parameters, batches, first=first, role=role, sharding=sharding
                ),
            )
        sums: dict[str, Tensor] = {}

        def add(weighted: Tensor, recorder: Recorder | None) -> None:
            assert recorder is not None
            for name, part in captured_parts(recorder, weighted, scored.names, sharding).items():
                sums[name] = sums[name] + part if name in sums else part

        # G needs ordinary errors only, for which the model's own attention backward is right.
        recording = partial(record, adapter, scored.scope, attention=False, sharding=sharding)
        count = stream_losses(adapter, batches, add, first=first, role=role, recording=recording)
        return self._mean(role, sums, count)

    def _mean(self, role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
        mean = (self.reduce or mean_gradient)(role, sums, count)
        require_finite_gradient(role, mean)
        return mean

    def _stability(self) -> dict[str, Tensor] | None:
        if not self.retains:
            return None
        if self.parts is not None:
            return self.parts.direction()
        if isinstance(self.retention, FisherDrift):
            drift: dict[str, Tensor] = {}
            for name, parameter in self.scored.parameters.items():  # one master at a time
                weight = self.masters(name, parameter) if self.masters else parameter
                drift |= self.retention.direction({name: weight})
            return drift
        batches = as_batches(self.retention, "retention batch")
        return self._gradient("retention", _told("retention", batches))

    def _scaling(self) -> Scaling:
        """Scaling of G and V by P."""
        if self.influence is not None:
            return partial(self.influence.solve, damping=self.config.damping)
        return partial(precondition, preconditioner=self._preconditioner())

    def _preconditioner(self) -> Mapping[str, Tensor] | None:
        """P where it is the same for every batch: frozen, or the user's own mapping."""
        kind, sharding = self.config.preconditioner, self.scored.sharding
        # "full" contains the gradient of the step: ``at_step`` applies it per batch.
        if kind is None or kind == "full":
            return None
        if isinstance(kind, Mapping):
            if sharding is None:
                return kind
            return {name: sharding.part_of(name, p) for name, p in kind.items()}
        frozen: dict[str, Tensor] | None = _optimizers().frozen_preconditioners(
            self.optimizer, self.scored.parameters, after=self.config.precondition_after
        )
        return frozen

    # --- M of one step ---------------------------------------------------------------------------

    def at_step(self, held: Direction, gradient: dict[str, Tensor]) -> Direction:
        """M for the step that sees ``gradient``; for ``preconditioner="full"``.

        Args:
            held: M without P.
            gradient: of the loss that the optimizer will see, by ``step_gradient``.
        """
        p = _optimizers().full_preconditioners(
            self.optimizer, self.scored.parameters, gradient, after=self.config.precondition_after
        )
        if p is None:
            return held
        if held.stability is None and not held.parts:  # P is this step's own, and needed once
            scaled = {
                n: p.pop(n).to(m).mul_(m) if n in p else m for n, m in held.adaptation.items()
            }
            return replace(held, adaptation=scaled)
        return _preconditioned(held, partial(precondition, preconditioner=p))

    def step_gradient(self, loss: Tensor, recorder: Recorder) -> dict[str, Tensor]:
        """Gradient of the step's loss in the parameters in scope; the graph stays.

        Args:
            loss: scalar, of the recorded forward (whose graph reaches every parameter in scope).
            recorder: of that forward.

        Raises:
            NumericalError: it is not finite.
        """
        scored = self.scored
        if scored.sharding is not None:
            sums = captured_parts(recorder, loss, scored.names, scored.sharding)
        else:
            parameters = scored.parameters
            gradients = gradient_of(loss, list(parameters.values()), retain_graph=True)
            sums = {
                name: torch.zeros_like(p, dtype=wide(p.dtype), requires_grad=False)
                if g is None
                else g.to(wide(g.dtype))
                for (name, p), g in zip(parameters.items(), gradients, strict=True)
            }
        return self._mean("step", sums, 1.0)


def _told(role: str, batches: Sequence[Any]) -> Iterator[Any]:
    """The batches; of what takes longer than a second the progress is shown."""
    with Tracker(f"Gradient of the {role} rows", len(batches), None, delay=1.0) as tracker:
        for number, batch in enumerate(batches, start=1):
            yield batch
            tracker.report(number)


Scaling = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

_COUNT = "tokens of the batch"
"""Stands beside the summed gradients of a part; no parameter has a space in its name."""


def _preconditioned(direction: Direction, scaled: Scaling) -> Direction:
    """The direction with P applied to each of its matrices."""
    stability = direction.stability
    return replace(
        direction,
        adaptation=scaled(direction.adaptation),
        stability=None if stability is None else scaled(stability),
        parts=tuple(scaled(part) for part in direction.parts),
    )


def _optimizers() -> ModuleType:
    """The module that reads optimizers, loaded when a preconditioner asks for it.

    It handles sharded state and so imports torch's distributed tensors, which not every build of
    torch has.
    """
    from alphatoken.direction import optimizers

    return optimizers
