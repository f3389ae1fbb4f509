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
    """Counts, first and second moments, and summed magnitudes.

    Micro-batches may come with components or without: each name counts its own tokens.
    Adding a micro-batch reads nothing from the device; :meth:`state` does.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._moments: dict[str, Tensor] = {}  # name -> (4,): tokens, sum, squares, magnitudes

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
        if values is not None:
            self._add_values(values, wide)

    def _add_values(self, values: TokenValues, wide: torch.dtype) -> None:
        parts = {"total": values.total, **values.components()}
        zero = torch.zeros((), device=values.mask.device)
        table = torch.stack(
            [torch.where(values.mask, part.detach(), zero) for part in parts.values()]
        )
        rows = table.flatten(1).to(wide)
        count = values.mask.sum().to(wide).expand(len(rows))
        moments = torch.stack([count, rows.sum(1), rows.square().sum(1), rows.abs().sum(1)], 1)
        for name, moment in zip(parts, moments, strict=True):
            before = self._moments.get(name)
            self._moments[name] = moment if before is None else before.to(moment) + moment

    def state(self) -> dict[str, Any]:
        """Everything, as plain JSON values; floats come back bit for bit."""
        moments = torch.stack([*self._moments.values()]).tolist() if self._moments else []
        return {
            "counts": [0.0] * len(_COUNTS) if self._counts is None else self._counts.tolist(),
            "moments": dict(zip(self._moments, moments, strict=True)),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state` gave."""
        self._counts = torch.tensor(state["counts"], dtype=torch.float64)
        self._moments = {
            name: torch.tensor(moments, dtype=torch.float64)
            for name, moments in state["moments"].items()
        }

    def clear(self) -> None:
        """Start the next interval."""
        self._counts, self._moments = None, {}


def summary(states: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Named statistics of the processes' sums together.

    ``kept_share``: kept tokens over response tokens. ``weight_share``: summed weights over
    response tokens (the same for masks). ``effective_share``: effective sample size of the
    weights, ``(sum w)^2 / sum w^2``, over response tokens (the same for masks).
    ``{component}_share``: its part of the summed magnitudes of all components, as they enter the
    total. Means and deviations are over valued tokens, those of a component over the tokens that
    came with it.
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
    moments: dict[str, Tensor] = {}
    for name, part in (item for state in states for item in state["moments"].items()):
        moments[name] = moments.get(name, 0) + torch.tensor(part, dtype=torch.float64)
    statistics |= _by_component({name: part.tolist() for name, part in moments.items()})
    return {"tokens": counts["tokens"], **statistics}


def _by_component(moments: Mapping[str, Sequence[float]]) -> dict[str, float]:
    statistics: dict[str, float] = {}
    whole = sum(part[3] for name, part in moments.items() if name != "total")
    for name, (count, total, square, size) in moments.items():
        if not count:
            continue
        mean = total / count
        statistics[f"{name}_mean"] = mean
        statistics[f"{name}_std"] = max(square / count - mean * mean, 0.0) ** 0.5
        if name != "total":
            statistics[f"{name}_share"] = size / whole if whole > 0 else 0.0
    return statistics


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
