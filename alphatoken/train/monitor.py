"""Reports during a run: kept tokens, values, the validation gap, the time.

Statistics gather between two logs, are read once a log, and go wherever the trainer's own logs go,
under names that begin with ``alpha/``. What has gathered since the last log is part of a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from alphatoken.values import TokenValues

__all__ = ["TrainMonitor", "ValueSums", "summary"]

_COUNTS = ("response", "kept", "weight", "square")


class ValueSums:
    """Counts, and of the values tokens, sum and squares.

    Adding a micro-batch reads nothing from the device; :meth:`state` does.
    """

    def __init__(self) -> None:
        self._counts: Tensor | None = None
        self._moments: Tensor | None = None  # (3,): tokens, sum, squares of the totals

    @torch.no_grad()
    def add(self, weights: Tensor, mask: Tensor, values: TokenValues | None) -> None:
        """Add one micro-batch to the sums.

        Args:
            weights: (b, t) training weight of each token.
            mask: (b, t) response tokens.
            values: their values, if they were scored now.
        """
        wide, response = _wide(mask.device), mask.sum()
        kept = weights.detach() * mask
        columns = [
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
    return statistics


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


class TrainMonitor:
    """Gathers statistics between two logs."""

    def __init__(self) -> None:
        self._sums = ValueSums()
        self._balance: dict[str, float] = {}
        self._looks: list[dict[str, float]] = []
        self._scoring = self._direction = 0.0

    # --- what is handed in -------------------------------------------------------------------

    def record(
        self,
        weights: Tensor,
        mask: Tensor,
        values: TokenValues | None,
        *,
        seconds: float = 0.0,
    ) -> None:
        """One micro-batch of this process.

        Args:
            weights: (b, t) training weight of each token.
            mask: (b, t) response tokens.
            values: their values, if they were scored now.
            seconds: spent on scoring.
        """
        self._sums.add(weights, mask, values)
        self._scoring += seconds
        if values is not None and values.balance:
            self._balance = values.balance

    def direction(self, seconds: float) -> None:
        """Add the time of building the validation and retention gradients.

        Args:
            seconds: spent on it.
        """
        self._direction += seconds

    def gap(self, step: int, objectives: Mapping[str, float]) -> None:
        """A look at the validation objective: ``pool``, ``held_out`` and ``gap``."""
        if objectives:
            self._looks.append({"step": float(step), **objectives})

    @property
    def looked_at(self) -> int | None:
        """Step of the last look, or None."""
        return int(self._looks[-1]["step"]) if self._looks else None

    # --- what is logged ---------------------------------------------------------------------

    def logs(self) -> dict[str, float]:
        """Statistics since the last call, over all processes (each must call it); then empty."""
        mine = {
            "sums": self._sums.state(),
            "scoring": self._scoring,
            "direction": self._direction,
        }
        parts = gather_object([mine])
        statistics = summary([part["sums"] for part in parts])
        for name in ("scoring", "direction"):
            statistics[f"{name}_seconds"] = max(part[name] for part in parts)
        if self._balance:
            statistics["balance"] = median(self._balance.values())
        if self._looks:
            statistics |= self._validation()
        self._sums.clear()
        self._scoring = self._direction = 0.0
        return {f"alpha/{name}": float(value) for name, value in statistics.items()}

    def _validation(self) -> dict[str, float]:
        last = self._looks[-1]
        objectives = {f"validation_{k}": v for k, v in last.items() if k not in ("step", "gap")}
        return {**objectives, "validation_gap": last["gap"], "validation_alarm": float(self.alarm)}

    @property
    def alarm(self) -> bool:
        """True if the held-out objective has risen above its best while the pool's has not.

        Risen: by more than 2 % of the best; so the run now fits the validation rows themselves.
        """
        if len(self._looks) < 2:
            return False
        best = min(self._looks, key=lambda look: look["held_out"])
        last = self._looks[-1]
        risen = last["held_out"] - best["held_out"] > 0.02 * abs(best["held_out"])
        return risen and last["pool"] <= best["pool"]

    # --- the checkpoint's part --------------------------------------------------------------

    def state_values(self) -> dict[str, Any]:
        """Statistics gathered since the last log, as plain JSON values."""
        return {
            "sums": self._sums.state(),
            "balance": self._balance,
            "looks": self._looks,
            "scoring": self._scoring,
            "direction": self._direction,
        }

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_values` gave."""
        self._sums.load(values["sums"])
        self._balance, self._looks = dict(values["balance"]), list(values["looks"])
        self._scoring, self._direction = float(values["scoring"]), float(values["direction"])
