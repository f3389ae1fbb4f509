"""Values inside a run: of which forward, against which validation rows and which direction."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alphatoken.direction.objective import objective_value, scoring_forward
from alphatoken.estimate.names import WALK
from alphatoken.model.batch import label_mask, labels_of_all
from alphatoken.scorer import Observed, Scorer
from alphatoken.support.progress import shown_progress
from alphatoken.train.checks import check_pool
from alphatoken.train.distributed import Ranks, even_micro_batches
from alphatoken.train.fused_head import errors_only
from alphatoken.train.layouts import needs_own_forward, sharding_of
from alphatoken.train.log_prob_proxy import LogProbProxy, by_token, require_finite
from alphatoken.train.masters import masters_of
from alphatoken.train.micro_batch import MicroBatch, MicroBatchValues, undivided
from alphatoken.train.monitor import TrainMonitor
from alphatoken.train.pool import ValidationPool
from alphatoken.train.run_rows import RunRows
from alphatoken.train.selecting import selecting
from alphatoken.train.trainer_loss import TrainerLoss

__all__ = ["Valuation"]


class Valuation:
    """One value a response token, against the direction of its step: a scorer that follows a run.

    Everything that it draws is a function of (seed, step). Checkpoints hold the norm of the step's
    gradient, which the next step's values need under a full preconditioner, and the end of the
    walk along which values are computed.

    Args:
        trainer_loss: of the run's trainer.
        rows: against which values are computed, prepared.
        monitor: is told how long directions take, and of the validation objective.
        needed: whether the run's policy or its ledger needs values; if not, there are none.
    """

    def __init__(
        self, trainer_loss: TrainerLoss, rows: RunRows, monitor: TrainMonitor, *, needed: bool
    ) -> None:
        self._trainer_loss, self._options = trainer_loss, trainer_loss.args
        self._rows, self._monitor, self._needed = rows, monitor, needed
        options = trainer_loss.args
        self.pool: ValidationPool | None = None
        self._retention_pool: ValidationPool | None = None
        if rows.validation:
            self.pool = check_pool(options, len(rows.validation), self._ranks.world)
        if rows.retention:
            self._retention_pool = ValidationPool(
                len(rows.retention),
                min(options.retention_batch_size, len(rows.retention)),
                mode="pool",
                held_out_share=0.0,
                seed=options.value_seed + 1,
            )
        self._sharded = False
        self._scorer: Scorer | None = None
        self._step: int | None = None
        self._built: int | None = None
        # In a log too the first direction, or walk, shows its progress; then steps are logged.
        self._shown: bool | None = not options.disable_tqdm
        # Norm of the last step's gradient before it was cut; None where it is not kept.
        self._norm: Any = None
        self._walk: tuple[int, dict[str, Tensor]] | None = None

    @property
    def _ranks(self) -> Ranks:
        return self._trainer_loss.ranks

    # --- the direction ----------------------------------------------------------------------------

    @property
    def scorer(self) -> Scorer:
        """Built at the first training step, when model and optimizer are wrapped."""
        if self._scorer is None:
            self._scorer = self._build()
            if self._walk is not None:
                self._resume(self._scorer, *self._walk)
                self._walk = None
        return self._scorer

    def _build(self) -> Scorer:
        run, options, rows = self._trainer_loss, self._options, self._rows
        sharding = sharding_of(run.accelerator, run.model)
        masters = masters_of(run.accelerator, run.model)
        self._sharded = sharding is not None
        for pool in (rows.validation, rows.retention):
            if pool:
                run.prepare_pool(pool)
        retention: Any = rows.fisher
        if self._retention_pool is not None:
            retention = self._draw(self._retention_pool, rows.retention, 0)
        elif masters is not None and rows.fisher is not None:
            retention = masters.started(rows.fisher)
        scorer = Scorer(
            run.model,
            None if self.pool is None else self._draw(self.pool, rows.validation, 0),
            retention,
            # The distance to the reference is checked before training; a run may go far from it.
            replace(options.scorer_config(), max_relative_drift=None),
            optimizer=run.optimizer if options.preconditioner else None,
            reduce=self._reduce,
            sharding=sharding,
            masters=None if masters is None else masters.weight,
        )
        scorer.warn = False  # no drift at the first steps; the balance is logged
        return scorer

    def _resume(self, scorer: Scorer, built: int, end: dict[str, Tensor]) -> None:
        """Go on with a walk that began at step ``built`` of the run."""
        self._built = built
        scorer.pin(("step", built))
        places = {name: p.device for name, p in scorer.scored.parameters.items()}
        scorer.estimator.cache.keep({n: t.to(places[n]) for n, t in end.items()})

    def _draw(self, pool: ValidationPool, rows: Sequence[dict[str, Any]], step: int) -> list[Any]:
        return self._batches(rows, pool.rows(step))

    def _batches(self, rows: Sequence[dict[str, Any]], chosen: Sequence[int]) -> list[Any]:
        """This process's share of the chosen rows, in micro-batches."""
        ranks, size = self._ranks, self._options.validation_rows_at_once
        if self._sharded:
            parts = even_micro_batches(chosen, ranks.rank, ranks.world, size)
        else:
            own = ValidationPool.share_of(chosen, ranks.rank, ranks.world)
            size = size or max(len(own), 1)
            parts = [own[i : i + size] for i in range(0, len(own), size)]
        return [self._trainer_loss.row_batch([rows[i] for i in part]) for part in parts]

    def _reduce(self, role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
        """Mean over all ranks."""
        sums, count = self._ranks.sum_gradients(sums, count, sharded=self._sharded)
        return {name: total / count for name, total in sums.items()}

    @selecting()
    def begin(self) -> None:
        """Enter the current optimizer step: a new direction where one is due.

        Called for every micro-batch; only the first of a step does anything.
        """
        options, monitor = self._options, self._monitor
        if not self._needed:
            return
        step, started = self._trainer_loss.step, time.perf_counter()
        self._enter(step)
        monitor.direction(time.perf_counter() - started)
        due = options.held_out_steps and step % options.held_out_steps == 0
        if due and monitor.looked_at != step:
            monitor.gap(step, self.objective_gap(step))

    def _enter(self, step: int) -> None:
        """Draw new rows, and have the direction built anew, where it is due at this step."""
        scorer, rows, lasts = self.scorer, self._rows, self._options.direction_lasts
        if step == self._step:
            return
        self._step = step
        # A run that starts over (``auto_find_batch_size``) is at a step before the last build.
        age = -1 if self._built is None else step - self._built
        if age >= 0 and (lasts is None or age < lasts):
            return
        self._built = step
        if self.pool is not None:
            scorer.set_validation(self._draw(self.pool, rows.validation, step))
        if self._retention_pool is not None:
            scorer.set_retention(self._draw(self._retention_pool, rows.retention, step))
        scorer.pin(("step", step))

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
        for item in self._batches(self._rows.validation, rows):
            value, weight = objective_value(self.scorer.adapter, item)
            total, count = total + value, count + weight
        loss = torch.tensor(total, dtype=torch.float64, device=self._ranks.device)
        summed, count = self._ranks.sum_gradients({"loss": loss}, count)
        return float(summed["loss"]) / max(count, 1.0)

    # --- one micro-batch --------------------------------------------------------------------------

    def wanted(self, batch: MicroBatch) -> bool:
        """True if this micro-batch is valued: on all processes if on one (it is collective)."""
        return self._needed and self._ranks.any(bool(batch.mask.any()))

    def forward_of(self, batch: MicroBatch) -> str | None:
        """Forward of which the micro-batch is valued now: "training", or one of its "own".

        None where there is none: nothing to value, or the plan of the step has valued it.
        """
        if batch.plan.weights is not None or not self.wanted(batch):
            return None
        own = needs_own_forward(self._trainer_loss.accelerator, self._options)
        return "own" if own else "training"

    @contextmanager
    def observing(self, wanted: bool = True) -> Iterator[Observed | None]:
        """The scorer's ``observe``, the time on entering it logged as the direction's.

        On entering, the scorer builds the direction that this step's values are computed against,
        where it is new. None, and nothing is observed, where it is not ``wanted``.
        """
        if not wanted:
            yield None
            return
        started = time.perf_counter()
        with ExitStack() as observing:
            with selecting(), shown_progress(self._shown):
                observed = observing.enter_context(self.scorer.observe())
            self._shown = None if self._shown else self._shown
            self._monitor.direction(time.perf_counter() - started)
            yield observed

    def of_training_forward(
        self, observed: Observed, proxy: LogProbProxy, coefficients: Tensor, batch: MicroBatch
    ) -> MicroBatchValues:
        """Values of the training forward, of whose head they and the update take one error.

        Not where the head is spread over processes: no process has it whole.
        """
        if self.scorer.scored.sharding is None:
            proxy.share_head(batch.labels)
        return self._values(observed, proxy, coefficients, batch)

    @selecting()
    def _values(
        self,
        observed: Observed,
        proxy: LogProbProxy,
        coefficients: Tensor,
        batch: MicroBatch,
    ) -> MicroBatchValues:
        """Values of the micro-batch whose forward ``observed`` saw."""
        started = time.perf_counter()
        labels, mask = batch.labels, batch.mask
        empty = not bool(mask.any())
        if empty:  # on another process there is a response; this one takes part, and counts nothing
            labels = _with_one_label(labels, batch.inputs)
            mask = label_mask(labels)
        assert proxy.log_probs is not None
        # Nothing above the first scored layer is a parameter of the values: its gradient is waste.
        below = self.scorer.scored.first is not None
        with errors_only(proxy.log_probs) if below else nullcontext():
            values = observed.values(
                proxy.scores,
                labels,
                token_weights=self._trainer_loss.value_weights(coefficients, mask, batch.num_items),
                step_weights=self._step_weights(coefficients, batch),
                components=self._options.export_values,
            )
        if empty:
            return MicroBatchValues(torch.zeros_like(values.total))
        return MicroBatchValues(values.total, values, time.perf_counter() - started)

    @selecting()
    def of_own_forward(self, batch: MicroBatch) -> MicroBatchValues:
        """Values of a forward that nothing is trained on (dropout off)."""
        run, first = self._trainer_loss, self.scorer.scored.first
        proxy = LogProbProxy(run.model)
        with run.beside_training(), self.observing() as observed:
            assert observed is not None
            with scoring_forward(self.scorer.adapter, first):
                loss = run.of(proxy, dict(batch.inputs), batch.num_items)
                require_finite(loss, run.step)
            return self._values(observed, proxy, proxy.coefficients(loss), batch)

    # --- the step's gradient, for values of a full step -------------------------------------------

    def _step_weights(self, coefficients: Tensor, batch: MicroBatch) -> Tensor | None:
        """Weight (b, t) of each token's gradient in the step's, as the optimizer gets it.

        It is that of a step in which all tokens are kept. The step's gradient is estimated from
        this micro-batch, and its clipping is estimated by the last step's.
        """
        if self._options.preconditioner != "full":
            return None
        scale = self._trainer_loss.step_scale(batch.num_items)
        whole = scale * undivided(batch, self._options.kept_normalization) * self.clip_factor
        return -by_token(coefficients) * whole

    def gradient_cut(self, norm: Any) -> None:
        """Take the norm that the step's gradient had before it was cut.

        It is stored where values of the next step are of a full step, and not read here, because
        reading it waits for the device.
        """
        if self._needed and self._options.preconditioner == "full":
            self._norm = norm

    @property
    def clip_factor(self) -> float:
        """Factor by which the last step's gradient was cut; reading it waits for the device."""
        if self._norm is None:
            return 1.0
        self._norm = float(self._norm)
        return float(min(1.0, self._options.max_grad_norm / (self._norm + 1e-6)))

    # --- the checkpoint's part --------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """State for a checkpoint: the end of the walk in use; its step, and the last norm."""
        end: dict[str, Tensor] = {}
        if self._scorer is not None and self._scorer.config.estimator == WALK:
            end = {} if self._built is None else self._scorer.estimator.cache.current()
        elif self._scorer is not None:
            # A resumed run builds its direction at its first step; so must the one that goes on.
            self._built = None
            self._scorer.refresh()
        norm = None if self._norm is None else float(self._norm)
        return end, {"norm": norm, "walk": self._built if end else None}

    def load(self, end: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Take back what ``state`` gave.

        A scorer that an earlier call or attempt of ``train`` built goes: its direction is of
        another step.
        """
        self._scorer = self._step = self._built = None
        self._norm = values["norm"]
        self._walk = None if values["walk"] is None else (values["walk"], dict(end))


def _with_one_label(labels: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Some token that the model predicts, labelled: a scorer needs at least one."""
    ids = inputs["input_ids"]
    every = label_mask(labels_of_all(ids, inputs.get("attention_mask")))
    row, index = every.nonzero()[0].tolist()
    labels = labels.clone()
    labels[row, index] = ids[row, index]
    return labels
