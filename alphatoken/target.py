"""The fixed side of every value: what is in scope, and the direction M at the current parameters.

A ``Target`` chooses the parameters, builds G (or, under the gram route, the validation errors and
inputs that would build it) and V, and knows when they are stale.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from alphatoken.adapter import DecoderAdapter, ScoredLinear
from alphatoken.batch import PreferenceBatch, as_batches
from alphatoken.capture import (
    LinearUse,
    Scope,
    accumulate_errors,
    find_scope,
    record,
    used_outside,
)
from alphatoken.config import ScorerConfig
from alphatoken.contraction import plan_contraction
from alphatoken.direction import Direction, precondition
from alphatoken.drift import FisherDrift
from alphatoken.errors import ConfigError, CoverageError, InputError, ModelError
from alphatoken.estimators import CAPTURED
from alphatoken.objective import objective_gradient, scoring_forward, weighted_losses
from alphatoken.precision import wide

__all__ = ["Factors", "Target"]

Factors = dict[str, list[tuple[Tensor, Tensor]]]
"""Parameter name -> (errors (v, o), inputs (v, i)) of the validation positions."""


class Target:
    """Scope, parameters and direction of a scorer.

    Attributes:
        scope: the scored layers and linears.
        parameters: parameter name -> parameter, everything that values are inner products over.
        names: id of a parameter -> its name.
        stability: P o V by parameter name, or None; current after ``prepare``.
        adaptation: P o G by parameter name; of the biases only under the gram route.
        factors: the gram route's validation side, or None under the projected one.
        balance: ``||lambda V|| / ||G||`` per parameter; empty under the gram route.
    """

    def __init__(
        self,
        adapter: DecoderAdapter,
        validation: Sequence[Any],
        retention: FisherDrift | Mapping[str, Any] | Sequence[Any] | None,
        config: ScorerConfig,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.adapter, self.config = adapter, config
        self.validation, self.retention, self.optimizer = validation, retention, optimizer
        self.captured = config.estimator in CAPTURED
        self.scope = self._choose_scope()
        self.parameters = self._choose_parameters()
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.adaptation: dict[str, Tensor] = {}
        self.stability: dict[str, Tensor] | None = None
        self.factors: Factors | None = None
        self.balance: dict[str, float] = {}
        self._stamp: object = None
        self._check_options()

    @property
    def first(self) -> int | None:
        """First layer of the graph; None when parameters below the layers take part."""
        whole = self.config.parameters == "all" or self._used_outside
        return None if whole else self.scope.first

    @cached_property
    def _used_outside(self) -> bool:
        return used_outside(self.adapter, self.scope.first, self.parameters.values())

    def _choose_scope(self) -> Scope:
        scope = find_scope(self.adapter, self.config.layers)
        if scope.uncovered and self.config.uncovered == "error" and self.captured:
            name, reason = next(iter(scope.uncovered.items()))
            raise CoverageError(
                f"'{self.config.estimator}' cannot cover every matrix of the scored layers",
                got=f"{name}: {reason} ({len(scope.uncovered)} such)",
                why="their part of the gradient would be missing from the values",
                remedy="estimator='label', or uncovered='skip' to leave them out and say so",
            )
        return scope

    def _choose_parameters(self) -> dict[str, Tensor]:
        """Parameters in scope by name, tied ones once."""
        named: dict[str, Tensor] = dict(self.adapter.model.named_parameters(remove_duplicate=False))
        if self.config.parameters == "all":
            chosen = {n: p for n, p in named.items() if p.requires_grad}
        else:
            chosen = {linear.weight_name: linear.weight for linear in self.scope.linears}
            if self.config.score_bias:
                for linear in self.scope.linears:
                    if linear.bias is not None and linear.bias.requires_grad:
                        chosen[f"{linear.name}.bias"] = linear.bias
            if self.config.uncovered == "error":
                chosen |= {name: named[name] for name in self.scope.uncovered}
        once: dict[int, tuple[str, Tensor]] = {}
        for name, parameter in chosen.items():
            once.setdefault(id(parameter), (name, parameter))
        if not once:
            skipped = list(self.scope.uncovered)
            raise ConfigError(
                "no trainable matrix of the scored layers is left in scope",
                got=f"{len(skipped)} skipped, such as {skipped[0]}",
                why="values are inner products with gradients of trainable weights",
                remedy="estimator='label' with uncovered='error', which covers them",
            )
        return dict(once.values())

    def _check_options(self) -> None:
        if not self.validation:
            raise InputError(
                "no validation tokens",
                got="an empty validation set",
                why="the adaptation value is measured against the validation gradient",
                remedy="pass at least one batch with response tokens",
            )
        if self.config.preconditioner == "frozen" and self.optimizer is None:
            raise ConfigError(
                "preconditioner='frozen' needs the optimizer",
                remedy="Scorer(..., optimizer=optimizer)",
            )
        if isinstance(self.retention, FisherDrift):
            self.retention.check(
                self.adapter,
                list(self.parameters),
                max_relative_drift=self.config.max_relative_drift,
            )
        if isinstance(self.config.preconditioner, Mapping):
            for name, p in self.config.preconditioner.items():
                if name not in self.parameters or p.shape != self.parameters[name].shape:
                    raise ConfigError(
                        "a preconditioner fits no parameter in scope",
                        got=f"{name} {tuple(p.shape)}",
                        remedy="key it by parameter name, in the parameter's own shape",
                    )

    def invalidate(self) -> None:
        """Drop G and V; the next ``prepare`` builds them anew."""
        self._stamp = None

    def _current_stamp(self) -> object:
        # Any parameter moves G, frozen ones too if somebody writes to them.
        return tuple((id(p), p._version) for p in self.adapter.model.parameters())

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

    def prepare(self, tokens: int | None) -> None:
        """Make G (or its factors) and V current.

        Args:
            tokens: training positions to be contracted, for the choice of route; None stays with
                the route in use, projected at first.
        """
        stamp = self._current_stamp()
        if stamp == self._stamp:
            return
        self._stamp = None
        if self._gram_is_cheaper(tokens):
            self.factors, self.adaptation = self._build_factors()
            self.stability, self.balance = self._stability(), {}
        else:
            direction = self._build_direction()
            self.adaptation, self.factors = direction.adaptation, None
            self.stability, self.balance = direction.stability, direction.balance()
        self._stamp = stamp

    def direction(self) -> Direction:
        """Both sides of M in projected form, at the current parameters."""
        if self._current_stamp() != self._stamp or self.factors is not None:
            return self._build_direction()
        return Direction(self.adaptation, self.stability, self.config.stability_weight)

    def _gram_is_cheaper(self, tokens: int | None) -> bool:
        if self.config.contraction != "auto" or not self.captured:
            return self.config.contraction == "gram"
        if tokens is None or self.config.preconditioner is not None:
            return False
        positions = sum(
            int(torch.as_tensor(branch.get("input_ids", ())).numel())  # checked when it is read
            for item in self.validation
            for branch in (
                (item.chosen, item.rejected) if isinstance(item, PreferenceBatch) else (item,)
            )
        )
        plans = [
            plan_contraction(tokens, positions, *_widths(linear)) for linear in self.scope.linears
        ]
        return sum(p.gram_flops for p in plans) < sum(p.projected_flops for p in plans)

    def _build_direction(self) -> Direction:
        gradient = objective_gradient(
            self.adapter, self.parameters, self.validation, first=self.first
        )
        p = self._preconditioner()
        stability = self._stability()
        return Direction(
            precondition(gradient, p),
            None if stability is None else precondition(stability, p),
            self.config.stability_weight,
        )

    def _stability(self) -> dict[str, Tensor] | None:
        if self.retention is None:
            return None
        if isinstance(self.retention, FisherDrift):
            return self.retention.direction(self.parameters)
        return objective_gradient(
            self.adapter, self.parameters, as_batches(self.retention), first=self.first
        )

    def _preconditioner(self) -> Mapping[str, Tensor] | None:
        if self.config.preconditioner != "frozen":
            assert not isinstance(self.config.preconditioner, str)
            return self.config.preconditioner
        optimizers = importlib.import_module("alphatoken.adapters.optimizers")
        found: dict[str, Tensor] | None = optimizers.frozen_preconditioners(
            self.optimizer, self.parameters, after=self.config.precondition_after
        )
        return found

    def _build_factors(self) -> tuple[Factors, dict[str, Tensor]]:
        """Validation errors and inputs per weight, and G of the biases, each over the count."""
        factors: Factors = {}
        biases: dict[str, Tensor] = {}
        count = 0.0
        for item in self.validation:
            for _, losses, weights, tokens in weighted_losses(self.adapter, item, self.first):
                with record(self.adapter, self.scope, attention=False) as recorder:
                    with scoring_forward(self.adapter, self.first):
                        loss = losses()
                        with torch.enable_grad():
                            weighted = (loss * weights.to(loss)).sum()
                    errors = accumulate_errors(recorder, weighted, recorder.outputs, "ordinary")
                    for use, error in zip(recorder.linears, errors, strict=True):
                        if error is not None:
                            self._add_factors(use, error, factors, biases)
                count += tokens
        scaled = {n: [(e / count, x) for e, x in pairs] for n, pairs in factors.items()}
        return scaled, {n: sums / count for n, sums in biases.items()}

    def _add_factors(
        self, use: LinearUse, error: Tensor, factors: Factors, biases: dict[str, Tensor]
    ) -> None:
        live = (error != 0).any(-1)
        weight = self.names[id(use.linear.weight)]
        factors.setdefault(weight, []).append((error[live], use.x[live]))
        # A bias is summed by itself: modules around one tied weight may have biases of their own.
        bias = None if use.linear.bias is None else self.names.get(id(use.linear.bias))
        if bias is not None:
            part = error.flatten(0, -2).to(wide(error.dtype)).sum(0)
            biases[bias] = biases[bias] + part if bias in biases else part


def _widths(linear: ScoredLinear) -> tuple[int, int]:
    rows, columns = linear.weight.shape
    return (columns, rows) if linear.transposed else (rows, columns)
