"""Search for the linear map of a wrong value: the scorer's own values, by parameter.

Asked only when a value is off. These numbers decide nothing; they are taken from inside the scorer
so that the certificate can name the place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from alphatoken.estimate.columns import ColumnSums
from alphatoken.estimate.forward_mode import label_values
from alphatoken.scoring.captured import Captured
from alphatoken.scoring.estimator import Estimator

__all__ = ["values_by_parameter"]


def values_by_parameter(
    estimator: Estimator[Any],
    batch: Mapping[str, Any],
    token_weights: Tensor | None,
    step_weights: Tensor | None,
) -> dict[str, dict[str, Tensor]]:
    """Component -> linear map (or, for label, parameter) -> values by position of use (b, t).

    Components are "adaptation_direct" and so on, lambda not applied; for label "adaptation" and
    "stability", by token.
    """
    scored, adapter = estimator.scored, estimator.adapter
    checked, token, step = estimator.read(batch, token_weights, step_weights)
    direction = estimator.prepare(checked)
    with estimator.forward(checked, token, step) as recording:
        sides = estimator.at_step(recording, direction).sides(components=True)
        present = {n: s for n, s in zip(("adaptation", "stability"), sides, strict=True) if s}
        if not isinstance(estimator, Captured):
            return {
                name: {
                    parameter: label_values(
                        adapter, checked, {parameter: m}, first=scored.first or 0
                    ).double().cpu()
                    for parameter, m in side.items()
                }
                for name, side in present.items()
            }  # fmt: skip
        recorder, _ = recording.recorded
        sums = ColumnSums(recorder, list(present.values()), scored.names)
        estimator.errors(recording, sums.add)
        by_place: dict[str, dict[str, Tensor]] = {}
        for name, parts in zip(present, sums.by_use, strict=True):
            for (part, index), value in parts.items():
                linear = recorder.linears[index].linear.name
                before = by_place.setdefault(f"{name}_{part}", {})
                zero = torch.zeros(checked.labels.shape, dtype=torch.float64)
                before[linear] = before.get(linear, zero) + value.detach().double().cpu()
        return by_place
