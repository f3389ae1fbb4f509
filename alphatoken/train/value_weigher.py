"""Weights of tokens by their values: the trainers' own way of choosing.

One micro-batch, with a forward that scoring and training share::

    begin          validation rows, schedules, direction M (once an optimizer step)
    observe        the trainer's own forward, through the gate
    coefficients   c = d loss / d log-probabilities, of whatever loss the trainer computes
    score          one value a response token
    choose         weights of the values
    surrogate      the trainer's loss in value, the sum of w c lp in gradient

Where scoring needs a forward of its own (DeepSpeed, or ``keep_scope="global"``), the first four run
on that forward. The trainer's own forward and the surrogate follow, with weights that are known.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from alphatoken.direction.objective import scoring_forward
from alphatoken.model.batch import label_mask, predicted_labels
from alphatoken.scorer import Observed
from alphatoken.select.confidence import select_harmless
from alphatoken.select.interaction import select_diverse
from alphatoken.select.masks import keep_count, response_values
from alphatoken.select.weights import token_weights
from alphatoken.support.seeds import seed_of
from alphatoken.train.distributed import Ranks, global_selection, needs_own_forward
from alphatoken.train.fused_head import errors_only
from alphatoken.train.gradient_weights import GradientWeightedModel, by_token, gated_loss
from alphatoken.train.micro_batch import (
    Carried,
    MicroBatch,
    Scored,
    draw_seed,
    normalised,
    of_rows,
    undivided,
)
from alphatoken.train.records import RunRecords
from alphatoken.train.selection_cost import selecting
from alphatoken.train.trainer_protocol import TrainerParts
from alphatoken.train.valuation import Valuation
from alphatoken.values import standard_error

__all__ = ["ValueWeigher"]


@dataclass(frozen=True)
class _Plan:
    """What is known of one micro-batch before its training forward.

    Attributes:
        kept_share: kept tokens over response tokens of the whole step, where they divide the loss.
        weights: (b, t), where a threshold over the whole step decided them; None otherwise.
        scored: the values that the weights came from, if any.
        extra: inputs that scoring added, such as the reference's log-probabilities.
    """

    kept_share: float | None = None
    weights: Tensor | None = None
    scored: Scored | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class ValueWeigher:
    """Scores micro-batches, makes weights of the values, and gives the weighted loss.

    Args:
        trainer: whose run it is.
        records: where each micro-batch is written down.
        build: makes the valuation, at the first step that needs one.

    Two things of a weigher outlive a step: the valuation, whose running mean grows, and the norm of
    the step's gradient, which the next step's values need. Both are in checkpoints.
    """

    def __init__(
        self, trainer: TrainerParts, records: RunRecords, build: Callable[[], Valuation]
    ) -> None:
        self._trainer, self._records, self._build = trainer, records, build
        self._valuation: Valuation | None = None
        # The running mean of a checkpoint, from when it is loaded to when the valuation is built.
        self._resumed: dict[str, Tensor] = {}
        # Norm of the last step's gradient before it was cut; None where it was not taken.
        self._norm: Any = None

    @property
    def valuation(self) -> Valuation:
        """Built at the first training step, when model and optimizer are wrapped."""
        if self._valuation is None:
            self._valuation = self._build()
            if self._valuation.running is not None and self._resumed:
                self._valuation.running.load_tensors(self._resumed)
            self._resumed = {}
        return self._valuation

    @property
    def _options(self) -> Any:
        return self._trainer.args

    @property
    def _step(self) -> int:
        return int(self._trainer.state.global_step)

    # --- one optimizer step -----------------------------------------------------------------------

    def plan(self, samples: Sequence[Any], num_items: Any) -> list[_Plan]:
        """What is decided for a whole step before its first training forward.

        Under a global threshold all micro-batches are scored and weighed here.

        Args:
            samples: batches of the step, as the collator made them.
            num_items: transformers' count of the step's response tokens, or None.
        """
        options, plans = self._options, [_Plan()] * len(samples)
        threshold_of_step = options.keep_scope == "global"
        if threshold_of_step:
            samples = [self._trainer._prepare_inputs(sample) for sample in samples]
        elif options.kept_normalization != "kept":
            return plans
        batches = [
            self._trainer.read_micro_batch(sample, Carried(index), num_items)
            for index, sample in enumerate(samples)
        ]
        if threshold_of_step:
            plans = self._weigh_globally(batches)
        if options.kept_normalization == "kept":
            share = self._kept_share(batches, [plan.weights for plan in plans])
            plans = [replace(plan, kept_share=share) for plan in plans]
        return plans

    @selecting()
    def _begin(self) -> None:
        """Enter the current optimizer step: a new direction where one is due.

        Called for every micro-batch; only the first of a step does anything.
        """
        if not self._options.needs_values:
            return
        options, monitor = self._options, self._records.monitor
        started = time.perf_counter()
        self.valuation.begin(self._step)
        monitor.direction(time.perf_counter() - started)
        due = options.held_out_steps and self._step % options.held_out_steps == 0
        if due and monitor.looked_at != self._step:
            monitor.gap(self._step, self.valuation.objective_gap(self._step))

    # --- one micro-batch --------------------------------------------------------------------------

    def loss(self, model: Any, batch: MicroBatch) -> Tensor:
        """Loss of one micro-batch whose gradient is weighted by token.

        Raises:
            NumericalError: the loss is not finite.
        """
        self._begin()
        plan = batch.planned(_Plan)
        if plan.weights is not None:
            batch = replace(batch, inputs={**batch.inputs, **plan.extra})
            return self._train_with(model, batch, plan.scored, plan.weights)
        scored = None
        if self._must_score(batch):
            if not needs_own_forward(self._trainer.accelerator, self._options):
                return self._score_and_train(model, batch)
            batch = replace(batch, inputs=self._trainer.own_inputs(batch.inputs))
            scored = self._own_pass(batch)
        return self._train_with(model, batch, scored, self.choose(batch, scored))

    def _must_score(self, batch: MicroBatch) -> bool:
        """Whether this micro-batch is scored. Where one process must, all do: it is collective."""
        if not self._options.needs_values:
            return False
        ranks = Ranks(self._trainer.accelerator)
        return ranks.any(bool(batch.mask.any()))

    def _score_and_train(self, model: Any, batch: MicroBatch) -> Tensor:
        """Score and train on one forward."""
        gate = GradientWeightedModel(model)
        with self._observing() as observed:
            loss = gated_loss(self._trainer, gate, batch)
            coefficients = gate.coefficients(loss)
            if self.valuation.scorer.builder.sharding is None:  # the head is whole in this process
                gate.share_head(batch.labels)
            scored = self._score(observed, gate, coefficients, batch)
        weights = self.choose(batch, scored)
        return self._surrogate(gate, loss, coefficients, batch, scored, weights)

    def _train_with(
        self, model: Any, batch: MicroBatch, scored: Scored | None, weights: Tensor
    ) -> Tensor:
        """Train with weights that are known before the forward."""
        gate = GradientWeightedModel(model)
        rows = self._kept_rows(batch, weights)
        loss = gated_loss(self._trainer, gate, batch if rows is None else of_rows(batch, rows))
        total = self._surrogate(gate, loss, gate.coefficients(loss), batch, scored, weights, rows)
        if rows is None or scored is None or scored.loss is None:
            return total
        # What is reported is of all rows: the scoring pass has met them.
        return total + (scored.loss.to(total) - loss).detach()

    def _kept_rows(self, batch: MicroBatch, weights: Tensor) -> Tensor | None:
        """The rows that have a token of weight, where others are skipped; None for all rows.

        Without transformers' count of the step's tokens the trainer would divide by those of the
        rows that are left.
        """
        if not self._options.skip_dropped_rows or batch.num_items is None:
            return None
        kept = (weights != 0).any(-1)
        if bool(kept.all()):
            return None
        # One at least: other processes may wait for this one's forward.
        first = kept.new_zeros(1, dtype=torch.int64)
        return kept.nonzero().squeeze(-1) if bool(kept.any()) else first

    def _surrogate(
        self,
        gate: GradientWeightedModel,
        loss: Tensor,
        coefficients: Tensor,
        batch: MicroBatch,
        scored: Scored | None,
        weights: Tensor,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Write the micro-batch down; the trainer's loss in value, the weighted one in gradient.

        ``rows`` are those that the gate's forward has seen; None for all of the batch.
        """
        self._records.micro_batch(batch, scored, weights)
        kind = self._options.kept_normalization
        divided = normalised(weights.to(coefficients), batch, kind, batch.planned(_Plan).kept_share)
        if rows is not None:
            divided, weights, batch = divided[rows], weights[rows], of_rows(batch, rows)
        final = self._trainer.final_coefficients(gate, coefficients, weights, batch.inputs)
        return gate.surrogate(loss, final, divided)

    # --- values -----------------------------------------------------------------------------------

    @contextmanager
    def _observing(self) -> Iterator[Observed]:
        """The scorer's ``observe``, the time on entering it logged as the direction's.

        On entering, the scorer builds the direction that this step's values are taken against,
        where it is new.
        """
        started = time.perf_counter()
        with ExitStack() as observing:
            with selecting():
                observed = observing.enter_context(
                    self.valuation.scorer.observe(interaction=self._interacts)
                )
            self._records.monitor.direction(time.perf_counter() - started)
            yield observed

    @selecting()
    def _score(
        self,
        observed: Observed,
        gate: GradientWeightedModel,
        coefficients: Tensor,
        batch: MicroBatch,
    ) -> Scored:
        """Values of the micro-batch whose forward ``observed`` saw."""
        started = time.perf_counter()
        labels, mask = batch.labels, batch.mask
        empty = not bool(mask.any())
        if empty:  # on another process there is a response; this one takes part, and counts nothing
            labels = _with_one_label(labels, batch.inputs)
            mask = label_mask(labels)
        assert gate.log_probs is not None
        logs_components = self._records.monitor.wants_components
        keeps_components = self._records.keeps_values
        # Nothing above the first scored layer is a parameter of the values: its gradient is waste.
        below = self.valuation.scorer.builder.first is not None
        with errors_only(gate.log_probs) if below else nullcontext():
            values = observed.values(
                gate.scores,
                labels,
                token_weights=self._trainer.value_weights(coefficients, mask, batch.num_items),
                step_weights=self._step_weights(coefficients, batch),
                components=keeps_components,
                keep_errors=logs_components and not keeps_components,
            )
            if logs_components:  # the totals keep their bits: no log moves a mask
                values = observed.components()
        if empty:
            return Scored(torch.zeros_like(values.total))
        gram = observed.interaction() if self._interacts else None
        return Scored(values.total, values, gram, time.perf_counter() - started)

    @selecting()
    def _own_pass(self, batch: MicroBatch) -> Scored:
        """Score one micro-batch without training on it (dropout off)."""
        builder = self.valuation.scorer.builder
        gate = GradientWeightedModel(self._trainer.model)
        with _untouched_metrics(self._trainer), self._observing() as observed:
            with scoring_forward(self.valuation.adapter, builder.first):
                loss = gated_loss(self._trainer, gate, batch)
            scored = self._score(observed, gate, gate.coefficients(loss), batch)
            return replace(scored, loss=loss.detach())

    def _step_weights(self, coefficients: Tensor, batch: MicroBatch) -> Tensor | None:
        """Weight (b, t) of each token's gradient in the step's, as the optimizer gets it.

        It is that of a step in which all tokens are kept. The step's gradient is estimated from
        this micro-batch, and its clipping is taken to be the last step's.
        """
        if self._options.preconditioner != "full":
            return None
        scale = self._trainer.step_scale(batch.num_items)
        whole = scale * undivided(batch, self._options.kept_normalization) * self.clip_factor
        return -by_token(coefficients) * whole

    def gradient_cut(self, norm: Any) -> None:
        """Take the norm that the step's gradient had before it was cut.

        It is stored where values of the next step are of a full step, and not read here, because
        reading it waits for the device.
        """
        if self._options.preconditioner == "full":
            self._norm = norm

    @property
    def clip_factor(self) -> float:
        """Factor by which the last step's gradient was cut; reading it waits for the device."""
        if self._norm is None:
            return 1.0
        self._norm = float(self._norm)
        return float(min(1.0, self._options.max_grad_norm / (self._norm + 1e-6)))

    # --- weights ----------------------------------------------------------------------------------

    @selecting()
    def choose(self, batch: MicroBatch, scored: Scored | None) -> Tensor:
        """Weights (b, t) of one micro-batch by the run's policy; 0 off the response."""
        if self._options.policy == "harmless":
            return self._harmless(batch, scored)
        mask, totals = batch.mask, self._ranked(batch, scored)
        generator = torch.Generator().manual_seed(draw_seed(self._trainer, batch))
        if scored is None or scored.gram is None:
            return torch.cat([self._weigh(totals[r], mask[r], generator) for r in batch.pools])
        parts: list[Tensor] = []
        used = 0
        for rows in batch.pools:
            tokens = slice(used, used := used + int(mask[rows].sum()))
            mask_of_pool = select_diverse(
                totals[rows],
                mask[rows],
                self._ratio,
                scored.gram[tokens, tokens],
                self._options.interaction_weight,
                scope=self._options.keep_scope,
                units="relative",
            )
            parts.append(mask_of_pool.to(totals.dtype))
        return torch.cat(parts)

    def _harmless(self, batch: MicroBatch, scored: Scored | None) -> Tensor:
        """1 at tokens (of responses, by their mean) that are not harmful beyond doubt."""
        values = None if scored is None else scored.values
        if values is None:  # no response here
            return torch.zeros(batch.mask.shape, device=batch.mask.device)
        assert values.parts is not None
        assert values.part_shares is not None
        totals, parts = self._ranked(batch, scored), values.parts
        if self._options.value_unit == "response":
            parts = torch.stack([response_values(p, batch.mask) for p in parts.unbind(-1)], -1)
        errors = standard_error(parts, values.part_shares)
        level, count = self._options.confidence, parts.shape[-1]
        keep = select_harmless(totals, errors, batch.mask, parts=count, confidence=level)
        return keep.to(totals.dtype)

    def _ranked(self, batch: MicroBatch, scored: Scored | None) -> Tensor:
        """(b, t) by which tokens are ranked."""
        if scored is None:
            return torch.zeros(batch.mask.shape, device=batch.mask.device)
        by_response = self._options.value_unit == "response"
        return response_values(scored.totals, batch.mask) if by_response else scored.totals

    def _weigh(self, totals: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
        """Weights of tokens that are ranked together."""
        options = self._options
        return token_weights(
            totals,
            mask,
            self._ratio,
            policy=options.policy,
            scope="sequence" if options.keep_scope == "sequence" else "batch",
            generator=generator,
        )

    @property
    def _interacts(self) -> bool:
        return bool(self._options.interaction_weight > 0)

    @property
    def _ratio(self) -> float:
        """rho of this step, for controls too."""
        return float(self._options.ratio_at(self._step, self._trainer.state.max_steps))

    # --- a threshold over the whole step ----------------------------------------------------------

    def _weigh_globally(self, batches: Sequence[MicroBatch]) -> list[_Plan]:
        """Score all micro-batches of this step; rank over accumulation and processes."""
        self._begin()
        scores, extras = zip(*(self._scored_ahead(batch) for batch in batches), strict=True)
        weights = self._choose_globally(batches, scores)
        return [
            _Plan(None, weight, scored, extra)
            for weight, scored, extra in zip(weights, scores, extras, strict=True)
        ]

    def _scored_ahead(self, batch: MicroBatch) -> tuple[Scored | None, Mapping[str, Any]]:
        """Values of one micro-batch, and the inputs that scoring added to it."""
        if not self._must_score(batch):
            return None, {}
        with self._trainer.compute_loss_context_manager():
            own = self._trainer.own_inputs(batch.inputs)
            scored = self._own_pass(replace(batch, inputs=own))
        return scored, {k: v for k, v in own.items() if k not in batch.inputs}

    def _choose_globally(
        self, batches: Sequence[MicroBatch], scores: Sequence[Scored | None]
    ) -> list[Tensor]:
        """Weights of all micro-batches, each pool ranked over the whole step."""
        totals = [self._ranked(batch, one) for batch, one in zip(batches, scores, strict=True)]
        weights = [torch.zeros_like(total) for total in totals]
        for pool in range(len(batches[0].pools)):
            rows = [batch.pools[pool] for batch in batches]
            seed = seed_of("whole step", self._options.value_seed, self._step, pool)
            chosen = global_selection(
                Ranks(self._trainer.accelerator),
                [total[r] for total, r in zip(totals, rows, strict=True)],
                [batch.mask[r] for batch, r in zip(batches, rows, strict=True)],
                partial(self._weigh, generator=torch.Generator().manual_seed(seed)),
            )
            for weight, part, r in zip(weights, chosen, rows, strict=True):
                weight[r] = part
        return weights

    # --- kept tokens as the divisor ---------------------------------------------------------------

    def _kept_share(
        self, batches: Sequence[MicroBatch], weights: Sequence[Tensor | None]
    ) -> float | None:
        """Kept tokens over response tokens of the whole step, over all processes.

        The budget says how many are kept before any is scored, so this costs no forward.
        """
        ranks = Ranks(self._trainer.accelerator)
        count = sum(int(batch.mask.sum()) for batch in batches)
        if self._options.keep_scope == "global":
            kept = sum((float(weight.sum()) for weight in weights if weight is not None), 0.0)
        else:
            kept = float(sum(self._budget(batch) for batch in batches))
        totals = torch.tensor([kept, count], dtype=torch.float64, device=ranks.device)
        kept, count = ranks.sum_gradients({"kept": totals}, 0.0)[0]["kept"].tolist()
        return kept / count if kept > 0 else None

    def _budget(self, batch: MicroBatch) -> int:
        """Summed weights of one micro-batch whose tokens are ranked by themselves."""
        mask = batch.mask
        if self._options.policy == "all":
            return int(mask.sum())
        rows = [slice(i, i + 1) for i in range(len(mask))]
        pools = rows if self._options.keep_scope == "sequence" else batch.pools
        return sum(keep_count(self._ratio, int(mask[pool].sum())) for pool in pools)

    # --- the checkpoint's part --------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Tensor], Any]:
        """Running mean by name, and the norm of the last gradient."""
        tensors: dict[str, Tensor] = {}
        if self._valuation is not None:
            # A resumed run builds its direction at its first step; so must the one that goes on.
            self._valuation.checkpointed()
            if self._valuation.running is not None:
                tensors = self._valuation.running.state_tensors()
        return tensors, None if self._norm is None else float(self._norm)

    def load(self, running: dict[str, Tensor], norm: Any) -> None:
        """Take back what ``state`` gave.

        A valuation that an earlier call or attempt of ``train`` built goes: its direction and its
        running mean are of other steps.
        """
        self._valuation, self._resumed, self._norm = None, running, norm


@contextmanager
def _untouched_metrics(trainer: Any) -> Iterator[None]:
    """TRL's running metrics see the training forward only."""
    names = ("_metrics", "_total_train_tokens")
    before = {n: copy.deepcopy(getattr(trainer, n)) for n in names if hasattr(trainer, n)}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(trainer, name, value)


def _with_one_label(labels: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    """Some token that the model predicts, labelled: values are taken of at least one."""
    ids = inputs["input_ids"]
    every = label_mask(predicted_labels(ids, inputs.get("attention_mask")))
    row, index = every.nonzero()[0].tolist()
    labels = labels.clone()
    labels[row, index] = ids[row, index]
    return labels
