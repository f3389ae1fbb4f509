"""Weights from values of tokens: the share that the run's policy keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alphatoken.select.masks import (
    keep_count,
    response_values,
    select_bottom,
    select_random,
    select_top,
)
from alphatoken.support.precision import wide
from alphatoken.train.micro_batch import MicroBatch, MicroBatchValues

__all__ = ["Ranked"]


class Ranked:
    """The share ``keep_ratio`` of the tokens that are ranked together: top, bottom, random or all.

    A run that keeps all tokens keeps those without a value too, which padding predicts: it is the
    run of the trainer below. Any other run leaves them out.

    Args:
        options: of the run.
    """

    def __init__(self, options: Any) -> None:
        self._options = options

    @property
    def keeps_all(self) -> bool:
        """True if every token has weight 1."""
        return bool(self._options.policy == "all" or self._options.keep_ratio == 1)

    def weights(
        self, batch: MicroBatch, scored: MicroBatchValues | None, generator: torch.Generator
    ) -> Tensor:
        """Weights (b, t) of one micro-batch; 0 off the response."""
        mask, totals = batch.mask, self.ranks(batch, scored)
        groups = [self.of_group(totals[r], mask[r], generator) for r in batch.rank_groups]
        return self.completed(torch.cat(groups), batch)

    def completed(self, weights: Tensor, batch: MicroBatch) -> Tensor:
        """The weights of one micro-batch, and of its tokens without a value."""
        return batch.loss_mask.to(weights) if self.keeps_all else weights

    def ranks(self, batch: MicroBatch, scored: MicroBatchValues | None) -> Tensor:
        """(b, t) by which tokens are ranked."""
        if scored is None:
            return torch.zeros(batch.mask.shape, device=batch.mask.device)
        by_response = self._options.value_unit == "response"
        return response_values(scored.totals, batch.mask) if by_response else scored.totals

    def of_group(self, totals: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
        """Weights of tokens that are ranked together, in float32 or wider."""
        options, kept = self._options, mask
        if options.policy == "random":
            kept = select_random(mask, options.keep_ratio, generator=generator)
        elif options.policy != "all":
            select = select_top if options.policy == "top" else select_bottom
            kept = select(totals, mask, options.keep_ratio)
        return kept.to(wide(totals.dtype))

    def kept(self, batch: MicroBatch) -> int:
        """Summed weights of one micro-batch that is ranked by itself, known before its values."""
        if self.keeps_all:
            return int(batch.loss_mask.sum())
        mask, ratio = batch.mask, self._options.keep_ratio
        return sum(keep_count(ratio, int(mask[group].sum())) for group in batch.rank_groups)
