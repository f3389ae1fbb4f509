"""Weights of tokens by a ``TokenPolicy``: the part of the trainers that carries one out.

One micro-batch, on the training forward::

    columns        what the static pass left of each response token
    reference      token log-probabilities of the reference model, without gradients
    base loss      the trainer's own forward, through the proxy
    weights        of the policy, from all of that
    coefficients   of the trainer's loss times the weights; or of the policy's own loss of the pairs
    surrogate      the loss in value, the weighted update in gradient

Nothing is scored, so no layout needs a second forward.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alphatoken.errors import ConfigError, UnsupportedError
from alphatoken.model.attention import AttentionStatistics
from alphatoken.model.protocol import AttentionCall, NativeAttention, find_adapter
from alphatoken.support.storage import write_json
from alphatoken.train.checks import has_pass
from alphatoken.train.distributed import Ranks
from alphatoken.train.log_prob_proxy import (
    LogProbProxy,
    by_token,
    gated_loss,
    require_finite,
)
from alphatoken.train.micro_batch import MicroBatch, MicroBatchPlan, draw_seed, normalised
from alphatoken.train.placement import on_accelerator
from alphatoken.train.policy import Columns, PolicyBatch, TokenPolicy
from alphatoken.train.policy_stage import kept_random_state, make_stage, select_rows
from alphatoken.train.selecting import selecting

if TYPE_CHECKING:
    from alphatoken.train.mixin import AlphaTrainerMixin

__all__ = ["PolicyWeigher"]


class PolicyWeigher:
    """Static pass, weights and loss of a policy.

    Args:
        trainer: whose run it is; rows that the policy does not choose are taken out of it.
        policy: the one that is carried out.
        validation: validation data set as it was handed over, or None.

    Raises:
        ConfigError: something that the policy needs is missing; a streamed data set.
        InputError: an empty selection.
    """

    def __init__(self, trainer: AlphaTrainerMixin, policy: TokenPolicy, validation: Any) -> None:
        self._trainer, self.policy = trainer, policy
        self._columns: Columns | None = None
        trainer.args.check_policy(policy)
        self._prepare(validation)
        self._write()

    # --- before training --------------------------------------------------------------------------

    def _write(self) -> None:
        """``policy.json`` in ``output_dir``: what runs under which name, and what it found."""
        args, policy = self._trainer.args, self.policy
        if not args.should_save:
            return
        folder = Path(str(args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "policy": policy.variant,
            "settings": asdict(policy.settings),
            "summary": dict(policy.summary),
        }
        write_json(folder / "policy.json", record)

    @selecting()
    def _prepare(self, validation: Any) -> None:
        """Let the policy choose rows and run its static pass, where it has them."""
        policy = self.policy
        trainer = self._trainer
        if has_pass(policy):
            with kept_random_state(), on_accelerator(trainer.model, trainer.accelerator.device):
                self._columns = self._pass(validation)
        missing = set(policy.needs.columns) - set(self._columns.columns if self._columns else ())
        if missing:
            raise ConfigError(
                f"prepare() of policy '{policy.name}' left columns out",
                got=", ".join(sorted(missing)),
            )

    def _pass(self, validation: Any) -> Columns | None:
        """Columns of the rows that the policy chooses; the others go out of the run."""
        trainer, policy = self._trainer, self.policy
        stage = make_stage(trainer, policy, validation)
        # Processes that chose differently would train on different data sets.
        rows = Ranks(trainer.accelerator).broadcast_object(policy.choose_rows(stage))
        if rows is not None:
            trainer.train_dataset = select_rows(trainer.train_dataset, rows, policy.name)
            stage = make_stage(trainer, policy, validation)
        return policy.prepare(stage)

    # --- one optimizer step -----------------------------------------------------------------------

    def plan(self, samples: Sequence[Any], num_items: Any) -> list[MicroBatchPlan]:
        """Kept tokens of the whole step, where they are known before the forward.

        Counted as the trainer counts ``num_items``: over the micro-batches, and over the processes
        under ``average_tokens_across_devices``.

        Args:
            samples: batches of the step, as the collator made them.
            num_items: transformers' count of the step's response tokens, or None.
        """
        trainer, plans = self._trainer, [MicroBatchPlan(index) for index in range(len(samples))]
        if self._divisor != "kept" or num_items is None:
            return plans
        batches, counts = [], []
        for sample, plan in zip(samples, plans, strict=True):
            batch = trainer.read_micro_batch(sample, plan, num_items)
            zeros = torch.zeros(batch.mask.shape, device=batch.mask.device)
            batches.append(self._policy_batch(batch, log_probs=zeros))
            count = self.policy.kept_tokens(batches[-1])
            whole = count is not None and float(count) == float(batch.mask.sum())
            counts.append(batch.loss_mask.sum() if whole else count)
        known = [count.double() for count in counts if count is not None]
        # One batch that cannot be counted leaves the step uncounted, on every process.
        ranks, share = Ranks(trainer.accelerator), None
        if not ranks.any(len(known) < len(counts)):
            kept = torch.stack([count.cpu() for count in known]).sum()
            if trainer.args.average_tokens_across_devices and ranks.world > 1:
                own = kept.float().reshape(1).to(trainer.args.device)
                kept = trainer.accelerator.gather(own).sum()
            share = float(kept) / max(float(num_items), 1.0) or None
        return [
            replace(plan, kept_share=share, columns=batch.columns)
            for plan, batch in zip(plans, batches, strict=True)
        ]

    def _policy_batch(self, batch: MicroBatch, **of_the_forward: Any) -> PolicyBatch:
        """The micro-batch as the policy sees it: columns of the static pass, and the forward's."""
        columns, names = batch.plan.columns, self.policy.needs.columns
        if columns is None:
            known = self._columns if names else None
            columns = {} if known is None else known.columns_of(batch.inputs, batch.mask, names)
        return PolicyBatch(
            inputs=batch.inputs,
            labels=batch.labels,
            mask=batch.mask,
            rank_groups=batch.rank_groups,
            columns={name: column.to(batch.mask.device) for name, column in columns.items()},
            step=self._trainer.state.global_step,
            **of_the_forward,
        )

    @property
    def _divisor(self) -> str:
        """Divisor of the update: as published, or by the options at a budget."""
        if self.policy.settings.mode == "native":
            return self.policy.denominator
        return str(self._trainer.args.kept_normalization)

    # --- one micro-batch --------------------------------------------------------------------------

    def loss(self, model: Any, batch: MicroBatch) -> Tensor:
        """Loss of one micro-batch whose gradient is the policy's.

        Raises:
            NumericalError: a loss or a weight that is not finite.
        """
        policy = self.policy
        inputs, reference = self._trainer.reference_log_probs(batch.inputs)
        proxy = LogProbProxy(model)
        with self._last_attention() as attention:
            loss = gated_loss(self._trainer, proxy, replace(batch, inputs=inputs))
        policy_batch = self._batch_after_forward(batch, proxy, reference, attention)
        started = time.perf_counter()
        with selecting():
            weights = policy.weights(policy_batch)
        self._trainer.records.micro_batch(batch, None, weights, time.perf_counter() - started)
        log_probs = policy_batch.log_probs.clone().requires_grad_()
        policy_loss = policy.loss(policy_batch, log_probs, weights)
        if policy_loss is not None:
            return self._loss_of_policy(proxy, policy_loss, log_probs)
        if type(policy).loss is not TokenPolicy.loss and not policy.needs.reference:
            raise ConfigError(
                f"policy '{policy.name}' gave no loss for a batch",
                why="it asks for no reference model, so the trainer's own loss was not computed",
                remedy="needs = Needs(reference=True), or no loss() of its own",
            )
        if bool((weights[batch.mask] == 1).all()):  # the trainer's own loss, of all its tokens
            weights = batch.loss_mask.to(weights)
        divided = normalised(weights, batch, self._divisor, batch.plan.kept_share)
        return proxy.surrogate(loss, proxy.coefficients(loss), divided)

    def _loss_of_policy(self, proxy: LogProbProxy, loss: Tensor, log_probs: Tensor) -> Tensor:
        """A loss that the policy computed, as a surrogate on the model's graph.

        Its own graph stays: a term that reaches the model through another forward has its gradient
        there. What its backward adds to the gradient of ``log_probs`` is read by nobody.

        Args:
            proxy: of the training forward.
            loss: what the policy computed.
            log_probs: the leaf that it was given.
        """
        if proxy.aux_loss is not None:
            raise UnsupportedError(
                "a policy with its own loss does not add the router loss of mixtures of experts",
                remedy="router_aux_loss_coef=0",
            )
        require_finite(loss, self._trainer.state.global_step)
        coefficients = torch.zeros_like(log_probs)
        if loss.requires_grad:
            grad = torch.autograd.grad(loss, log_probs, retain_graph=True, allow_unused=True)[0]
            coefficients = coefficients if grad is None else grad
        ones = torch.ones_like(log_probs)
        return proxy.surrogate(loss.detach(), coefficients[:, 1:], ones) + (loss - loss.detach())

    def _batch_after_forward(
        self,
        batch: MicroBatch,
        proxy: LogProbProxy,
        reference: Tensor | None,
        attention: Sequence[AttentionStatistics],
    ) -> PolicyBatch:
        """The micro-batch as the policy sees it after the training forward."""
        policy, mask = self.policy, batch.mask
        assert proxy.log_probs is not None
        if policy.needs.attention and not attention:
            raise UnsupportedError(
                "the last layer's attention could not be seen in the training forward",
                got=f"policy '{policy.name}'",
                remedy="attn_implementation='sdpa' or 'eager'",
            )
        return self._policy_batch(
            batch,
            log_probs=by_token(proxy.log_probs.detach()).masked_fill(~mask, 0.0),
            reference=None if reference is None else reference.masked_fill(~mask, 0.0),
            reference_logits=self._trainer.reference_logits(),
            attention=attention[0] if attention else None,
            entropy=partial(proxy.entropy, batch.labels) if policy.needs.entropy else None,
            model=self._trainer.model if policy.needs.model else None,
            generator=torch.Generator().manual_seed(draw_seed(self._trainer, batch)),
        )

    @contextmanager
    def _last_attention(self) -> Iterator[list[AttentionStatistics]]:
        """The list yielded is filled with the last layer's attention as a forward computes it."""
        attention: list[AttentionStatistics] = []
        if not self.policy.needs.attention:
            yield attention
            return
        adapter = find_adapter(self._trainer.model)
        last = len(adapter.layers()) - 1

        def record(call: AttentionCall, native: NativeAttention) -> Tensor:
            attention.append(AttentionStatistics(call))
            return native(call.query, call.key, call.value)

        with (
            adapter.pause_checkpointing([adapter.layers()[last]]),
            adapter.override_attention(adapter.attention_modules(last), record),
        ):
            yield attention
