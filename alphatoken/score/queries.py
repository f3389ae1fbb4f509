"""Queries: texts whose own loss is the objective, each by itself and all of them together.

A query is a row. With the queries q, of n_q valued tokens each, as the validation rows,

    adaptation  =  sum_q (n_q / n) value_q ,     n = sum_q n_q ,

where ``value_q`` is the adaptation value against query q alone. A positive ``value_q`` says that a
small step on the token lowers the mean token loss of the query, that is, raises its probability.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from operator import attrgetter
from pathlib import Path
from typing import Any

from alphatoken.data import EncodeOptions, EncodeReport, Example, Fields, Row, Turn, encode_rows
from alphatoken.data.reading import short
from alphatoken.data.rows import require_text, row_of
from alphatoken.errors import DataError
from alphatoken.score.page import Section, number, render_page
from alphatoken.score.statistics import worded
from alphatoken.score.value_page import setting_tiles, shown_example, window
from alphatoken.score.values import ScoredExample, query_key, visible
from alphatoken.support.storage import write_text

__all__ = [
    "QueryRanks",
    "Ranked",
    "ShownQuery",
    "encode_queries",
    "query_rows",
    "read_as",
    "write_query_report",
]


def query_rows(texts: Sequence[str], fields: Fields) -> list[Row]:
    """The queries as rows: a JSON object by its columns, any other text as plain text.

    Args:
        texts: the queries; plain text is valued from its first token to its end token.
        fields: names of the columns of JSON objects, where they are not among the known ones.

    Raises:
        DataError: a JSON object that is no row; the message names the query.
    """
    return [_row(text, number, fields) for number, text in enumerate(texts)]


def _row(text: str, number: int, fields: Fields) -> Row:
    place, record = f"query {number + 1}", _object(text)
    if record is not None:
        return row_of(record, number, place, replace(fields, optional=True))
    turns = (Turn("assistant", text),)
    require_text(turns, place)
    return Row(number, place, turns)


def _object(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def encode_queries(
    rows: Sequence[Row], tokenizer: Any, how: EncodeOptions
) -> tuple[list[Example], EncodeReport]:
    """Queries as tokens, none of them left out.

    Raises:
        DataError: a query without a valued token, or one that cannot be written as tokens.
    """
    examples, report = encode_rows(
        rows, tokenizer, replace(how, on_empty="skip", on_bad_rows="error")
    )
    left = {row.index for row in rows} - {example.row.index for example in examples}
    if left:
        row = rows[min(left)]
        raise DataError(
            "a query has no token to value",
            got=f"{row.place}: {short(row.response, 40)!r} after {len(row.prompt)} characters of "
            "prompt",
            why="values are taken against the loss of its tokens, and the first token of a text, "
            "which nothing predicts, has none",
            remedy="a longer text, a response that is not empty, or a larger --max_length",
        )
    return examples, report


def read_as(query: Example) -> str:
    """Say in one sentence how a query was read."""
    kind = "plain text" if len(query.row.turns) == 1 else "a prompt with its response"
    cut = f"; {query.tokens_cut} more are beyond the length and were cut" * bool(query.tokens_cut)
    return (
        f"{query.row.place} is read as {kind}: {query.response_tokens} of its "
        f"{len(query.input_ids)} tokens are valued{cut}"
    )


_ROWS = 10
"""Training rows on each side of a query."""

_TOKENS, _PROMPT = 300, 60
"""Tokens of a row that are shown, at most, and how many of its prompt before the response."""

_LEAD = (
    "Which training rows raise the probability of a text, and which lower it, by values of their "
    "response tokens: what one small plain gradient step on a token does to the text's mean token "
    "loss, to first order, at the weights of this model."
)

_HONEST = (
    "A value says what the token would teach this model now. It does not say that the row is why "
    "the model learned the text, and one-step values did not predict a run of 256 steps of a small "
    "model."
)

_READ = (
    "Rows are ordered by the sum of the values over their response tokens, so long rows come "
    "first where each token does the same. Blue tokens raise the probability of the query, orange "
    "ones lower it; a colour means the same value in all rows of one query, and follows its root, "
    "so that small values are seen. Prompts are grey. Move over a token, or focus it and use the "
    "arrow keys, for its value."
)


@dataclass(frozen=True)
class ShownQuery:
    """A query as a page shows it: its tokens, which of them are valued, how it was read."""

    tokens: Sequence[str]
    valued: Sequence[bool]
    read_as: str


@dataclass(frozen=True)
class Ranked:
    """A training row and the sum of its values against one query."""

    total: float
    example: ScoredExample

    def as_dict(self) -> dict[str, Any]:
        """The row and its sum, for a summary file."""
        return {"row": self.example.row, "place": self.example.place, "value": self.total}


@dataclass
class _Side:
    """The rows that raise and that lower one query: their counts, and the extreme ones."""

    raising: int = 0
    lowering: int = 0
    highest: list[Ranked] = field(default_factory=list)
    lowest: list[Ranked] = field(default_factory=list)

    def offer(self, found: Ranked) -> None:
        """Count one row. Of equal sums the first one seen comes first; 0 is on neither side."""
        if found.total > 0:
            self.raising += 1
            self.highest = heapq.nlargest(_ROWS, [*self.highest, found], key=attrgetter("total"))
        elif found.total < 0:
            self.lowering += 1
            self.lowest = heapq.nsmallest(_ROWS, [*self.lowest, found], key=attrgetter("total"))


class QueryRanks:
    """Training rows by the sum of their values against each query, gathered in one pass.

        total_q(row)  =  sum over the row's response tokens of value_q

    Args:
        count: of the queries.
    """

    def __init__(self, count: int) -> None:
        self.rows = 0
        self.sides = [_Side() for _ in range(count)]

    def through(self, examples: Iterable[ScoredExample]) -> Iterator[ScoredExample]:
        """Yield the examples unchanged, and rank each as it passes."""
        for example in examples:
            self.rows += 1
            for n, side in enumerate(self.sides):
                values = example.values[query_key(n)][example.response]
                side.offer(Ranked(float(values.sum(dtype=float)), example))
            yield example

    def as_dict(self) -> list[dict[str, Any]]:
        """One entry a query, for a summary file."""
        return [
            {
                "rows_raising": side.raising,
                "rows_lowering": side.lowering,
                "highest": [one.as_dict() for one in side.highest],
                "lowest": [one.as_dict() for one in side.lowest],
            }
            for side in self.sides
        ]


def write_query_report(
    path: str | Path,
    queries: Sequence[ShownQuery],
    ranks: QueryRanks,
    *,
    title: str,
    texts: Callable[[Sequence[int]], list[str]],
    settings: Mapping[str, object],
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> Path:
    """Write the page, whole or not at all, and return its path; options as of ``write_report``.

    ``queries`` are in the order of the values' columns, ``ranks`` of the training rows, and
    ``texts``, token ids -> text of each token, is asked for the rows that are shown.

    Raises:
        DataError: the file could not be written; an old one is intact.
    """
    sections, lists = list[Section](), list[dict[str, Any]]()
    for n, (query, side) in enumerate(zip(queries, ranks.sides, strict=True)):
        section, shown = _section(n, query, side, texts)
        sections.append(section)
        lists += shown
    html = render_page(
        title,
        _LEAD,
        sections,
        contents=len(queries) > 1,
        tiles=[(number(ranks.rows), "training rows valued"), *setting_tiles(settings)],
        notes=[_HONEST, *notes],
        warnings=warnings,
        settings=settings,
        data={"lists": lists},
    )
    write_text(path, html)
    return Path(path)


def _section(
    n: int, query: ShownQuery, side: _Side, texts: Callable[[Sequence[int]], list[str]]
) -> tuple[Section, list[dict[str, Any]]]:
    """The section of one query, and the lists of rows that the page's script draws in it."""
    key, html, lists = query_key(n), [_text(query)], []
    found = {"raise": side.highest, "lower": side.lowest}
    shown = {word: [_shown(one, key, texts) for one in rows] for word, rows in found.items()}
    largest = max(
        (abs(v) for rows in shown.values() for e in rows for v in e["values"][key]), default=0
    )
    for word, examples in shown.items():
        anchor = f"{key.replace('_', '-')}-{word}"
        html.append(f"<h3>Rows that {word} it most</h3>")
        if not examples:
            html.append(f"<p>No training row does {word} it.</p>")
            continue
        html.append(f'<div id="{anchor}"></div>')
        lists.append(
            {
                "anchor": anchor,
                "examples": examples,
                "component": {"key": key, "name": "Value"},
                "saturation": largest,
            }
        )
    read = f"{query.read_as[:1].upper()}{query.read_as[1:]}."
    section = Section(
        key.replace("_", "-"),
        _short("".join(t for t, v in zip(query.tokens, query.valued, strict=True) if v)),
        name=f"Query {n + 1}",
        verdict=f"{number(side.raising)} training rows raise it, {number(side.lowering)} lower it.",
        remarks=[read, _READ] if n == 0 else [read],
        html="\n".join(html),
    )
    return section, lists


def _shown(found: Ranked, key: str, texts: Callable[[Sequence[int]], list[str]]) -> dict[str, Any]:
    """One row as the page's script draws it, with a sentence about it."""
    example = worded(found.example, texts)
    start, end = window(example, _TOKENS, _PROMPT)
    count, length = int(example.response.sum()), len(example.ids)
    part = f"; tokens {start} to {end - 1} of {length} shown" if end - start < length else ""
    said = f"sum {number(found.total, signed=True)} over {count} response tokens{part}"
    return shown_example(example, start, end, [key]) | {"kept": None, "said": said}


def _short(text: str, length: int = 90) -> str:
    text = visible(" ".join(text.split()))
    return text if len(text) <= length else text[: length - 1] + "\u2026"


def _text(query: ShownQuery) -> str:
    """The query as a card: what is not valued is grey."""
    parts = []
    for token, valued in zip(query.tokens, query.valued, strict=True):
        text = escape(visible(token))
        parts.append(text if valued else f'<span class="prompt">{text}</span>')
    return f'<div class="example paper"><div class="text" dir="auto">{"".join(parts)}</div></div>'
