"""What M is built from, and how: G, V, lambda and P, at the current weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.config import ScorerConfig
from alphatoken.direction.algebra import Direction, first_not_finite, norms, precondition
from alphatoken.direction.drift import FisherDrift, ShardedDrift
from alphatoken.direction.gradients import gradient_of
from alphatoken.direction.influence import InfluenceFactors
from alphatoken.direction.objective import (
    GradientReducer,
    captured_parts,
    mean_gradient,
    objective_sums,
    require_finite_gradient,
    stream_losses,
)
from alphatoken.direction.scored import ScoredParameters, choose_parameters
from alphatoken.errors import (
    AlphaTokenWarning,
    ConfigError,
    InputError,
    NumericalError,
    UnsupportedError,
    warn_caller,
)
from alphatoken.model.batch import AnyBatch, LabelledBatch, PreferenceBatch, as_batches, read_batch
from alphatoken.model.capture import Recorder, record
from alphatoken.model.protocol import DecoderAdapter, find_adapter
from alphatoken.model.sharding import MasterWeights, Sharding
from alphatoken.support.precision import wide
from alphatoken.support.progress import Tracker

Retention = FisherDrift | Mapping[str, Any] | Sequence[Any] | None
"""A Fisher drift, or labelled batches whose mean loss is to be kept, or nothing."""


@dataclass(frozen=True, eq=False)
class ScorerArguments:
    """The arguments of a :class:`alphatoken.scorer.Scorer`, unchanged; its page describes them."""

    model: nn.Module
    validation: Any = None
    retention: Any = None
    config: ScorerConfig = field(default_factory=ScorerConfig)
    optimizer: torch.optim.Optimizer | None = None
    adapter: DecoderAdapter | None = None
    reduce: GradientReducer | None = None
    sharding: Sharding | None = None
    masters: MasterWeights | None = None
    reference: nn.Module | None = None
    influence: InfluenceFactors | None = None


@dataclass(frozen=True, eq=False)
class DirectionInputs:
    """Everything that M is built from; under sharded weights every matrix is this process's part.

    Attributes:
        arguments: of the scorer.
        adapter: of the model.
        scored: the parameters in scope.
        validation: the validation batches or pairs of ``arguments``, checked.
        drift: this process's parts of a Fisher drift, under sharded weights.
    """

    arguments: ScorerArguments
    adapter: DecoderAdapter
    scored: ScoredParameters
    validation: Sequence[AnyBatch] = ()
    drift: ShardedDrift | None = None

    @classmethod
    def read(cls, arguments: ScorerArguments) -> DirectionInputs:
        """Choose scope and parameters in the model as it is now, and check what goes into M.

        Raises:
            ConfigError, CoverageError, UnsupportedError, FisherError, InputError, NumericalError.
        """
        adapter = arguments.adapter or find_adapter(arguments.model)
        scored = choose_parameters(adapter, arguments.config, arguments.sharding)
        inputs = cls(arguments, adapter, scored)
        inputs.check_preconditioner()
        return inputs.against(arguments.validation).retaining(arguments.retention)

    @property
    def config(self) -> ScorerConfig:
        """The options of the scorer."""
        return self.arguments.config

    def against(self, validation: Any) -> DirectionInputs:
        """The same inputs with another validation set, once it is checked."""
        batches = () if validation is None else as_batches(validation)
        stands_in = self.arguments.reference is not None
        if self.config.adapts and not batches and not stands_in:
            raise InputError(
                "no validation tokens",
                got="an empty validation set",
                why="the adaptation value is measured against the validation gradient",
                remedy="pass at least one batch with response tokens, or objective='stability'",
            )
        if self.config.standard_errors and len(batches) < 2:
            raise InputError(
                "standard errors need at least two validation batches",
                got=f"{len(batches)}",
                why="they are taken from the spread of the values between the batches",
                remedy="hand the validation rows over in several batches; in a trainer set "
                "validation_micro_batch_size",
            )
        arguments = replace(self.arguments, validation=validation)
        return replace(self, arguments=arguments, validation=batches)

    def retaining(self, retention: Retention) -> DirectionInputs:
        """The same inputs with another retention term, once it is checked."""
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
        drift = None
        if isinstance(retention, FisherDrift) and self.config.objective != "adaptation":
            drift = self._checked_drift(retention)
        return replace(self, arguments=replace(self.arguments, retention=retention), drift=drift)

    def _checked_drift(self, drift: FisherDrift) -> ShardedDrift | None:
        """Raise unless the drift fits the model; under sharded weights return its parts."""
        limit, scored = self.config.max_relative_drift, self.scored
        if scored.sharding is None:
            drift.check(self.adapter, list(scored.parameters), max_relative_drift=limit)
            if self.arguments.masters is None:  # beside these the reference is rounded as they were
                _warn_of_rounding(drift, scored.parameters)
            return None
        # ``drift.check`` compares whole weights, which no process has here.
        drift.check_identity(self.adapter.identity())
        sharded = ShardedDrift(drift, scored.sharding, scored.parameters, self.arguments.masters)
        sharded.check(limit)
        return sharded

    def check_preconditioner(self) -> None:
        """Raise unless P can be had: from this optimizer, or from matrices that fit."""
        kind, influence = self.config.preconditioner, self.arguments.influence
        if (kind == "kronecker") != (influence is not None):
            raise ConfigError(
                "preconditioner='kronecker' and influence factors go together",
                got=f"preconditioner={kind!r:.40}, influence={influence!r:.40}",
                remedy="Scorer(..., influence=fit_influence(model, rows)) with "
                "ScorerConfig(preconditioner='kronecker')",
            )
        if influence is not None:
            if self.scored.sharding is not None:
                raise UnsupportedError(
                    "preconditioner='kronecker' cannot be had on sharded weights",
                    why="eigenvectors mix all rows and columns of G, and no process has them",
                    remedy="a layout in which each process has the weights (DDP, ZeRO-1 or 2)",
                )
            influence.check(self.scored.shapes(), self.adapter.identity())
        elif isinstance(kind, str):
            if self.arguments.optimizer is None:
                raise ConfigError(
                    f"preconditioner={kind!r} needs the optimizer",
                    remedy="Scorer(..., optimizer=optimizer)",
                )
            _optimizers().check_optimizer(self.arguments.optimizer, self.scored.parameters)
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
        """Whether there is a V to build."""
        return self.config.objective != "adaptation" and self.arguments.retention is not None

    def first_batch(self) -> LabelledBatch | None:
        """The batch that the first forward of a build runs; None where M is built from none.

        Of preference pairs it is the chosen branch.
        """
        batches: Sequence[Any] = ()
        if self.config.adapts:
            batches, role = self.validation, "validation batch"
        elif not isinstance(retention := self.arguments.retention, FisherDrift):
            role = "retention batch"
            batches = as_batches(retention, role)
        if not batches:
            return None
        item = batches[0].chosen if isinstance(batches[0], PreferenceBatch) else batches[0]
        limit, model = self.adapter.max_positions(), self.adapter.model
        return read_batch(item, max_length=limit, role=role, model=model)

    def direction(self) -> Direction:
        """Both sides of M at the weights as they are; P = 1 for "full"."""
        parts, shares = self._parts() if self.config.standard_errors else ((), ())
        if parts:
            gradient = {n: reduce(torch.add, [part[n] for part in parts]) for n in parts[0]}
        else:
            adapts = self.config.adapts
            rows = _with_progress("validation", self.validation)
            gradient = self._gradient("validation", rows) if adapts else {}
        built = self.of_sides(gradient, self._stability(), parts, shares)
        # One P for all of it, since it scales M as a whole.
        return _preconditioned(built, self._scaling())

    def of_sides(
        self,
        adaptation: dict[str, Tensor],
        stability: dict[str, Tensor] | None,
        parts: tuple[dict[str, Tensor], ...] = (),
        shares: tuple[float, ...] = (),
    ) -> Direction:
        """The direction that has these sides, under this configuration."""
        weight, sharding = self.config.stability_weight, self.scored.sharding
        norms_of = norms if sharding is None else sharding.norms
        return Direction(adaptation, stability, weight, parts, shares, norms_of)

    def gradient_of_step(self, number: int) -> dict[str, Tensor]:
        """The gradient of one validation batch, which each step of a walk takes in turn."""
        turn = number % max(len(self.validation), 1)
        return self._gradient("validation", self.validation[turn : turn + 1])

    def _parts(self) -> tuple[tuple[dict[str, Tensor], ...], tuple[float, ...]]:
        """``S_h / n`` of each validation batch h, and its share ``n_h / n`` of the tokens (pairs).

        S_h is the summed gradient of the n_h tokens of batch h, so that the parts sum to G.
        """
        parameters, first = self.scored.parameters, self.scored.first
        sums_and_counts = [
            objective_sums(self.adapter, parameters, [batch], first=first, role="validation")
            for batch in _with_progress("validation", self.validation)
        ]
        whole = sum(count for _, count in sums_and_counts)
        parts, shares = [], []
        for sums, count in sums_and_counts:
            # Among the sums, so that it is summed over processes as they are.
            sums[_COUNT] = next(iter(sums.values())).new_tensor(count)
            mean = self._mean("validation", sums, whole)
            shares.append(float(mean.pop(_COUNT)))
            parts.append(mean)
        return tuple(parts), tuple(shares)

    def _gradient(self, role: str, batches: Iterable[Any]) -> dict[str, Tensor]:
        adapter, scored = self.adapter, self.scored
        first, sharding = scored.first, scored.sharding
        if sharding is None or not self.config.captured:  # by autograd
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
        mean = (self.arguments.reduce or mean_gradient)(role, sums, count)
        require_finite_gradient(role, mean)
        return mean

    def _stability(self) -> dict[str, Tensor] | None:
        if not self.retains:
            return None
        if self.drift is not None:
            return self.drift.direction()
        retention, masters = self.arguments.retention, self.arguments.masters
        if isinstance(retention, FisherDrift):
            drift: dict[str, Tensor] = {}
            for name, parameter in self.scored.parameters.items():  # one master at a time
                weight = parameter if masters is None else masters(name, parameter)
                drift |= retention.direction({name: weight})
            return drift
        batches = as_batches(retention, "retention batch")
        return self._gradient("retention", _with_progress("retention", batches))

    def _scaling(self) -> Scaling:
        if self.arguments.influence is not None:
            return partial(self.arguments.influence.solve, damping=self.config.damping)
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
            self.arguments.optimizer, self.scored.parameters, after=self.config.precondition_after
        )
        return frozen

    def at_step(self, direction: Direction, gradient: dict[str, Tensor]) -> Direction:
        """M for the step that sees this gradient (by ``step_gradient``), from M without P."""
        p = _optimizers().full_preconditioners(
            self.arguments.optimizer,
            self.scored.parameters,
            gradient,
            after=self.config.precondition_after,
        )
        if p is None:
            return direction
        # P is this step's own, and needed once.
        if direction.stability is None and not direction.parts:
            scaled = {
                n: p.pop(n).to(m).mul_(m) if n in p else m for n, m in direction.adaptation.items()
            }
            return replace(direction, adaptation=scaled)
        return _preconditioned(direction, partial(precondition, preconditioner=p))

    def step_gradient(self, loss: Tensor, recorder: Recorder) -> dict[str, Tensor]:
        """Gradient of the loss of a recorded forward in the parameters in scope; the graph stays.

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


def _warn_of_rounding(drift: FisherDrift, parameters: Mapping[str, Tensor]) -> None:
    if dtypes := drift.lost_in(parameters):
        reference, weights = (str(dtype).removeprefix("torch.") for dtype in dtypes)
        warn_caller(
            f"The Fisher's reference weights are {reference} and the model's {weights}, and the "
            "drift between them is mostly rounding: the stability part values that. Fit the "
            f"Fisher in {weights}, or load the model in {reference}.",
            AlphaTokenWarning,
        )


def _with_progress(role: str, batches: Sequence[Any]) -> Iterator[Any]:
    """The batches; progress is shown once they take longer than a second."""
    with Tracker(f"Gradient of the {role} rows", len(batches), None, delay=1.0) as tracker:
        for number, batch in enumerate(batches, start=1):
            yield batch
            tracker.report(number)


Scaling = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]

_COUNT = "tokens of the batch"
"""Stands beside the summed gradients of a part; no parameter has a space in its name."""


def _preconditioned(direction: Direction, scaled: Scaling) -> Direction:
    stability = direction.stability
    return replace(
        direction,
        adaptation=scaled(direction.adaptation),
        stability=None if stability is None else scaled(stability),
        parts=tuple(scaled(part) for part in direction.parts),
    )


def _optimizers() -> ModuleType:
    # Loaded when P asks for it: it imports torch's distributed tensors, which not every build of
    # torch has.
    from alphatoken.direction import optimizers

    return optimizers
