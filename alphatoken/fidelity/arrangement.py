"""The same tokens scored in another arrangement: batches and padding.

Neighbours in a batch and padding must change a value by no more than rounding. What the arrangement
does change is the threshold, where each batch has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from alphatoken.certificate.metrics import kept
from alphatoken.data import Example, batches
from alphatoken.fidelity.decisions import Agreement, agreement, over_draws
from alphatoken.fidelity.intervals import bootstrap
from alphatoken.fidelity.per_row import absolute_terms
from alphatoken.fidelity.subject import Subject
from alphatoken.scorer import Scorer

__all__ = [
    "Rearranged",
    "Reference",
    "composition",
    "padding",
    "rescored",
    "thresholds",
]

Numbers = NDArray[np.float64]

# Of a rounding difference, relative to the largest sum of absolute terms: as in the certificate.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
_NARROW = 5e-2


@dataclass(frozen=True)
class Rearranged:
    """One rearrangement and what it did.

    Attributes:
        source: "batch" or "padding".
        variant: what was changed.
        agreement: with the values before.
        error: largest difference, relative to the largest sum of absolute terms of a value (to the
            largest value, where the estimator sums none).
        tolerance: what rounding in this dtype may do.
    """

    source: str
    variant: str
    agreement: Agreement
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """True if values changed by rounding only."""
        return self.error <= self.tolerance  # False for NaN


@dataclass(frozen=True)
class Reference:
    """Values before any rearrangement.

    Attributes:
        subject: whose tokens they are.
        scorer: what made them.
        rows: the rows valued, in order.
        total: (n,) values.
        scale: what rounding is relative to.
    """

    subject: Subject
    scorer: Scorer
    rows: Sequence[Example]
    total: Numbers
    scale: float

    @classmethod
    def of(
        cls, subject: Subject, scorer: Scorer, rows: Sequence[Example], total: Numbers
    ) -> Reference:
        """With the scale measured."""
        direction = scorer.direction.total()
        found = [absolute_terms(scorer, batch, direction) for batch in subject.batches(rows)]
        sizes = [float(part.max()) for part in found if part is not None]
        return cls(subject, scorer, rows, total, max(sizes or [float(np.abs(total).max())]))

    @property
    def groups(self) -> NDArray[np.int64]:
        """(n,) row of each token."""
        return np.repeat(np.arange(len(self.rows)), [row.response_tokens for row in self.rows])

    def again(self, source: str, variant: str, **change: Any) -> Rearranged:
        """Score once more in another arrangement; see ``rescored``."""
        other = rescored(self.subject, self.scorer, self.rows, **change)
        dtype = next(iter(self.scorer.parameters.values())).dtype
        difference = float(np.abs(other - self.total).max())
        return Rearranged(
            source,
            variant,
            agreement(self.total, other, self.subject.ratio, self.groups, seed=self.subject.seed),
            difference / self.scale if self.scale > 0 else difference,
            _TOLERANCE.get(dtype, _NARROW),
        )


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


def padding(reference: Reference, extra: int) -> list[Rearranged]:
    """Padding on the left, and ``extra`` more of it on either side, as far as the model allows."""
    limit = reference.scorer.adapter.max_positions()
    longest = max(len(row.input_ids) for row in reference.rows)
    extra = extra if limit is None else max(0, min(extra, limit - longest))
    found = [reference.again("padding", "left", side="left")]
    if extra:
        found.append(reference.again("padding", f"right, {extra} more", extra=extra))
        found.append(reference.again("padding", f"left, {extra} more", side="left", extra=extra))
    return found


def composition(reference: Reference) -> list[Rearranged]:
    """Other neighbours in the batch."""
    generator = np.random.default_rng(reference.subject.seed)
    order = generator.permutation(len(reference.rows)).tolist()
    return [
        reference.again("batch", "one row a batch", size=1),
        reference.again("batch", "rows shuffled", order=order),
    ]


def thresholds(
    total: Numbers,
    groups: NDArray[Any],
    ratio: float,
    sizes: Sequence[int],
    *,
    shuffles: int,
    seed: int,
) -> list[dict[str, Any]]:
    """How decisions depend on the batch, if each keeps its own top share of the same values.

    Args:
        total: (n,) values.
        groups: row of each token.
        ratio: share to keep.
        sizes: rows a batch; those that hold all rows are left out.
        shuffles: pairs of random orders that are compared.
        seed: of the orders.
    """
    generator = np.random.default_rng((seed, 2))
    rows, pooled = np.unique(groups), kept(total, ratio)
    records = []
    for size in sorted({size for size in sizes if 1 < size < len(rows)}):
        made = np.array(
            [
                _by_batch(total, groups, generator.permutation(rows), size, ratio)
                for _ in range(2 * shuffles)
            ]
        )
        records.append(
            {
                "rows a batch": size,
                "flips between two orders": over_draws((made[::2] != made[1::2]).mean(1)),
                "flips from one threshold for all": over_draws((made != pooled).mean(1)),
            }
        )
    alone = _by_batch(total, groups, rows, 1, ratio) != pooled
    by_row = bootstrap(np.mean, alone, groups=groups, seed=seed)
    return [{"rows a batch": 1, "flips from one threshold for all": by_row}, *records]


def _by_batch(
    total: Numbers, groups: NDArray[Any], order: NDArray[Any], size: int, ratio: float
) -> NDArray[np.bool_]:
    """Kept tokens if rows come in ``order``, ``size`` a batch, each batch with its threshold."""
    chosen = np.zeros(len(total), dtype=bool)
    for start in range(0, len(order), size):
        places = np.flatnonzero(np.isin(groups, order[start : start + size]))
        chosen[places] = kept(total[places], ratio)
    return chosen
