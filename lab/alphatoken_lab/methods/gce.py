"""GCE: generalised cross-entropy, between the log loss and minus the probability."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from alphatoken.errors import ConfigError
from alphatoken.train.policy import PolicyBatch, PolicySettings, TokenPolicy


class GCE(TokenPolicy):
    """Generalised cross-entropy, a policy.

        L_q = sum_t (1 - p_t^q) / q / (response tokens)
        dL_q = sum_t w_t dl_t / (response tokens),    w_t = p_t^q,    l_t = -log p_t

    since d(1 - p^q)/q = -p^(q-1) dp = p^q dl. For q towards 0 it is cross-entropy; at q = 1 it is
    1 - p, whose gradient is DFT's. ``w`` is a constant, from the current model. The loss in the
    logs is the trainer's own, of all tokens.

    At a budget: the most likely tokens first.

    Args:
        settings: see ``PolicySettings``.
        q: exponent, 0.7. [above 0, to 1; lower it where hard tokens are right; the paper's 0.7]

    Raises:
        ConfigError: q outside (0, 1].

    Exactness: exact. Source: Zhang and Sabuncu, arXiv 1805.07836, whose examples have one label
        each; the truncated form is left out. Oracle: autograd of the written loss.
    """

    name: ClassVar[str] = "gce"
    by_confidence: ClassVar[bool] = True
    source: ClassVar[str] = "arXiv 1805.07836"

    def __init__(self, settings: PolicySettings | None = None, *, q: float = 0.7) -> None:
        super().__init__(settings)
        if isinstance(q, bool) or not isinstance(q, (int, float)) or not 0 < q <= 1:
            raise ConfigError(
                "q of GCE must lie in (0, 1]",
                got=repr(q),
                why="at 0 the loss is cross-entropy, and above 1 likely tokens alone would count",
                remedy="policy='standard' for cross-entropy",
            )
        self.q = q

    def scores(self, batch: PolicyBatch) -> Tensor:
        """``log p``: the order of the weights."""
        return batch.log_probs

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        """Weights equal to ``p^q``."""
        return (self.q * batch.log_probs).exp()
