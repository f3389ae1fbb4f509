"""What a run's accumulated values mean: a decrease of the loss, or not, by its optimizer."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["PLAIN", "ledger_unit"]

PLAIN = "step size times value, summed over visits"
"""What accumulated values are in any run."""


def ledger_unit(optimizer: Any, preconditioner: str | None, after: int) -> str:
    """One sentence on the ledger of a run that had this optimizer.

    ``sum of lr <M, grad l_u>`` over all tokens is ``lr <M, g>``. That is the decrease of J, to
    first order, where the step is ``-lr g`` and M = G: in SGD without momentum or weight decay.
    An adaptive optimizer steps elsewhere, with momentum a gradient acts on later steps too, and
    decay moves the weights along themselves; no value holds these. Measured
    (``tests/integration/test_ledger_unit.py``): the decrease is 1.0 times the sum under SGD, 26
    times under AdamW, 14 times with ``preconditioner="full"``, and 1.05 times with that and without
    momentum.

    Args:
        optimizer: of the run, wrapped or not.
        preconditioner: the option.
        after: steps before which the preconditioner is 1.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    name = type(inner).__name__
    if (obstacle := _obstacle(inner, preconditioner)) is not None:
        return f"{PLAIN}; no decrease of a loss, since {name} {obstacle}"
    if preconditioner == "full":
        return (
            f"predicted decrease of the validation objective by the steps of {name} from step "
            f"{after} on, where no gradient is cut ({PLAIN})"
        )
    return f"predicted decrease of the validation objective, where no gradient is cut ({PLAIN})"


def _obstacle(optimizer: Any, preconditioner: str | None) -> str | None:
    """Why the sum is no decrease; None where it is one."""
    if preconditioner == "frozen":
        return "has a denominator that moves with the gradient, which no value counts"
    if preconditioner != "full" and type(optimizer) is not torch.optim.SGD:
        return "steps along another direction than the gradient"
    groups = optimizer.param_groups
    if any(group.get("momentum") or (group.get("betas") or (0.0,))[0] != 0.0 for group in groups):
        return "carries a gradient into later steps by its momentum, which no value counts"
    if any(group.get("weight_decay") for group in groups):
        return "moves weights toward zero as well (weight_decay), which no value counts"
    if any(group.get("maximize") for group in groups):
        return "climbs the loss (maximize)"
    if len({float(group.get("initial_lr", group["lr"])) for group in groups}) > 1:
        return "has several step sizes, and a value is multiplied by the first"
    return None
