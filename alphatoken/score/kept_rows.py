"""Rows by their values: the best and the worst of them, and the file of those that are kept.

A row has the mean and the sum of the values of its response tokens, which stand in the value files
as ``value_mean`` and ``value_sum``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from alphatoken.data.source import RowSource
from alphatoken.errors import DataError
from alphatoken.score.values import IGNORE, read_row_values, read_values
from alphatoken.select.masks import keep_count
from alphatoken.support.storage import replacing

__all__ = ["Unit", "best_rows", "require_json", "row_ends", "write_rows"]

Unit = Literal["tokens", "mean", "sum"]
"""What ``--rows`` keeps: tokens within their rows, or whole rows by the mean or sum of values."""

_ENDS = 3
"""Rows at each end that are printed and stand in the summary."""


def require_json(source: RowSource) -> None:
    """Check that every record can be written as JSON, before rows are valued.

    Raises:
        DataError: one cannot; a record that cannot be read at all is passed over.
    """
    for row in source.read():
        if isinstance(row.record, DataError):
            continue
        try:
            json.dumps(row.record)
        except TypeError as error:
            raise DataError(
                "a row cannot be written as JSON",
                got=f"{row.place}: {error}",
                remedy="turn dates, decimals and bytes into text first",
            ) from None


def row_ends(values: Path, unit: Unit = "mean") -> dict[str, list[dict[str, float]]]:
    """The rows of highest and lowest value: "best" from the first, "worst" from the last.

    Args:
        values: folder of value files.
        unit: "sum" ranks by it, anything else by the mean.
    """
    columns = read_row_values(values)
    order = _ranked(columns[_column(unit)])
    count = min(_ENDS, max(1, len(order) // 2))
    ends = {"best": order[:count], "worst": order[::-1][:count]}
    return {
        side: [{name: column[at].item() for name, column in columns.items()} for at in places]
        for side, places in ends.items()
    }


def best_rows(
    values: NDArray[np.float64], tokens: NDArray[np.int64], ratio: float
) -> NDArray[np.bool_]:
    """(n,) True for the best rows, as long as they fit the budget of tokens; at least for one.

    The budget is ``keep_count(ratio, tokens.sum())``. Rows are taken by falling value, of equal
    values the first, up to the first one that no longer fits.

    Args:
        values: (n,) of the rows.
        tokens: (n,) numbers of their response tokens.
        ratio: share of all response tokens, in (0, 1].

    Raises:
        InputError: ratio outside (0, 1].

    Oracle: the rule by a loop, in the tests.
    """
    order = _ranked(values)
    budget = keep_count(ratio, int(tokens.sum()))
    count = int(np.searchsorted(np.cumsum(tokens[order]), budget, side="right"))
    kept = np.zeros(len(values), bool)
    kept[order[: max(1, count)]] = True
    return kept


def write_rows(
    unit: Unit, values: Path, source: RowSource, ratio: float, path: Path
) -> dict[str, int]:
    """Write the rows that are kept as JSONL, whole or not at all; the counts of rows and tokens.

    By "tokens" a row has ``input_ids``, ``attention_mask``, ``labels``, ``loss_weights`` and
    ``row``: labels are -100 and weights 0 at prompts and at dropped response tokens, and rows
    without a kept token are left out. By "mean" or "sum" each row of :func:`best_rows` is written
    as it stands in the source.

    Args:
        unit: what is kept.
        values: folder of value files.
        source: the rows that were valued.
        ratio: share of the response tokens in the rows that "mean" and "sum" keep.
        path: of the file; an earlier one is replaced.

    Raises:
        DataError: a value file cannot be read, or the file cannot be written.
    """
    columns = read_row_values(values)
    if unit == "tokens":
        records = _weighted(values)
    else:
        records = _whole(source, columns, best_rows(
            columns[_column(unit)], columns["response_tokens"], ratio
        ))  # fmt: skip
    rows = kept_tokens = 0
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record, tokens in records:
            file.write(_line(record))
            rows += 1
            kept_tokens += tokens
    return {
        "rows": rows,
        "rows_left_out": len(columns["row"]) - rows,
        "response_tokens": int(columns["response_tokens"].sum()),
        "kept_tokens": kept_tokens,
    }


def _column(unit: Unit) -> str:
    return "value_sum" if unit == "sum" else "value_mean"


def _ranked(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Places by falling value, of equal values the first; rows stand in the order of the source."""
    return np.argsort(-values, kind="stable")


def _weighted(values: Path) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Rows with a weight for each token, and the number of those whose weight is not 0."""
    for example in read_values(values):
        weights = np.where(example.response, example.kept, 0).astype(float)
        if weights.any():
            record = {
                "input_ids": list(example.ids),
                "attention_mask": [1] * len(example.ids),
                "labels": np.where(weights != 0, example.labels, IGNORE).tolist(),
                "loss_weights": weights.tolist(),
                "row": example.row,
            }
            yield record, int(weights.sum())


def _whole(
    source: RowSource, columns: Mapping[str, NDArray[Any]], kept: NDArray[np.bool_]
) -> Iterator[tuple[Mapping[str, Any], int]]:
    """Records of the kept rows as they are, and the number of their response tokens."""
    tokens = np.zeros(source.rows, np.int64)
    tokens[columns["row"][kept]] = columns["response_tokens"][kept]
    for row in source.read():
        if tokens[row.index]:
            assert not isinstance(row.record, DataError)  # it was valued
            yield row.record, int(tokens[row.index])


def _line(record: Mapping[str, Any]) -> str:
    """One line of JSON, readable in any script; half a character stays the escape that it was."""
    text = json.dumps(record, ensure_ascii=False)
    whole = not any("\ud800" <= character <= "\udfff" for character in text)
    return (text if whole else json.dumps(record)) + "\n"
