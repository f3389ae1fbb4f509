"""The same tokens scored in another arrangement: other batches, other padding.

Neighbours in a batch and padding must change a value by no more than rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from alphatoken.data import Example, batches
from alphatoken.fidelity.agreement import agreement
from alphatoken.fidelity.subject import Subject, places_of
from alphatoken.scorer import Scorer

__all__ = ["rearranged", "rescored"]

Numbers = NDArray[np.float64]

# Of a rounding difference, relative to the largest value, whose terms may cancel.
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
_NARROW = 1e-1


def rearranged(
    subject: Subject, scorer: Scorer, rows: Sequence[Example], total: Numbers, extra: int
) -> list[dict[str, Any]]:
    """What other neighbours in the batch and other padding do to the values ``total`` of ``rows``.

    Args:
        subject: whose tokens they are.
        scorer: what made the values.
        rows: the rows valued, in order.
        total: (n,) values.
        extra: padding positions added on a side, as far as the model allows.

    Returns:
        Records of "source" ("batch" or "padding"), "variant", the measures of ``agreement``,
        "error" (largest difference over the largest value), "tolerance", "rounding only".
    """
    limit, longest = scorer.adapter.max_positions(), max(len(row.input_ids) for row in rows)
    extra = extra if limit is None else max(0, min(extra, limit - longest))
    order = np.random.default_rng(subject.seed).permutation(len(rows)).tolist()
    tried: list[tuple[str, str, dict[str, Any]]] = [
        ("batch", "one row a batch", {"size": 1}),
        ("batch", "rows shuffled", {"order": order}),
        ("padding", "left", {"side": "left"}),
    ]
    if extra:
        tried.append(("padding", f"right, {extra} more", {"extra": extra}))
        tried.append(("padding", f"left, {extra} more", {"side": "left", "extra": extra}))
    groups, size = places_of(rows)[:, 0], float(np.abs(total).max())
    allowed = _TOLERANCE.get(next(iter(scorer.parameters.values())).dtype, _NARROW)
    records = []
    for source, variant, change in tried:
        other = rescored(subject, scorer, rows, **change)
        error = float(np.abs(other - total).max()) / (size or 1.0)
        found = agreement(total, other, subject.ratio, groups, seed=subject.seed)
        records.append(
            {"source": source, "variant": variant, **found, "error": error, "tolerance": allowed,
             "rounding only": error <= allowed}  # False for NaN
        )  # fmt: skip
    return records


def rescored(
    subject: Subject,
    scorer: Scorer,
    rows: Sequence[Example],
    *,
    order: Sequence[int] | None = None,
    size: int | None = None,
    side: str = "right",
    extra: int = 0,
) -> Numbers:
    """Totals of the tokens of ``rows``, in their own order, scored in another arrangement.

    Args:
        subject: whose batch size is the default.
        scorer: of the values.
        rows: encoded.
        order: in which the rows come into batches.
        size: rows a batch.
        side: of the padding.
        extra: padding positions beyond the longest row of each batch.
    """
    places = list(range(len(rows))) if order is None else list(order)
    found: list[Numbers] = [np.zeros(0)] * len(rows)
    size = size or subject.batch_size
    made = batches([rows[place] for place in places], size, padding_side=side)
    for number, batch in enumerate(made):
        values = scorer.score(_padded(batch, extra, side, subject.device))
        for index, (total, mask) in enumerate(zip(values.total, values.mask, strict=True)):
            row = places[number * size + index]
            found[row] = total[mask].detach().double().cpu().numpy()
    return np.concatenate(found)


def _padded(
    batch: Mapping[str, Tensor], extra: int, side: str, device: torch.device
) -> dict[str, Tensor]:
    """``extra`` more padding positions; position ids on the left count real tokens only."""
    pads = (extra, 0) if side == "left" else (0, extra)
    return {
        name: F.pad(tensor, pads, value=-100 if name == "labels" else 0).to(device)
        for name, tensor in batch.items()
    }
