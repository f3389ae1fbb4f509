"""Queries: texts whose own loss is the objective, each by itself and all of them together.

A query is a row. With the queries q, of n_q valued tokens each, as the validation rows,

    adaptation  =  sum_q (n_q / n) value_q ,     n = sum_q n_q ,

where ``value_q`` is the adaptation value against query q alone. A positive ``value_q`` says that a
small step on the token lowers the mean token loss of the query, that is, raises its probability.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import Any

from alphatoken.data import EncodeOptions, EncodeReport, Example, Fields, Row, Turn, encode_rows
from alphatoken.data.file_kinds import JSON, placed
from alphatoken.data.rows import require_text, row_of
from alphatoken.errors import DataError, counted, short
from alphatoken.score.meaning import Meaning
from alphatoken.score.page import Section, number, parts, render_page
from alphatoken.score.summary import mean_of, worded
from alphatoken.score.token_kinds import is_control
from alphatoken.score.value_page import row_list, shown_example, three_digits, window
from alphatoken.score.values import LOSS, ScoredExample, query_key, responses
from alphatoken.support.coloured import full_scale
from alphatoken.support.storage import write_text
from alphatoken.support.token_texts import visible


def query_rows(texts: Sequence[str], fields: Fields) -> list[Row]:
    """The queries as rows: a JSON object by its columns, any other text as plain text.

    Args:
        texts: the queries; plain text is valued from its first token to its end token.
        fields: names of the columns of JSON objects, where they are not among the usual ones.

    Raises:
        DataError: a JSON object that is no row; the message names the query.
    """
    return [_row(text, number, fields) for number, text in enumerate(texts)]


def _row(text: str, number: int, fields: Fields) -> Row:
    place, record = f"query {number + 1}", None
    try:
        record = JSON.decode(text)
    except DataError as error:
        raise placed(error, place) from None
    except (ValueError, RecursionError):
        pass  # a plain text
    if isinstance(record, dict):
        return row_of(record, number, place, replace(fields, optional=True))
    turns = (Turn("assistant", text),)
    require_text(turns, place)
    return Row(number, place, turns)


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


# Training rows on each side of a query.
_ROWS = 10

_TOKENS, _PROMPT = 300, 60
"""Tokens of a row that are shown, at most, and how many of its prompt before the response."""

_LEAD = (
    "Which training rows raise the probability of a text (blue tokens), and which lower it "
    "(orange): {counted}."
)

_HONEST = (
    "A value says what the token would teach this model now. It does not say that the row is why "
    "the model learned the text, and one-step values did not predict a run of 256 steps of a small "
    "model."
)

_READ = (
    "Rows are ordered by the sum of the values over their response tokens, so long rows come first "
    "where each token does the same. Grey lines are prompts; open one to read all of it. Move over "
    "a token, or focus it and use the arrow keys, for its value."
)


RankedRow = tuple[float, ScoredExample]
"""The sum of a row's values against one query, and the row."""


@dataclass
class QueryRank:
    """Training rows by the sum of their values against one query.

        total_q(row)  =  sum over the row's response tokens of value_q

    Attributes:
        raising: number of rows with a positive sum.
        lowering: number of rows with a negative one; 0 is on neither side.
        highest: the rows with the largest sums, of equal ones the first.
        lowest: those with the smallest.
    """

    raising: int = 0
    lowering: int = 0
    highest: list[RankedRow] = field(default_factory=list)
    lowest: list[RankedRow] = field(default_factory=list)

    def add(self, total: float, example: ScoredExample) -> None:
        """Count one training row, and keep it if its sum is extreme."""
        if total > 0:
            self.raising += 1
            rows = [*self.highest, (total, example)]
            self.highest = heapq.nlargest(_ROWS, rows, key=itemgetter(0))
        elif total < 0:
            self.lowering += 1
            rows = [*self.lowest, (total, example)]
            self.lowest = heapq.nsmallest(_ROWS, rows, key=itemgetter(0))

    def as_dict(self) -> dict[str, Any]:
        """Counts and extreme rows, for a summary file."""
        highest, lowest = (
            [{"row": row.row, "place": row.place, "value": total} for total, row in side]
            for side in (self.highest, self.lowest)
        )
        return {
            "rows_raising": self.raising,
            "rows_lowering": self.lowering,
            "highest": highest,
            "lowest": lowest,
        }


def rank_rows(
    examples: Iterable[ScoredExample], ranks: Sequence[QueryRank]
) -> Iterator[ScoredExample]:
    """Yield the examples unchanged; each is added to the rank of every query as it passes."""
    for example in examples:
        for n, rank in enumerate(ranks):
            values = example.values[query_key(n)][example.response]
            rank.add(float(values.sum(dtype=float)), example)
        yield example


def write_query_report(
    path: str | Path,
    queries: Sequence[Example],
    ranks: Sequence[QueryRank],
    *,
    rows: int,
    title: str,
    texts: Callable[[Sequence[int]], list[str]],
    meaning: Meaning,
    about: Mapping[str, object] | None = None,
    settings: Mapping[str, object],
    notes: Sequence[str] = (),
    warnings: Sequence[str] = (),
) -> Path:
    """Write the page, whole or not at all, and return its path; options as of ``write_report``.

    ``queries`` and their ``ranks`` are in the order of the values' columns, ``rows`` is the number
    of training rows, and ``texts``, token ids -> text of each token, is called for the queries and
    the rows that are shown.

    Raises:
        DataError: the file could not be written; an old one is intact.
    """
    sections = [
        _section(n, query, rank, texts, meaning)
        for n, (query, rank) in enumerate(zip(queries, ranks, strict=True))
    ]
    html = render_page(
        title,
        _LEAD.format(counted=f"{number(rows)} rows were valued"),
        sections,
        contents=len(queries) > 1,
        notes=[meaning.lead, *notes],
        warnings=warnings,
        about=about,
        settings=settings,
    )
    write_text(path, html)
    return Path(path)


def _section(
    n: int,
    query: Example,
    rank: QueryRank,
    texts: Callable[[Sequence[int]], list[str]],
    meaning: Meaning,
) -> Section:
    tokens, valued = texts(query.input_ids), responses(query.labels).tolist()
    key, reading, lists = query_key(n), read_as(query), list[dict[str, Any]]()
    heading = f"<summary>{escape(reading[:1].upper() + reading[1:])}.</summary>"
    html = [f"<details>{heading}{_text(tokens, valued)}</details>"]
    ends = {"raise": rank.highest, "lower": rank.lowest}
    shown = {word: [_shown(*row, key, texts) for row in rows] for word, rows in ends.items()}
    full = full_scale(v for rows in shown.values() for e in rows for v in e["values"][key])
    if full:
        html.append(str(parts().scale(number(full), meaning.unit)))
    sides = {}
    for word, examples in shown.items():
        if examples:
            anchor = f"{key.replace('_', '-')}-{word}"
            sides[anchor] = f"Rows that {word} it most"
            lists.append(row_list(anchor, examples, key, full, meaning))
        else:
            html.append(f"<p>No training row does {word} it.</p>")
    html.append(str(parts().ends_of(sides)))
    return Section(
        key.replace("_", "-"),
        visible(short(_words(query, tokens, valued), 90)),
        name=f"Query {n + 1}",
        verdict=f"{number(rank.raising)} training rows raise it, {number(rank.lowering)} lower it.",
        html="\n".join(html),
        lists=lists,
        notes=[_READ, _HONEST] if n == 0 else [],
    )


def _words(query: Example, tokens: Sequence[str], valued: Sequence[bool]) -> str:
    """A plain text from its first token on, or the response; without special tokens."""
    plain = len(query.row.turns) == 1
    return "".join(
        token
        for token, is_valued in zip(tokens, valued, strict=True)
        if (is_valued or plain) and not is_control(token)
    ).strip()


def _shown(
    total: float, example: ScoredExample, key: str, texts: Callable[[Sequence[int]], list[str]]
) -> dict[str, Any]:
    example = worded(example, texts)
    start, end = window(example, _TOKENS, _PROMPT)
    count, length = int(example.response.sum()), len(example.ids)
    part = f"; tokens {start} to {end - 1} of {length} shown" if end - start < length else ""
    loss = f"; loss {three_digits(mean_of(example, LOSS))}" if LOSS in example.values else ""
    tokens = counted(count, "response tokens")
    said = f"sum {three_digits(total, signed=True)} over {tokens}{loss}{part}"
    return shown_example(example, start, end, [key]) | {"kept": None, "said": said}


def _text(tokens: Sequence[str], valued: Sequence[bool]) -> str:
    parts = []
    for token, is_valued in zip(tokens, valued, strict=True):
        text = escape(visible(token))
        parts.append(text if is_valued else f'<span class="prompt">{text}</span>')
    return f'<div class="example"><div class="text" dir="auto">{"".join(parts)}</div></div>'
