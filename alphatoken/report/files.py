"""Files of values: one record a token, as Parquet or JSONL.

Columns: ``row`` (row of the training file, from 0), ``place``, ``position`` (token index in the
sequence), ``token_id``, ``token`` (its text), ``label`` (-100: not learned), ``kept``, and one
column a component (:data:`alphatoken.report.COMPONENTS`); a component that the estimator does not
split off is null. Prompt tokens are there, with value 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken.errors import ConfigError, DataError
from alphatoken.report.examples import COMPONENTS, ScoredExample
from alphatoken.support.storage import replacing

__all__ = ["FORMATS", "pyarrow_modules", "read_values", "stretches", "value_files", "write_values"]

FORMATS = ("parquet", "jsonl")
_KEYS = tuple(component.key for component in COMPONENTS)


def write_values(path: str | Path, examples: Sequence[ScoredExample]) -> None:
    """Write one file, whole or not at all; its suffix (.parquet, .jsonl) decides the format.

    Raises:
        ConfigError: Parquet without pyarrow, or another suffix.
        DataError: the file could not be written; an old one is intact.
    """
    path = Path(path)
    if path.suffix == ".jsonl":
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            for record in _records(examples):
                file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
    elif path.suffix == ".parquet":
        _write_parquet(path, examples)
    else:
        raise ConfigError(
            "unknown format of a value file", got=path.name, remedy=".parquet, .jsonl"
        )


def _records(examples: Iterable[ScoredExample]) -> Iterator[dict[str, Any]]:
    for example in examples:
        columns = {key: np.asarray(values).tolist() for key, values in example.values.items()}
        for position, token in enumerate(example.tokens):
            yield {
                "row": example.row,
                "place": example.place,
                "position": position,
                "token_id": int(example.ids[position]),
                "token": token,
                "label": int(example.labels[position]),
                "kept": bool(example.kept[position]),
                **{key: columns[key][position] if key in columns else None for key in _KEYS},
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


def _write_parquet(path: Path, examples: Sequence[ScoredExample]) -> None:
    pa, pq = pyarrow_modules()
    text = pa.dictionary(pa.int32(), pa.string())
    types = {
        "row": pa.int64(),
        "place": text,
        "position": pa.int32(),
        "token_id": pa.int32(),
        "token": pa.string(),
        "label": pa.int32(),
        "kept": pa.bool_(),
    } | {key: pa.float64() for key in _KEYS}
    records = list(_records(examples))
    table = pa.table(
        {name: pa.array([record[name] for record in records], kind) for name, kind in types.items()}
    )
    with replacing(path) as temporary:
        pq.write_table(table, temporary)


def value_files(folder: str | Path) -> list[Path]:
    """The value files in a folder, in order."""
    found = [p for kind in FORMATS for p in Path(folder).glob(f"part-*.{kind}")]
    return sorted(found)


def read_values(path: str | Path) -> Iterator[ScoredExample]:
    """The scored sequences of one file, or of all files in a folder, in order.

    Raises:
        DataError: a file that cannot be read, or holds something else.
    """
    path = Path(path)
    for file in value_files(path) if path.is_dir() else [path]:
        try:
            records = chain.from_iterable(stretches(file))
            for _, group in groupby(records, key=lambda record: record["row"]):
                yield _example(list(group))
        except (OSError, ValueError, KeyError, TypeError) as problem:  # pyarrow's are ValueErrors
            raise DataError(
                "a value file cannot be read",
                got=f"{file}: {type(problem).__name__}: {problem}",
                remedy="score again; the file is truncated or not one of ours",
            ) from problem


def stretches(path: Path, size: int = 4096, every: int = 1) -> Iterator[list[dict[str, Any]]]:
    """Each n-th stretch of so many neighbouring records of a Parquet or JSONL file."""
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as file:
            parts = iter(lambda: list(islice(file, size)), [])
            for lines in islice(parts, 0, None, every):
                yield [json.loads(line) for line in lines]
    else:
        _, pq = pyarrow_modules()
        with pq.ParquetFile(path) as file:
            for batch in islice(file.iter_batches(batch_size=size), 0, None, every):
                yield batch.to_pylist()


def _example(records: list[dict[str, Any]]) -> ScoredExample:
    first = records[0]
    return ScoredExample(
        row=int(first["row"]),
        place=str(first["place"]),
        tokens=[record["token"] for record in records],
        ids=[int(record["token_id"]) for record in records],
        labels=[int(record["label"]) for record in records],
        kept=np.array([record["kept"] for record in records], dtype=bool),
        values={
            key: np.array([record[key] for record in records], dtype=np.float64)
            for key in _KEYS
            if first[key] is not None
        },
    )
