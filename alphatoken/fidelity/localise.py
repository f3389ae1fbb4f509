"""Which linear map a wrong value comes from: the scorer's own values, one parameter at a time.

Asked only when a value is off. These numbers decide nothing; they are taken from inside the scorer
so that the certificate can name the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from alphatoken.batch import read_batch
from alphatoken.forward_mode import label_values
from alphatoken.objective import forward_losses, scoring_forward
from alphatoken.readout import ColumnSums
from alphatoken.scorer import Scorer, Weights

__all__ = ["values_by_parameter"]


def values_by_parameter(
    scorer: Scorer,
    batch: Mapping[str, Any],
    token_weights: Tensor | None,
    step_weights: Tensor | None,
) -> dict[str, dict[str, Tensor]]:
    """Component -> linear map (or, for label, parameter) -> values by position of use (b, t).

    Components are "adaptation_direct" and so on, lambda not applied; for label "adaptation" and
    "stability", by token.
    """
    checked = read_batch(batch, max_length=scorer.adapter.max_positions())
    weights = Weights.read(checked.mask, token_weights, step_weights)
    target = scorer.target
    with scorer._witness.recording() as recorder:
        with scoring_forward(scorer.adapter, target.first):
            losses = forward_losses(scorer.adapter, checked, "batch")
        sides, _ = scorer._sides(recorder, losses, checked.mask, weights, components=True)
        present = {n: s for n, s in zip(("adaptation", "stability"), sides, strict=True) if s}
        if not target.captured:
            return {
                name: {
                    parameter: label_values(
                        scorer.adapter, checked, {parameter: m}, first=target.first or 0
                    ).double().cpu()
                    for parameter, m in side.of(side.matrices).items()
                }
                for name, side in present.items()
            }  # fmt: skip
        sums = ColumnSums(recorder, list(present.values()), target.names)
        scorer._errors(recorder, losses, weights.token, sums.add)
        found: dict[str, dict[str, Tensor]] = {}
        for name, parts in zip(present, sums.found, strict=True):
            for (part, index), value in parts.items():
                linear = recorder.linears[index].linear.name
                before = found.setdefault(f"{name}_{part}", {})
                zero = torch.zeros(checked.labels.shape, dtype=torch.float64)
                before[linear] = before.get(linear, zero) + value.detach().double().cpu()
        return found
