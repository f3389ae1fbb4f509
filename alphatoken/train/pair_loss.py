"""The loss of preference pairs, TRL's ``DPOTrainer``'s, as token weights act on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from alphatoken.model.batch import IGNORE
from alphatoken.select.losses import masked_dpo_coefficient
from alphatoken.train.log_prob_proxy import LogProbProxy, by_token
from alphatoken.train.policy import TokenPolicy
from alphatoken.train.trainer_loss import TrainerLoss

__all__ = ["REFERENCE_SUMS", "PairLoss"]

REFERENCE_SUMS = ("ref_chosen_logps", "ref_rejected_logps")
"""Columns of a batch that hold the reference's log-probability of each response, if it has any."""


class _Logits:
    """A model whose forward gives logits, in the place of TRL's fused head, and keeps them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.logits: Tensor | None = None

    def __call__(self, *, labels: Tensor, fused_lm_head: bool, **kwargs: Any) -> Any:
        self.logits = self._model(**kwargs).logits
        return SimpleNamespace(log_probs=torch.zeros_like(labels[:, 1:], dtype=torch.float32))


class PairLoss(TrainerLoss):
    """Any of TRL's preference losses: (2n, t) batches, chosen rows first, then rejected ones."""

    @property
    def reference_model(self) -> Any:
        """The reference; the model itself where that is it with its adapter off or exchanged."""
        trainer = self._trainer
        return trainer.model if trainer.ref_model is None else trainer.ref_model

    def reference_sums(self, model: Any, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """TRL's log-probabilities of both responses under the reference, with ``model`` for it."""
        with torch.no_grad():
            sums = self._trainer.compute_ref_log_probs(model=model, inputs=dict(inputs))
        return dict(zip(REFERENCE_SUMS, sums, strict=True))

    def loss_labels(self, inputs: Mapping[str, Any]) -> Tensor:
        """The completions of both branches, chosen rows first."""
        labels: Tensor = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORE)
        return labels

    def rank_groups(self, rows: int) -> list[slice]:
        """Chosen and rejected by themselves, unless ``shared_threshold``."""
        if self.args.shared_threshold:
            return [slice(0, rows)]
        return [slice(0, rows // 2), slice(rows // 2, rows)]

    def of(self, proxy: LogProbProxy, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """TRL's loss; reference log-probabilities that are in the batch are not computed again."""
        before = self._trainer.precompute_ref_logps
        self._trainer.precompute_ref_logps = before or all(n in inputs for n in REFERENCE_SUMS)
        try:
            return super().of(proxy, inputs, num_items)
        finally:
            self._trainer.precompute_ref_logps = before

    def own_inputs(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs with the reference's log-probabilities, so that valuing runs one model only."""
        if REFERENCE_SUMS[0] in inputs:
            return dict(inputs)
        return {**inputs, **self.reference_sums(self.reference_model, inputs)}

    def reference_log_probs(
        self, inputs: Mapping[str, Any], policy: TokenPolicy
    ) -> tuple[dict[str, Any], Tensor | None]:
        """Inputs with the reference's log-probabilities: sums for TRL, each token's for the policy.

        A policy with a loss of its own that needs neither reference nor values costs no reference
        forward; the logged rewards are then ``beta log p`` themselves.
        """
        sums, log_probs = dict[str, Tensor](), None
        if policy.needs.reference:
            proxy = LogProbProxy(self.reference_model)
            sums = self.reference_sums(proxy, inputs)
            assert proxy.log_probs is not None
            log_probs = by_token(proxy.log_probs)
        elif policy.replaces_loss and not policy.needs.values:
            ids = inputs["input_ids"]
            zeros = torch.zeros(len(ids) // 2, device=ids.device)
            sums = dict.fromkeys(REFERENCE_SUMS, zeros)
        return {**inputs, **sums}, log_probs

    def reference_logits(self, policy: TokenPolicy) -> Callable[[Mapping[str, Any]], Tensor] | None:
        """A plain forward of the reference model, for policies that need all its logits."""
        if not (policy.needs.reference and policy.needs.model):
            return None

        def logits(inputs: Mapping[str, Any]) -> Tensor:
            recording = _Logits(self.reference_model)
            plain = {**inputs, "completion_mask": torch.ones_like(inputs["input_ids"])}
            plain.pop("labels", None)
            self.reference_sums(recording, plain)
            assert recording.logits is not None
            return recording.logits

        return logits

    def value_weights(self, coefficients: Tensor, mask: Tensor, num_items: Any) -> Tensor | None:
        """``+omega`` on chosen and ``-omega`` on rejected tokens: the loss's own, per pair."""
        return -by_token(coefficients) * (coefficients.shape[0] // 2)

    def unit(self, mask: Tensor, num_items: Any) -> float:
        """One over the pairs of the step on this rank."""
        steps = int(self._trainer.current_gradient_accumulation_steps)
        return 1.0 / (mask.shape[0] // 2 * steps)

    def final_coefficients(
        self,
        proxy: LogProbProxy,
        coefficients: Tensor,
        weights: Tensor,
        inputs: Mapping[str, Any],
    ) -> Tensor:
        """Coefficients; under ``masked_logit``, omega comes from the kept tokens' log-ratios.

        The mask acts on policy and reference alike, as it was chosen: whatever divides the loss
        scales the update and not the preference.
        """
        if not self.args.masked_logit:
            return coefficients
        assert proxy.log_probs is not None
        reference = LogProbProxy(self.reference_model)
        self.reference_sums(reference, inputs)
        assert reference.log_probs is not None
        current, fixed = proxy.log_probs.detach().chunk(2), reference.log_probs.chunk(2)
        kept = weights[:, 1:].to(proxy.log_probs).chunk(2)
        omega = masked_dpo_coefficient(
            current[0], current[1], fixed[0], fixed[1], kept[0], kept[1], self._trainer.beta
        )
        return torch.cat([-omega, omega]).unsqueeze(-1) / len(omega)
