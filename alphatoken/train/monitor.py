"""Reports during a run: kept tokens, the validation gap, the time.

Statistics gather between two logs, are read once a log, and go wherever the trainer's own logs go,
under names that begin with ``alpha/``. What has gathered since the last log is part of a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from alphatoken.values import TokenValues

__all__ = ["TrainMonitor"]


class TrainMonitor:
    """Gathers statistics between two logs."""

    def __init__(self) -> None:
        self._counts: Tensor | None = None  # (4,): response and kept tokens, sum w, sum w^2
        self._balance: dict[str, float] = {}
        self._look: dict[str, float] = {}
        self._derivatives: dict[str, float] = {}
        self._scoring = self._direction = 0.0

    # --- what is handed in -------------------------------------------------------------------

    @torch.no_grad()
    def record(
        self,
        weights: Tensor,
        mask: Tensor,
        values: TokenValues | None,
        *,
        seconds: float = 0.0,
    ) -> None:
        """One micro-batch of this process; reads nothing from the device.

        Args:
            weights: (b, t) training weight of each token.
            mask: (b, t) response tokens.
            values: their values, if they were scored now.
            seconds: spent on scoring.
        """
        wide = torch.float32 if mask.device.type == "mps" else torch.float64
        kept = weights.detach() * mask
        columns = [
            mask.sum(),
            (kept > 0).sum(),
            kept.sum(dtype=wide),
            kept.to(wide).square().sum(),
        ]
        counts = torch.stack([count.to(mask.device, wide) for count in columns])
        self._counts = counts if self._counts is None else self._counts.to(counts) + counts
        self._scoring += seconds
        if values is not None and values.balance:
            self._balance = values.balance
        if values is not None and (way := values.derivative) is not None:
            self._derivatives[way] = max(values.error, self._derivatives.get(way, 0.0))

    def direction(self, seconds: float) -> None:
        """Add the seconds spent on building the validation and retention gradients."""
        self._direction += seconds

    def gap(self, step: int, objectives: Mapping[str, float]) -> None:
        """A look at the validation objective: ``pool``, ``held_out`` and ``gap``."""
        if objectives:
            self._look = {"step": float(step), **objectives}

    @property
    def looked_at(self) -> int | None:
        """Step of the last look, or None."""
        return int(self._look["step"]) if self._look else None

    # --- what is logged ---------------------------------------------------------------------

    def logs(self) -> dict[str, float]:
        """Statistics since the last call, over all processes (each must call it); then empty.

        ``kept_share``: kept tokens over response tokens. ``weight_share``: summed weights over
        response tokens (the same for masks). ``effective_share``: effective sample size of the
        weights, ``(sum w)^2 / sum w^2``, over response tokens (the same for masks).
        """
        parts = gather_object([self.state_values()])
        counts = torch.tensor([part["counts"] for part in parts], dtype=torch.float64).sum(0)
        response, kept, weight, square = counts.tolist()
        statistics = {"response_tokens": response}
        if response:
            statistics["kept_share"] = kept / response
            statistics["weight_share"] = weight / response
            if square:
                statistics["effective_share"] = weight**2 / square / response
        for name in ("scoring", "direction"):
            statistics[f"{name}_seconds"] = max(part[name] for part in parts)
        if self._balance:
            statistics["balance"] = median(self._balance.values())
        for name, value in self._look.items():
            if name != "step":
                statistics[f"validation_{name}"] = value
        self._counts = None
        self._scoring = self._direction = 0.0
        return {f"alpha/{name}": float(value) for name, value in statistics.items()}

    def derivatives(self) -> dict[str, float]:
        """Ways of the run's label values -> largest error, over all processes (each calls it)."""
        errors: dict[str, float] = {}
        for part in gather_object([self._derivatives]):
            for way, error in part.items():
                errors[way] = max(error, errors.get(way, 0.0))
        return errors

    # --- the checkpoint's part --------------------------------------------------------------

    def state_values(self) -> dict[str, Any]:
        """Statistics gathered since the last log, as JSON values that restore bitwise."""
        return {
            "counts": [0.0] * 4 if self._counts is None else self._counts.tolist(),
            "balance": self._balance,
            "look": self._look,
            "derivatives": self._derivatives,
            "scoring": self._scoring,
            "direction": self._direction,
        }

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_values` gave."""
        self._counts = torch.tensor(values["counts"], dtype=torch.float64)
        self._balance, self._look = dict(values["balance"]), dict(values["look"])
        self._derivatives = dict(values["derivatives"])
        self._scoring, self._direction = float(values["scoring"]), float(values["direction"])
