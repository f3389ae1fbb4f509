"""Values inside a run: of which forward, against which validation rows and which direction."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from alphatoken.config import WALK
from alphatoken.direction.algebra import Direction
from alphatoken.direction.objective import (
    mean_gradient,
    objective_value,
    scoring_forward,
)
from alphatoken.estimate.walk import BEHIND
from alphatoken.model.batch import (
    LabelledBatch,
    has_response,
    label_mask,
    labels_of_all,
    read_batch,
)
from alphatoken.model.forward import spares_logits, tokens_beside_weights
from alphatoken.scorer import Observed, Scorer
from alphatoken.support.progress import shown_progress
from alphatoken.train.distributed import (
    even_micro_batches,
    in_pieces,
    layout,
    master_weights,
    needs_own_forward,
    rounded_reference,
    sharding_of,
)
from alphatoken.train.log_prob_proxy import LogProbProxy, by_token, errors_only, require_finite
from alphatoken.train.pool import ValidationPool
from alphatoken.train.records import TrainMonitor
from alphatoken.train.refusals import check_pool
from alphatoken.train.run_rows import RunRows
from alphatoken.train.trainer_loss import MicroBatch, TrainerLoss, selecting, undivided
from alphatoken.values import TokenValues


class Valuation:
    """One value a response token, against the direction of its step: a scorer that follows a run.

    Everything that it draws is a function of (seed, step).

    Args:
        trainer_loss: of the run's trainer.
        rows: against which values are computed, prepared.
        monitor: is told how long directions take, and of the validation objective.
        needed: whether the run's policy or its ledger needs values; if not, there are none.
    """

    def __init__(
        self, trainer_loss: TrainerLoss, rows: RunRows, monitor: TrainMonitor, *, needed: bool
    ) -> None:
        options = trainer_loss.args
        self._trainer_loss, self._options, self._ranks = trainer_loss, options, trainer_loss.ranks
        self._rows, self._monitor, self._needed = rows, monitor, needed
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
                # Else two pools of as many rows would run side by side through one order.
                seed=options.value_seed + 1,
            )
        self._sharded = False
        self._spares_logits = False
        self._drawn: dict[int, tuple[Sequence[int], list[Any]]] = {}
        self._scorer: Scorer | None = None
        self._step: int | None = None
        self._built: int | None = None
        # In a log too the first direction, or walk, shows its progress; then steps are logged.
        self._shown: bool | None = not options.disable_tqdm
        # Norm of the last step's gradient before it was cut; None where it is not kept.
        self._norm: Any = None
        # Of a checkpoint, until there is a scorer.
        self._loaded: tuple[dict[str, Tensor], Mapping[str, Any]] | None = None

    # --- the direction ----------------------------------------------------------------------------

    @property
    def scorer(self) -> Scorer:
        """Built at the first training step, when model and optimizer are wrapped."""
        if self._scorer is None:
            self._scorer = self._build()
            if self._loaded is not None:
                (tensors, values), self._loaded = self._loaded, None
                self._take_up(self._scorer, tensors, values)
        return self._scorer

    def _take_up(
        self, scorer: Scorer, tensors: Mapping[str, Tensor], values: Mapping[str, Any]
    ) -> None:
        """Go on where a checkpoint's scorer was."""
        self._built = values["along"]
        if self._built is not None:
            scorer.pin(("step", self._built))
            scorer.estimator.cache.keep(_valued_along(tensors, scorer))
        if values["batches"]:
            scorer.estimator.load_batch_state(values["batches"])

    def _build(self) -> Scorer:
        run, options, rows = self._trainer_loss, self._options, self._rows
        sharding = sharding_of(run.accelerator, run.model)
        masters = master_weights(run.accelerator, run.model)
        self._sharded = sharding is not None
        # Only now the prepared model can be asked for the reference's log-probabilities.
        for pool in (rows.validation, rows.retention):
            if pool:
                run.prepare_pool(pool)
        retention: Any = rows.fisher
        if self._retention_pool is not None:
            retention = self._draw(self._retention_pool, rows.retention, 0)
        elif masters is not None and rows.fisher is not None:
            # A drift read off 16-bit copies of the weights would be rounding.
            retention = rounded_reference(rows.fisher, run.accelerator.unwrap_model(run.model))
        scorer = Scorer(
            run.model,
            None if self.pool is None else self._draw(self.pool, rows.validation, 0),
            retention,
            # The distance to the reference is checked before training; a run may go far from it.
            replace(options.scorer_config(), max_relative_drift=None),
            optimizer=run.optimizer if options.preconditioner else None,
            reduce=self._reduce,
            sharding=sharding,
            masters=masters,
        )
        scorer.warn = False  # no drift at the first steps; the balance is logged
        whole = layout(run.accelerator) in ("single", "ddp")
        if rows.validation and whole and options.estimator != WALK:
            # Seen of one row, so that no pass over many forms logits that one could have spared.
            objective_value(scorer.adapter, run.row_batch(rows.validation[:1]))
            self._spares_logits = spares_logits(scorer.adapter)
        return scorer

    def _draw(self, pool: ValidationPool, rows: Sequence[dict[str, Any]], step: int) -> list[Any]:
        """Batches of a pool's rows at this step; those of the last draw where it has the same."""
        chosen, before = self._chosen(pool, rows, step), self._drawn.get(id(pool))
        if before is not None and before[0] == chosen:
            return before[1]
        batches = self._batches(rows, chosen)
        # A reference that moves gives other numbers to the same pairs; and before the scorer is
        # built fewer rows are taken together.
        if all(isinstance(batch, LabelledBatch) for batch in batches):
            self._drawn[id(pool)] = chosen, batches
        return batches

    def _chosen(
        self, pool: ValidationPool, rows: Sequence[dict[str, Any]], step: int
    ) -> Sequence[int]:
        """Rows of a pool at this step: a batch; for a walk all that its own steps reach."""
        size = None
        if self._options.estimator == WALK and pool is self.pool:
            size = self._rows_at_once(rows)
        if size is None:
            return pool.rows(step)
        return pool.rows_from(step)[: self._options.walk_steps * size * self._ranks.world]

    def _rows_at_once(self, rows: Sequence[dict[str, Any]]) -> int | None:
        """Rows of one validation forward; None for all of a process, where nothing is known.

        Gradients do not exist yet when M is built. So a pass may take what memory they will take,
        where that is more than a training forward's: fewer and larger passes keep an accelerator
        busy. It stays a training forward's where each is a step of a walk, where logits are formed,
        and where gradients are kept in other forms.
        """
        options, scorer = self._options, self._scorer
        if options.validation_micro_batch_size is not None:
            return int(options.validation_micro_batch_size)
        size: int | None = getattr(options, "per_device_train_batch_size", None)
        if size is None or scorer is None or not self._spares_logits:
            return size
        longest = max(map(self._trainer_loss.row_length, rows))
        return max(size, tokens_beside_weights(scorer.adapter, scorer.scored.first) // longest)

    def _batches(self, rows: Sequence[dict[str, Any]], chosen: Sequence[int]) -> list[Any]:
        """This process's share of the chosen rows, in micro-batches."""
        ranks, size = self._ranks, self._rows_at_once(rows)
        if self._sharded:
            # Each forward gathers weights: a process with one fewer would leave the others waiting.
            parts = even_micro_batches(chosen, ranks.rank, ranks.world, size)
        else:
            own = ValidationPool.share_of(chosen, ranks.rank, ranks.world)
            parts = in_pieces(own, 1 if size is None else max(1, -(-len(own) // size)))
        return [self._checked(self._trainer_loss.row_batch([rows[i] for i in p])) for p in parts]

    def _checked(self, batch: Any) -> Any:
        """A batch that the same rows need not be read from again; pairs as they are."""
        if self._scorer is None or not isinstance(batch, Mapping):
            return batch
        adapter = self._scorer.adapter
        limit, model = adapter.max_positions(), adapter.model
        return read_batch(batch, max_length=limit, role="validation batch", model=model)

    def _reduce(self, role: str, sums: dict[str, Tensor], count: float) -> dict[str, Tensor]:
        # Sharded sums are summed already, counts are not.
        sums, count = self._ranks.sum_gradients(sums, count, sharded=self._sharded)
        return mean_gradient(role, sums, count)

    @selecting()
    def begin(self) -> None:
        """Enter the current optimizer step: new rows and a new direction where they are due.

        Called for every micro-batch; only the first of a step does anything.
        """
        options, monitor = self._options, self._monitor
        if not self._needed:
            return
        step, started = self._trainer_loss.step, time.perf_counter()
        self._enter(step)
        monitor.direction(time.perf_counter() - started)
        # A step has several micro-batches, and its objective is looked at once.
        due = options.held_out_steps and step % options.held_out_steps == 0
        if due and monitor.looked_at != step:
            monitor.gap(step, self.objective_gap(step))

    def _enter(self, step: int) -> None:
        scorer, rows = self.scorer, self._rows
        if step == self._step:
            return
        self._step = step
        if not self._due(step):
            return
        self._built = step
        if self.pool is not None:
            scorer.set_validation(self._draw(self.pool, rows.validation, step))
        if self._retention_pool is not None:
            scorer.set_retention(self._draw(self._retention_pool, rows.retention, step))
        scorer.pin(("step", step))

    def _due(self, step: int) -> bool:
        """Whether this step begins with a new direction, or a new walk."""
        lasts = self._options.direction_lasts
        # A run that starts over (``auto_find_batch_size``) is at a step before the last build.
        age = -1 if self._built is None else step - self._built
        return age < 0 or (lasts is not None and age >= lasts)

    def objective_gap(self, step: int) -> dict[str, float]:
        """Mean validation objective on the rows of this step and on the held-out rows."""
        if self.pool is None or not self.pool.held_out:
            return {}
        sides = {"pool": self.pool.rows(step), "held_out": self.pool.held_out}
        objectives = {name: self._objective(rows) for name, rows in sides.items()}
        return {**objectives, "gap": objectives["held_out"] - objectives["pool"]}

    @torch.no_grad()
    def _objective(self, rows: Sequence[int]) -> float:
        total = count = 0.0
        for item in self._batches(self._rows.validation, rows):
            value, weight = objective_value(self.scorer.adapter, item)
            total, count = total + value, count + weight
        loss = torch.tensor(total, dtype=torch.float64, device=self._ranks.device)
        summed, count = self._ranks.sum_gradients({"loss": loss}, count)
        return float(summed["loss"]) / max(count, 1.0)

    # --- one micro-batch --------------------------------------------------------------------------

    def wanted(self, batch: MicroBatch) -> bool:
        """Whether this micro-batch is valued: on all processes if on one (it is collective)."""
        return self._needed and self._ranks.any(has_response(batch.labels))

    def forward_of(self, batch: MicroBatch) -> str | None:
        """Forward of which the micro-batch is valued now: "training", or one of its "own".

        None: there is nothing to value, or the plan of the step has valued it.
        """
        if batch.plan.weights is not None or not self.wanted(batch):
            return None
        own = needs_own_forward(self._trainer_loss.accelerator, self._options)
        return "own" if own else "training"

    @contextmanager
    def observing(self, wanted: bool = True) -> Iterator[Observed | None]:
        """The scorer's ``observe``; where it is not ``wanted``, None, and nothing is observed."""
        if not wanted:
            yield None
            return
        # On entering, the scorer builds the direction of this step, where it is new.
        started = time.perf_counter()
        with ExitStack() as observing:
            with selecting(), shown_progress(self._shown):
                observed = observing.enter_context(self.scorer.observe())
            self._shown = None if self._shown else self._shown
            self._monitor.direction(time.perf_counter() - started)
            yield observed

    def of_training_forward(
        self, observed: Observed, proxy: LogProbProxy, coefficients: Tensor, batch: MicroBatch
    ) -> TokenValues | None:
        """Values of the training forward; see :meth:`_values`."""
        # Values and update take one error of the head. No process has a head whole that is spread
        # over several.
        if self.scorer.scored.sharding is None and self.scorer.estimator.shares_head:
            proxy.share_head(batch.labels)
        return self._values(observed, proxy, coefficients, batch)

    @selecting()
    def _values(
        self, observed: Observed, proxy: LogProbProxy, coefficients: Tensor, batch: MicroBatch
    ) -> TokenValues | None:
        """Values of the micro-batch whose forward ``observed`` saw; None without a response."""
        started = time.perf_counter()
        labels, mask = batch.labels, batch.mask
        empty = not has_response(labels)
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
            return None
        self._monitor.scoring(time.perf_counter() - started)
        return values

    @selecting()
    def of_own_forward(self, batch: MicroBatch) -> TokenValues | None:
        """Values of a forward that nothing is trained on (dropout off)."""
        run, first = self._trainer_loss, self.scorer.scored.first
        proxy = LogProbProxy(run.model)
        # TRL's running metrics are of training forwards.
        with run.beside_training(), self.observing() as observed:
            assert observed is not None
            with scoring_forward(self.scorer.adapter, first):
                loss = run.of(proxy, dict(batch.inputs), batch.num_items)
                require_finite(loss, run.step)
            return self._values(observed, proxy, proxy.coefficients(loss), batch)

    # --- the step's gradient, for values of a full step -------------------------------------------

    def _step_weights(self, coefficients: Tensor, batch: MicroBatch) -> Tensor | None:
        """Weight (b, t) of each token's gradient in the step's, as the optimizer gets it."""
        if self._options.preconditioner != "full":
            return None
        # Of a step in which all tokens are kept. Its gradient is estimated from this micro-batch,
        # and its clipping by the last step's.
        scale = self._trainer_loss.step_scale(batch.num_items)
        whole = scale * undivided(batch, self._options.kept_normalization) * self.clip_factor
        return -by_token(coefficients) * whole

    def gradient_cut(self, norm: Any) -> None:
        """Take the norm of the step's gradient before it was cut, for values of a full step."""
        if self._needed and self._options.preconditioner == "full":
            self._norm = norm  # not read here, because reading it waits for the device

    @property
    def clip_factor(self) -> float:
        """Factor by which the last step's gradient was cut; reading it waits for the device."""
        if self._norm is None:
            return 1.0
        self._norm = float(self._norm)
        return float(min(1.0, self._options.max_grad_norm / (self._norm + 1e-6)))

    # --- the checkpoint's part --------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """State for a checkpoint: what later steps are valued along; its step, and the last norm.

        Where the next step builds it anew, there is none.
        """
        estimator = None if self._scorer is None else self._scorer.estimator
        kept = None if estimator is None else estimator.cache.peek()
        if kept is None or self._due(self._trainer_loss.step):
            self._built = kept = None
        # The next step's values of a full step are cut by it.
        norm = None if self._norm is None else float(self._norm)
        of_batches = {} if estimator is None else estimator.batch_state()
        return _tensors_of(kept), {"norm": norm, "along": self._built, "batches": of_batches}

    def load(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        # The direction of a scorer that an earlier call of ``train`` built is of another step.
        self._scorer = self._step = self._built = None
        self._norm, self._loaded = values["norm"], (dict(tensors), values)


def _tensors_of(kept: Direction | Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Both sides of a direction, a walk's end as it is: of sharded weights this process's parts."""
    if not isinstance(kept, Direction):
        return dict(kept or {})
    sides = {"adaptation": kept.adaptation, "stability": kept.stability or {}}
    return {f"{side}/{n}": t for side, tensors in sides.items() for n, t in tensors.items()}


def _valued_along(tensors: Mapping[str, Tensor], scorer: Scorer) -> Any:
    """What ``_tensors_of`` took apart."""
    parameters, inputs = scorer.scored.parameters, scorer.estimator.inputs
    if scorer.config.estimator == WALK:
        return {n: t.to(parameters[n.removeprefix(BEHIND)].device) for n, t in tensors.items()}
    sides: dict[str, dict[str, Tensor]] = {"adaptation": {}, "stability": {}}
    for key, tensor in tensors.items():
        side, _, name = key.partition("/")
        sides[side][name] = tensor.to(parameters[name].device)
    return inputs.of_sides(sides["adaptation"], sides["stability"] if inputs.retains else None)


def _with_one_label(labels: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Some token that the model predicts, labelled: a scorer needs at least one."""
    ids = inputs["input_ids"]
    every = label_mask(labels_of_all(ids, inputs.get("attention_mask")))
    row, index = every.nonzero()[0].tolist()
    labels = labels.clone()
    labels[row, index] = ids[row, index]
    return labels
