"""Numbers about the values of a whole data set, gathered in one pass."""

from __future__ import annotations

import heapq
import math
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.score.token_kinds import PAGE_KINDS, page_kinds
from alphatoken.score.values import COMPONENTS, LOSS, ScoredExample

TokenRank = tuple[float, ScoredExample, int]
"""The total of one of the highest or lowest tokens, its sequence, and its position there."""

RankedRow = tuple[float, ScoredExample]
"""The mean value, or loss, of one of the highest or lowest rows, and the row."""

# Tokens shown on each side of an extreme token.
_CONTEXT = 10

# Rows at each end of a page.
_ROW_ENDS = 3

LOWEST, HIGHEST_LOSS, HIGHEST = "lowest mean value", "highest mean loss", "highest mean value"
"""The ends by which rows are odd, in the order in which pages and terminals name them: spoiled rows
are often at the first two."""

_UNCOUNTED = (
    *("sample", "row_means", "row_losses"),
    *("highest_rows", "lowest_rows", "highest_losses"),
)
"""What a summary file has no place for, or has from the value files."""


@dataclass
class ValueSummary:
    """Statistics of all examples together, for the report and the summary file.

    Attributes:
        components: key -> ``count`` of the response tokens, ``mean``, ``minimum``, ``maximum``, and
            ``positive``, the share above 0.
        derivatives: each way in which label values were differentiated -> its largest error.
        highest: the tokens of highest total, of equal ones the first.
        lowest: those of lowest total.
        kinds: kind of token -> ``count``, ``sum`` of the totals, and ``negative``, how many of them
            are below 0; empty where no token has a text.
        row_means: the mean total of each sequence with a response.
        row_losses: the mean loss of each of these, NaN where it is not known.
        highest_rows: the sequences of highest mean total, the highest first.
        lowest_rows: those of lowest mean total, the lowest first; none is at both ends.
        highest_losses: those of highest mean loss, the highest first, of those that have one.
        sample: sequences for the page, in row order.
    """

    sequences: int = 0
    tokens: int = 0
    response_tokens: int = 0
    kept_tokens: int = 0
    components: dict[str, dict[str, float]] = field(default_factory=dict)
    derivatives: dict[str, float] = field(default_factory=dict)
    highest: list[TokenRank] = field(default_factory=list)
    lowest: list[TokenRank] = field(default_factory=list)
    kinds: dict[str, dict[str, float]] = field(default_factory=dict)
    row_means: array[float] = field(default_factory=lambda: array("d"))
    row_losses: array[float] = field(default_factory=lambda: array("d"))
    highest_rows: list[RankedRow] = field(default_factory=list)
    lowest_rows: list[RankedRow] = field(default_factory=list)
    highest_losses: list[RankedRow] = field(default_factory=list)
    sample: list[ScoredExample] = field(default_factory=list)

    def row_ends(self) -> dict[str, list[RankedRow]]:
        """The rows at each end, by its name."""
        ends = (self.lowest_rows, self.highest_losses, self.highest_rows)
        return dict(zip((LOWEST, HIGHEST_LOSS, HIGHEST), ends, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """Everything that fits a summary file: no sample, and no row but in ``highest``."""
        return {
            **{name: value for name, value in vars(self).items() if name not in _UNCOUNTED},
            "components": [{"key": key, **numbers} for key, numbers in self.components.items()],
            "kinds": [{"kind": kind, **numbers} for kind, numbers in self.kinds.items()],
            "highest": [_record(*token) for token in self.highest],
            "lowest": [_record(*token) for token in self.lowest],
        }


def summarise(
    examples: Iterable[ScoredExample],
    *,
    sample: int = 200,
    extremes: int = 15,
    seed: int = 0,
    texts: Callable[[Sequence[int]], list[str]] | None = None,
) -> ValueSummary:
    """One pass over all examples: distributions, extremes, and a uniform sample to show.

    Args:
        examples: any number of scored sequences; held are the sample and those of extreme tokens.
        sample: how many sequences to keep for the page (uniform, seeded, in row order).
        extremes: how many of the highest and of the lowest tokens to keep.
        seed: of the sample.
        texts: token ids -> text of each token, for examples that come without; asked for those
            that are shown, and one by one for the kinds of all.
    """
    summary, sums = ValueSummary(), dict[str, list[float]]()
    chosen, draw = dict[int, ScoredExample](), random.Random(seed)
    high: list[TokenRank] = []
    low: list[TokenRank] = []
    kinds = _Kinds(texts)
    for index, example in enumerate(examples):
        summary.sequences += 1
        summary.tokens += len(example.ids)
        summary.kept_tokens += int(example.kept.sum())
        # Of a stream of unknown length each example is in the sample with the same chance.
        place = index if index < sample else draw.randrange(index + 1)
        if place < sample:
            chosen[place] = example
        if (way := example.derivative) is not None:
            summary.derivatives[way] = max(example.error, summary.derivatives.get(way, 0.0))
        response = example.response
        kinds.add(example)
        _rank_row(summary, example)
        own = {key: np.asarray(v, float)[response] for key, v in example.values.items()}
        _add(sums, own)
        summary.response_tokens += int(response.sum())
        # Of equal values the first one seen comes first.
        high += _ends(example, -own["total"], extremes)
        high = heapq.nlargest(extremes, high, key=itemgetter(0))
        low += _ends(example, own["total"], extremes)
        low = heapq.nsmallest(extremes, low, key=itemgetter(0))
    n = summary.response_tokens
    summary.components = {
        key: {"count": n, "mean": total / n, "minimum": low, "maximum": high}
        | {"positive": positive / n}
        for key in COMPONENTS
        if key in sums
        for total, low, high, positive in [sums[key]]
    }
    summary.highest, summary.lowest = (
        [(total, worded(example, texts), at) for total, example, at in side] for side in (high, low)
    )
    summary.kinds = {kind: kinds.by_kind[kind] for kind in PAGE_KINDS if kind in kinds.by_kind}
    _part_ends(summary, texts)
    picked = sorted(chosen.values(), key=lambda example: example.row)
    summary.sample = [worded(example, texts) for example in picked]
    return summary


@dataclass
class _Kinds:
    """Counts by kind of token; each token id is written as text once."""

    texts: Callable[[Sequence[int]], list[str]] | None
    by_kind: dict[str, dict[str, float]] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)

    def add(self, example: ScoredExample) -> None:
        """Count the response tokens of one sequence."""
        texts = self.texts
        if not example.tokens and texts is None:
            return

        def text_of(place: int) -> str:
            if example.tokens:
                return example.tokens[place]
            token = example.ids[place]
            if token not in self.words:
                assert texts is not None
                self.words[token] = texts([token])[0]
            return self.words[token]

        totals = np.asarray(example.values["total"], float)[example.response].tolist()
        for kind, total in zip(page_kinds(example, text_of), totals, strict=True):
            own = self.by_kind.setdefault(kind, {"count": 0, "sum": 0.0, "negative": 0})
            own["count"] += 1
            own["sum"] += total
            own["negative"] += total < 0


def _rank_row(summary: ValueSummary, example: ScoredExample) -> None:
    """Keep mean total and loss of a sequence, and the sequence where it is at an end so far."""
    if not example.response.any():
        return
    mean = mean_of(example, "total")
    loss = mean_of(example, LOSS) if LOSS in example.values else math.nan
    summary.row_means.append(mean)
    summary.row_losses.append(loss)
    ranked = (mean, example)
    summary.highest_rows = heapq.nlargest(
        _ROW_ENDS, [*summary.highest_rows, ranked], key=itemgetter(0)
    )
    summary.lowest_rows = heapq.nsmallest(
        _ROW_ENDS, [*summary.lowest_rows, ranked], key=itemgetter(0)
    )
    if not math.isnan(loss):
        losses = [*summary.highest_losses, (loss, example)]
        summary.highest_losses = heapq.nlargest(_ROW_ENDS, losses, key=itemgetter(0))


def _part_ends(summary: ValueSummary, texts: Callable[[Sequence[int]], list[str]] | None) -> None:
    count = len(summary.row_means) // 2  # of fewer than six rows, none is at both ends
    summary.lowest_rows, summary.highest_losses, summary.highest_rows = (
        [(mean, worded(example, texts)) for mean, example in rows[:count]]
        for rows in summary.row_ends().values()
    )


def end_places(
    values: NDArray[np.float64], losses: NDArray[np.float64], count: int
) -> dict[str, list[int]]:
    """Places of so many rows at each end, by its name; outermost first, of equal ones the first.

    Args:
        values: (n,) of the rows.
        losses: (n,) their mean losses; where one is NaN, no row is named by its loss.
        count: of the rows at an end.
    """
    keys = {LOWEST: values, HIGHEST_LOSS: -losses, HIGHEST: -values}
    return {
        end: np.argsort(key, kind="stable")[:count].tolist()
        for end, key in keys.items()
        if not np.isnan(key).any()
    }


def mean_of(example: ScoredExample, key: str) -> float:
    """Mean of a column over the response tokens; NaN without one."""
    own = np.asarray(example.values[key], float)[example.response]
    return float(own.mean()) if len(own) else math.nan


def _ends(example: ScoredExample, order: NDArray[np.float64], count: int) -> list[TokenRank]:
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
    for key, column in values.items():
        if len(column):
            total, low, high, positive = sums.get(key, [0.0, math.inf, -math.inf, 0.0])
            sums[key] = [
                total + float(column.sum()),
                min(low, float(column.min())),
                max(high, float(column.max())),
                positive + float((column > 0).sum()),
            ]


def _record(_: float, example: ScoredExample, position: int) -> dict[str, Any]:
    """An extreme token with its surroundings, as the summary file has it."""
    before, token, after = _surroundings(example, position)
    return {
        "row": example.row,
        "place": example.place,
        "position": position,
        "before": before,
        "token": token,
        "after": after,
        "kept": bool(example.kept[position]),
        "values": {key: float(values[position]) for key, values in example.values.items()},
    }


def _surroundings(example: ScoredExample, position: int) -> tuple[str, str, str]:
    """Text before a token, its own, and after it."""
    tokens, end = example.tokens, position + 1
    before, after = tokens[max(0, position - _CONTEXT) : position], tokens[end : end + _CONTEXT]
    return "".join(before), tokens[position], "".join(after)
