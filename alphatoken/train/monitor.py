"""What a run reports while it goes: speed, what is kept, the values, the gap, the drift.

Statistics gather between two logs, are read once a log, and go wherever the trainer's own logs go,
under names that begin with ``alpha/``. What has gathered since the last log is part of a
checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import TrainerCallback

from alphatoken.model.sharding import MasterWeights, Sharding
from alphatoken.train.statistics import ValueSums, summary
from alphatoken.values import TokenValues

__all__ = ["TrainMonitor", "weight_drift"]


@torch.no_grad()
def weight_drift(
    parameters: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    sharding: Sharding | None = None,
    masters: MasterWeights | None = None,
) -> dict[str, float]:
    """``||theta - theta_ref||_F`` over all given parameters together, and relative to theta_ref.

    Args:
        parameters: current weights by name, as the model has them.
        reference: those of the reference, whole, at least these names, on any device.
        sharding: of the parameters, where they lie in parts; the call is then collective.
        masters: what the optimizer moves; the parameters' own values without it.

    Returns:
        ``drift`` in units of weight; ``relative_drift``, 0 where the reference is 0.
    """
    read = masters if sharding is None or masters is not None else sharding.local
    moved, whole = dict[str, Tensor](), dict[str, Tensor]()

    def together(norms: Mapping[str, Tensor]) -> float:
        if sharding is None:
            return float(torch.stack([*norms.values()]).norm())
        # The norm of a matrix is that of its parts' norms: one collective, of numbers, does.
        found = torch.tensor([*sharding.norms(norms).values()], dtype=torch.float64)
        return float(found.norm())

    wider = None if sharding is None else torch.float64  # as ``sharding.norms`` sums
    for name, weight in parameters.items():
        now = (weight.detach() if read is None else read(name, weight)).to(torch.float32)
        start = reference[name].to(now.device, torch.float32)
        start = start if sharding is None else sharding.part_of(name, start)
        moved[name], whole[name] = (now - start).norm(dtype=wider), start.norm(dtype=wider)
    if not moved:
        return {"drift": 0.0, "relative_drift": 0.0}
    distance, size = together(moved), together(whole)
    return {"drift": distance, "relative_drift": distance / size if size > 0 else 0.0}


class TrainMonitor(TrainerCallback):
    """Gathers statistics between two logs.

    Args:
        trainer: the run: its state, options and processes.
        drift: gives ``||theta - theta_ref||_F`` and the like by name; asked once a log.
    """

    def __init__(
        self, trainer: Any, drift: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        self.drift = drift
        self._trainer, self._sums = trainer, ValueSums()
        self._balance: dict[str, float] = {}
        self._looks: list[dict[str, float]] = []
        self._scoring = self._direction = 0.0
        self._earlier = 0.0  # seconds since the last log that an interrupted run spent
        self._since = time.monotonic()

    # --- what is handed in -------------------------------------------------------------------

    def record(
        self,
        weights: Tensor,
        mask: Tensor,
        values: TokenValues | None,
        *,
        seconds: float = 0.0,
        tokens: Tensor | int | None = None,
    ) -> None:
        """One micro-batch of this process.

        Args:
            weights: (b, t) training weight of each token.
            mask: (b, t) response tokens.
            values: their values, if they were scored now.
            seconds: spent on scoring.
            tokens: tokens that are not padding; None counts all places.
        """
        count = mask.numel() if tokens is None else tokens
        self._sums.add(weights, mask, values, tokens=count)
        self._scoring += seconds
        if values is not None and values.balance:
            self._balance = values.balance

    def direction(self, seconds: float) -> None:
        """What values are taken against was made anew: validation and retention gradient.

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
        now = time.monotonic()
        mine = {
            "sums": self._sums.state(),
            "seconds": now - self._since + self._earlier,
            "scoring": self._scoring,
            "direction": self._direction,
        }
        parts = gather_object([mine])
        statistics = summary([part["sums"] for part in parts])
        seconds = max(part["seconds"] for part in parts)
        statistics["tokens_per_second"] = statistics.pop("tokens") / seconds if seconds > 0 else 0.0
        for name in ("scoring", "direction"):
            statistics[f"{name}_seconds"] = max(part[name] for part in parts)
        if self._balance:
            statistics["balance"] = median(self._balance.values())
        if self._looks:
            statistics |= self._validation()
        if self.drift is not None:
            statistics |= self.drift()
        self._sums.clear()
        self._since, self._earlier = now, 0.0
        self._scoring = self._direction = 0.0
        return {f"alpha/{name}": float(value) for name, value in statistics.items()}

    def _validation(self) -> dict[str, float]:
        last = self._looks[-1]
        objectives = {f"validation_{k}": v for k, v in last.items() if k not in ("step", "gap")}
        return {**objectives, "validation_gap": last["gap"], "validation_alarm": float(self.alarm)}

    @property
    def alarm(self) -> bool:
        """Whether the held-out objective has risen above its best while the pool's has not.

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
        """What has gathered since the last log, as plain JSON values."""
        return {
            "sums": self._sums.state(),
            "balance": self._balance,
            "looks": self._looks,
            "seconds": time.monotonic() - self._since + self._earlier,
            "scoring": self._scoring,
            "direction": self._direction,
        }

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_values` gave."""
        self._sums.load(values["sums"])
        self._balance, self._looks = dict(values["balance"]), list(values["looks"])
        self._earlier, self._scoring = float(values["seconds"]), float(values["scoring"])
        self._direction = float(values["direction"])
        self._since = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the clock."""
        self._since = time.monotonic()
