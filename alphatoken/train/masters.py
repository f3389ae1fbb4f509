"""The float32 weights that DeepSpeed's optimizer moves, where the model holds 16-bit copies.

A weight in bfloat16 is rounded to 2^-9 of itself. Early in a run, and at small learning rates, it
has moved by less than that from the reference, so that a drift read off the copies is rounding.
The optimizer's own weights have none. They began as what the copies were then, so the reference is
rounded as those were, and the drift is exactly zero at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken.direction.drift import FisherDrift
from alphatoken.model.sharding import MasterWeights
from alphatoken.train.layouts import layout, sharding_of
from alphatoken.train.shards import Zero3Sharding

__all__ = ["Masters", "masters_of"]


@dataclass(frozen=True)
class Masters:
    """Weights that the optimizer moves.

    Attributes:
        weight: name and parameter to its weight, whole, or a part under ZeRO-3. Collective.
        dtypes: of the model's copies, by name.
    """

    weight: MasterWeights
    dtypes: Mapping[str, torch.dtype]

    def started(self, drift: FisherDrift) -> FisherDrift:
        """The same Fisher, its reference as the optimizer's began: rounded as the copy was."""
        reference = {n: w.to(self.dtypes[n]).to(w.dtype) for n, w in drift.reference.items()}
        return FisherDrift(drift.fisher, reference, drift.metadata, drift.factors)


def masters_of(accelerator: Any, model: nn.Module) -> Masters | None:
    """Master weights of a prepared model; None if there are none, or if they are kept on disk."""
    if not layout(accelerator).startswith("zero"):
        return None
    plain = accelerator.unwrap_model(model)
    parameters = dict(plain.named_parameters(remove_duplicate=False))
    dtypes = {name: p.dtype for name, p in parameters.items()}
    if not any(dtype in (torch.bfloat16, torch.float16) for dtype in dtypes.values()):
        return None
    sharding = sharding_of(accelerator, model)
    if isinstance(sharding, Zero3Sharding):
        optimizers = (getattr(p, "_z3_optimizer", None) for p in parameters.values())
        if any(getattr(optimizer, "swap_optimizer", False) for optimizer in optimizers):
            return None  # on disk: each matrix would cost a read of its whole group
        return Masters(sharding.master, dtypes)

    @torch.no_grad()
    def whole(name: str, parameter: Tensor) -> Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        master = safe_get_full_fp32_param(parameters[name])
        return parameter.detach() if master is None else master

    return Masters(whole, dtypes)
