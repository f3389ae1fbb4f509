"""Valuation inside a run: which validation rows and which direction at which step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.direction.drift import FisherDrift
from alphatoken.direction.objective import objective_value
from alphatoken.direction.walk import WalkBuilder
from alphatoken.model.protocol import DecoderAdapter
from alphatoken.scorer import Scorer
from alphatoken.train.distributed import Ranks, even_micro_batches
from alphatoken.train.masters import Masters
from alphatoken.train.options import AlphaOptions
from alphatoken.train.pool import ValidationPool

__all__ = ["Valuation"]

Batches = Callable[[Sequence[int]], Any]
"""Row numbers to one labelled or preference batch on the model's device."""


class Valuation:
    """A scorer that follows a run: new validation rows and direction at each step.

    Everything that it draws is a function of (seed, step): a checkpoint holds nothing of it.

    Args:
        model: the unwrapped model.
        options: of the run.
        pool: which validation rows are drawn; None for ``objective="stability"``.
        validation: rows of the pool to a batch.
        retention: a Fisher drift, or (pool, rows to a batch) of retention rows, or None.
        optimizer: of the run, for preconditioned values.
        ranks: this process among the others.
        sharding: how weights are sharded, or None.
        masters: weights that the optimizer keeps beside the model's, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        options: AlphaOptions,
        pool: ValidationPool | None,
        validation: Batches,
        retention: FisherDrift | tuple[ValidationPool, Batches] | None,
        *,
        optimizer: torch.optim.Optimizer | None,
        ranks: Ranks,
        sharding: Any = None,
        masters: Masters | None = None,
    ) -> None:
        self.options, self.pool, self.ranks = options, pool, ranks
        if masters is not None and isinstance(retention, FisherDrift):
            retention = masters.started(retention)
        self._validation, self._retention = validation, retention
        self._sharded, self._size = sharding is not None, options.validation_rows_at_once
        self._step: int | None = None
        self._built: int | None = None
        self._lasts = options.direction_lasts
        self.scorer = Scorer(
            model,
            None if pool is None else self._draw(pool, validation, 0),
            retention
            if retention is None or isinstance(retention, FisherDrift)
            else self._draw(*retention, 0),
            # The distance to the reference is checked before training; a run may go far from it.
            replace(options.scorer_config(), max_relative_drift=None),
            optimizer=optimizer if options.preconditioner else None,
            reduce=self._reduce,
            sharding=sharding,
            masters=None if masters is None else masters.weight,
        )
        self.scorer.warn = False  # no drift at the first steps; the balance is logged

    @property
    def adapter(self) -> DecoderAdapter:
        """The scorer's view of the model."""
        return self.scorer.adapter

    def _draw(self, pool: ValidationPool, batches: Batches, step: int) -> list[Any]:
        return self._batches(batches, pool.rows(step))

    def _batches(self, batches: Batches, rows: Sequence[int]) -> list[Any]:
        """This process's share of the rows, in micro-batches."""
        rank, world, size = self.ranks.rank, self.ranks.world, self._size
        if self._sharded:
            return [batches(part) for part in even_micro_batches(rows, rank, world, size)]
        own = ValidationPool.share_of(rows, rank, world)
        size = size or max(len(own), 1)
        return [batches(own[i : i + size]) for i in range(0, len(own), size)]

    def _reduce(self, role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
        """Mean over all ranks."""
        sums, count = self.ranks.sum_gradients(sums, count, sharded=self._sharded)
        return {name: total / count for name, total in sums.items()}

    def begin(self, step: int) -> None:
        """Enter optimizer step ``step``: a new direction when due."""
        if step == self._step:
            return
        self._step = step
        # A run that starts over (``auto_find_batch_size``) is at a step before the last build.
        age = -1 if self._built is None else step - self._built
        if age >= 0 and (self._lasts is None or age < self._lasts):
            return
        self._built = step
        if self.pool is not None:
            self.scorer.set_validation(self._draw(self.pool, self._validation, step))
        if isinstance(self._retention, tuple):
            self.scorer.set_retention(self._draw(*self._retention, step))
        self.scorer.pin(("step", step))

    def checkpointed(self) -> tuple[int, dict[str, Tensor]] | None:
        """State of the direction for a checkpoint: for a walk its step and its end.

        Any other is built anew at the next step, as a run resumed from here would.
        """
        if isinstance(builder := self.scorer.builder, WalkBuilder):
            return None if self._built is None else (self._built, builder.end_weights())
        self._built = None
        self.scorer.refresh()
        return None

    def resume(self, built: int, end: dict[str, Tensor]) -> None:
        """Go on with a walk that was taken at step ``built`` of the run."""
        self._built = built
        self.scorer.pin(("step", built))
        places = {name: p.device for name, p in self.scorer.scored.parameters.items()}
        assert isinstance(self.scorer.builder, WalkBuilder)
        self.scorer.builder.keep({n: t.to(places[n]) for n, t in end.items()})

    def objective_gap(self, step: int) -> dict[str, float]:
        """Mean validation objective on the rows of this step and on the held-out rows."""
        if self.pool is None or not self.pool.held_out:
            return {}
        sides = {"pool": self.pool.rows(step), "held_out": self.pool.held_out}
        objectives = {name: self._objective(rows) for name, rows in sides.items()}
        return {**objectives, "gap": objectives["held_out"] - objectives["pool"]}

    @torch.no_grad()
    def _objective(self, rows: Sequence[int]) -> float:
        """Mean token loss, or mean preference loss, over the ranks' rows."""
        total = count = 0.0
        for item in self._batches(self._validation, rows):
            value, weight = objective_value(self.adapter, item)
            total, count = total + value, count + weight
        loss = torch.tensor(total, dtype=torch.float64, device=self.ranks.device)
        summed, count = self.ranks.sum_gradients({"loss": loss}, count)
        return float(summed["loss"]) / max(count, 1.0)
