"""Files of values: one record an example, as Parquet.

Columns: ``row`` (row of the training file, from 0), ``place`` (how a person finds it);
``response_tokens``, their number, and ``value_mean`` and ``value_sum`` of their totals; and lists
with an entry a token: ``input_ids``, ``labels`` (-100: not learned), ``keep``, ``value`` (the
total), and one list a component (:data:`alphatoken.score.COMPONENTS`); a component that the
estimator does not split off is null. ``loss`` is the loss of each token in nats (of a walk: before
it), null of values of a training run. A run with queries adds ``query_1``, ``query_2``, ...:
adaptation against each query alone. ``derivative`` and ``error`` say how label values were taken
and how far they may be off. Prompt tokens are there, with value 0. Values of a training run have
five columns more (:class:`alphatoken.score.Visits`): ``visits``, ``last_step``, ``branch``, and
the lists ``rows`` and ``kept_share``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.errors import ConfigError, DataError
from alphatoken.model.batch import IGNORE
from alphatoken.support.storage import replacing

COMPONENTS: dict[str, tuple[str, str]] = {
    "total": ("Total", "adaptation plus lambda times stability: the value that ranks"),
    "adaptation": (
        "Adaptation",
        "how much training on the token lowers the validation objective",
    ),
    "stability": (
        "Stability",
        "how much training on the token keeps the model near what it was (before lambda)",
    ),
    "adaptation_direct": ("Adaptation, direct", "adaptation through the token's own position"),
    "adaptation_causal": (
        "Adaptation, causal",
        "adaptation through later positions that attend to it",
    ),
    "stability_direct": (
        "Stability, direct",
        "stability through the token's own position (before lambda)",
    ),
    "stability_causal": (
        "Stability, causal",
        "stability through later positions that attend to it (before lambda)",
    ),
}
"""Key of each column of values -> its name on the page, and what it says in a sentence; in the
order of the page."""


LOSS = "loss"
"""Key, and column, of the losses in nats; of a walk, those before it."""


def query_key(number: int) -> str:
    """Key, and column, of the values against query ``number``, from 0: "query_1" of the first."""
    return f"query_{number + 1}"


def responses(labels: Sequence[int] | NDArray[Any]) -> NDArray[np.bool_]:
    """(t,) True where a label is learned; the first token, which nothing predicts, never is."""
    mask: NDArray[np.bool_] = np.asarray(labels) != IGNORE
    mask[:1] = False
    return mask


@dataclass(frozen=True)
class Visits:
    """Visits of a training run to a sequence.

    Attributes:
        count: how often it was trained on.
        last_step: the optimizer step of the last time, from 0.
        branch: "chosen" or "rejected" of a pair; else None.
        rows: the training rows that hold it.
        kept_share: (t,) mean weight of each token over the visits.
    """

    count: int
    last_step: int
    branch: str | None
    rows: Sequence[int]
    kept_share: NDArray[np.float64]


@dataclass(frozen=True)
class ScoredExample:
    """One sequence of t tokens with its values.

    Attributes:
        row: row number in the training file, from 0.
        place: how a person finds the row, such as ``train.jsonl, line 7``.
        tokens: text of each token, length t; empty where nobody has asked for it.
        ids: their token ids.
        labels: their labels, -100 where nothing is learned.
        kept: (t,) boolean, True where the selection keeps the token.
        values: component key -> (t,) values; components that the estimator does not split off
            are left out. ``LOSS`` -> the losses, where they are known. Of a run with queries also
            ``query_key`` -> values against that query.
        visits: of a training run, whose values are added up over them; None of any other.
        derivative: of label values, how they were differentiated, as in ``TokenValues``.
        error: of differences, the estimated relative error (norm over a batch of rows), as the
            process that valued the row had last looked at it.
    """

    row: int
    place: str
    tokens: Sequence[str]
    ids: Sequence[int]
    labels: Sequence[int]
    kept: NDArray[np.bool_]
    values: Mapping[str, NDArray[np.floating[Any]]]
    visits: Visits | None = None
    derivative: str | None = None
    error: float = 0.0

    @property
    def response(self) -> NDArray[np.bool_]:
        """(t,) True where the token is a valued response token; the first one never is."""
        return responses(self.labels)


# Key of a component, or of the losses -> column of a file.
_COLUMNS = {key: "value" if key == "total" else key for key in (*COMPONENTS, LOSS)}

_KEYS = {column: key for key, column in _COLUMNS.items()}
# Begins the names of columns of values against one query.
_QUERY = "query_"

# Columns with a number a row.
_BY_ROW = ("row", "response_tokens", "value_mean", "value_sum")

# Tokens of a row group of a Parquet file, about; what is in memory while a file is written.
_GROUP = 1 << 16

# Examples that are in memory while a file is read.
_ROWS = 64


def write_values(path: str | Path, examples: Iterable[ScoredExample]) -> None:
    """Write one file, whole or not at all.

    Examples are taken one after the other, and some thousand tokens of them held at a time.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: the file could not be written; an old one is intact.
    """
    records = map(_record, examples)
    first = next(records, None)
    pa, pq = _pyarrow_modules()
    types = _types(first)
    kinds = {name: pa.type_for_alias(kind.strip("[]")) for name, kind in types.items()}
    schema = pa.schema({n: pa.list_(k) if "[" in types[n] else k for n, k in kinds.items()})
    with replacing(Path(path)) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for group in _groups(chain([] if first is None else [first], records)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


Record = Mapping[str, Any]
"""One row of a file: column -> a number, a text, an array, or None."""


def _record(example: ScoredExample) -> Record:
    totals = np.asarray(example.values["total"], np.float64)[example.response]
    record = {
        "row": example.row,
        "place": example.place,
        "response_tokens": len(totals),
        "value_mean": float(totals.mean()) if len(totals) else None,
        "value_sum": float(totals.sum()),
        "input_ids": np.asarray(example.ids, np.int32),
        "labels": np.asarray(example.labels, np.int32),
        "keep": np.asarray(example.kept, bool),
        "derivative": example.derivative,
        "error": None if example.derivative is None else example.error,
        **dict.fromkeys(_COLUMNS.values()),
        **{_COLUMNS.get(key, key): np.asarray(values) for key, values in example.values.items()},
    }
    if (visits := example.visits) is not None:
        record |= {"visits": visits.count, "last_step": visits.last_step, "branch": visits.branch}
        record |= {"rows": np.asarray(visits.rows, np.int64), "kept_share": visits.kept_share}
    return record


def _types(first: Record | None) -> dict[str, str]:
    """Columns of a file with such records -> their types, a list's as ``[type]``."""
    further = [name for name in first or () if name.startswith(_QUERY)]
    values = [] if first is None else [first[name] for name in (*_COLUMNS.values(), *further)]
    single = bool(values) and all(v is None or v.dtype == np.float32 for v in values)
    number = "[float]" if single else "[double]"
    visits = {
        "visits": "int64", "last_step": "int64", "branch": "string", "rows": "[int64]",
        "kept_share": "[double]",
    }  # fmt: skip
    return {
        "row": "int64",
        "place": "string",
        "response_tokens": "int64",
        "value_mean": "double",
        "value_sum": "double",
        "input_ids": "[int32]",
        "labels": "[int32]",
        "keep": "[bool]",
        "derivative": "string",
        "error": "double",
        **dict.fromkeys((*_COLUMNS.values(), *further), number),
        **(visits if first is not None and "visits" in first else {}),
    }


def _pyarrow_modules() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(
            "Parquet needs pyarrow", remedy="pip install 'alphatoken[data]'"
        ) from None
    return pa, pq


def _groups(records: Iterable[Record]) -> Iterator[list[Record]]:
    group: list[Record] = []
    size = 0
    for record in records:
        group.append(record)
        size += len(record["input_ids"])
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def value_files(folder: str | Path) -> list[Path]:
    """The value files in a folder, in order."""
    return sorted(Path(folder).glob("part-*.parquet"))


def read_values(path: str | Path) -> Iterator[ScoredExample]:
    """The scored sequences of one file, or of all files in a folder, in order, without texts.

    Raises:
        DataError: a folder without value files, or a file that cannot be read or holds something
            else.
    """
    path = Path(path)
    _, pq = _pyarrow_modules()
    parts = value_files(path) if path.is_dir() else [path]
    if not parts:
        raise DataError(
            "the folder holds no value files",
            got=f"no part-*.parquet in {path}",
            remedy="the folder 'values' in the --output_dir of a score, or '_alphatoken/values' in "
            "that of a training run",
        )
    for part in parts:
        with _readable(part), pq.ParquetFile(part) as file:
            for batch in file.iter_batches(batch_size=_ROWS):
                columns = [column.to_numpy(zero_copy_only=False) for column in batch.columns]
                for entries in zip(*columns, strict=True):
                    named = zip(batch.schema.names, entries, strict=True)
                    yield _example({name: entry for name, entry in named if entry is not None})


def read_row_values(folder: Path) -> dict[str, NDArray[Any]]:
    """Columns of numbers by row over all files of a folder, n rows in order.

    ``row``, ``response_tokens`` (int64), ``value_mean``, ``value_sum`` (float64), each (n,): 32
    bytes a row are in memory, and no token.

    Raises:
        DataError: a file that cannot be read, or holds something else.
    """
    _, pq = _pyarrow_modules()
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in _BY_ROW}
    for path in value_files(folder):
        with _readable(path), pq.ParquetFile(path) as file:
            table = file.read(columns=list(_BY_ROW))
            for name, parts in columns.items():
                parts.append(table[name].to_numpy())
    return {name: np.concatenate(parts) for name, parts in columns.items()}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as problem:  # pyarrow's are ValueErrors
        raise DataError(
            "a value file cannot be read",
            got=f"{path}: {type(problem).__name__}: {problem}",
            remedy="score again; the file is truncated or not one of ours",
        ) from problem


def _example(record: Record) -> ScoredExample:
    # Copies of numbers, because Arrow's own memory must not be written to.
    visits = None
    if "visits" in record:
        rows, share = record["rows"].tolist(), record["kept_share"].copy()
        count, last_step = int(record["visits"]), int(record["last_step"])
        visits = Visits(count, last_step, record.get("branch"), rows, share)
    return ScoredExample(
        row=int(record["row"]),
        place=str(record["place"]),
        tokens=[],
        ids=record["input_ids"].tolist(),
        labels=record["labels"].tolist(),
        kept=record["keep"].astype(bool),
        values={
            _KEYS.get(column, column): values.copy()
            for column, values in record.items()
            if column in _KEYS or column.startswith(_QUERY)
        },
        visits=visits,
        derivative=record.get("derivative"),
        error=float(record["error"]) if "derivative" in record else 0.0,  # a null is NaN
    )
