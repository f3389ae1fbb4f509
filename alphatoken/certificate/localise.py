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
from alphatoken.scoring.valuing import Valuer

__all__ = ["values_by_parameter"]


def values_by_parameter(
    valuer: Valuer,
    batch: Mapping[str, Any],
    token_weights: Tensor | None,
    step_weights: Tensor | None,
) -> dict[str, dict[str, Tensor]]:
    """Component -> linear map (or, for label, parameter) -> values by position of use (b, t).

    Components are "adaptation_direct" and so on, lambda not applied; for label "adaptation" and
    "stability", by token.
    """
    scored = valuer.scored
    checked, weights = valuer.read(batch, token_weights, step_weights)
    frame = valuer.prepare(checked)
    with valuer.forward(checked, weights) as seen:
        *sides, _ = valuer.at(frame, seen).sides(components=True)
        present = {n: s for n, s in zip(("adaptation", "stability"), sides, strict=True) if s}
        if not valuer.config.captured:
            return {
                name: {
                    parameter: label_values(
                        valuer.adapter, checked, {parameter: m}, first=scored.first or 0
                    ).double().cpu()
                    for parameter, m in side.whole().items()
                }
                for name, side in present.items()
            }  # fmt: skip
        recorder, _ = seen.recorded
        sums = ColumnSums(recorder, list(present.values()), scored.names)
        valuer.errors(seen, sums.add)
        found: dict[str, dict[str, Tensor]] = {}
        for name, parts in zip(present, sums.found, strict=True):
            for (part, index), value in parts.items():
                linear = recorder.linears[index].linear.name
                before = found.setdefault(f"{name}_{part}", {})
                zero = torch.zeros(checked.labels.shape, dtype=torch.float64)
                before[linear] = before.get(linear, zero) + value.detach().double().cpu()
        return found
