"""EAFT: weigh tokens by the entropy of what the model expected, so that conflicts change little."""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor

from alphatoken.errors import ConfigError
from alphatoken.train.policy import Needs, PolicyBatch, PolicySettings, TokenPolicy


class EAFT(TokenPolicy):
    """Entropy-adaptive fine-tuning, a policy.

        w_t = (H_t / ln K)^alpha,    H_t = - sum_{v in top K} q_t(v) ln q_t(v)
        L = sum_t w_t l_t / (response tokens)

    with q_t the current model's distribution of token t, cut to its K likeliest tokens and
    divided by their sum. ``w`` is a constant in [0, 1]. An unlikely token counts where the model
    was open to many, and next to nothing where it was sure of another one.

    At a budget: the tokens of highest entropy first.

    Args:
        settings: see ``PolicySettings``.
        alpha: exponent, 1. [above 0; towards 0 it is plain training, more favours uncertain tokens;
            the paper's 1]
        k: tokens of the entropy, 20. [from 2; raise it where the vocabulary is flat; the paper's
            20]

    Raises:
        ConfigError: an exponent that is not above 0, or fewer than two tokens.

    Source: arXiv 2601.02151; official code in LLaMA-Factory, which divides by 3.0, ln 20 being
    2.996.
    """

    name: ClassVar[str] = "eaft"
    by_confidence: ClassVar[bool] = True
    source: ClassVar[str] = "arXiv 2601.02151"
    needs: ClassVar[Needs] = Needs(entropy=True)

    def __init__(
        self, settings: PolicySettings | None = None, *, alpha: float = 1.0, k: int = 20
    ) -> None:
        super().__init__(settings)
        if not alpha > 0:
            raise ConfigError("alpha must be above 0", got=repr(alpha))
        if isinstance(k, bool) or not isinstance(k, int) or k < 2:
            raise ConfigError("k must be an integer of 2 or more", got=repr(k))
        self.alpha, self.k = alpha, k

    def scores(self, batch: PolicyBatch) -> Tensor:
        """``H``: the order of the weights."""
        assert batch.entropy is not None
        return batch.entropy(self.k).to(batch.log_probs).masked_fill(~batch.mask, 0.0)

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        """``(H / ln K)^alpha``."""
        return (self.scores(batch) / math.log(self.k)) ** self.alpha
