"""Counts of attention's pairs during training, in fixed cells, by step, kept in a file.

A pair (t, k) of one layer and head has an attention weight ``alpha_{t->k}``, a normalised deviation
``d = ||v_t - o_k|| / sqrt(d_h)`` and a risk ``alpha d``. Their logarithms (base 10) are counted in
16 cells a power of ten, the same for every step and run: so counts add up, a run of any length
takes a fixed number of bytes a look, and shares above powers of ten of the risk are exact.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from alphatoken.errors import DataError
from alphatoken.support.storage import read_tensors, write_tensors

__all__ = ["ALPHA", "DEVIATION", "RISK", "CollectedPairs", "PairCounts"]

Counts = NDArray[np.int64]
_KIND, _FORMAT = "alphatoken collected pairs", "1"
_CELLS = 16  # a power of ten


def _edges(low: int, high: int) -> NDArray[np.float64]:
    return np.linspace(low, high, (high - low) * _CELLS + 1)


ALPHA, DEVIATION, RISK = _edges(-8, 0), _edges(-4, 4), _edges(-12, 4)
"""Edges of the cells, in powers of ten; what lies beyond is counted in the cell at that end."""


@dataclass(frozen=True)
class PairCounts:
    """Counts of pairs in one layer, all heads.

    Attributes:
        joint: (alpha, deviation) cells.
        risk: cells of alpha times deviation.
    """

    joint: Counts
    risk: Counts

    @classmethod
    def of(cls, alpha: NDArray[Any], deviation: NDArray[Any]) -> PairCounts:
        """Count pairs; those that a mask hides (weight exactly 0) are left out.

        Args:
            alpha: attention weights, of any shape.
            deviation: ``||v_t - o_k|| / sqrt(d_h)``, of the same shape.
        """
        seen = alpha > 0
        weight, away = (x[seen].astype(np.float64) for x in (alpha, deviation))
        columns = [
            np.clip(np.log10(np.maximum(x, 1e-300)), edges[0], edges[-1])
            for x, edges in ((weight, ALPHA), (away, DEVIATION), (weight * away, RISK))
        ]
        joint, _, _ = np.histogram2d(columns[0], columns[1], bins=(ALPHA, DEVIATION))
        risk, _ = np.histogram(columns[2], bins=RISK)
        return cls(joint.astype(np.int64), risk.astype(np.int64))

    @classmethod
    def total(cls, counts: Iterable[PairCounts]) -> PairCounts:
        """Counts of all together; of none, zeros."""
        joint = np.zeros((len(ALPHA) - 1, len(DEVIATION) - 1), np.int64)
        risk = np.zeros(len(RISK) - 1, np.int64)
        for one in counts:
            joint, risk = joint + one.joint, risk + one.risk
        return cls(joint, risk)

    def __add__(self, other: PairCounts) -> PairCounts:
        """Counts of both together."""
        return PairCounts.total([self, other])

    @property
    def pairs(self) -> int:
        """The number of pairs counted."""
        return int(self.risk.sum())

    def share_above(self, level: float) -> float:
        """Share of the pairs with alpha times deviation at or above ``level``.

        Exact for powers of ten; between them the level is moved to the next edge of a cell.
        """
        first = math.ceil(round((math.log10(level) - RISK[0]) * _CELLS, 6))
        above = int(self.risk[max(first, 0) :].sum())
        return above / self.pairs if self.pairs else math.nan


@dataclass
class CollectedPairs:
    """Counts by step and layer, and what they are of.

    Attributes:
        about: probe and settings: plain JSON values, the same for all steps.
        steps: optimizer step -> layer -> counts.
    """

    about: dict[str, Any]
    steps: dict[int, dict[int, PairCounts]] = field(default_factory=dict)

    @property
    def layers(self) -> list[int]:
        """Layers that were looked at."""
        return sorted({layer for found in self.steps.values() for layer in found})

    def total(self, steps: Iterable[int] | None = None) -> PairCounts:
        """Counts of all layers over these steps, or over all."""
        chosen = self.steps if steps is None else steps
        return PairCounts.total(one for step in chosen for one in self.steps[step].values())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all.

        Raises:
            DataError: it could not be written.
        """
        tensors = {
            f"{step}/{layer}/{name}": torch.from_numpy(getattr(counts, name))
            for step, found in sorted(self.steps.items())
            for layer, counts in sorted(found.items())
            for name in ("joint", "risk")
        }
        metadata = {"kind": _KIND, "format": _FORMAT, "about": json.dumps(self.about)}
        write_tensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CollectedPairs:
        """Read what ``save`` wrote.

        Raises:
            DataError: no such file, damaged, or of another kind.
        """
        tensors, metadata = read_tensors(path)
        if (metadata.get("kind"), metadata.get("format")) != (_KIND, _FORMAT):
            raise DataError(
                "the file holds no collected pairs",
                got=f"{path}: {metadata.get('kind', 'another kind of file')}",
                remedy="the file that the callback watch_pairs of the lab writes",
            )
        found = cls(json.loads(metadata["about"]))
        for name in (one for one in tensors if one.endswith("/joint")):
            step, layer, _ = name.split("/")
            counts = PairCounts(tensors[name].numpy(), tensors[f"{step}/{layer}/risk"].numpy())
            found.steps.setdefault(int(step), {})[int(layer)] = counts
        return found
