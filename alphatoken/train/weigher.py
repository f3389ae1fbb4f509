"""The way from a policy to the loss of a step: a plan, then one function a micro-batch.

``Weigher.plan`` does work only where a threshold (``keep_scope="global"``, or of a policy whose
scope is the step) or a divisor (kept tokens) needs the whole step. ``Weigher.loss`` is the whole
story of a micro-batch::

    reference      log-probabilities of the reference model, where the policy needs them
    own forward    values of a forward beside the training, where the layout or the user wants one
    loss           the trainer's own, of its training forward through the proxy
    coefficients   c = d loss / d log-probabilities, of whatever loss the trainer computes
    values         one a response token, of the training forward, where the policy needs them
    weights        of the policy, from all of that
    update         the sum of w c lp in gradient, the loss in value; or the policy's own loss
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from alphatoken.errors import ConfigError, NumericalError, UnsupportedError
from alphatoken.model.attention import AttentionStatistics
from alphatoken.model.batch import label_mask
from alphatoken.model.forward import evaluation_mode
from alphatoken.model.protocol import (
    AttentionCall,
    NativeAttention,
    attention_overridden,
    find_adapter,
)
from alphatoken.support.devices import Refusals, deferred_refusals, refuse, settle
from alphatoken.support.precision import float16_named
from alphatoken.support.seeds import seed_of
from alphatoken.train.distributed import global_selection, layout
from alphatoken.train.interface import TrainerInterface
from alphatoken.train.log_prob_proxy import LogProbProxy, by_token, require_finite
from alphatoken.train.policy import Columns, PolicyBatch, TokenPolicy, own_methods
from alphatoken.train.records import RunRecords
from alphatoken.train.trainer_loss import (
    MicroBatch,
    MicroBatchPlan,
    TrainerLoss,
    divisor_factor,
    selecting,
)
from alphatoken.train.valuation import Valuation
from alphatoken.values import TokenValues


class Weigher:
    """Turns a policy into the loss of a run's steps.

    Args:
        trainer_loss: of the run's trainer.
        policy: weighs the tokens.
        valuation: of the run; values nothing where the policy needs no values.
        records: where each micro-batch is written down with its weights.
        columns: numbers of each response token that the policy's static pass left, if it has one.
    """

    def __init__(
        self,
        trainer_loss: TrainerLoss,
        policy: TokenPolicy,
        valuation: Valuation,
        records: RunRecords,
        columns: Columns | None = None,
    ) -> None:
        self._trainer_loss, self.policy, self.valuation = trainer_loss, policy, valuation
        self._records, self._columns = records, columns

    # --- one optimizer step -----------------------------------------------------------------------

    def plan(self, samples: Sequence[Any], num_items: Any) -> list[MicroBatchPlan]:
        """Decide for a whole step before its first training forward.

        Args:
            samples: batches of the step, as the collator made them.
            num_items: transformers' count of the step's response tokens, or None.
        """
        trainer_loss, plans = self._trainer_loss, [MicroBatchPlan(i) for i in range(len(samples))]
        several = len(samples) > 1 or trainer_loss.ranks.world > 1
        by_losses = several and self.policy.scope == "step"
        threshold_of_step = by_losses or trainer_loss.args.keep_scope == "global"
        counted = num_items is not None or self.policy.divisor_scope == "step"
        # A loss that each micro-batch divides by its own count needs no count of the step.
        divisor_of_step = self._divisor == "kept" and counted
        if threshold_of_step:
            samples = [trainer_loss.prepared(sample) for sample in samples]
        elif not divisor_of_step:
            return plans
        batches = [
            trainer_loss.micro_batch(sample, plan, num_items)
            for sample, plan in zip(samples, plans, strict=True)
        ]
        if threshold_of_step:
            # No token can be dropped before all of the step have their values.
            self.valuation.begin()
            plans = self._weigh_step([self._value_in_advance(batch) for batch in batches])
        if divisor_of_step:
            plans = self._count_kept(batches, plans)
        return plans

    def _value_in_advance(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch whose plan has its values, and the inputs that valuing added."""
        if self.valuation.wanted(batch):
            with self._trainer_loss.autocast():
                own = self._trainer_loss.own_inputs(batch.inputs)
                values = self.valuation.of_own_forward(replace(batch, inputs=own))
            extra = {k: v for k, v in own.items() if k not in batch.inputs}
            batch = replace(batch, plan=replace(batch.plan, values=values, extra=extra))
        return batch

    @selecting()
    def _scores_in_advance(self, batch: MicroBatch) -> Tensor:
        """(b, t) scores of a micro-batch, by its values or by a forward without dropout."""
        run, proxy = self._trainer_loss, None
        if self.policy.scope == "step":
            proxy = LogProbProxy(run.model)
            with torch.no_grad(), run.autocast(), run.beside_training(), evaluation_mode(run.model):
                run.of(proxy, dict(batch.inputs), batch.num_items)
        return self.policy.scores(self._policy_batch(batch, batch.plan.values, proxy))

    def _weigh_step(self, batches: Sequence[MicroBatch]) -> list[MicroBatchPlan]:
        """Plans with the weights of all micro-batches, each group ranked over the whole step."""
        run, policy = self._trainer_loss, self.policy
        scores = [self._scores_in_advance(batch) for batch in batches]
        weights = [torch.zeros_like(score) for score in scores]
        for group in range(len(batches[0].rank_groups)):
            rows = [batch.rank_groups[group] for batch in batches]
            # Without the process's number: all processes draw alike, and each keeps its own part.
            seed = seed_of("whole step", run.args.value_seed, run.step, group)
            generator = torch.Generator().manual_seed(seed)
            chosen = global_selection(
                run.ranks,
                [score[r] for score, r in zip(scores, rows, strict=True)],
                [batch.mask[r] for batch, r in zip(batches, rows, strict=True)],
                partial(policy.select, ratio=policy.ratio, generator=generator),
            )
            for weight, part, r in zip(weights, chosen, rows, strict=True):
                weight[r] = part
        return [replace(b.plan, weights=w) for b, w in zip(batches, weights, strict=True)]

    def _count_kept(
        self, batches: Sequence[MicroBatch], plans: Sequence[MicroBatchPlan]
    ) -> list[MicroBatchPlan]:
        """Plans with the kept tokens over those of the loss, of the whole step."""
        ranks, counts, columns = self._trainer_loss.ranks, list[Tensor | None](), []
        counted = list[Tensor | None]()
        # A count of the policy's own is its own affair.
        compares = self.policy.static and not own_methods(self.policy, "kept_tokens")
        for batch, plan in zip(batches, plans, strict=True):
            before = self._policy_batch(batch, plan.values)
            count = self.policy.kept_tokens(before) if plan.weights is None else plan.weights.sum()
            # A micro-batch that keeps all trains on tokens without a value too, as TRL does.
            full = count is not None and float(count) == float(batch.mask.sum())
            counted.append(count if compares and plan.weights is None else None)
            counts.append(batch.loss_mask.sum() if self.policy.keeps_all(full) else count)
            columns.append(before.columns)
        kept = [count.cpu().double() for count in counts if count is not None]
        # One micro-batch that cannot be counted leaves the step uncounted, on every process.
        uncounted = ranks.any(len(kept) < len(counts))
        share = None if uncounted else self._kept_share(torch.stack(kept).sum(), batches)
        return [
            replace(plan, kept_share=share, counted=own, columns=of_pass)
            for plan, own, of_pass in zip(plans, counted, columns, strict=True)
        ]

    def _kept_share(self, kept: Tensor, batches: Sequence[MicroBatch]) -> float | None:
        """``kept`` over the tokens of the loss, in the policy's ``divisor_scope``; None for 0."""
        run, ranks, count = self._trainer_loss, self._trainer_loss.ranks, batches[0].num_items
        if self.policy.divisor_scope == "step":
            own = [float(kept), sum(int(batch.loss_mask.sum()) for batch in batches)]
            totals = torch.tensor(own, dtype=torch.float64, device=ranks.device)
            kept, count = ranks.sum_gradients({"kept": totals}, 0.0)[0]["kept"]
        elif run.args.average_tokens_across_devices and ranks.world > 1:
            kept = run.accelerator.gather(kept.float().reshape(1).to(run.args.device)).sum()
        if self.policy.signed:
            self._refuse_divisor(kept, ~(kept > 0))
        return float(kept) / max(float(count), 1.0) or None

    def _refuse_divisor(self, kept: Tensor, bad: Tensor) -> None:
        """Refuse a sum of signed weights that is to divide the loss, where it is ``bad``."""
        step = self._trainer_loss.step

        def raise_error() -> None:
            raise NumericalError(
                f"the weights of step {step} cannot divide its loss",
                got=f"a sum of {float(kept):g}",
                why="divided by it, tokens of weight 1 would be trained away from",
                remedy="kept_normalization='response', or larger batches",
            )

        refuse(bad, raise_error)

    def _refuse_other_weights(self, weights: Tensor, counted: Tensor) -> None:
        """Refuse weights of a static policy whose sum is not what was ``counted`` before."""
        policy = self.policy
        own, before = weights.float(), counted.to(weights.device).float()
        # Of log-probabilities of fewer digits than the zeros in their place before the forward.
        digits = max(1e-4, 4 * torch.finfo(weights.dtype).eps) if weights.is_floating_point() else 0

        def raise_error() -> None:
            raise ConfigError(
                f"policy '{policy.name}' is static, and its weights depend on the forward",
                got=f"a sum of {float(before):g} before the forward, {float(own.sum()):g} after it",
                why="the loss of the step is divided by the first, before which log-probabilities "
                "are 0",
                remedy="static = False, or a rule of columns, labels and mask alone",
            )

        refuse((own.sum() - before).abs() > digits * own.abs().sum(), raise_error)

    @property
    def _divisor(self) -> str:
        """Divisor of the update: as published, or by the options at a budget."""
        if self.policy.settings.mode == "native":
            return self.policy.denominator
        return str(self._trainer_loss.args.kept_normalization)

    # --- one micro-batch --------------------------------------------------------------------------

    def loss(self, model: Any, batch: MicroBatch) -> Tensor:
        """Loss of one micro-batch whose gradient is the policy's.

        Args:
            model: that is trained, as the trainer hands it to its loss.
            batch: the micro-batch, with the plan of its step.

        Raises:
            NumericalError: a loss or a weight that is not finite.
        """
        run, policy, valuation, plan = self._trainer_loss, self.policy, self.valuation, batch.plan
        valuation.begin()
        inputs, reference = run.reference_log_probs(batch.inputs, policy)
        inputs, values = {**inputs, **plan.extra}, plan.values
        valued_forward = valuation.forward_of(batch)
        if valued_forward == "own":
            # Of pairs it adds the reference's log-probabilities, which the loss then has already.
            inputs = run.own_inputs(inputs)
            values = valuation.of_own_forward(replace(batch, inputs=inputs))
        proxy, on_training = LogProbProxy(model), valued_forward == "training"
        with valuation.observing(on_training) as observed, self._last_attention() as attention:
            loss = run.of(proxy, dict(inputs), batch.num_items)
            require_finite(loss, run.step)
            coefficients = proxy.coefficients(loss)
            if observed is not None:
                values = valuation.of_training_forward(observed, proxy, coefficients, batch)
        policy_batch = self._policy_batch(batch, values, proxy, reference, attention)
        # A loss of the policy's own is differentiated by a leaf of its own; the trainer's has one.
        leaf = policy_batch.log_probs.clone().requires_grad_()
        started = time.perf_counter()
        with selecting():
            planned = plan.weights
            weights = policy.weights(policy_batch) if planned is None else planned.to(leaf.dtype)
        if values is None:
            self._records.monitor.scoring(time.perf_counter() - started)
        if plan.counted is not None:
            self._refuse_other_weights(weights, plan.counted)
        own_loss = policy.loss(policy_batch, leaf, weights)
        self._check_own_loss(own_loss, proxy)
        factor: float | Tensor = 1.0
        if own_loss is not None:
            self._note_rewards(policy_batch)
            coefficients = proxy.coefficients(own_loss, leaf)[:, 1:]
            loss, trained = own_loss.detach(), torch.ones_like(leaf)
        else:
            trained = self._with_unvalued(batch, weights)
            if policy.signed and self._divisor == "kept" and plan.kept_share is None:
                kept = trained.sum()
                self._refuse_divisor(kept, (kept <= 0) & trained.any())
            factor = divisor_factor(trained, batch, self._divisor, plan.kept_share)
            coefficients = run.final_coefficients(proxy, coefficients, trained, inputs)
        replaced = own_loss is not None
        self._records.micro_batch(batch, values, weights, factor, own_loss=replaced)
        update = proxy.surrogate(loss, coefficients, trained * factor)
        # A term of the policy's loss that reaches the model by another forward has its graph here.
        return update if own_loss is None else update + (own_loss - own_loss.detach())

    def evaluation_loss(self, model: Any, inputs: Mapping[str, Any]) -> Tensor:
        """Loss of all response tokens of evaluation rows, by the policy's own where it has one.

        Args:
            model: as the trainer hands it to its loss.
            inputs: the trainer's batch.
        """
        run = self._trainer_loss
        mask = label_mask(labels := run.response_labels(inputs))
        batch = MicroBatch(
            inputs=inputs,
            labels=labels,
            mask=mask,
            loss_mask=mask,
            rank_groups=run.rank_groups(len(mask)),
            unit_of=run.unit,
            plan=MicroBatchPlan(0),
        )
        own, reference = run.reference_log_probs(inputs, self.policy)
        proxy = LogProbProxy(model)
        loss = run.of(proxy, own, None)
        policy_batch = self._policy_batch(batch, None, proxy, reference)
        log_probs = policy_batch.log_probs
        own_loss = self.policy.loss(policy_batch, log_probs, mask.to(log_probs.dtype))
        if own_loss is None:
            return loss
        self._note_rewards(policy_batch)
        return own_loss

    def _note_rewards(self, batch: PolicyBatch) -> None:
        rewards = self.policy.rewards(batch)
        if rewards is not None:
            self._trainer_loss.note_rewards(rewards)

    def _with_unvalued(self, batch: MicroBatch, weights: Tensor) -> Tensor:
        """Weights; where the trainer below trains so, also of tokens that only padding predicts."""
        # Whether all weights are 1 is not waited for: most policies go by something else, and the
        # others' answers are both known.
        of_full, of_others = (self.policy.keeps_all(full) for full in (True, False))
        if of_full == of_others:
            return batch.loss_mask.to(weights) if of_full else weights
        full = ((weights == 1) | ~batch.mask).all()
        return torch.where(full == of_full, batch.loss_mask.to(weights), weights)

    def _check_own_loss(self, loss: Tensor | None, proxy: LogProbProxy) -> None:
        """Refuse a policy's loss that is not finite, lacks the routers' loss, or is missing."""
        policy = self.policy
        if loss is not None:
            if proxy.aux_loss is not None:
                raise UnsupportedError(
                    "a policy with its own loss does not add the router loss of mixtures of "
                    "experts",
                    remedy="router_aux_loss_coef=0",
                )
            require_finite(loss, self._trainer_loss.step)
        elif policy.replaces_loss and not (policy.needs.reference or policy.needs.values):
            raise ConfigError(
                f"policy '{policy.name}' gave no loss for a batch",
                why="it asks for no reference model, so the trainer's own loss was not computed",
                remedy="needs = Needs(reference=True), or no loss() of its own",
            )

    def _policy_batch(
        self,
        batch: MicroBatch,
        values: TokenValues | None,
        proxy: LogProbProxy | None = None,
        reference: Tensor | None = None,
        attention: Sequence[AttentionStatistics] = (),
    ) -> PolicyBatch:
        """The micro-batch as the policy sees it.

        Args:
            batch: the micro-batch; its columns of the static pass are looked up once.
            values: of its tokens; None gives 0 to a policy that needs them.
            proxy: of the training forward. Before that (None) log-probabilities are 0, and nothing
                else of a forward is there.
            reference: (b, t) log-probabilities of the reference model.
            attention: of the last layer.
        """
        run, needs, mask = self._trainer_loss, self.policy.needs, batch.mask
        columns = batch.plan.columns
        if columns is None:
            columns = {}
            if needs.columns and self._columns is not None:
                columns = self._columns.columns_of(batch.inputs, mask, needs.columns)
        if needs.row_weights and batch.row_weights is None:
            raise UnsupportedError(
                f"a batch came without the weights of its rows, which policy '{self.policy.name}' "
                "reads",
                got=", ".join(batch.inputs),
                why="every token would count alike",
                remedy="the trainer's own get_train_dataloader, with rows that policy was told of",
            )
        zeros = torch.zeros(mask.shape, device=mask.device)
        of_forward: dict[str, Any] = {"log_probs": zeros}
        # Off the response everything is 0: whatever stands there must decide nothing.
        if proxy is not None:
            assert proxy.log_probs is not None
            of_forward = {
                "log_probs": by_token(proxy.log_probs.detach()).masked_fill(~mask, 0.0),
                "reference": None if reference is None else reference.masked_fill(~mask, 0.0),
                "reference_logits": run.reference_logits(self.policy),
                "attention": attention[0] if attention else None,
                "entropy": partial(proxy.entropy, batch.labels) if needs.entropy else None,
                "model": run.model if needs.model else None,
                # Of seed, step, micro-batch and process, so that a resumed run draws the same.
                "generator": torch.Generator().manual_seed(run.draw_seed(batch)),
            }
        totals = zeros if values is None else values.total
        return PolicyBatch(
            inputs=batch.inputs,
            labels=batch.labels,
            mask=mask,
            rank_groups=batch.rank_groups,
            columns={name: column.to(mask.device) for name, column in columns.items()},
            values=totals if needs.values else None,
            row_weights=None if batch.row_weights is None else batch.row_weights.to(mask.device),
            step=run.step,
            **of_forward,
        )

    @contextmanager
    def _last_attention(self) -> Iterator[list[AttentionStatistics]]:
        """Yields a list that a forward fills with the last layer's attention."""
        attention: list[AttentionStatistics] = []
        if not self.policy.needs.attention:
            yield attention
            return
        adapter = find_adapter(self._trainer_loss.model)
        last = len(adapter.layers()) - 1

        def record(call: AttentionCall, native: NativeAttention) -> Tensor:
            attention.append(AttentionStatistics(call))
            return native(call.query, call.key, call.value)

        with (
            adapter.pause_checkpointing([adapter.layers()[last]]),
            attention_overridden(adapter, adapter.attention_modules(last), record),
        ):
            yield attention
        if not attention:
            raise UnsupportedError(
                "the last layer's attention could not be seen in the training forward",
                got=f"policy '{self.policy.name}'",
                remedy="attn_implementation='sdpa' or 'eager'",
            )


class StepGuard(TrainerCallback):
    """Stops a run before a step whose gradient no weigher has made.

    An override of ``compute_loss`` or ``training_step`` may hand the trainer another loss than the
    weighted one. The step would then train on every token, and nothing would show it. So the
    weighted losses that a backward has reached are counted since the step began.

    Args:
        trainer: whose run it is.
    """

    def __init__(self, trainer: TrainerInterface) -> None:
        self._trainer, self._reached = trainer, 0
        self._refusals = Refusals()

    def deferring(self) -> AbstractContextManager[None]:
        """Numbers on a device that are refused inside are read once, before the weights move."""
        # DeepSpeed's engine moves them inside the backward.
        within = layout(self._trainer.accelerator).startswith("zero")
        return deferred_refusals(None if within else self._refusals)

    def expect_gradient(self, loss: Tensor) -> None:
        """Count ``loss``, a weigher's, when its gradient is taken."""
        loss.register_hook(self._count)

    def _count(self, _: Tensor) -> None:
        self._reached += 1

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Begin to count weighted losses."""
        self._reached = 0
        self._refusals.clear()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Stop where a micro-batch of the step was not weighed.

        Raises:
            UnsupportedError: before the optimizer has moved anything.
            NumericalError, InputError: numbers of the step that are refused, on a device.
        """
        if self._refusals:
            with float16_named(self._trainer.model):
                settle(self._refusals)
        due = self._trainer.current_gradient_accumulation_steps
        if self._reached >= due:
            return
        raise UnsupportedError(
            "a step was about to be taken with a loss that is not weighted by token",
            got=f"{due - self._reached} of {due} micro-batches of step "
            f"{self._trainer.state.global_step}, trained by {type(self._trainer).__qualname__}",
            why="an override of compute_loss or training_step made a loss of its own, or put the "
            "model into evaluation mode: every token would be trained on",
            remedy="have the override call super().compute_loss(...), with the model in training "
            "mode, and add to the loss that it gives; or train with policy='all' and "
            "export_values=False",
        )
