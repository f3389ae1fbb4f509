"""From values of tokens to weights, one class a rule; a run has one of them.

``Ranked`` keeps a share (top, bottom, random, all), ``Harmless`` all but those that are harmful
beyond doubt.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from alphatoken.select.confidence import select_harmless
from alphatoken.select.masks import (
    keep_count,
    response_values,
    select_bottom,
    select_random,
    select_top,
)
from alphatoken.support.precision import wide
from alphatoken.train.micro_batch import MicroBatch, Scored
from alphatoken.values import standard_error

__all__ = ["Ranked", "rule_of"]


class Ranked:
    """The share ``keep_ratio`` of the tokens that are ranked together.

    Args:
        options: of the run.
    """

    def __init__(self, options: Any) -> None:
        self._options = options

    def weights(
        self, batch: MicroBatch, scored: Scored | None, generator: torch.Generator
    ) -> Tensor:
        """Weights (b, t) of one micro-batch; 0 off the response."""
        mask, totals = batch.mask, self.ranks(batch, scored)
        return torch.cat([self.of_pool(totals[r], mask[r], generator) for r in batch.pools])

    def ranks(self, batch: MicroBatch, scored: Scored | None) -> Tensor:
        """(b, t) by which tokens are ranked."""
        if scored is None:
            return torch.zeros(batch.mask.shape, device=batch.mask.device)
        by_response = self._options.value_unit == "response"
        return response_values(scored.totals, batch.mask) if by_response else scored.totals

    def of_pool(self, totals: Tensor, mask: Tensor, generator: torch.Generator) -> Tensor:
        """Weights of tokens that are ranked together, in float32 or wider."""
        options, kept = self._options, mask
        scope = "sequence" if options.keep_scope == "sequence" else "batch"
        if options.policy == "random":
            kept = select_random(mask, options.keep_ratio, generator=generator, scope=scope)
        elif options.policy != "all":
            select = select_top if options.policy == "top" else select_bottom
            kept = select(totals, mask, options.keep_ratio, scope=scope)
        return kept.to(wide(totals.dtype))

    def kept(self, batch: MicroBatch) -> int:
        """Summed weights of one micro-batch that is ranked by itself, known before its values."""
        mask = batch.mask
        if self._options.policy == "all":
            return int(mask.sum())
        rows = [slice(i, i + 1) for i in range(len(mask))]
        pools = rows if self._options.keep_scope == "sequence" else batch.pools
        return sum(keep_count(self._options.keep_ratio, int(mask[pool].sum())) for pool in pools)


class Harmless(Ranked):
    """All tokens (of responses, by their mean) but those that are harmful beyond doubt."""

    def weights(
        self, batch: MicroBatch, scored: Scored | None, generator: torch.Generator
    ) -> Tensor:
        """Weights (b, t) of one micro-batch."""
        values = None if scored is None else scored.values
        if values is None:  # no response here
            return torch.zeros(batch.mask.shape, device=batch.mask.device)
        assert values.parts is not None
        assert values.part_shares is not None
        totals, parts = self.ranks(batch, scored), values.parts
        if self._options.value_unit == "response":
            parts = torch.stack([response_values(p, batch.mask) for p in parts.unbind(-1)], -1)
        errors = standard_error(parts, values.part_shares)
        level, count = self._options.confidence, parts.shape[-1]
        keep = select_harmless(totals, errors, batch.mask, parts=count, confidence=level)
        return keep.to(totals.dtype)


def rule_of(options: Any) -> Ranked:
    """The rule that a run's options mean."""
    return Harmless(options) if options.policy == "harmless" else Ranked(options)
