"""The part of the trainers that carries out a ``TokenPolicy``.

One micro-batch, on the training forward:

    columns        what the static pass left of each response token
    reference      token log-probabilities of the reference model, without gradients
    base loss      the trainer's own forward, through the gate
    weights        of the policy, from all of that
    coefficients   of the trainer's loss times the weights; or of the policy's own loss of the pairs
    surrogate      the loss in value, the weighted update in gradient

Nothing is scored, so no layout needs a second forward.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from alphatoken.errors import ConfigError, UnsupportedError
from alphatoken.model.attention import AttentionStatistics
from alphatoken.model.batch import label_mask
from alphatoken.model.protocol import AttentionCall, NativeAttention, find_adapter
from alphatoken.support.storage import write_json
from alphatoken.train.distributed import Ranks
from alphatoken.train.gate import TokenGate, by_token
from alphatoken.train.policy import PolicyBatch, TokenPolicy
from alphatoken.train.policy_stage import kept_random_state, make_stage, select_rows

if TYPE_CHECKING:
    from transformers import Trainer

    from alphatoken.train.token_table import TokenTable

    _Base = Trainer
else:
    _Base = object

__all__ = ["PolicyMixin"]


class PolicyMixin(_Base):
    """Static pass, weights and loss of a policy; see the module's text."""

    args: Any
    _policy: TokenPolicy | None = None
    _columns: TokenTable | None = None
    _step_kept: Tensor | None = None
    _ahead: list[Mapping[str, Tensor]]

    # --- before training --------------------------------------------------------------------------

    def policy_setup(self, validation: Any, reference: nn.Module | None) -> None:
        """Choose rows, run the static pass; called at the end of the trainer's ``__init__``.

        Raises:
            ConfigError: something that the policy needs is missing; a streamed data set.
            InputError: an empty selection.
        """
        policy, self._ahead = self._policy, []
        assert policy is not None
        self._prepare_policy(policy, validation, reference)
        self._write_policy(policy)

    @property
    def token_policy(self) -> TokenPolicy | None:
        """The policy that is carried out; None where the trainer's own one is."""
        return self._policy

    def _write_policy(self, policy: TokenPolicy) -> None:
        """``policy.json`` in ``output_dir``: what runs under which name, and what it found."""
        if not self.args.should_save:
            return
        folder = Path(str(self.args.output_dir))
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "policy": policy.variant,
            "settings": asdict(policy.settings),
            "summary": dict(policy.summary),
        }
        write_json(folder / "policy.json", record)

    def _prepare_policy(self, policy: TokenPolicy, validation: Any, reference: Any) -> None:
        kind = type(policy)
        chooses = kind.choose_rows is not TokenPolicy.choose_rows
        passes = kind.prepare is not TokenPolicy.prepare
        if not chooses and not passes:
            if policy.needs.columns:
                raise ConfigError(
                    f"policy '{policy.name}' asks for columns and has no prepare() to make them",
                    got=", ".join(policy.needs.columns),
                )
            return
        with kept_random_state():
            stage = make_stage(self, policy, validation, reference)
            if chooses:
                rows = policy.choose_rows(stage)
                rows = Ranks(self.accelerator).broadcast_object(rows)
                if rows is not None:
                    self._keep_rows(rows)
                    stage = make_stage(self, policy, validation, stage.reference_model)
            self._columns = policy.prepare(stage)
        missing = set(policy.needs.columns) - set(self._columns.columns if self._columns else ())
        if missing:
            raise ConfigError(
                f"prepare() of policy '{policy.name}' left columns out",
                got=", ".join(sorted(missing)),
            )

    def _keep_rows(self, rows: Sequence[int]) -> None:
        assert self._policy is not None
        names = getattr(self.train_dataset, "column_names", None) or ()
        if "seq_lengths" in names:
            raise ConfigError(
                "samples cannot be chosen from packed rows",
                got=f"policy '{self._policy.name}', packing=True",
                why="a packed row holds several samples",
                remedy="packing=False",
            )
        self.train_dataset = select_rows(self.train_dataset, rows, self._policy.name)

    # --- one step ---------------------------------------------------------------------------------

    def plan_policy_step(self, samples: Sequence[Any], num_items: Any) -> None:
        """Kept tokens of the whole step, where they are known before the forward.

        Counted as the trainer counts ``num_items``: over the micro-batches, and over the processes
        under ``average_tokens_across_devices``.
        """
        self._step_kept, self._ahead = None, []
        if self._policy is None or self._divisor != "kept" or num_items is None:
            return
        counts = []
        for sample in samples:
            batch = self._batch_before(sample)
            self._ahead.append(batch.columns)
            counts.append(self._policy.kept_tokens(batch))
        known = [count.double() for count in counts if count is not None]
        # One batch that cannot be counted leaves the step uncounted, on every process.
        ranks = Ranks(self.accelerator)
        if ranks.any(len(known) < len(counts)):
            return
        total = torch.stack([count.cpu() for count in known]).sum().to(self.args.device)
        if self.args.average_tokens_across_devices and ranks.world > 1:
            total = self.accelerator.gather(total.float().reshape(1)).sum().double()
        self._step_kept = total

    def _batch_before(self, inputs: Mapping[str, Any]) -> PolicyBatch:
        labels = self.response_labels(inputs)  # type: ignore[attr-defined]
        mask = label_mask(labels)
        return PolicyBatch(
            inputs=inputs,
            labels=labels,
            mask=mask,
            log_probs=torch.zeros(mask.shape, device=mask.device),
            pools=self.pools(len(mask)),  # type: ignore[attr-defined]
            columns=self._looked_up(inputs, mask),
            step=self.state.global_step,
        )

    def _looked_up(self, inputs: Mapping[str, Any], mask: Tensor) -> Mapping[str, Tensor]:
        policy = self._policy
        assert policy is not None
        if self._columns is None or not policy.needs.columns:
            return {}
        return self._columns.columns_of(inputs, mask, policy.needs.columns)

    @property
    def _divisor(self) -> str:
        """What the update is divided by: as published, or as the options say at a budget."""
        policy = self._policy
        assert policy is not None
        if policy.settings.mode == "native":
            return policy.denominator
        return str(self.args.kept_normalization)

    # --- one micro-batch --------------------------------------------------------------------------

    def reference_log_probs(
        self, inputs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Tensor | None]:
        """Inputs, and (b, t) log-probabilities of the reference model where the policy asks."""
        return dict(inputs), None

    def reference_logits(self) -> Callable[[Mapping[str, Any]], Tensor] | None:
        """Inputs of a forward to logits of the reference model; None where there is none."""
        return None

    def policy_loss(self, model: Any, inputs: Mapping[str, Any], num_items: Any) -> Tensor:
        """Loss of one micro-batch whose gradient is the policy's.

        Raises:
            NumericalError: a loss or a weight that is not finite.
        """
        policy = self._policy
        assert policy is not None
        found, reference = self.reference_log_probs(inputs)
        gate = TokenGate(model)
        with self._last_attention() as attention:
            loss = self.base_loss(gate, found, num_items)  # type: ignore[attr-defined]
        self._require_finite(loss)  # type: ignore[attr-defined]
        batch = self._policy_batch(inputs, gate, reference, attention)
        started = time.perf_counter()
        weights = policy.weights(batch)
        seconds = time.perf_counter() - started
        self._record(inputs, batch.mask, num_items, None, weights, seconds)  # type: ignore[attr-defined]
        log_probs = batch.log_probs.clone().requires_grad_()
        own = policy.loss(batch, log_probs, weights)
        if own is not None:
            return self._own_loss(gate, own, log_probs)
        if type(policy).loss is not TokenPolicy.loss and not policy.needs.reference:
            raise ConfigError(
                f"policy '{policy.name}' gave no loss for a batch",
                why="it asks for no reference model, so the trainer's own loss was not computed",
                remedy="needs = Needs(reference=True), or no loss() of its own",
            )
        weights = self._divided(weights, batch.mask, num_items)
        return gate.surrogate(loss, gate.coefficients(loss), weights)

    def _own_loss(self, gate: TokenGate, own: Tensor, log_probs: Tensor) -> Tensor:
        """A loss of the policy's, as a surrogate on the model's graph.

        Its own graph stays: a term that reaches the model through another forward has its gradient
        there. What it adds to the leaf is read by nobody.
        """
        if gate.auxiliary:
            raise UnsupportedError(
                "a policy with its own loss does not add the router loss of mixtures of experts",
                remedy="router_aux_loss_coef=0",
            )
        self._require_finite(own)  # type: ignore[attr-defined]
        coefficients = torch.zeros_like(log_probs)
        if own.requires_grad:
            found = torch.autograd.grad(own, log_probs, retain_graph=True, allow_unused=True)[0]
            coefficients = coefficients if found is None else found
        ones = torch.ones_like(log_probs)
        return gate.surrogate(own.detach(), coefficients[:, 1:], ones) + (own - own.detach())

    def _policy_batch(
        self,
        inputs: Mapping[str, Any],
        gate: TokenGate,
        reference: Tensor | None,
        attention: Sequence[AttentionStatistics],
    ) -> PolicyBatch:
        policy = self._policy
        assert policy is not None
        assert gate.log_probs is not None
        labels = self.response_labels(inputs)  # type: ignore[attr-defined]
        mask = label_mask(labels)
        columns = self._ahead.pop(0) if self._ahead else self._looked_up(inputs, mask)
        seed = self._draw_seed()  # type: ignore[attr-defined]
        if policy.needs.attention and not attention:
            raise UnsupportedError(
                "the last layer's attention could not be seen in the training forward",
                got=f"policy '{policy.name}'",
                remedy="attn_implementation='sdpa' or 'eager'",
            )
        return PolicyBatch(
            inputs=inputs,
            labels=labels,
            mask=mask,
            log_probs=by_token(gate.log_probs.detach()).masked_fill(~mask, 0.0),
            pools=self.pools(len(mask)),  # type: ignore[attr-defined]
            columns={name: column.to(mask.device) for name, column in columns.items()},
            reference=None if reference is None else reference.masked_fill(~mask, 0.0),
            reference_logits=self.reference_logits(),
            attention=attention[0] if attention else None,
            model=self.model if policy.needs.model else None,
            step=self.state.global_step,
            generator=torch.Generator().manual_seed(seed),
        )

    @contextmanager
    def _last_attention(self) -> Iterator[list[AttentionStatistics]]:
        """Inside, the attention of the last layer is kept as it is computed."""
        seen: list[AttentionStatistics] = []
        assert self._policy is not None
        if not self._policy.needs.attention:
            yield seen
            return
        adapter = find_adapter(self.model)  # type: ignore[arg-type]
        last = len(adapter.layers()) - 1

        def record(call: AttentionCall, native: NativeAttention) -> Tensor:
            seen.append(AttentionStatistics(call))
            return native(call.query, call.key, call.value)

        with (
            adapter.pause_checkpointing([adapter.layers()[last]]),
            adapter.override_attention(adapter.attention_modules(last), record),
        ):
            yield seen

    def _divided(self, weights: Tensor, mask: Tensor, num_items: Any) -> Tensor:
        """Weights under the policy's denominator."""
        if self._divisor == "kept" and self._step_kept is not None:
            count = torch.as_tensor(num_items).to(weights.device)
            return weights * (count / self._step_kept.to(weights.device).clamp(min=1e-12)).to(
                weights.dtype
            )
        found: Tensor = self._normalised(weights, mask, num_items, self._divisor)  # type: ignore[attr-defined]
        return found

    # --- what the run depends on ------------------------------------------------------------------

    def policy_identity(self) -> str | None:
        """Digest of the policy and its arguments; a resumed run must have the same."""
        policy = self._policy
        if policy is None:
            return None
        plain = (bool, int, float, str, tuple, list, dict, type(None))
        own = {k: v for k, v in vars(policy).items() if isinstance(v, plain) and k[0] != "_"}
        settings = asdict(policy.settings)
        parts = {"class": type(policy).__qualname__, "own": own, "settings": settings}
        text = json.dumps(parts, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()
