"""Queries: texts whose own loss is the objective, each by itself and all of them together.

A query is a row. With the queries q, of n_q valued tokens each, as the validation rows,

    adaptation  =  sum_q (n_q / n) value_q ,     n = sum_q n_q ,

where ``value_q`` is the adaptation value against query q alone. A positive ``value_q`` says that a
small step on the token lowers the mean token loss of the query, that is, raises its probability.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from alphatoken.data import EncodeOptions, EncodeReport, Example, Fields, Row, Turn, encode_rows
from alphatoken.data.rows import require_text, row_of
from alphatoken.data.survey import short
from alphatoken.errors import DataError

__all__ = ["encode_queries", "query_rows", "read_as"]


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
