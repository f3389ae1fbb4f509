"""TALR: weigh tokens by a power of their probability, so that unlikely ones change little."""

from __future__ import annotations

from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from alphatoken.errors import ConfigError, require_choice
from alphatoken.train.policy import PolicyBatch, PolicySettings, TokenPolicy

_TAUS = ("sequence_median", "token_median")
_LEAST = 1e-6


def median_of_sequences(
    losses: Float[Tensor, "b t"], mask: Bool[Tensor, "b t"]
) -> Float[Tensor, ""]:
    """Median over rows of the mean token loss; of two middle ones their mean. 1 without rows."""
    counts = mask.sum(-1)
    means = (losses.double() * mask).sum(-1)[counts > 0] / counts[counts > 0]
    return _median(means)


def _median(numbers: Tensor) -> Tensor:
    if not numbers.numel():
        return torch.ones((), dtype=torch.float64, device=numbers.device)
    return torch.quantile(numbers.double(), 0.5)


class TALR(TokenPolicy):
    """Token-adaptive loss reweighting, a policy.

        w_t = max(p_t^(1/tau), w_min),    tau = max(median over rows of mean_t l_t, 1e-6)
        L = sum_t w_t l_t / (response tokens)

    From min_w sum w_t l_t + tau sum w_t log w_t. ``w`` is a constant, from the current model, and
    is not divided by its sum; tau is that of the micro-batch. At tau = 1 and w_min = 0 the update
    is DFT's. A row is a sequence; with packed rows too.

    At a budget: the most likely tokens first.

    Args:
        settings: see ``PolicySettings``.
        tau: "sequence_median" (our reading, after a reimplementation), "token_median", or a number.
            ["sequence_median", "token_median", or above 0; a number for a fixed temperature; our
            reading; the paper does not settle it]
        w_min: floor, 0.01. [0 to 1; raise it to keep hard tokens in; our reading; the paper gives
            no number]

    Raises:
        ConfigError: another tau, or a floor outside [0, 1].

    Source: arXiv 2509.20758; no official code. tau and w_min follow arXiv 2602.16093.
    """

    name: ClassVar[str] = "talr"
    by_confidence: ClassVar[bool] = True
    source: ClassVar[str] = "arXiv 2509.20758"

    def __init__(
        self,
        settings: PolicySettings | None = None,
        *,
        tau: str | float = "sequence_median",
        w_min: float = 0.01,
    ) -> None:
        super().__init__(settings)
        if isinstance(tau, str):
            require_choice("tau", tau, _TAUS)
        elif not tau > 0:
            raise ConfigError("tau must be above 0", got=repr(tau))
        if not 0 <= w_min <= 1:
            raise ConfigError("w_min must lie in [0, 1]", got=repr(w_min))
        self.tau, self.w_min = tau, w_min

    def temperature(self, batch: PolicyBatch) -> Tensor:
        """tau of a micro-batch, at least 1e-6."""
        if not isinstance(self.tau, str):
            return torch.tensor(self.tau, device=batch.mask.device, dtype=torch.float64)
        losses = -batch.log_probs
        if self.tau == "token_median":
            return _median(losses[batch.mask]).clamp(min=_LEAST)
        return median_of_sequences(losses, batch.mask).clamp(min=_LEAST)

    def scores(self, batch: PolicyBatch) -> Tensor:
        """``log p``: the order of the weights."""
        return batch.log_probs

    def native_weights(self, batch: PolicyBatch) -> Tensor:
        """Weights equal to ``max(p^(1/tau), w_min)``."""
        weights = torch.exp(batch.log_probs.double() / self.temperature(batch))
        return weights.clamp(min=self.w_min).to(batch.log_probs.dtype)
