"""ConfPO: learn on the tokens that the policy is less sure of than on average in their response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphatoken.train.policy import PolicyBatch
from alphatoken_lab.methods.preference import PreferencePolicy

_TIE = 1e-9
"""Relative; equal probabilities are a tie, whatever the rounding of their mean."""


def below_mean_probability(
    log_probs: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Bool[Tensor, "b t"]:
    """Tokens with ``p_t < mu``, ``mu`` the arithmetic mean of ``p`` over the response.

    Strict: of a response whose tokens are all equally likely, or of one token, nothing is left.
    The mean is taken in float64, so that neither padding nor the batch moves a token.
    """
    p = torch.where(mask, log_probs.detach().double().exp(), 0.0)
    mean = p.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    return mask & (p < mean * (1 - _TIE))


class ConfPO(PreferencePolicy):
    """Confidence-based preference optimisation, on SimPO.

        L = -log sigma(beta (r_w - r_l) - gamma),   r = mean of log p_t over {t: p_t < mu}

    ``mu`` is the arithmetic mean of the token probabilities of that response, taken from the
    current model at every step. The share of tokens is an outcome. A pair with no token on one
    side adds 0 and stays in the mean. Published: beta 1.5, gamma 1.6; ``loss="dpo"`` puts the
    same mask on the log-ratios (our reading; beta 0.1).

    At a budget: the least likely ``keep_ratio`` of each response, rounded up (our reading).

    Source: Yoon et al., arXiv 2506.08712; code hee-suk-yoon/ConfPO@40896cc, ``cpo_loss_confpo``.
    """

    name: ClassVar[str] = "confpo"
    published_loss: ClassVar[str] = "simpo"
    losses: ClassVar[Mapping[str, tuple[float, float]]] = {"simpo": (1.5, 1.6), "dpo": (0.1, 0.0)}
    scope: ClassVar[str] = "sequence"
    rounding: ClassVar[str] = "ceil"
    denominator: ClassVar[str] = "kept"
    source: ClassVar[str] = "arXiv 2506.08712; hee-suk-yoon/ConfPO"

    def scores(self, batch: PolicyBatch) -> Tensor:
        """``-log p``: the order of ``-p``, and no ties where p rounds to 1."""
        return -batch.log_probs

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        """1 where ``p_t < mu``."""
        return below_mean_probability(batch.log_probs, batch.mask).to(batch.log_probs.dtype)
