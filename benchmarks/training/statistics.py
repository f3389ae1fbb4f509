"""Means over seeds with their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import t as student


@dataclass(frozen=True)
class Mean:
    """A mean, the half width of its 95 % t-interval (nan for one value), and how many values."""

    mean: float
    half: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Over independent repetitions."""
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(mean, math.nan, len(values))
        error = statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean, float(student.ppf(0.975, len(values) - 1)) * error, len(values))

    @property
    def clear(self) -> bool:
        """Whether the interval leaves 0 out."""
        return abs(self.mean) > self.half

    def text(self, sign: str = "", digits: int = 3) -> str:
        """``mean ± half``; without an interval the mean alone."""
        mean = f"{self.mean:{sign}.{digits}f}"
        return mean if math.isnan(self.half) else f"{mean} ± {self.half:.{digits}f}"
