"""TI-DPO: weight the log-ratio of each token by its influence on the model's last prediction."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphatoken.errors import ConfigError, InputError, require_choice
from alphatoken.model.batch import label_mask, token_losses
from alphatoken.model.modes import evaluation_mode
from alphatoken.model.protocol import find_adapter
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings
from alphatoken_lab.methods.attribution import forward_inputs, gradient_attribution
from alphatoken_lab.methods.preference import PreferencePolicy, weighted_dpo_losses
from alphatoken_lab.methods.ti_dpo_terms import (
    packed,
    prompts_of,
    sample_anchors,
    sequence_kl,
    triplet_losses,
)

__all__ = ["TIDPO", "importance_weights"]

SPANS = ("response", "sequence")


def importance_weights(
    importance: Float[Tensor, "b t"],
    span: Bool[Tensor, "b t"],
    *,
    mix: float = 0.7,
    sigma_divisor: float = 4.0,
    normalize_prior: bool = True,
    mean_one: bool = True,
) -> Float[Tensor, "b t"]:
    """``W = mix I / sum I + (1 - mix) P``, ``P(j) = exp(-((j - (T - 1) / 2) / sigma)^2 / 2)``.

    ``j`` counts the T tokens of the span from 0, ``sigma = T / sigma_divisor``.

    Args:
        importance: I, not negative.
        span: tokens that share the weight.
        mix: lambda, in [0, 1].
        sigma_divisor: 4 in the paper.
        normalize_prior: P divided by its sum, like I (the code); False leaves it (the paper).
        mean_one: W times T / sum W, so that uniform weights are 1 (the code); False leaves it.

    Returns:
        (b, t), 0 off the span. Where all importance is 0 the prior stands for it.
    """
    inside = span.to(importance.dtype)
    count = inside.sum(-1, keepdim=True)
    steps = (inside.cumsum(-1) - 1 - (count - 1) / 2) / (count.clamp(min=1) / sigma_divisor)
    bell = torch.exp(-steps.square() / 2) * inside
    whole = bell / _or_one(bell.sum(-1, keepdim=True))
    total = (importance * inside).sum(-1, keepdim=True)
    share = torch.where(total > 0, importance * inside / _or_one(total), whole)
    mixed = mix * share + (1 - mix) * (whole if normalize_prior else bell)
    return mixed * count / _or_one(mixed.sum(-1, keepdim=True)) if mean_one else mixed


def _or_one(total: Tensor) -> Tensor:
    return torch.where(total == 0, 1.0, total)


class TIDPO(PreferencePolicy):
    """Token-importance DPO: gradient attribution, a Gaussian prior, and a triplet loss.

        I_i = || d max logit(last position) / d e_i ||_1
        W   = lambda I / sum I + (1 - lambda) P          over the response, then mean 1
        L   = -log sigma(beta (sum W D - sum W D' - alpha (KL' - sg KL))) + gamma L_triplet

    ``D`` are log-ratios of the chosen response, ``D'`` of the rejected one; W carries no
    gradient. The triplet loss is part of the published loss, and on; TDPO's divergence is in the
    code alone, and off. The name in records says which of them a run leaves out. Both run forwards
    of their own, through which the loss is differentiable as well.

    At a budget: the ``keep_ratio`` of each response with the largest W, weight 1 (our reading).

    Args:
        settings: see ``PolicySettings``.
        mix: lambda. [0 to 1; lower it to trust the prior more; the paper's 0.7; the code has 0.2]
        sigma_divisor: sigma is T over this. [above 0; raise it for a narrower prior; the paper's 4;
            the code has 8]
        span: "response", or "sequence": importance and prior over the prompt too (the code).
            ["response" or "sequence"; "sequence" to follow the code; the paper]
        normalize_prior: see ``importance_weights``. [true or false; false to follow the paper to
            the letter; the code]
        mean_one: see ``importance_weights``. [true or false; false to follow the paper to the
            letter; the code]
        tdpo_alpha: factor of the full-vocabulary divergence; the code has 0.5, the paper's
            equations none. [from 0; 0.5 to follow the code; the paper has none in its equations]
        triplet_gamma: factor of the triplet loss, the paper's 0.1; 0 leaves it out, and with it the
            sampling of an anchor for each pair. [from 0; 0 to save the sampling; the paper's 0.1;
            the code has 0.001]
        triplet_margin: margin of its hinge; not in the paper, 0.001 in the code. [from 0; only to
            compare; the code]
        anchor_tokens: longest sampled anchor. [from 1; lower it to save time; the code's 64]
        **base: see ``PreferencePolicy``.

    Raises:
        ConfigError: a number out of range, an unknown span.

    Source: ICLR 2026 paper, eqs. of W, L_DPO-w, L_triplet; code of the first commits of
    bowenzhaosh/Saliency-Guided-TI-DPO (3e792f9).
    """

    name: ClassVar[str] = "ti-dpo"
    published_loss: ClassVar[str] = "dpo"
    losses: ClassVar[Mapping[str, tuple[float, float]]] = {"dpo": (0.1, 0.0)}
    needs: ClassVar[Needs] = Needs(model=True, reference=True)
    scope: ClassVar[str] = "sequence"
    source: ClassVar[str] = "ICLR 2026; bowenzhaosh/Saliency-Guided-TI-DPO"

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        mix: float = 0.7,
        sigma_divisor: float = 4.0,
        span: str = "response",
        normalize_prior: bool = True,
        mean_one: bool = True,
        tdpo_alpha: float = 0.0,
        triplet_gamma: float = 0.1,
        triplet_margin: float = 0.001,
        anchor_tokens: int = 64,
        **base: Any,
    ) -> None:
        super().__init__(settings, **base)
        require_choice("span", span, SPANS)
        if not 0 <= mix <= 1:
            raise ConfigError("mix must lie in [0, 1]", got=repr(mix))
        if not sigma_divisor > 0 or anchor_tokens < 1:
            raise ConfigError(
                "sigma_divisor must be greater than 0, anchor_tokens at least 1",
                got=f"{sigma_divisor!r}, {anchor_tokens!r}",
            )
        if min(tdpo_alpha, triplet_gamma, triplet_margin) < 0:
            raise ConfigError(
                "tdpo_alpha, triplet_gamma and triplet_margin must not be negative",
                got=f"{tdpo_alpha!r}, {triplet_gamma!r}, {triplet_margin!r}",
            )
        self.mix, self.sigma_divisor, self.span = mix, sigma_divisor, span
        self.normalize_prior, self.mean_one = normalize_prior, mean_one
        self.tdpo_alpha, self.triplet_gamma = tdpo_alpha, triplet_gamma
        self.triplet_margin, self.anchor_tokens = triplet_margin, anchor_tokens

    @property
    def variant(self) -> str:
        """Name in records: the terms that are left out are named."""
        left = [] if self.triplet_gamma else ["no triplet"]
        left += [] if self.tdpo_alpha else ["no KL"]
        return f"{self.name} ({', '.join(left)})" if left else self.name

    def scores(self, batch: PolicyBatch) -> Tensor:
        """Scores equal to the weights W."""
        inside = batch.mask
        if self.span == "sequence":
            real = batch.inputs.get("attention_mask")
            inside = torch.ones_like(inside) if real is None else real != 0
        weights = importance_weights(
            gradient_attribution(batch.model, batch.inputs),
            inside,
            mix=self.mix,
            sigma_divisor=self.sigma_divisor,
            normalize_prior=self.normalize_prior,
            mean_one=self.mean_one,
        )
        return weights.masked_fill(~batch.mask, 0.0)

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        """Weights equal to W."""
        return self.scores(batch)

    def loss(self, batch: PolicyBatch, log_probs: Tensor, weights: Tensor) -> Tensor:
        """Mean over pairs; differentiable in ``log_probs``, and in the model's own parameters.

        Raises:
            ConfigError: a term that needs the reference model's logits, without them.
            InputError: a pair to which no anchor can be sampled.
        """
        reference = self.reference_of(batch)
        offset = self._divergence(batch) if self.tdpo_alpha else None
        losses = weighted_dpo_losses(log_probs, reference, weights, beta=self.beta, offset=offset)
        if self.triplet_gamma:
            losses = losses + self.triplet_gamma * self._triplet(batch, log_probs - reference)
        return losses.mean()

    def _divergence(self, batch: PolicyBatch) -> Tensor:
        """``alpha (KL of the rejected - sg KL of the chosen)`` of each pair."""
        inputs = forward_inputs(batch.inputs)
        logits = find_adapter(batch.model).forward(inputs)
        reference = self._reference_logits(batch)(inputs)
        chosen, rejected = sequence_kl(logits, reference, batch.mask).chunk(2)
        return self.tdpo_alpha * (rejected - chosen.detach())

    def _triplet(self, batch: PolicyBatch, ratios: Tensor) -> Tensor:
        """(n,) triplet losses beside anchors sampled from the model as it is."""
        half = len(ratios) // 2
        chosen, rejected = (
            packed(ratios[rows], batch.mask[rows]) for rows in (slice(half), slice(half, None))
        )
        adapter = find_adapter(batch.model)
        prompts = prompts_of({k: v[:half] for k, v in forward_inputs(batch.inputs).items()},
                             batch.mask[:half])  # fmt: skip
        with evaluation_mode(adapter.model):
            anchors = sample_anchors(
                adapter, prompts, most=self.anchor_tokens, seed=self._seed(batch)
            )
        labels = anchors.pop("labels")
        ours = -token_losses(adapter.forward(anchors), labels)
        theirs = -token_losses(self._reference_logits(batch)(anchors), labels)
        anchor = packed(ours - theirs.detach(), label_mask(labels))
        return triplet_losses(anchor, chosen, rejected, margin=self.triplet_margin)

    def _seed(self, batch: PolicyBatch) -> int:
        if batch.generator is None:
            raise InputError(
                "sampled anchors need a generator", remedy="PolicyBatch(generator=...)"
            )
        return int(torch.randint(2**31 - 1, (1,), generator=batch.generator))

    def _reference_logits(self, batch: PolicyBatch) -> Callable[[Mapping[str, Any]], Tensor]:
        reference_logits = batch.reference_logits
        if reference_logits is None:
            raise ConfigError(
                "this term of TI-DPO needs a plain forward of the reference model",
                got=f"tdpo_alpha={self.tdpo_alpha}, triplet_gamma={self.triplet_gamma}",
                why="log-probabilities of the responses do not hold the whole distribution",
                remedy="a trainer that keeps its reference model, or both factors 0",
            )
        return reference_logits
