"""Loss truncation: leave out what has the highest loss under the current model."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from alphatoken.errors import ConfigError, require_choice
from alphatoken.select.masks import response_values
from alphatoken.train.policy import PolicyBatch, PolicySettings, TokenPolicy

UNITS = ("token", "response")


class LossTruncation(TokenPolicy):
    """Loss truncation, a policy.

        keep the ceil((1 - d) N) of the N tokens of the step with the lowest l_t = -log p_t
        L = (sum of l over them) / (response tokens)

    A hard mask, ranked anew at every step with the current model. With ``unit="response"`` a
    response has its mean loss and whole responses are kept, of the last one what the budget leaves;
    it needs steps of many rows. The published code leaves out whole sequences above a quantile of
    the last 10,000 losses. Here the quantile is that of the optimizer step, over its micro-batches
    and processes: a policy keeps no state over steps. A step of several micro-batches takes one
    forward a micro-batch more, without dropout, since the losses of all are ranked before the
    first is trained on; a step of one ranks the losses of its training forward.

    Args:
        settings: see ``PolicySettings``.
        drop: d, the share that is left out, 0.4. [above 0, below 1; the share of the rows that is
            thought wrong; the code's default]
        unit: "token", or "response". ["token" or "response"; "response" where whole rows are wrong
            and steps have many rows; ours; the paper's are responses]

    Raises:
        ConfigError: a share outside (0, 1), or another unit.

    Exactness: exact. Source: Kang and Hashimoto, arXiv 2004.14589; code ddkang/loss_dropper.
        Oracle: a sort by hand.
    """

    name: ClassVar[str] = "loss-truncation"
    scope: ClassVar[str] = "step"
    rounding: ClassVar[str] = "ceil"
    source: ClassVar[str] = "arXiv 2004.14589"

    def __init__(
        self, settings: PolicySettings | None = None, *, drop: float = 0.4, unit: str = "token"
    ) -> None:
        super().__init__(settings)
        if isinstance(drop, bool) or not isinstance(drop, (int, float)) or not 0 < drop < 1:
            raise ConfigError(
                "drop of loss truncation must lie in (0, 1)",
                got=repr(drop),
                why="0 would leave out nothing, and 1 everything",
            )
        require_choice("unit of loss truncation", unit, UNITS)
        self.drop, self.unit = drop, unit
        self.native_ratio = 1 - drop

    @property
    def by_response(self) -> bool:
        """True if whole responses are kept."""
        return self.unit == "response"

    def scores(self, batch: PolicyBatch) -> Tensor:
        """``log p``, the lowest loss first; of a response the mean of its tokens'."""
        if self.unit == "response":
            return response_values(batch.log_probs, batch.mask)
        return batch.log_probs
