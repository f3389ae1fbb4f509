"""What all values of a scorer share: the parameters in scope, and M at the current weights.

A ``DirectionBuilder`` chooses the parameters, builds G and V, and knows when they are stale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, reduce
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from alphatoken.config import ScorerConfig
from alphatoken.direction.algebra import (
    Direction,
    balance,
    norms,
    precondition,
    unit_of_stability,
)
from alphatoken.direction.drift import FisherDrift
from alphatoken.direction.drift_parts import ShardedDrift
from alphatoken.direction.objective import (
    GradientReducer,
    captured_parts,
    captured_sums,
    mean_gradient,
    objective_sums,
    require_finite_gradient,
)
from alphatoken.errors import ConfigError, InputError, ModelError, UnsupportedError
from alphatoken.estimate.estimators import CAPTURED
from alphatoken.estimate.gradients import gradient_of
from alphatoken.estimate.matrices import Formed, Matrices
from alphatoken.estimate.proofs import require_covered
from alphatoken.model.batch import LabelledBatch, PreferenceBatch, as_batches, read_batch
from alphatoken.model.capture import Recorder, Scope, record, used_outside
from alphatoken.model.fingerprint import numbers_of
from alphatoken.model.parameter_choice import ParameterChoice
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.model.sharding import MasterWeights, Sharding
from alphatoken.support.precision import wide

__all__ = ["DirectionBuilder"]

Retention = FisherDrift | Mapping[str, Any] | Sequence[Any] | None
"""A Fisher drift, or labelled batches whose mean loss is to be kept, or nothing."""

Sizes = tuple[dict[str, float], dict[str, float]]
"""Norms of G and of V by parameter."""


class DirectionBuilder:
    """Scope, parameters and direction of a scorer.

    Under sharded weights every matrix below is this process's part of it.

    Attributes:
        scope: the scored layers and linears.
        parameters: parameter name -> parameter, everything that values are inner products over.
        names: place of a parameter (``ScoredLinear.weight_name``, ``bias_name``) -> its name; tied
            places have one name.
        pinned: what decides when G and V are stale; None for the weights themselves.
    """

    def __init__(
        self,
        adapter: DecoderAdapter,
        validation: Sequence[Any],
        retention: Retention,
        config: ScorerConfig,
        optimizer: torch.optim.Optimizer | None,
        *,
        reduce: GradientReducer | None = None,
        sharding: Sharding | None = None,
        masters: MasterWeights | None = None,
    ) -> None:
        self.adapter, self.config, self.optimizer = adapter, config, optimizer
        self.sharding, self._reduce, self._masters = sharding, reduce, masters
        self.captured = config.estimator in CAPTURED
        self._choice = ParameterChoice.read(config.parameters)
        self.scope = self._choose_scope()
        self.names: dict[str, str] = {}
        self.parameters = self._choose_parameters()
        self._stored = Direction({}, None, 0.0)
        self._kept: tuple[object, dict[str, Tensor]] | None = None
        self._sizes: Sizes | None = None
        self._stamp: object = None
        self.pinned: object | None = None
        self._check_options()
        self.set_validation(validation)
        self.set_retention(retention)

    # --- what is valued against what -------------------------------------------------------------

    @property
    def adaptation(self) -> dict[str, Tensor]:
        """G by parameter name, already multiplied by P unless P is "full".

        Empty under ``objective="stability"``. Current after ``prepare``.
        """
        return self._stored.adaptation

    @property
    def stability(self) -> Matrices | None:
        """V likewise, or None; under ``offload="stream"`` formed when it is asked for."""
        return self._stored.stability

    @property
    def adapts(self) -> bool:
        """Whether G is built."""
        return self.config.objective != "stability"

    @property
    def retains(self) -> bool:
        """Whether V is built."""
        return self.config.objective != "adaptation" and self.retention is not None

    def set_validation(self, validation: Sequence[Any]) -> None:
        """Take another validation set; G is built anew at the next use."""
        if self.adapts and not validation:
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
        self.validation = validation
        self.invalidate()

    def set_retention(self, retention: Retention) -> None:
        """Take another retention term, once it is checked; V is built anew at the next use."""
        if retention is None and self.config.objective == "stability":
            raise ConfigError(
                "objective='stability' needs a retention term",
                got="retention=None",
                why="every value would be zero",
                remedy="pass a FisherDrift or retention batches",
            )
        if self.config.offload == "stream" and not isinstance(retention, (FisherDrift, type(None))):
            raise ConfigError(
                "offload='stream' needs a FisherDrift",
                got=f"retention of type {type(retention).__name__}",
                why="a gradient on retention batches cannot be formed one matrix at a time",
                remedy="offload='none'",
            )
        sharded = None
        if isinstance(retention, FisherDrift) and self.config.objective != "adaptation":
            sharded = self._check_drift(retention)
        # All is well: only now is anything changed.
        self.retention, self._sharded_drift = retention, sharded
        self.invalidate()

    def _check_drift(self, drift: FisherDrift) -> ShardedDrift | None:
        """Raise unless the drift fits the model; under sharded weights return its parts."""
        limit = self.config.max_relative_drift
        if self.sharding is None:
            drift.check(self.adapter, list(self.parameters), max_relative_drift=limit)
            return None
        # ``drift.check`` compares whole weights, which no process has here.
        drift.check_identity(self.adapter.identity())
        sharded = ShardedDrift(drift, self.sharding, self.parameters, self._masters)
        sharded.check(limit)
        return sharded

    @property
    def first(self) -> int | None:
        """First layer of the graph; None when parameters below the layers take part."""
        whole = self._choice.everything or self._used_outside
        return None if whole else self.scope.first

    @cached_property
    def _used_outside(self) -> bool:
        return used_outside(self.adapter, self.scope.first, self.parameters.values())

    def _choose_scope(self) -> Scope:
        scope = self._choice.scope(self.adapter, self.config.layers)
        require_covered(scope, self.config.estimator, self.config.uncovered)
        return scope

    def _choose_parameters(self) -> dict[str, Tensor]:
        """Parameters in scope by name, tied ones once."""
        named: dict[str, Tensor] = dict(self.adapter.model.named_parameters(remove_duplicate=False))
        chosen = self.scope.parameters(biases=self.config.score_bias)
        # ``require_covered`` has let only ``label`` come here with matrices that no linear covers;
        # moved along M they are as exact as any other weight, so they are in scope.
        if self.config.uncovered == "error":
            chosen |= {name: named[name] for name in self.scope.uncovered}
        # A tied weight is one parameter with one gradient: counted under two names, its part of
        # every inner product would be doubled. ``names`` leads each place to the one name that is
        # kept.
        once: dict[int, str] = {}
        self.names = {name: once.setdefault(id(p), name) for name, p in chosen.items()}
        if not once:
            skipped = list(self.scope.uncovered)
            raise ConfigError(
                "no trainable parameter is left in scope",
                got=f"{len(skipped)} skipped, such as {skipped[0]}"
                if skipped
                else "all are frozen",
                why="values are inner products with gradients of trainable weights",
                remedy="estimator='label' with uncovered='error', which covers them"
                if skipped
                else "unfreeze some (requires_grad_), or switch an adapter on",
            )
        return {name: chosen[name] for name in once.values()}

    def _check_options(self) -> None:
        kind = self.config.preconditioner
        if isinstance(kind, str) and self.optimizer is None:
            raise ConfigError(
                f"preconditioner={kind!r} needs the optimizer",
                remedy="Scorer(..., optimizer=optimizer)",
            )
        if isinstance(kind, str):
            _optimizers().check_optimizer(self.optimizer)
        if isinstance(kind, Mapping):
            shapes = {n: self._shape(n) for n in self.parameters}
            for name, p in kind.items():
                if shapes.get(name) != p.shape:
                    raise ConfigError(
                        "a preconditioner fits no parameter in scope",
                        got=f"{name} {tuple(p.shape)}",
                        remedy="key it by parameter name, in the parameter's own shape",
                    )
        if self.sharding is not None:
            self._check_sharded()

    def _shape(self, name: str) -> torch.Size:
        if self.sharding is not None:
            return self.sharding.shape(name)
        return self.parameters[name].shape

    def _check_sharded(self) -> None:
        others = "'alphatoken', 'direct', 'same_layer_hop', 'path' or 'paper_literal'"
        if self.config.standard_errors:
            raise UnsupportedError(
                "standard errors cannot be had on sharded weights",
                got="standard_errors=True",
                why="the gradient of each validation batch would be gathered by itself",
                remedy="standard_errors=False, or a layout in which each process has the weights "
                "(DDP, ZeRO-1 or 2)",
            )
        if not self.captured:
            raise UnsupportedError(
                f"estimator={self.config.estimator!r} cannot run on sharded weights",
                got=f"parameters={self.config.parameters!r}",
                why="it moves whole weights along M within one forward, and no process has them",
                remedy=f"estimator={others}; or a layout in which each process has the weights "
                "(DDP, ZeRO-1 or 2)",
            )
        if self._used_outside:
            raise UnsupportedError(
                "a scored weight is tied to a module outside the scored layers",
                why="under sharded weights gradients come from the scored linears' errors, and "
                "the other use would be missing",
                remedy="untie it, score other layers, or a layout in which each process has the "
                "weights (DDP, ZeRO-1 or 2)",
            )

    # --- staleness -------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """Drop G and V; the next ``prepare`` builds them anew."""
        self._stamp = self._kept = None

    def pin(self, version: object | None) -> None:
        """Let ``version`` decide when G and V are stale, instead of the weights' numbers."""
        self.pinned = version

    def _current_stamp(self) -> object:
        """A value that is equal at two times only if G and V need not be rebuilt in between."""
        if self.pinned is not None:
            return ("pinned", self.pinned)
        if self.sharding is not None:  # each process sees its own parts: always stale
            return object()
        # Every parameter of the model counts and not only those in scope: G is a gradient through
        # all of them, and moves with frozen ones too if somebody writes to them.
        model, p = self.adapter.model, self.config.preconditioner
        return (
            numbers_of(model.parameters()),
            numbers_of(model.buffers()),
            # Autocast rounds the products that G is made of.
            [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
            numbers_of(_tensors_in((self.validation, self.retention))),
            _identity(self.retention),
            numbers_of(_tensors_in(p)) if isinstance(p, Mapping) else self._optimizer_stamp(),
        )

    def _optimizer_stamp(self) -> object:
        """What P is made of, where it is the optimizer's and the same for every batch."""
        if self.config.preconditioner != "frozen" or self.optimizer is None:
            return None
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]
        state = [self.optimizer.state.get(p, {}) for p in self.parameters.values()]
        return numbers_of(_tensors_in((state, groups))), repr(groups)

    def require_current(self) -> None:
        """Raise where a weight was written to since ``prepare``, unless ``pin`` decides.

        Raises:
            ModelError: one was.
        """
        if self.pinned is not None or self.sharding is not None or self._stamp is None:
            return
        assert isinstance(self._stamp, tuple)
        if numbers_of(self.adapter.model.parameters()) != self._stamp[0]:
            raise ModelError(
                "a weight has changed since the observed forward began",
                why="its graph and the direction are of the earlier weights",
                remedy="take the values before the optimizer's step, inside observe()",
            )

    def require_gradients(self) -> None:
        """Raise where no graph can be built."""
        outside = next(
            (n for n, p in self.adapter.model.named_parameters() if p.is_inference()), None
        )
        if outside is not None or torch.is_inference_mode_enabled():
            raise ModelError(
                "values need gradients, which inference mode rules out for good",
                got="torch.inference_mode() is on" if outside is None else f"{outside}, made in it",
                remedy="load the model and call outside torch.inference_mode(); torch.no_grad() "
                "is fine",
            )

    def first_batch(self) -> LabelledBatch | None:
        """The batch that the first forward of a build runs; None where M is built from none.

        Of preference pairs it is the chosen branch.
        """
        batches: Sequence[Any] = ()
        if self.adapts:
            batches, role = self.validation, "validation batch"
        elif not isinstance(self.retention, FisherDrift):
            role = "retention batch"
            batches = as_batches(self.retention, role)
        if not batches:
            return None
        item = batches[0].chosen if isinstance(batches[0], PreferenceBatch) else batches[0]
        limit, model = self.adapter.max_positions(), self.adapter.model
        return read_batch(item, max_length=limit, role=role, model=model)

    @property
    def spread(self) -> bool:
        """Whether G is a mean over processes or steps, or weights lie in parts."""
        return self.sharding is not None or self._reduce is not None

    def gradient(self) -> dict[str, Tensor]:
        """G by parameter name at the current parameters, without P; kept for the next build."""
        kept = self._kept_gradient()
        if kept is None:
            kept = self._gradient("validation", self.validation)
            self.keep_gradient(kept)
        return kept

    def keep_gradient(self, gradient: dict[str, Tensor]) -> None:
        """Use this G, without P, for as long as the parameters stay as they are."""
        self.invalidate()
        self._kept = (self._current_stamp(), gradient)

    def _kept_gradient(self) -> dict[str, Tensor] | None:
        if self._kept is None or self._kept[0] != self._current_stamp():
            return None
        return self._kept[1]

    def prepare(self) -> None:
        """Make G and V current."""
        stamp = self._current_stamp()
        if stamp == self._stamp:
            return
        self._stamp = None  # if building fails, nothing of it may pass for current
        self._stored = self._build_direction()
        self._sizes, self._stamp = None, stamp

    @property
    def balance(self) -> dict[str, float]:
        """``||lambda V|| / ||G||`` per parameter.

        Measured when it is first asked for; under sharded weights by all processes together.
        """
        # Not measured with the direction: under ``offload="stream"`` the norms of V read F and
        # W_ref from disk once more, and a pass without components has no use for them.
        if self._sizes is None:
            self._sizes = self._norms(self.adaptation, self.stability)
        return balance(*self._sizes, self.held.stability_weight)

    def balance_of(self, direction: Direction) -> dict[str, float]:
        """``||lambda V|| / ||G||`` per parameter of another direction, such as one for a step."""
        sizes = self._norms(direction.adaptation, direction.stability)
        return balance(*sizes, direction.stability_weight)

    def _weighted(self, direction: Direction) -> Direction:
        """A direction as it is built, with lambda as it is now, in the direction's units."""
        weight = self.config.stability_weight * direction.stability_weight
        return replace(direction, stability_weight=weight)

    def direction(self) -> Direction:
        """Both sides of M as whole matrices, at the current parameters; P = 1 for "full".

        Where M is stale it is built but not stored. ``prepare`` alone stores it: it is called
        after the proofs, and what is stored may be contracted.
        """
        if self._current_stamp() == self._stamp:
            return self.held
        return self._weighted(self._build_direction())

    @property
    def held(self) -> Direction:
        """Both sides of M as ``prepare`` stored them, with lambda as it is now."""
        return self._weighted(self._stored)

    def at_step(self, gradient: dict[str, Tensor]) -> Direction:
        """M for the step that sees ``gradient``; for ``preconditioner="full"``.

        Args:
            gradient: of the loss that the optimizer will see, by ``step_gradient``.
        """
        p = self._local(
            _optimizers().full_preconditioners(
                self.optimizer, self.parameters, gradient, after=self.config.precondition_after
            )
        )
        if p is None:
            return self.held
        held = self.held
        if held.stability is None and not held.parts:  # P is this step's own, and needed once
            scaled = {
                n: p.pop(n).to(m).mul_(m) if n in p else m for n, m in held.adaptation.items()
            }
            return replace(held, adaptation=scaled)
        return _preconditioned(held, p)

    def step_gradient(self, loss: Tensor, recorder: Recorder) -> dict[str, Tensor]:
        """Gradient of the step's loss in the parameters in scope; the graph stays.

        Args:
            loss: scalar, of the recorded forward (whose graph reaches every parameter in scope).
            recorder: of that forward.

        Raises:
            NumericalError: it is not finite.
        """
        if self.sharding is not None:
            sums = captured_parts(recorder, loss, self.names, self.sharding)
        else:
            gradients = gradient_of(loss, list(self.parameters.values()), retain_graph=True)
            sums = {
                name: torch.zeros_like(p, dtype=wide(p.dtype), requires_grad=False)
                if g is None
                else g.to(wide(g.dtype))
                for (name, p), g in zip(self.parameters.items(), gradients, strict=True)
            }
        return self._mean("step", sums, 1.0)

    # --- building it -----------------------------------------------------------------------------

    def _norms(self, adaptation: Matrices, stability: Matrices | None) -> Sizes:
        if self.sharding is None:
            return norms(adaptation), norms(stability or {})
        both = dict(adaptation), dict(stability or {})
        return self.sharding.norms(both[0]), self.sharding.norms(both[1])

    def _build_direction(self) -> Direction:
        """G and V, and as ``stability_weight`` the unit that lambda counts in."""
        parts, shares = self._parts() if self.config.standard_errors else ((), ())
        if parts:
            gradient = {n: reduce(torch.add, [part[n] for part in parts]) for n in parts[0]}
        else:
            gradient = self._kept_gradient() or {}
            if self.adapts and not gradient:
                gradient = self._gradient("validation", self.validation)
        stability, unit = self._stability(), 1.0
        if self.config.stability_units == "balance":
            unit = unit_of_stability(*self._norms(gradient, stability))
        built = Direction(gradient, stability, unit, parts, shares)
        # One P for all of it, since it scales M as a whole.
        return _preconditioned(built, self._preconditioner())

    def _parts(self) -> tuple[tuple[dict[str, Tensor], ...], tuple[float, ...]]:
        """``S_h / n`` of each validation batch h, and its share ``n_h / n`` of the tokens.

        S_h is the summed gradient of the n_h tokens (pairs) of batch h, and n the number of all, so
        that the parts sum to G.
        """
        found = [
            objective_sums(
                self.adapter, self.parameters, [batch], first=self.first, role="validation"
            )
            for batch in self.validation
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

    def _gradient(self, role: str, batches: Sequence[Any]) -> dict[str, Tensor]:
        """Mean gradient of one objective, by autograd or, under sharding, from captured errors."""
        if self.sharding is None:
            sums, count = objective_sums(
                self.adapter, self.parameters, batches, first=self.first, role=role
            )
        else:
            sums, count = captured_sums(
                self.adapter,
                self.names,
                self.sharding,
                batches,
                first=self.first,
                recording=self._recording,
                role=role,
            )
        return self._mean(role, sums, count)

    def _mean(self, role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
        mean = (self._reduce or mean_gradient)(role, sums, count)
        require_finite_gradient(role, mean)
        return mean

    def _recording(self) -> AbstractContextManager[Recorder]:
        # G needs ordinary errors only, for which the model's own attention backward is right.
        return record(self.adapter, self.scope, attention=False, sharding=self.sharding)

    def _stability(self) -> Matrices | None:
        if not self.retains:
            return None
        if self._sharded_drift is not None:
            return self._sharded_drift.direction()
        if isinstance(self.retention, FisherDrift):
            # Label values move all weights at once, so that V must be whole for them anyway.
            if self.config.offload == "stream" and self.captured:
                return self.retention.forming(self._trained_weights())
            drift: dict[str, Tensor] = {}
            for name, parameter in self.parameters.items():  # one master at a time
                weight = self._masters(name, parameter) if self._masters else parameter
                drift |= self.retention.direction({name: weight})
            return drift
        return self._gradient("retention", as_batches(self.retention, "retention batch"))

    def _trained_weights(self) -> Mapping[str, Tensor]:
        """The weights as they are trained; masters as copies, which wait on the CPU.

        Asking for a master takes all processes, and V is formed by each when it needs it.
        """
        if self._masters is None:
            return self.parameters
        masters, parameters = self._masters, self.parameters
        kept = {name: masters(name, p).to("cpu", copy=True) for name, p in parameters.items()}
        return Formed(kept, lambda name: kept[name].to(parameters[name].device))

    def _preconditioner(self) -> Mapping[str, Tensor] | None:
        """P where it is the same for every batch: frozen, or the user's own mapping."""
        kind = self.config.preconditioner
        if kind == "full":  # it contains the gradient of the step: ``at_step`` applies it per batch
            return None
        if isinstance(kind, Mapping):
            if self.sharding is None:
                return kind
            return {name: self.sharding.part_of(name, p) for name, p in kind.items()}
        if kind is None:
            return None
        return self._local(
            _optimizers().frozen_preconditioners(
                self.optimizer, self.parameters, after=self.config.precondition_after
            )
        )

    def _local(self, p: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
        """P from the optimizer's state, laid out as the directions are."""
        if p is None or self.sharding is None:
            return p
        return {name: self.sharding.local(name, scale) for name, scale in p.items()}


def _identity(retention: Retention) -> object:
    """Which tensors a drift holds in memory: they are constants, so that none of them is read."""
    if not isinstance(retention, FisherDrift):
        return None
    held = [m for m in (retention.fisher, retention.reference) if isinstance(m, dict)]
    return [(id(tensor), tensor._version) for m in held for tensor in m.values()]


def _tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in mappings, lists and pairs; others may read their batches from a disk."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, PreferenceBatch):
        yield from _tensors_in(list(vars(value).values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


_COUNT = "tokens of the batch"
"""Stands beside the summed gradients of a part; no parameter has a space in its name."""


def _preconditioned(direction: Direction, p: Mapping[str, Tensor] | None) -> Direction:
    """The direction with each of its matrices scaled by P."""
    stability = direction.stability
    return replace(
        direction,
        adaptation=dict(precondition(direction.adaptation, p)),
        stability=None if stability is None else precondition(stability, p),
        parts=tuple(dict(precondition(part, p)) for part in direction.parts),
    )


def _optimizers() -> ModuleType:
    """The module that reads optimizers, loaded when a preconditioner asks for it.

    It handles sharded state and so imports torch's distributed tensors, which not every build of
    torch has.
    """
    from alphatoken.direction import optimizers

    return optimizers
