"""Numbers about the values of a whole data set, gathered in one pass."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from alphatoken.report.examples import COMPONENTS, ScoredExample

__all__ = ["ComponentSummary", "Extreme", "ValueSummary", "summarise"]

_Token = tuple[float, ScoredExample, int]
"""A total, and where it is."""

_CONTEXT = 10
"""Tokens shown on each side of an extreme token."""


@dataclass(frozen=True)
class ComponentSummary:
    """Distribution of one component over all response tokens.

    ``variance_share`` is cov(w x, total) / var(total), w = lambda for stability and 1 otherwise:
    shares of components that add up to the total add up to 1. ``rank_correlation`` is Spearman's,
    with the total. Both are None where nothing varies.
    """

    key: str
    count: int
    mean: float
    deviation: float
    minimum: float
    median: float
    maximum: float
    positive: float
    variance_share: float | None
    rank_correlation: float | None


@dataclass(frozen=True)
class Extreme:
    """One of the highest or lowest tokens by total value, with its surroundings."""

    row: int
    place: str
    position: int
    before: str
    token: str
    after: str
    kept: bool
    values: dict[str, float]


@dataclass
class ValueSummary:
    """What the report and the summary file say about all examples together."""

    sequences: int = 0
    tokens: int = 0
    response_tokens: int = 0
    kept_tokens: int = 0
    components: list[ComponentSummary] = field(default_factory=list)
    highest: list[Extreme] = field(default_factory=list)
    lowest: list[Extreme] = field(default_factory=list)
    sample: list[ScoredExample] = field(default_factory=list)
    columns: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Everything that fits a summary file (no sample, no columns)."""
        return {
            "sequences": self.sequences,
            "tokens": self.tokens,
            "response_tokens": self.response_tokens,
            "kept_tokens": self.kept_tokens,
            "components": [asdict(component) for component in self.components],
            "highest": [asdict(extreme) for extreme in self.highest],
            "lowest": [asdict(extreme) for extreme in self.lowest],
        }


def summarise(
    examples: Iterable[ScoredExample],
    *,
    stability_weight: float = 1.0,
    sample: int = 40,
    extremes: int = 15,
    seed: int = 0,
) -> ValueSummary:
    """One pass over all examples: distributions, extremes, and a uniform sample to show.

    Args:
        examples: any number of scored sequences; only the sample is held whole.
        stability_weight: lambda, for the shares.
        sample: how many sequences to keep for the heatmaps (uniform, seeded, in row order).
        extremes: how many of the highest and of the lowest tokens to keep.
        seed: of the sample.
    """
    summary, chosen = ValueSummary(), _Reservoir(sample, seed)
    columns: dict[str, list[NDArray[np.float64]]] = {}
    high: list[_Token] = []
    low: list[_Token] = []
    for example in examples:
        summary.sequences += 1
        summary.tokens += len(example.tokens)
        summary.kept_tokens += int(example.kept.sum())
        chosen.offer(example)
        response = example.response
        for key, values in example.values.items():
            columns.setdefault(key, []).append(np.asarray(values, float)[response])
        summary.response_tokens += int(response.sum())
        total = example.values["total"]
        own = [(float(total[place]), example, int(place)) for place in np.flatnonzero(response)]
        # Of equal values the first one seen comes first.
        high = heapq.nlargest(extremes, [*high, *own], key=_value)
        low = heapq.nsmallest(extremes, [*low, *own], key=_value)
    summary.columns = {key: np.concatenate(parts) for key, parts in columns.items()}
    summary.components = _components(summary.columns, stability_weight)
    summary.highest = [_extreme(*token[1:]) for token in high]
    summary.lowest = [_extreme(*token[1:]) for token in low]
    summary.sample = sorted(chosen.items, key=lambda example: example.row)
    return summary


class _Reservoir:
    """A uniform sample of a stream of unknown length."""

    def __init__(self, size: int, seed: int) -> None:
        self.items: list[ScoredExample] = []
        self._size, self._seen, self._random = size, 0, random.Random(seed)

    def offer(self, example: ScoredExample) -> None:
        self._seen += 1
        if len(self.items) < self._size:
            self.items.append(example)
            return
        place = self._random.randrange(self._seen)
        if place < self._size:
            self.items[place] = example


def _value(token: _Token) -> float:
    return token[0]


def _extreme(example: ScoredExample, position: int) -> Extreme:
    tokens = example.tokens
    return Extreme(
        row=example.row,
        place=example.place,
        position=position,
        before="".join(tokens[max(0, position - _CONTEXT) : position]),
        token=tokens[position],
        after="".join(tokens[position + 1 : position + 1 + _CONTEXT]),
        kept=bool(example.kept[position]),
        values={key: float(values[position]) for key, values in example.values.items()},
    )


def _components(
    columns: dict[str, NDArray[np.float64]], stability_weight: float
) -> list[ComponentSummary]:
    total = columns.get("total")
    if total is None or not total.size:
        return []
    ranks = rankdata(total)
    result = []
    for key in (component.key for component in COMPONENTS if component.key in columns):
        values = columns[key]
        weight = stability_weight if key.startswith("stability") else 1.0
        result.append(
            ComponentSummary(
                key=key,
                count=int(values.size),
                mean=float(values.mean()),
                deviation=float(values.std()),
                minimum=float(values.min()),
                median=float(np.median(values)),
                maximum=float(values.max()),
                positive=float((values > 0).mean()),
                variance_share=_ratio(_covariance(weight * values, total), total.var()),
                rank_correlation=_correlation(rankdata(values), ranks),
            )
        )
    return result


def _covariance(left: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    return float(((left - left.mean()) * (right - right.mean())).mean())


def _ratio(numerator: float, denominator: float) -> float | None:
    ratio = numerator / denominator if denominator > 0 else math.nan
    return ratio if math.isfinite(ratio) else None


def _correlation(left: NDArray[np.float64], right: NDArray[np.float64]) -> float | None:
    return _ratio(_covariance(left, right), float(left.std() * right.std()))
