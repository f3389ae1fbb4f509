"""Weights of tokens by their values: the trainers' own way of choosing.

One micro-batch, with a forward that scoring and training share::

    begin          validation rows, direction M (once an optimizer step)
    observing      the trainer's own forward, through the proxy
    coefficients   c = d loss / d log-probabilities, of whatever loss the trainer computes
    read           one value a response token
    choose         weights of the values
    surrogate      the trainer's loss in value, the sum of w c lp in gradient

Where scoring needs a forward of its own (DeepSpeed, or ``keep_scope="global"``), the first four run
on that forward. The trainer's own forward and the surrogate follow, with weights that are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alphatoken.support.seeds import seed_of
from alphatoken.train.distributed import Ranks, global_selection
from alphatoken.train.layouts import needs_own_forward
from alphatoken.train.log_prob_proxy import LogProbProxy, gated_loss
from alphatoken.train.micro_batch import (
    MicroBatch,
    MicroBatchPlan,
    MicroBatchValues,
    draw_seed,
    normalised,
)
from alphatoken.train.selecting import selecting
from alphatoken.train.token_rules import Ranked
from alphatoken.train.valuation import Valuation

if TYPE_CHECKING:
    from alphatoken.train.mixin import AlphaTrainerMixin

__all__ = ["ValueWeigher"]


class ValueWeigher:
    """Scores micro-batches, makes weights of the values, and gives the weighted loss.

    Args:
        trainer: whose run it is.
    """

    def __init__(self, trainer: AlphaTrainerMixin) -> None:
        self._trainer, self.valuation = trainer, Valuation(trainer)
        self._rule = Ranked(trainer.args)

    # --- one optimizer step -----------------------------------------------------------------------

    def plan(self, samples: Sequence[Any], num_items: Any) -> list[MicroBatchPlan]:
        """Decide for a whole step before its first training forward.

        Under a global threshold all micro-batches are scored and weighed here.

        Args:
            samples: batches of the step, as the collator made them.
            num_items: transformers' count of the step's response tokens, or None.
        """
        options, plans = (
            self._trainer.args,
            [MicroBatchPlan(index) for index in range(len(samples))],
        )
        threshold_of_step = options.keep_scope == "global"
        if threshold_of_step:
            samples = [self._trainer._prepare_inputs(sample) for sample in samples]
        elif options.kept_normalization != "kept":
            return plans
        batches = [
            self._trainer.read_micro_batch(sample, plan, num_items)
            for sample, plan in zip(samples, plans, strict=True)
        ]
        if threshold_of_step:  # all micro-batches are scored, and ranked with those of the others
            self.valuation.begin()
            plans = [self._scored_ahead(batch) for batch in batches]
            weights = self._choose_globally(batches, [plan.scored for plan in plans])
            plans = [replace(plan, weights=w) for plan, w in zip(plans, weights, strict=True)]
        if options.kept_normalization == "kept":
            share = self._kept_share(batches, plans)
            plans = [replace(plan, kept_share=share) for plan in plans]
        return plans

    def _scored_ahead(self, batch: MicroBatch) -> MicroBatchPlan:
        """Values of one micro-batch, and the inputs that scoring added to it."""
        if not self.valuation.wanted(batch):
            return batch.plan
        with self._trainer.compute_loss_context_manager():
            own = self._trainer.own_inputs(batch.inputs)
            scored = self.valuation.of_own_forward(replace(batch, inputs=own))
        extra = {k: v for k, v in own.items() if k not in batch.inputs}
        return replace(batch.plan, scored=scored, extra=extra)

    def _choose_globally(
        self, batches: Sequence[MicroBatch], scores: Sequence[MicroBatchValues | None]
    ) -> list[Tensor]:
        """Weights of all micro-batches, each group ranked over the whole step."""
        totals = [self._rule.ranks(batch, one) for batch, one in zip(batches, scores, strict=True)]
        weights = [torch.zeros_like(total) for total in totals]
        step, seed = self._trainer.state.global_step, self._trainer.args.value_seed
        for group in range(len(batches[0].rank_groups)):
            rows = [batch.rank_groups[group] for batch in batches]
            generator = torch.Generator().manual_seed(seed_of("whole step", seed, step, group))
            chosen = global_selection(
                Ranks(self._trainer.accelerator),
                [total[r] for total, r in zip(totals, rows, strict=True)],
                [batch.mask[r] for batch, r in zip(batches, rows, strict=True)],
                partial(self._rule.of_group, generator=generator),
            )
            for weight, part, r in zip(weights, chosen, rows, strict=True):
                weight[r] = part
        return [self._rule.completed(w, batch) for w, batch in zip(weights, batches, strict=True)]

    def _kept_share(
        self, batches: Sequence[MicroBatch], plans: Sequence[MicroBatchPlan]
    ) -> float | None:
        """Kept tokens over those of the loss, of the whole step, over all processes.

        The budget says how many are kept before any is scored, so this costs no forward.
        """
        ranks = Ranks(self._trainer.accelerator)
        count = sum(int(batch.loss_mask.sum()) for batch in batches)
        if self._trainer.args.keep_scope == "global":
            kept = sum((float(p.weights.sum()) for p in plans if p.weights is not None), 0.0)
        else:
            kept = float(sum(self._rule.kept(batch) for batch in batches))
        totals = torch.tensor([kept, count], dtype=torch.float64, device=ranks.device)
        kept, count = ranks.sum_gradients({"kept": totals}, 0.0)[0]["kept"].tolist()
        return kept / count if kept > 0 else None

    # --- one micro-batch --------------------------------------------------------------------------

    def loss(self, model: Any, batch: MicroBatch) -> Tensor:
        """Loss of one micro-batch whose gradient is weighted by token.

        Raises:
            NumericalError: the loss is not finite.
        """
        self.valuation.begin()
        plan = batch.plan
        if plan.weights is not None:
            batch = replace(batch, inputs={**batch.inputs, **plan.extra})
            return self._train(model, batch, plan.scored, plan.weights)
        if not self.valuation.wanted(batch):
            return self._train(model, batch, None, self.choose(batch, None))
        if needs_own_forward(self._trainer.accelerator, self._trainer.args):
            batch = replace(batch, inputs=self._trainer.own_inputs(batch.inputs))
            scored = self.valuation.of_own_forward(batch)
            return self._train(model, batch, scored, self.choose(batch, scored))
        return self._score_and_train(model, batch)

    @selecting()
    def choose(self, batch: MicroBatch, scored: MicroBatchValues | None) -> Tensor:
        """Weights (b, t) of one micro-batch by the run's policy; 0 off the response."""
        generator = torch.Generator().manual_seed(draw_seed(self._trainer, batch))
        return self._rule.weights(batch, scored, generator)

    def _score_and_train(self, model: Any, batch: MicroBatch) -> Tensor:
        """Score and train on one forward."""
        proxy = LogProbProxy(model)
        with self.valuation.observing() as observed:
            loss = gated_loss(self._trainer, proxy, batch)
            coefficients = proxy.coefficients(loss)
            # The head is whole in this process.
            if self.valuation.scorer.scored.sharding is None:
                proxy.share_head(batch.labels)
            scored = self.valuation.read(observed, proxy, coefficients, batch)
        weights = self.choose(batch, scored)
        return self._surrogate(proxy, loss, coefficients, batch, scored, weights)

    def _train(
        self, model: Any, batch: MicroBatch, scored: MicroBatchValues | None, weights: Tensor
    ) -> Tensor:
        """Train with weights that are known before the forward."""
        proxy = LogProbProxy(model)
        loss = gated_loss(self._trainer, proxy, batch)
        return self._surrogate(proxy, loss, proxy.coefficients(loss), batch, scored, weights)

    def _surrogate(
        self,
        proxy: LogProbProxy,
        loss: Tensor,
        coefficients: Tensor,
        batch: MicroBatch,
        scored: MicroBatchValues | None,
        weights: Tensor,
    ) -> Tensor:
        """Write the micro-batch down; the trainer's loss in value, the weighted one in gradient."""
        self._trainer.records.micro_batch(batch, scored, weights)
        kind, share = self._trainer.args.kept_normalization, batch.plan.kept_share
        divided = normalised(weights.to(coefficients), batch, kind, share)
        final = self._trainer.final_coefficients(proxy, coefficients, weights, batch.inputs)
        return proxy.surrogate(loss, final, divided)
