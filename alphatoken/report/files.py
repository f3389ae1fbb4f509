"""Files of values: one record an example, as Parquet or JSONL.

Columns: ``row`` (row of the training file, from 0), ``place`` (how a person finds it), and lists
with an entry a token: ``input_ids``, ``labels`` (-100: not learned), ``keep``, ``value`` (the
total), and one list a component (:data:`alphatoken.report.COMPONENTS`); a component that the
estimator does not split off is null. Prompt tokens are there, with value 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.errors import ConfigError, DataError
from alphatoken.report.examples import COMPONENTS, IGNORE, ScoredExample
from alphatoken.support.storage import replacing

__all__ = [
    "FORMATS",
    "pyarrow_modules",
    "read_totals",
    "read_values",
    "value_files",
    "write_values",
]

FORMATS = ("parquet", "jsonl")
_COLUMNS: dict[str, str] = {
    component.key: "value" if component.key == "total" else component.key
    for component in COMPONENTS
}
"""Key of a component -> column of a file."""

_GROUP = 1 << 16
"""Tokens of a row group of a Parquet file, about; what is in memory while a file is written."""

_ROWS = 64
"""Examples that are in memory while a file is read."""


def write_values(path: str | Path, examples: Iterable[ScoredExample]) -> None:
    """Write one file, whole or not at all; its suffix (.parquet, .jsonl) decides the format.

    Examples are taken one after the other, and a few thousand tokens of them held at a time.

    Raises:
        ConfigError: Parquet without pyarrow, or another suffix.
        DataError: the file could not be written; an old one is intact.
    """
    path = Path(path)
    if path.suffix == ".jsonl":
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for example in examples:
                record = _record(example)
                file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
    elif path.suffix == ".parquet":
        _write_parquet(path, iter(examples))
    else:
        raise ConfigError(
            "unknown format of a value file", got=path.name, remedy=".parquet, .jsonl"
        )


def _record(example: ScoredExample) -> dict[str, Any]:
    values = {_COLUMNS[key]: np.asarray(v).tolist() for key, v in example.values.items()}
    return {
        "row": example.row,
        "place": example.place,
        "input_ids": list(map(int, example.ids)),
        "labels": list(map(int, example.labels)),
        "keep": np.asarray(example.kept, bool).tolist(),
        **{column: values.get(column) for column in _COLUMNS.values()},
    }


def pyarrow_modules() -> tuple[Any, Any]:
    """``pyarrow`` and ``pyarrow.parquet``.

    Raises:
        ConfigError: they are not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow", remedy="pip install pyarrow, or --format jsonl"
        ) from None
    return pa, pq


def _write_parquet(path: Path, examples: Iterator[ScoredExample]) -> None:
    pa, pq = pyarrow_modules()
    first = next(examples, None)
    single = first is not None and all(v.dtype == np.float32 for v in first.values.values())
    number = pa.list_(pa.float32() if single else pa.float64())
    schema = pa.schema(
        {
            "row": pa.int64(),
            "place": pa.string(),
            "input_ids": pa.list_(pa.int32()),
            "labels": pa.list_(pa.int32()),
            "keep": pa.list_(pa.bool_()),
            **dict.fromkeys(_COLUMNS.values(), number),
        }
    )
    some = chain([] if first is None else [first], examples)
    with replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for group in _groups(some):
            columns = _flat(group)
            arrays = [pa.array([e.row for e in group]), pa.array([e.place for e in group])]
            ends = np.cumsum([0, *(len(e.ids) for e in group)], dtype=np.int32)
            for field in list(schema)[2:]:
                flat, kind = columns.get(field.name), field.type
                if flat is None:
                    arrays.append(pa.nulls(len(group), kind))
                else:
                    values = pa.array(flat, type=kind.value_type)
                    arrays.append(pa.ListArray.from_arrays(pa.array(ends), values))
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _flat(group: Sequence[ScoredExample]) -> dict[str, NDArray[Any]]:
    """Column -> its entries of all examples, one after the other."""
    columns = {
        "input_ids": np.concatenate([np.asarray(e.ids, np.int32) for e in group]),
        "labels": np.concatenate([np.asarray(e.labels, np.int32) for e in group]),
        "keep": np.concatenate([np.asarray(e.kept, bool) for e in group]),
    }
    for key in group[0].values:
        columns[_COLUMNS[key]] = np.concatenate([e.values[key] for e in group])
    return columns


def _groups(examples: Iterable[ScoredExample]) -> Iterator[list[ScoredExample]]:
    """Examples of about ``_GROUP`` tokens at a time."""
    group: list[ScoredExample] = []
    size = 0
    for example in examples:
        group.append(example)
        size += len(example.ids)
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def value_files(folder: str | Path) -> list[Path]:
    """The value files in a folder, in order."""
    found = [p for kind in FORMATS for p in Path(folder).glob(f"part-*.{kind}")]
    return sorted(found)


def read_values(
    path: str | Path, texts: Callable[[Sequence[int]], list[str]] | None = None
) -> Iterator[ScoredExample]:
    """The scored sequences of one file, or of all files in a folder, in order.

    Args:
        path: of a file, or of a folder of them.
        texts: token ids -> text of each token; without it ``tokens`` are left empty.

    Raises:
        DataError: a file that cannot be read, or holds something else.
    """
    path = Path(path)
    for file in value_files(path) if path.is_dir() else [path]:
        try:
            for example in _parquet(file) if file.suffix == ".parquet" else _jsonl(file):
                yield example if texts is None else replace(example, tokens=texts(example.ids))
        except (OSError, ValueError, KeyError, TypeError) as problem:  # pyarrow's are ValueErrors
            raise _unreadable(file, problem) from problem


def _jsonl(path: Path) -> Iterator[ScoredExample]:
    with path.open(encoding="utf-8") as file:
        for record in map(json.loads, file):
            yield _example(
                int(record["row"]),
                str(record["place"]),
                {k: np.array(v) for k, v in record.items() if isinstance(v, list)},
            )


def _parquet(path: Path) -> Iterator[ScoredExample]:
    for batch in _batches(path, None):
        rows, places = batch["row"].to_pylist(), batch["place"].to_pylist()
        names = ("input_ids", "labels", "keep", *_COLUMNS.values())
        lists = {name: _list(batch[name]) for name in names if batch[name].null_count == 0}
        for index, (row, place) in enumerate(zip(rows, places, strict=True)):
            own = {k: flat[ends[index] : ends[index + 1]] for k, (flat, ends) in lists.items()}
            yield _example(row, place, own)


def _batches(path: Path, columns: Sequence[str] | None) -> Iterator[Any]:
    _, pq = pyarrow_modules()
    with pq.ParquetFile(path) as file:
        yield from file.iter_batches(batch_size=_ROWS, columns=columns)


def _list(column: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """All entries of a column of lists, and where each list begins and the last one ends."""
    return column.values.to_numpy(zero_copy_only=False), column.offsets.to_numpy()


def _example(row: int, place: str, columns: Mapping[str, NDArray[Any]]) -> ScoredExample:
    return ScoredExample(
        row=row,
        place=place,
        tokens=[],
        ids=columns["input_ids"].tolist(),
        labels=columns["labels"].tolist(),
        kept=columns["keep"].astype(bool),
        # Copies, because Arrow's own memory must not be written to.
        values={
            key: columns[column].copy() for key, column in _COLUMNS.items() if column in columns
        },
    )


def read_totals(folder: str | Path) -> Iterator[NDArray[np.float64]]:
    """Totals of the response tokens of all files, in order, some thousand tokens at a time.

    Raises:
        DataError: as :func:`read_values`.
    """
    for path in value_files(folder):
        if path.suffix != ".parquet":
            yield from (
                np.asarray(e.values["total"], np.float64)[e.response] for e in read_values(path)
            )
            continue
        try:
            for batch in _batches(path, ["labels", "value"]):
                (labels, ends), (values, starts) = _list(batch["labels"]), _list(batch["value"])
                labels, values = labels[ends[0] : ends[-1]], values[starts[0] : starts[-1]]
                valued = labels != IGNORE
                valued[(ends[:-1] - ends[0])[np.diff(ends) > 0]] = False  # nothing predicts it
                yield values[valued].astype(np.float64)
        except (OSError, ValueError, KeyError) as problem:
            raise _unreadable(path, problem) from problem


def _unreadable(path: Path, problem: Exception) -> DataError:
    return DataError(
        "a value file cannot be read",
        got=f"{path}: {type(problem).__name__}: {problem}",
        remedy="score again; the file is truncated or not one of ours",
    )
