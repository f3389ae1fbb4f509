"""Losses of preference pairs with token weights, and the base of the policies that enter them.

The first half of the rows are the chosen responses, the second half their rejected counterparts.
A weight acts on a token's term of the loss, so the preference margin itself is a weighted one;
``alphatoken.select.losses.masked_dpo_loss`` is another thing, whose coefficient sees all tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from alphatoken.errors import ConfigError, InputError
from alphatoken.support.precision import wide
from alphatoken.train.policy import PolicyBatch, PolicySettings, TokenPolicy


def both_sides(weights: Float[Tensor, "rows t"]) -> Bool[Tensor, " n"]:
    """True for the pairs that have a weight other than 0 on either side."""
    chosen, rejected = (weights != 0).any(-1).chunk(2)
    return chosen & rejected


def weighted_dpo_losses(
    log_probs: Float[Tensor, "rows t"],
    reference: Float[Tensor, "rows t"],
    weights: Float[Tensor, "rows t"],
    *,
    beta: float,
    offset: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, " n"]:
    """DPO with token weights: ``-log sigma(beta (sum_t w D - sum_t w D' - offset))`` of each pair.

    ``D_t = log pi(y_t) - log pi_ref(y_t)`` on the chosen response, ``D'`` on the rejected one.
    With all weights 1 it is DPO's own loss, and TRL's ("sigmoid"). A pair with no weight on one
    side compares nothing: its loss and gradient are 0, and it stays in a mean over pairs.

    Args:
        log_probs: chosen rows, then rejected rows; differentiable.
        reference: the same under the reference model, a constant.
        weights: 0 off the response, a constant.
        beta: DPO's temperature.
        offset: taken from the margin of each pair, TDPO's term for instance.

    Raises:
        InputError: shapes that differ, or an odd number of rows.
    """
    _require_pairs(log_probs, weights, reference)
    sums = _products(log_probs - reference.detach().to(log_probs), weights).sum(-1)
    chosen, rejected = sums.chunk(2)
    margin = chosen - rejected
    if offset is not None:
        margin = margin - offset.to(margin)
    return _where_both(-F.logsigmoid(beta * margin), weights)


def weighted_simpo_losses(
    log_probs: Float[Tensor, "rows t"],
    weights: Float[Tensor, "rows t"],
    *,
    beta: float,
    gamma: float,
) -> Float[Tensor, " n"]:
    """SimPO with token weights: ``-log sigma(beta (r - r') - gamma)`` of each pair, no reference.

    ``r = sum_t w log pi(y_t) / sum_t w`` on the chosen response, ``r'`` on the rejected one: with
    weights 0 and 1 the mean over the kept tokens. With all weights 1 it is SimPO's own loss, and
    TRL's (``CPOTrainer``, "simpo", ``cpo_alpha=0``). A pair with no weight on one side has loss
    and gradient 0, and stays in a mean over pairs.

    Args:
        log_probs: chosen rows, then rejected rows; differentiable.
        weights: 0 off the response, not negative, a constant.
        beta: scale of the margin.
        gamma: target margin, absolute (TRL's ``simpo_gamma``).

    Raises:
        InputError: shapes that differ, or an odd number of rows.
    """
    _require_pairs(log_probs, weights)
    total = weights.detach().to(wide(log_probs.dtype, weights.dtype)).sum(-1)
    means = _products(log_probs, weights).sum(-1) / torch.where(total == 0, 1.0, total)
    chosen, rejected = means.chunk(2)
    return _where_both(-F.logsigmoid(beta * (chosen - rejected) - gamma), weights)


def _products(values: Tensor, weights: Tensor) -> Tensor:
    # A token of weight 0 may have log-probability -inf, and 0 times that would be NaN.
    dtype = wide(values.dtype, weights.dtype)
    fixed = weights.detach().to(dtype)
    return (fixed * values.to(dtype)).masked_fill(fixed == 0, 0.0)


def _where_both(losses: Tensor, weights: Tensor) -> Tensor:
    return losses.masked_fill(~both_sides(weights), 0.0)


def _require_pairs(log_probs: Tensor, *others: Tensor) -> None:
    if any(one.shape != log_probs.shape for one in others) or log_probs.shape[0] % 2:
        raise InputError(
            "a preference loss takes chosen rows, then as many rejected ones, all of one shape",
            got=", ".join(str(tuple(one.shape)) for one in (log_probs, *others)),
        )


class PreferencePolicy(TokenPolicy):
    """Token weights that enter the loss of a preference pair.

    Args:
        settings: see ``PolicySettings``.
        loss: base loss, "dpo" or "simpo"; None for the one it was published with. [null, "dpo" or
            "simpo"; "dpo" to compare rules under one loss; each method's paper]
        beta: beta of the base loss; None for the published number. [null, or above 0; as for plain
            DPO or SimPO; each method's paper]
        gamma: SimPO's target margin; None for the published number. [null, or any number; with loss
            "simpo" only; each method's paper]

    Raises:
        ConfigError: a base loss that it is not defined on, a number out of range, SimPO's margin
            for DPO, or a scope that no score at a batch can honour.

    Attributes:
        losses: (beta, gamma) by base loss that the policy is defined on.
        base_loss: the one in use.
    """

    family: ClassVar[str] = "preference"
    losses: ClassVar[Mapping[str, tuple[float, float]]] = {"dpo": (0.1, 0.0)}

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        loss: str | None = None,
        beta: float | None = None,
        gamma: float | None = None,
    ) -> None:
        super().__init__(settings)
        self.base_loss = self.published_loss if loss is None else loss
        if self.base_loss not in self.losses:
            raise ConfigError(
                f"{self.name} is not defined on this base loss",
                got=f"loss={loss!r}",
                remedy=f"one of {', '.join(self.losses)}",
            )
        if gamma is not None and self.base_loss != "simpo":
            raise ConfigError("gamma is SimPO's margin", got=f"loss={self.base_loss!r}")
        if beta is not None and not beta > 0:
            raise ConfigError("beta must be greater than 0", got=repr(beta))
        published = self.losses[self.base_loss]
        self.beta = published[0] if beta is None else beta
        self.gamma = published[1] if gamma is None else gamma
        if self.base_loss == "dpo":  # the class says what it needs whatever the base loss
            vars(self)["needs"] = replace(self.needs, reference=True)

    @property
    def variant(self) -> str:
        """Name in records: what was run, where that is not the published method."""
        return (
            self.name if self.base_loss == self.published_loss else f"{self.name}-{self.base_loss}"
        )

    def loss(self, batch: PolicyBatch, log_probs: Tensor, weights: Tensor) -> Tensor:
        """Mean over the pairs of the base loss.

        Raises:
            ConfigError: DPO without the reference model's log-probabilities.
        """
        return self.pair_losses(batch, log_probs, weights).mean()

    def rewards(self, batch: PolicyBatch) -> Tensor | None:
        """``beta`` times the mean log-probability of each response; DPO's are the trainer's own."""
        if self.base_loss != "simpo":
            return None
        return self.beta * batch.log_probs.sum(-1) / batch.mask.sum(-1).clamp(min=1)

    def pair_losses(self, batch: PolicyBatch, log_probs: Tensor, weights: Tensor) -> Tensor:
        """(n,) base loss of each pair."""
        if self.base_loss == "simpo":
            return weighted_simpo_losses(log_probs, weights, beta=self.beta, gamma=self.gamma)
        reference = self.reference_of(batch)
        return weighted_dpo_losses(log_probs, reference, weights, beta=self.beta)

    def reference_of(self, batch: PolicyBatch) -> Tensor:
        """(2n, t) of the batch.

        Raises:
            ConfigError: there is none.
        """
        if batch.reference is None:
            raise ConfigError(
                f"{self.name} on DPO needs the reference model's token log-probabilities",
                why="its margin is a sum of log-ratios",
                remedy="let the trainer compute them (they are no sums over responses)",
            )
        return batch.reference
