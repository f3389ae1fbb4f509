"""Numbers about the values of a whole data set, gathered in one pass."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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

MOST_TOKENS = 250_000
"""Tokens whose values are held for medians, ranks and histograms."""

_DRAWN = "drawn"


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
    texts: Callable[[Sequence[int]], list[str]] | None = None,
    most: int = MOST_TOKENS,
) -> ValueSummary:
    """One pass over all examples: distributions, extremes, and a uniform sample to show.

    Args:
        examples: any number of scored sequences; only the sample is held whole.
        stability_weight: lambda, for the shares.
        sample: how many sequences to keep for the heatmaps (uniform, seeded, in row order).
        extremes: how many of the highest and of the lowest tokens to keep.
        seed: of the sample.
        texts: token ids -> text of each token, for examples that come without; asked for those
            that are shown.
        most: of more response tokens than this, medians, rank correlations and ``columns`` are
            those of a uniform sample of so many. Everything else is of all tokens.
    """
    summary, chosen = ValueSummary(), _Reservoir(sample, seed)
    columns, moments = _Columns(most, seed), _Moments()
    high: list[_Token] = []
    low: list[_Token] = []
    for example in examples:
        summary.sequences += 1
        summary.tokens += len(example.ids)
        summary.kept_tokens += int(example.kept.sum())
        chosen.offer(example)
        response = example.response
        own = {key: np.asarray(v, float)[response] for key, v in example.values.items()}
        columns.add(own)
        moments.add(own)
        summary.response_tokens += int(response.sum())
        total, places = own["total"], np.flatnonzero(response)
        # Of equal values the first one seen comes first.
        high = heapq.nlargest(extremes, [*high, *_ends(-total, places, total, example, extremes)],
                              key=_value)  # fmt: skip
        low = heapq.nsmallest(extremes, [*low, *_ends(total, places, total, example, extremes)],
                              key=_value)  # fmt: skip
    summary.columns = columns.values()
    summary.components = _components(summary.columns, moments, stability_weight)
    summary.highest = [_extreme(_worded(e, texts), place) for _, e, place in high]
    summary.lowest = [_extreme(_worded(e, texts), place) for _, e, place in low]
    picked = sorted(chosen.items, key=lambda example: example.row)
    summary.sample = [_worded(example, texts) for example in picked]
    return summary


def _ends(
    order: NDArray[np.float64],
    places: NDArray[np.int64],
    total: NDArray[np.float64],
    example: ScoredExample,
    count: int,
) -> list[_Token]:
    """The first ``count`` tokens of a sequence in this order."""
    first = np.sort(np.argsort(order, kind="stable")[:count])
    return [(float(total[i]), example, int(places[i])) for i in first]


def _worded(
    example: ScoredExample, texts: Callable[[Sequence[int]], list[str]] | None
) -> ScoredExample:
    if texts is None or example.tokens:
        return example
    return replace(example, tokens=texts(example.ids))


class _Columns:
    """Values of all response tokens, or of a uniform sample of them where they are too many.

    Each token has a random number; those with the smallest ones are the sample.
    """

    def __init__(self, most: int, seed: int) -> None:
        self._most, self._random = most, np.random.default_rng(seed)
        self._parts: list[dict[str, NDArray[np.float64]]] = []
        self._size, self._bound = 0, 1.0

    def add(self, values: Mapping[str, NDArray[np.float64]]) -> None:
        drawn = self._random.random(len(values["total"]))
        part = {**values, _DRAWN: drawn}
        if self._bound < 1:
            part = {key: column[drawn < self._bound] for key, column in part.items()}
        self._parts.append(part)
        self._size += len(part[_DRAWN])
        if self._size > 2 * self._most:
            self._thin()

    def _thin(self) -> None:
        keys = self._parts[0]
        joined = {key: np.concatenate([part[key] for part in self._parts]) for key in keys}
        if self._size > self._most:
            self._bound = float(np.partition(joined[_DRAWN], self._most)[self._most])
            kept = joined[_DRAWN] < self._bound
            joined = {key: column[kept] for key, column in joined.items()}
        self._parts, self._size = [joined], len(joined[_DRAWN])

    def values(self) -> dict[str, NDArray[np.float64]]:
        if not self._parts:
            return {}
        self._thin()
        return {key: column for key, column in self._parts[0].items() if key != _DRAWN}


class _Moments:
    """Count, mean and range of each component, and products of deviations of each two."""

    def __init__(self) -> None:
        self.count = 0
        self.keys: list[str] = []
        self.mean = self.products = self.positive = np.zeros(())
        self.minimum, self.maximum = np.array(math.inf), np.array(-math.inf)

    def add(self, values: Mapping[str, NDArray[np.float64]]) -> None:
        """Add tokens; sums of deviations are moved to the common mean (Chan, Golub, LeVeque)."""
        self.keys, table = list(values), np.stack([*values.values()])
        more = table.shape[1]
        if not more:
            return
        both, means = self.count + more, table.mean(1)
        own, apart = table - means[:, None], means - self.mean
        shift = np.outer(apart, apart) * self.count * more / both
        self.products = self.products + own @ own.T + shift
        self.mean = self.mean + apart * more / both
        self.minimum = np.minimum(self.minimum, table.min(1))
        self.maximum = np.maximum(self.maximum, table.max(1))
        self.positive = self.positive + (table > 0).sum(1)
        self.count = both


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
    columns: Mapping[str, NDArray[np.float64]], moments: _Moments, stability_weight: float
) -> list[ComponentSummary]:
    count = moments.count
    if not count:
        return []
    ranks, total = rankdata(columns["total"]), moments.keys.index("total")
    result = []
    for key in (component.key for component in COMPONENTS if component.key in columns):
        weight = stability_weight if key.startswith("stability") else 1.0
        at = moments.keys.index(key)
        products = moments.products[at]
        result.append(
            ComponentSummary(
                key=key,
                count=count,
                mean=float(moments.mean[at]),
                deviation=math.sqrt(products[at] / count),
                minimum=float(moments.minimum[at]),
                median=float(np.median(columns[key])),
                maximum=float(moments.maximum[at]),
                positive=float(moments.positive[at] / count),
                variance_share=_ratio(weight * products[total], moments.products[total, total]),
                rank_correlation=_correlation(rankdata(columns[key]), ranks),
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
