"""Numbers about the values of a whole data set, gathered in one pass, and their page."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.score.page import (
    Column,
    Section,
    environment,
    number,
    render_page,
    table_html,
)
from alphatoken.score.values import COMPONENTS, ScoredExample, visible
from alphatoken.support.storage import write_text

TokenRank = tuple[float, ScoredExample, int]
"""The total of one of the highest or lowest tokens, its sequence, and its position there."""

# Tokens shown on each side of an extreme token.
_CONTEXT = 10


@dataclass
class ValueSummary:
    """Statistics of all examples together, for the report and the summary file.

    Attributes:
        components: key -> ``count`` of the response tokens, ``mean``, ``minimum``, ``maximum``, and
            ``positive``, the share above 0.
        derivatives: each way in which label values were differentiated -> its largest error.
        highest: the tokens of highest total, of equal ones the first.
        lowest: those of lowest total.
        sample: sequences for the heatmaps, in row order.
    """

    sequences: int = 0
    tokens: int = 0
    response_tokens: int = 0
    kept_tokens: int = 0
    components: dict[str, dict[str, float]] = field(default_factory=dict)
    derivatives: dict[str, float] = field(default_factory=dict)
    highest: list[TokenRank] = field(default_factory=list)
    lowest: list[TokenRank] = field(default_factory=list)
    sample: list[ScoredExample] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Everything that fits a summary file (no sample)."""
        return {
            **{name: value for name, value in vars(self).items() if name != "sample"},
            "components": [{"key": key, **numbers} for key, numbers in self.components.items()],
            "highest": [_record(*token) for token in self.highest],
            "lowest": [_record(*token) for token in self.lowest],
        }


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
        examples: any number of scored sequences; held are the sample and those of extreme tokens.
        sample: how many sequences to keep for the heatmaps (uniform, seeded, in row order).
        extremes: how many of the highest and of the lowest tokens to keep.
        seed: of the sample.
        texts: token ids -> text of each token, for examples that come without; asked for those
            that are shown.
    """
    summary, sums = ValueSummary(), dict[str, list[float]]()
    chosen, draw = dict[int, ScoredExample](), random.Random(seed)
    high: list[TokenRank] = []
    low: list[TokenRank] = []
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
    picked = sorted(chosen.values(), key=lambda example: example.row)
    summary.sample = [worded(example, texts) for example in picked]
    return summary


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


# --- the page -------------------------------------------------------------------------------------

MOST_TOKENS = 12_000
"""Tokens shown in all heatmaps together: keeps the page near one megabyte."""

MOST_TOKENS_A_ROW = 1_500
_PROMPT_SHOWN = 300

# Settings that stand at the top of the page -> what they are called there.
_HEADER = {
    "model_name_or_path": "model", "policy": "policy", "estimator": "estimator",
    "layers": "layers scored", "parameters": "parameters valued",
    "last_loss": "training loss of the last log",
}  # fmt: skip

_LEAD = (
    "Value of each response token: positive (blue) says that a small step on it lowers the "
    "validation objective or keeps what the model knew; negative (orange) says the opposite. It is "
    "no verdict on the token."
)


def write_report(
    path: str | Path,
    summary: ValueSummary,
    *,
    title: str = "AlphaToken report",
    settings: Mapping[str, object] | None = None,
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> Path:
    """Write the page, whole or not at all, and return its path.

    Args:
        path: the HTML file.
        summary: from :func:`alphatoken.score.summarise`.
        title: heading of the page.
        settings: what was run, shown as a table.
        notes: sentences a reader must know before trusting the numbers.
        warnings: what is probably wrong, shown apart from the notes.

    Raises:
        DataError: the file could not be written; an old one is intact.
    """
    settings, tokens = settings or {}, summary.response_tokens
    share = f"{summary.kept_tokens / tokens:.1%}" if tokens else "none"
    tiles = [
        (number(summary.sequences), "sequences"),
        (number(tokens), "response tokens valued"),
        (share, f"kept by the selection, {number(summary.kept_tokens)} tokens"),
        *setting_tiles(settings),
    ]
    sections, data = _value_sections(summary)
    html = render_page(
        title,
        _LEAD,
        sections,
        tiles=tiles,
        notes=notes,
        warnings=warnings,
        settings=settings,
        data=data,
    )
    write_text(path, html)
    return Path(path)


def setting_tiles(settings: Mapping[str, object]) -> list[tuple[str, str]]:
    """The settings that stand at the top of a page, each with its name there."""
    linears = settings.get("parameters", "linears") == "linears"
    hidden = {"parameters" if linears else "layers"}
    if settings.get("estimator") == "walk":  # all trainable parameters take part
        hidden = {"parameters", "layers"}
    shown = {key: str(settings[key]) for key in _HEADER if key in settings and key not in hidden}
    if model := shown.get("model_name_or_path"):
        shown["model_name_or_path"] = Path(model).name or model  # a long path breaks in words
    return [(text, _HEADER[key]) for key, text in shown.items()]


def _value_sections(summary: ValueSummary) -> tuple[list[Section], dict[str, Any]]:
    said = summary.components
    # A component that is zero everywhere is said to be so; drawing it would only take room.
    present = [
        key for key in said if key == "total" or said[key]["minimum"] or said[key]["maximum"]
    ]
    zero = [COMPONENTS[key][0] for key in said if key not in present]
    if "stability" not in present:  # then the total is the adaptation
        present = [key for key in present if key != "adaptation"]
    described = [
        {"key": key, "name": COMPONENTS[key][0], "meaning": COMPONENTS[key][1]} for key in present
    ]
    shown, left_out = shown_examples(summary.sample, present)
    heatmaps = environment().get_template("heatmap.html.j2")
    html = heatmaps.render(
        components=described,
        shown=len(shown),
        sequences=summary.sequences,
        left_out=left_out,
        zero=zero,
    )
    sections = [
        Section("heatmaps", "Values over the text", html=html),
        _distributions(summary),
        _extremes("Highest", summary.highest),
        _extremes("Lowest", summary.lowest),
    ]
    return sections, {"components": described, "examples": shown}


# --- tables ---------------------------------------------------------------------------------------


def _distributions(summary: ValueSummary) -> Section:
    said = summary.components.values()
    columns: list[Column] = [
        ("Component", "words", [COMPONENTS[key][0] for key in summary.components]),
        ("Mean", "number", [number(one["mean"], signed=True) for one in said]),
        ("Lowest", "number", [number(one["minimum"], signed=True) for one in said]),
        ("Highest", "number", [number(one["maximum"], signed=True) for one in said]),
        ("Positive", "number", [f"{one['positive']:.0%}" for one in said]),
    ]
    title = "Distributions"
    return Section("distributions", title, html=table_html(columns, title))


def _extremes(side: str, tokens: Sequence[TokenRank]) -> Section:
    columns: list[Column] = [
        ("Total", "number", [number(total, signed=True) for total, _, _ in tokens]),
        ("In its context", "html", [_in_context(*token) for token in tokens]),
        ("Where", "words", [f"{example.place}, token {at}" for _, example, at in tokens]),
        ("Kept", "words", ["yes" if example.kept[at] else "no" for _, example, at in tokens]),
    ]
    title = f"{side} tokens"
    return Section(side.lower(), title, html=table_html(columns, title))


def _in_context(total: float, example: ScoredExample, position: int) -> str:
    before, token, after = (escape(visible(text)) for text in _surroundings(example, position))
    side = "plus" if total >= 0 else "minus"
    return f'{before}<mark class="{side}">{token}</mark>{after}'


# --- examples -------------------------------------------------------------------------------------


def shown_examples(
    sample: Sequence[ScoredExample], keys: Sequence[str]
) -> tuple[list[dict[str, Any]], int]:
    """The examples as the page's script reads them, and the tokens left out of long ones.

    Components ``keys`` only; as many examples as fit the cap, the first one in any case.
    """
    shown: list[dict[str, Any]] = []
    room, left_out = MOST_TOKENS, 0
    for example in sample:
        start, end = window(example)
        if shown and end - start > room:
            break
        room -= end - start
        left_out += len(example.tokens) - (end - start)
        shown.append(shown_example(example, start, end, keys))
    return shown, left_out


def window(
    example: ScoredExample, most: int = MOST_TOKENS_A_ROW, prompt: int = _PROMPT_SHOWN
) -> tuple[int, int]:
    """The part of a long sequence to show: the end of its prompt, then the response."""
    length = len(example.tokens)
    if length <= most:
        return 0, length
    places = np.flatnonzero(example.response)
    first = int(places[0]) if places.size else 0
    start = max(0, first - prompt)
    return start, min(length, start + most)


def shown_example(
    example: ScoredExample, start: int, end: int, keys: Sequence[str]
) -> dict[str, Any]:
    """Tokens ``start`` to ``end`` of an example as the page's script reads them."""
    response = example.response[start:end]
    return {
        "row": example.row,
        "place": example.place,
        "start": start,
        "length": len(example.tokens),
        "tokens": [visible(token) for token in example.tokens[start:end]],
        "response": "".join("1" if flag else "0" for flag in response),
        "kept": "".join("1" if flag else "0" for flag in example.kept[start:end]),
        # One number a response token; a prompt token has none.
        "values": {
            key: [float(f"{value:.4g}") for value in example.values[key][start:end][response]]
            for key in keys
        },
    }
