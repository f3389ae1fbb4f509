"""Walk values from log-probabilities: a difference token by token; bad pairs by their place."""

from __future__ import annotations

import math
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from alphatoken.corpus.logprobs import read_pair
from tests.property.setups import refusal


def rows_of(shift: float) -> list[dict[str, Any]]:
    """Twelve rows of differing lengths, the first three tokens prompt."""
    found = []
    for number in range(12):
        ids = [(7 * number + i) % 40 for i in range(6 + number % 5)]
        labels = [-100] * 3 + ids[3:]
        logprobs = [None, *(-(0.1 + shift * ((i * number) % 3)) for i in range(1, len(ids)))]
        found.append({"row": number, "input_ids": ids, "labels": labels, "logprobs": logprobs})
    return found


def pair(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[Any]:
    """The examples of two files with these rows."""
    pa, pq = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("before.parquet", "after.parquet")]
        for path, rows in zip(paths, (before, after), strict=True):
            pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=5)
        return list(read_pair(*map(str, paths)))


def test_a_value_is_the_difference_of_two_log_probabilities() -> None:
    """After less before at response tokens, 0 elsewhere, row by row; numbers from 0 without any."""
    before, after = rows_of(0.5), rows_of(0.25)
    for drop in ((), ("row",)):
        kept = [[{k: v for k, v in r.items() if k not in drop} for r in x] for x in (before, after)]
        found = pair(*kept)
        assert [example.row for example in found] == list(range(12))
        for example, one, two in zip(found, before, after, strict=True):
            assert (example.ids, example.labels) == (one["input_ids"], one["labels"])
            for i, value in enumerate(example.values["total"]):
                learnt = i > 0 and one["labels"][i] != -100
                expected = two["logprobs"][i] - one["logprobs"][i] if learnt else 0.0
                assert math.isclose(value, expected, abs_tol=1e-12)


def _other(rows: list[dict[str, Any]], number: int, **more: Any) -> list[dict[str, Any]]:
    return [{**row, **more} if i == number else row for i, row in enumerate(rows)]


def _at(row: dict[str, Any], name: str, position: int, value: Any) -> dict[str, Any]:
    return {name: [value if i == position else x for i, x in enumerate(row[name])]}


BAD = {
    "another token": lambda r: (_other(r, 9, **_at(r[9], "input_ids", 2, 7)), "token .* at 2"),
    "another label": lambda r: (_other(r, 9, **_at(r[9], "labels", 5, -100)), "row 9"),
    "another order": lambda r: ([*r[:3], r[4], r[3], *r[5:]], "other rows, or another order"),
    "a missing row": lambda r: (r[:-1], "ends before"),
    "one row more": lambda r: ([*r, {**r[-1], "row": 12}], "ends before"),
    "a NaN": lambda r: (_other(r, 5, **_at(r[5], "logprobs", 5, float("nan"))), "row 5, pos"),
    "a missing one": lambda r: (_other(r, 5, **_at(r[5], "logprobs", 5, None)), "row 5, pos"),
    "minus infinity": lambda r: (_other(r, 5, **_at(r[5], "logprobs", 5, -math.inf)), "infinite"),
    "a loss": lambda r: (
        _other(r, 0, logprobs=[None, *(-x for x in r[0]["logprobs"][1:])]),
        "above 0",
    ),
    "a shorter list": lambda r: (_other(r, 2, logprobs=r[2]["logprobs"][:-1]), "row 2: "),
    "no labels": lambda r: ([{k: v for k, v in x.items() if k != "labels"} for x in r], "labels"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("side", ["before", "after"])
def test_a_bad_pair_is_refused_by_its_place(case: str, side: str) -> None:
    """File, row and position, whichever of the two is wrong."""
    rows = {"before": rows_of(0.5), "after": rows_of(0.25)}
    rows[side], said = BAD[case](rows[side])
    error = refusal(lambda: pair(rows["before"], rows["after"]))
    assert error is not None
    assert re.search(said, str(error)), str(error)
