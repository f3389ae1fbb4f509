"""Rows of a data file of any size: counted once, then read from any row on, in bounded memory.

Every command and every reader in Python takes its rows here.

A source is a ``.jsonl``, ``.json`` or ``.parquet`` file, or a folder of such files. Finding it
reads everything once, for the number of rows and a digest; what was found fits a small JSON
document, with which another process reads the same rows at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from alphatoken.data.reading import Reading, short
from alphatoken.data.rows import Fields, Row, row_of
from alphatoken.errors import ColumnsError, DataError
from alphatoken.support.storage import file_digest

__all__ = [
    "SUFFIXES",
    "Found",
    "RowSource",
    "each_row",
    "find_source",
    "read_records",
    "read_rows",
    "source_of",
    "take_rows",
]

STRIDE = 256
"""Rows between two places of a JSONL file that are remembered."""

_CHUNK = 1024
"""Rows of a column format that are in memory at a time."""

_BOM = b"\xef\xbb\xbf"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".pq")
"""Endings of the names of data files."""

Record = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """One row as it was found: its index, how a person finds it, and the record or what is wrong.

    ``record`` is a ``DataError`` where the row could not be read; the rows after it can be.
    """

    index: int
    place: str
    record: Record | DataError


# --- taking rows ----------------------------------------------------------------------------------


def each_row(
    found: Iterable[Found], make: Callable[[Record, int, str], T], on_bad_rows: str = "error"
) -> Iterator[tuple[Found, T | DataError]]:
    """Every record with the row that is made of it, or with what is wrong with it.

    ``make`` gives a row of a record, its index and its place. ``on_bad_rows`` "error" stops at the
    first record that is no row, "skip" goes on after it.

    Raises:
        DataError: such a record, under "error"; a choice about the columns of all rows, always.
    """
    for one in found:
        row: T | DataError
        try:
            if isinstance(one.record, DataError):
                raise one.record
            row = make(one.record, one.index, one.place)
        except ColumnsError:
            raise
        except DataError as error:
            if on_bad_rows == "error":
                raise
            row = error
        yield one, row


def take_rows(
    path: str | Path,
    make: Callable[..., T],
    fields: Fields | None,
    limit: int | None,
    on_bad_rows: str = "error",
) -> list[T]:
    """The rows of a file or folder as ``make`` reads them (``row_of``); see :func:`read_rows`."""
    found, reading = find_source(path).read(0, limit), Reading(Path(path).name)
    rows, first = list[T](), None
    for one, row in each_row(found, partial(make, fields=fields, reading=reading), on_bad_rows):
        if isinstance(row, DataError):
            first = first or row
            reading.leave(row.what, one.place)
        else:
            rows.append(row)
    reading.say()
    if first is not None and not rows:
        raise first
    return rows


def read_rows(
    path: str | Path,
    *,
    fields: Fields | None = None,
    limit: int | None = None,
    on_bad_rows: str = "error",
) -> list[Row]:
    """The rows of a data file or folder; plain texts as all response.

    What was read as what, and what was left out, is logged in one line (``alphatoken.data``), as a
    warning where a column or a row was not read.

    Args:
        path: see the top of this file.
        fields: field names, where they are not among the known ones.
        limit: read at most this many rows.
        on_bad_rows: "skip" leaves out rows that cannot be read; "error" stops at the first.

    Raises:
        DataError: no such file, unknown suffix, not UTF-8, a broken line, a missing or wrong
            field, a file without rows, an unreadable Parquet file. The message names file and line.
    """
    return take_rows(path, row_of, fields, limit, on_bad_rows)


def read_records(path: str | Path) -> Iterator[tuple[str, Record]]:
    """(place, record) of every row of a data file or folder, as they are.

    Raises:
        DataError: as for :func:`read_rows`, but for the fields.
    """
    for found, record in each_row(find_source(path).read(), lambda record, *_: record):
        assert not isinstance(record, DataError)
        yield found.place, record


# --- sources --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowSource:
    """Rows that can be read from any one on.

    Attributes:
        kind: "lines", "list", "parquet" or "folder".
        path: of the file or folder.
        rows: how many there are.
        sha256: digest of what the rows were read from.
        stamp: size and time of change of the file when it was found.
        marks: where rows can be reached: byte and line of every ``STRIDE``-th row of "lines", the
            rows of each row group of "parquet".
        parts: the files of a "folder", one after the other by name.
    """

    kind: str
    path: str
    rows: int
    sha256: str
    stamp: tuple[int, int]
    marks: Sequence[Any] = ()
    parts: tuple[RowSource, ...] = ()

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Found]:
        """Rows ``start`` to ``stop`` (the last one excluded), in order.

        Raises:
            DataError: the file is not what it was when it was found, or cannot be read at all.
        """
        path = Path(self.path)
        if _stamp(path) != self.stamp:
            raise DataError(
                "a data file changed while it was in use",
                got=self.path,
                why="its rows would be others than those that were counted",
                remedy="start again with the file as it is to be",
            )
        stop = self.rows if stop is None else min(stop, self.rows)
        if start < stop:
            yield from _READERS[self.kind](self, path, start, stop)

    def limited(self, rows: int | None) -> RowSource:
        """The first rows alone; None leaves all."""
        if rows is None or rows >= self.rows:
            return self
        digest = hashlib.sha256(f"{self.sha256} {rows}".encode()).hexdigest()
        return replace(self, rows=rows, sha256=digest)


def source_of(document: Mapping[str, Any]) -> RowSource:
    """The source that ``dataclasses.asdict`` wrote down, for another process to read the rows."""
    parts = tuple(source_of(part) for part in document["parts"])
    return RowSource(**{**document, "stamp": tuple(document["stamp"]), "parts": parts})


def find_source(path: str | Path) -> RowSource:
    """Count the rows of a file or folder.

    Raises:
        DataError: no such file, an unknown kind, no rows, or a file that cannot be read.
    """
    path = Path(path)
    source = _folder(path) if path.is_dir() else _file(path)
    if not source.rows:
        raise DataError("the data file has no rows", got=str(path), remedy="give a non-empty file")
    return source


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError("no such data file", got=str(path), remedy="check the path") from error
    # A folder's own size and time say nothing of its files, which have stamps of their own.
    return (0, 0) if path.is_dir() else (stat.st_size, stat.st_mtime_ns)


def _file(path: Path) -> RowSource:
    suffix, stamp = path.suffix.lower(), _stamp(path)
    if suffix not in SUFFIXES:
        raise DataError(
            "unknown kind of data file",
            got=str(path),
            remedy="give a .jsonl, a .json or a .parquet file, or a folder of them",
        )
    if suffix in (".parquet", ".pq"):
        with _parquet_file(path) as file:
            meta = file.metadata
            groups = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        return RowSource("parquet", str(path), sum(groups), file_digest(path), stamp, groups)
    if _is_one_document(path):
        return RowSource("list", str(path), len(_items(path, stamp)), file_digest(path), stamp)
    marks, rows, digest = _lines(path)
    return RowSource("lines", str(path), rows, digest, stamp, marks)


def _folder(path: Path) -> RowSource:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        raise DataError(
            "the folder was written by save_to_disk of datasets, which is not read",
            got=str(path),
            remedy="load_from_disk(FOLDER).to_parquet('rows.parquet'), of one split",
        )
    names = sorted(os.listdir(path))
    files = [path / n for n in names if n.lower().endswith(SUFFIXES) and not n.startswith(".")]
    if not files:
        raise DataError(
            "the folder holds no data files",
            got=str(path),
            remedy=f"files that end in {', '.join(SUFFIXES)}",
        )
    parts = tuple(_file(file) for file in files)
    digest = hashlib.sha256(" ".join(f"{p.rows} {p.sha256}" for p in parts).encode()).hexdigest()
    rows = sum(part.rows for part in parts)
    return RowSource("folder", str(path), rows, digest, _stamp(path), parts=parts)


def _read_folder(source: RowSource, path: Path, start: int, stop: int) -> Iterator[Found]:
    first = 0
    for part in source.parts:
        for found in part.read(max(start - first, 0), stop - first):
            yield replace(found, index=found.index + first)
        first += part.rows
        if first >= stop:
            return


# --- JSON -----------------------------------------------------------------------------------------


def _is_one_document(path: Path) -> bool:
    """True if a JSON file is one list, and not one object a line."""
    with path.open("rb") as file:
        lines = (line.removeprefix(_BOM).strip() for line in file if not is_blank(line))
        first, alone = next(lines, b""), next(lines, None) is None
    try:
        document = json.loads(first)
    except (ValueError, RecursionError):  # the beginning of a longer list, or broken
        return first.startswith(b"[")
    return alone and isinstance(document, list)


@lru_cache(maxsize=1)
def _items(path: Path, stamp: tuple[int, int]) -> list[Any]:
    """All items of a JSON list; read once while it is the same."""
    try:
        items: list[Any] = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
        raise DataError(
            "broken JSON file", got=f"{path.name}: {error}", remedy="mend the file"
        ) from None
    return items


def _read_list(source: RowSource, path: Path, start: int, stop: int) -> Iterator[Found]:
    """Rows of a file of one list, which no reader can enter in the middle: it is read whole."""
    for index, item in enumerate(_items(path, source.stamp)[start:stop], start=start):
        place = f"{path.name}, item {index + 1}"
        if not isinstance(item, dict):
            item = DataError(
                "an item of the JSON list is not an object",
                got=f"{place}: {short(repr(item))}",
                remedy='write {"prompt": ..., "response": ...} for each item',
            )
        yield Found(index, place, item)


def _lines(path: Path) -> tuple[list[tuple[int, int]], int, str]:
    """Marks, number of rows and digest of a JSONL file."""
    marks, rows, offset = [], 0, 0
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            digest.update(raw)
            if not is_blank(raw):
                if rows % STRIDE == 0:
                    marks.append((offset, line))
                rows += 1
            offset += len(raw)
    return marks, rows, digest.hexdigest()


def _read_lines(source: RowSource, path: Path, start: int, stop: int) -> Iterator[Found]:
    offset, line = source.marks[start // STRIDE]
    index = start // STRIDE * STRIDE
    with path.open("rb") as file:
        file.seek(offset)
        for number, raw in enumerate(file, start=line):
            if is_blank(raw):
                continue
            if index >= stop:
                return
            if index >= start:
                place = f"{path.name}, line {number}"
                yield Found(index, place, _json_line(raw, place))
            index += 1


def is_blank(raw: bytes) -> bool:
    """True if a line of a JSONL file is no row: white space, or a byte order mark alone."""
    return not raw.strip(_BOM + b" \t\r\n\v\f")


_MEND = (
    "mend or drop this line, or have it passed over (--on_bad_rows skip; not in evaluate and merge)"
)


def _json_line(raw: bytes, place: str) -> Record | DataError:
    """The object on one line of a JSONL file; an error that names ``place`` where there is none."""
    try:
        line = raw.removeprefix(_BOM).decode("utf-8").strip()
    except UnicodeDecodeError as error:
        return DataError(
            "the data file is not UTF-8",
            got=f"{place}: byte 0x{error.object[error.start]:02x} at column {error.start + 1}",
            remedy="convert the file to UTF-8",
        )
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        return DataError(
            "broken JSON line",
            got=f"{place}, column {error.colno}: {error.msg}: {short(line)}",
            remedy=f"each line must be one JSON object; {_MEND}",
        )
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond all bounds
        return DataError("a JSON line cannot be read", got=f"{place}: {error}", remedy=_MEND)
    if not isinstance(record, dict):
        return DataError(
            "a JSON line is not an object",
            got=f"{place}: {short(line)}",
            remedy='write {"prompt": ..., "response": ...} on each line',
        )
    return record


# --- columns --------------------------------------------------------------------------------------


def _read_parquet(source: RowSource, path: Path, start: int, stop: int) -> Iterator[Found]:
    ends = list(accumulate(source.marks))
    first, last = bisect_right(ends, start), bisect_right(ends, stop - 1)
    index = ends[first] - source.marks[first]
    with _parquet_file(path) as file:
        wanted = list(range(first, last + 1))
        for batch in file.iter_batches(batch_size=_CHUNK, row_groups=wanted):
            low, high = max(start - index, 0), min(stop - index, batch.num_rows)
            if low < high:  # whole batches before it are passed over as columns
                records = batch.slice(low, high - low).to_pylist()
                for own, record in enumerate(records, start=index + low):
                    yield Found(own, f"{path.name}, row {own + 1}", record)
            index += batch.num_rows


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    """An open Parquet file; whatever is wrong with it, also while it is read, names it."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(
            "reading Parquet needs pyarrow",
            got=str(path),
            remedy="pip install pyarrow, or give the rows as JSONL",
        ) from None
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            "the Parquet file cannot be read",
            got=f"{path}: {short(str(error))}",
            remedy="write the file again; it may be truncated",
        ) from None


_READERS: dict[str, Callable[[RowSource, Path, int, int], Iterator[Found]]] = {
    "lines": _read_lines,
    "list": _read_list,
    "parquet": _read_parquet,
    "folder": _read_folder,
}
