"""Numbers about the values of a whole data set, gathered in one pass."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.score.values import COMPONENTS, ScoredExample

__all__ = ["ComponentSummary", "Extreme", "ValueSummary", "summarise", "worded"]

_Token = tuple[float, ScoredExample, int]
"""A total, and where it is."""

_CONTEXT = 10
"""Tokens shown on each side of an extreme token."""


@dataclass(frozen=True)
class ComponentSummary:
    """Distribution of one component over all response tokens; ``positive`` is a share."""

    key: str
    count: int
    mean: float
    minimum: float
    maximum: float
    positive: float


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
    """Statistics of all examples together, for the report and the summary file.

    ``derivatives``: each way in which label values were differentiated -> its largest error.
    """

    sequences: int = 0
    tokens: int = 0
    response_tokens: int = 0
    kept_tokens: int = 0
    components: list[ComponentSummary] = field(default_factory=list)
    derivatives: dict[str, float] = field(default_factory=dict)
    highest: list[Extreme] = field(default_factory=list)
    lowest: list[Extreme] = field(default_factory=list)
    sample: list[ScoredExample] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Everything that fits a summary file (no sample)."""
        record = asdict(replace(self, sample=[]))
        del record["sample"]
        return record


def summarise(
    examples: Iterable[ScoredExample],
    *,
    sample: int = 40,
    extremes: int = 15,
    seed: int = 0,
    texts: Callable[[Sequence[int]], list[str]] | None = None,
) -> ValueSummary:
    """One pass over all examples: distributions, extremes, and a uniform sample to show.

    Args:
        examples: any number of scored sequences; only the sample is held whole.
        sample: how many sequences to keep for the heatmaps (uniform, seeded, in row order).
        extremes: how many of the highest and of the lowest tokens to keep.
        seed: of the sample.
        texts: token ids -> text of each token, for examples that come without; asked for those
            that are shown.
    """
    summary, sums = ValueSummary(), dict[str, list[float]]()
    chosen, draw = dict[int, ScoredExample](), random.Random(seed)
    high: list[_Token] = []
    low: list[_Token] = []
    for number, example in enumerate(examples):
        summary.sequences += 1
        summary.tokens += len(example.ids)
        summary.kept_tokens += int(example.kept.sum())
        # Of a stream of unknown length each example is in the sample with the same chance.
        place = number if number < sample else draw.randrange(number + 1)
        if place < sample:
            chosen[place] = example
        if (way := example.derivative) is not None:
            summary.derivatives[way] = max(example.error, summary.derivatives.get(way, 0.0))
        response = example.response
        own = {key: np.asarray(v, float)[response] for key, v in example.values.items()}
        _add(sums, own)
        summary.response_tokens += int(response.sum())
        # Of equal values the first one seen comes first.
        high += _ends(example, -own["total"], extremes)
        high = heapq.nlargest(extremes, high, key=itemgetter(0))
        low += _ends(example, own["total"], extremes)
        low = heapq.nsmallest(extremes, low, key=itemgetter(0))
    n = summary.response_tokens
    summary.components = [
        ComponentSummary(c.key, n, total / n, low, high, positive / n)
        for c in COMPONENTS
        if c.key in sums
        for total, low, high, positive in [sums[c.key]]
    ]
    summary.highest = [_extreme(worded(e, texts), place) for _, e, place in high]
    summary.lowest = [_extreme(worded(e, texts), place) for _, e, place in low]
    picked = sorted(chosen.values(), key=lambda example: example.row)
    summary.sample = [worded(example, texts) for example in picked]
    return summary


def _ends(example: ScoredExample, order: NDArray[np.float64], count: int) -> list[_Token]:
    """The first ``count`` response tokens of a sequence in this order."""
    first = np.sort(np.argsort(order, kind="stable")[:count])
    places, total = np.flatnonzero(example.response)[first], example.values["total"]
    return [(float(total[place]), example, int(place)) for place in places]


def worded(
    example: ScoredExample, texts: Callable[[Sequence[int]], list[str]] | None
) -> ScoredExample:
    """The example with the texts of its tokens, where it came without."""
    if texts is None or example.tokens:
        return example
    return replace(example, tokens=texts(example.ids))


def _add(sums: dict[str, list[float]], values: Mapping[str, NDArray[np.float64]]) -> None:
    """Add tokens to the sum, range and count of positive values of each component."""
    for key, column in values.items():
        if len(column):
            total, low, high, positive = sums.get(key, [0.0, math.inf, -math.inf, 0.0])
            sums[key] = [
                total + float(column.sum()),
                min(low, float(column.min())),
                max(high, float(column.max())),
                positive + float((column > 0).sum()),
            ]


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
