"""Sums over the tokens between two logs: on the device, read once, mergeable over processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from alphatoken.values import TokenValues

__all__ = ["ValueSums", "summary"]

_COUNTS = ("tokens", "response", "kept", "weight", "square")


class ValueSums:
    """Counts, and of the values tokens, sum and squares.

    Adding a micro-batch reads nothing from the device; :meth:`state` does.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._moments: Tensor | None = None  # (3,): tokens, sum, squares of the totals

    @torch.no_grad()
    def add(
        self,
        weights: Tensor,
        mask: Tensor,
        values: TokenValues | None,
        *,
        tokens: Tensor | int,
    ) -> None:
        """One micro-batch.

        Args:
            weights: (b, t) training weight of each token.
            mask: (b, t) response tokens.
            values: their values, if they were scored now.
            tokens: all tokens of the micro-batch that are not padding.
        """
        wide, response = _wide(mask.device), mask.sum()
        kept = weights.detach() * mask
        columns = [
            torch.full_like(response, tokens) if isinstance(tokens, int) else tokens,
            response,
            (kept > 0).sum(),
            kept.sum(dtype=wide),
            kept.to(wide).square().sum(),
        ]
        counts = torch.stack([count.to(mask.device, wide) for count in columns])
        self._counts = counts if self._counts is None else self._counts.to(counts) + counts
        if values is None:
            return
        total = torch.where(values.mask, values.total.detach(), 0.0).to(wide)
        moments = torch.stack([values.mask.sum().to(wide), total.sum(), total.square().sum()])
        self._moments = moments if self._moments is None else self._moments.to(moments) + moments

    def state(self) -> dict[str, Any]:
        """Everything, as plain JSON values; floats come back bit for bit."""
        return {
            "counts": [0.0] * len(_COUNTS) if self._counts is None else self._counts.tolist(),
            "moments": [0.0] * 3 if self._moments is None else self._moments.tolist(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        self._counts = torch.tensor(state["counts"], dtype=torch.float64)
        self._moments = torch.tensor(state["moments"], dtype=torch.float64)

    def clear(self) -> None:
        """Start the next interval."""
        self._counts = self._moments = None


def summary(states: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Named statistics of the processes' sums together.

    ``kept_share``: kept tokens over response tokens. ``weight_share``: summed weights over
    response tokens (the same for masks). ``effective_share``: effective sample size of the
    weights, ``(sum w)^2 / sum w^2``, over response tokens (the same for masks).
    ``total_mean`` and ``total_std`` are over valued tokens.
    """
    sums = torch.tensor([state["counts"] for state in states], dtype=torch.float64).sum(0)
    counts = dict(zip(_COUNTS, sums.tolist(), strict=True))
    statistics = {"response_tokens": counts["response"]}
    if counts["response"]:
        statistics["kept_share"] = counts["kept"] / counts["response"]
        statistics["weight_share"] = counts["weight"] / counts["response"]
        if counts["square"]:
            effective = counts["weight"] ** 2 / counts["square"]
            statistics["effective_share"] = effective / counts["response"]
    moments = torch.tensor([state["moments"] for state in states], dtype=torch.float64).sum(0)
    valued, total, square = moments.tolist()
    if valued:
        mean = total / valued
        statistics["total_mean"] = mean
        statistics["total_std"] = max(square / valued - mean * mean, 0.0) ** 0.5
    return {"tokens": counts["tokens"], **statistics}


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
