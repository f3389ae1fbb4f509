"""Rows of a data file of any size: counted once, then read from any row on, in bounded memory.

Every command reads its files here.

A source is a ``.jsonl``, ``.json`` or ``.parquet`` file, a folder that ``datasets`` saved, or a
folder of such files. Finding it reads everything once, for the number of rows and a digest; what
was found fits a small JSON document, with which another process reads the same rows at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from alphatoken.data.reading import Reading, short
from alphatoken.data.rows import Fields, Row, row_of
from alphatoken.errors import DataError

__all__ = ["Found", "RowSource", "find_source", "read_records", "read_rows", "source_of"]

STRIDE = 256
"""Rows between two places of a JSONL file that are remembered."""

_CHUNK = 1024
"""Rows of a column format that are in memory at a time."""

_BOM = b"\xef\xbb\xbf"
_OTHER_ENCODINGS = {
    b"\xff\xfe\x00\x00": "UTF-32", b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
}  # fmt: skip
_LISTS = ("data", "rows", "train", "examples")
"""Names under which one JSON object holds the rows of a file."""


def read_rows(
    path: str | Path, *, fields: Fields | None = None, limit: int | None = None
) -> list[Row]:
    """The rows of a data file or folder; plain texts as all response.

    What was read as what is logged in one line (``alphatoken.data``), as a warning where a column
    was not read.

    Args:
        path: see the top of this file.
        fields: field names, where they are not among the known ones.
        limit: read at most this many rows.

    Raises:
        DataError: no such file, unknown suffix, not UTF-8, a broken line, a missing or wrong
            field, a file without rows, an unreadable Parquet file. The message names file and line.
    """
    reading = Reading(Path(path).name)
    rows = [
        row_of(record, index, place, fields, reading)
        for index, (place, record) in enumerate(islice(read_records(path), limit))
    ]
    reading.say()
    return rows


def read_records(path: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, record) of every row of a data file or folder, as they are.

    Raises:
        DataError: as for :func:`read_rows`, but for the fields.
    """
    for found in find_source(path).read():
        if isinstance(found.record, DataError):
            raise found.record
        yield found.place, found.record


@dataclass(frozen=True)
class Found:
    """One row as it was found: its index, how a person finds it, and the record or what is wrong.

    ``record`` is a ``DataError`` where the row could not be read; the rows after it can be.
    """

    index: int
    place: str
    record: Mapping[str, Any] | DataError


@dataclass(frozen=True)
class RowSource(ABC):
    """Rows that can be read from any one on.

    Attributes:
        path: of the file or folder.
        rows: how many there are.
        sha256: digest of what the rows were read from.
        stamp: size and time of change of the file when it was found.
    """

    path: str
    rows: int
    sha256: str
    stamp: tuple[int, int]

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[Found]:
        """Rows ``start`` to ``stop`` (the last one excluded), in order.

        Raises:
            DataError: the file is not what it was when it was found, or cannot be read at all.
        """
        if self._stamp_now() != self.stamp:
            raise DataError(
                "a data file changed while it was in use",
                got=self.path,
                why="its rows would be others than those that were counted",
                remedy="start again with the file as it is to be",
            )
        stop = self.rows if stop is None else min(stop, self.rows)
        if start < stop:
            yield from self._read(start, stop)

    def _stamp_now(self) -> tuple[int, int]:
        return _stamp(Path(self.path))

    @abstractmethod
    def _read(self, start: int, stop: int) -> Iterator[Found]: ...

    def limited(self, rows: int | None) -> RowSource:
        """The first rows alone; None leaves all."""
        if rows is None or rows >= self.rows:
            return self
        digest = hashlib.sha256(f"{self.sha256} {rows}".encode()).hexdigest()
        return replace(self, rows=rows, sha256=digest)

    def as_dict(self) -> dict[str, Any]:
        """What another process needs to read the same rows; see :func:`source_of`."""
        return {"kind": type(self).__name__, **asdict(self)}


def find_source(path: str | Path) -> RowSource:
    """Count the rows of a file or folder.

    Args:
        path: see above.

    Raises:
        DataError: no such file, an unknown kind, no rows, or a file that cannot be read.
    """
    path = Path(path)
    source = _folder(path) if path.is_dir() else _file(path)
    if not source.rows:
        raise DataError("the data file has no rows", got=str(path), remedy="give a non-empty file")
    return source


def source_of(document: Mapping[str, Any]) -> RowSource:
    """The source that ``as_dict`` wrote down."""
    fields = dict(document)
    kind = _KINDS[fields.pop("kind")]
    if "parts" in fields:
        fields["parts"] = tuple(source_of(part) for part in fields["parts"])
    fields = {k: _tuples(v) if isinstance(v, list) else v for k, v in fields.items()}
    return kind(**fields)


def _tuples(value: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(one) if isinstance(one, list) else one for one in value)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError("no such data file", got=str(path), remedy="check the path") from error
    # A folder's own size and time say nothing of its files, which have stamps of their own.
    return (0, 0) if path.is_dir() else (stat.st_size, stat.st_mtime_ns)


def _file(path: Path) -> RowSource:
    suffix = path.suffix.lower()
    stamp = _stamp(path)
    if suffix in (".jsonl", ".json", ".ndjson"):
        if _is_one_document(path):
            return JsonList(str(path), len(_items(str(path), stamp)), _digest([path]), stamp)
        return _find_lines(path, stamp)
    if suffix in (".parquet", ".pq"):
        return _find_parquet(path, stamp)
    raise DataError(
        "unknown kind of data file",
        got=str(path),
        remedy="give a .jsonl, a .json or a .parquet file, or a folder of them",
    )


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


# --- JSON -----------------------------------------------------------------------------------------


def _is_one_document(path: Path) -> bool:
    """Whether a JSON file is one list, or one object that holds one, and not one object a line.

    Raises:
        DataError: the file is in another encoding than UTF-8.
    """
    with path.open("rb") as file:
        head = file.read(4)
        for mark, name in _OTHER_ENCODINGS.items():
            if head.startswith(mark):
                raise DataError(
                    "the data file is not UTF-8",
                    got=f"{path.name}: its first bytes are the mark of {name}",
                    remedy=f"convert it: iconv -f {name} -t UTF-8 {path.name} > utf8-{path.name}",
                )
        file.seek(0)
        lines = (line.removeprefix(_BOM).strip() for line in file if not is_blank(line))
        first, alone = next(lines, b""), next(lines, None) is None
    try:
        document = json.loads(first)
        return alone and (isinstance(document, list) or _wrapped(document) is not None)
    except (ValueError, RecursionError):  # the beginning of a longer list or object, or broken
        if first.startswith(b"["):
            return True
        with suppress(ValueError, RecursionError):
            return isinstance(json.loads(path.read_text(encoding="utf-8-sig")), dict)
        return False


def _wrapped(document: Any) -> list[Any] | None:
    """The rows in one object that holds nothing else, such as ``{"data": [...]}``."""
    if not isinstance(document, dict):
        return None
    lists = [v for name, v in document.items() if name in _LISTS and isinstance(v, list)]
    rows = lists[0] if len(lists) == 1 else None
    return rows if rows and all(isinstance(row, dict) for row in rows) else None


def json_items(path: Path) -> Sequence[Any]:
    """The items of one JSON list, or of an object that holds it.

    Raises:
        DataError: the file is neither.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
        raise DataError(
            "broken JSON file", got=f"{path.name}: {error}", remedy="mend the file"
        ) from None
    if isinstance(document, list):
        return document
    rows = _wrapped(document)
    return [document] if rows is None else rows


def require_object(record: Any, place: str) -> Mapping[str, Any]:
    """The item of a list, which must be an object.

    Raises:
        DataError: it is none.
    """
    if not isinstance(record, dict):
        raise DataError(
            "an item of the JSON list is not an object",
            got=f"{place}: {short(repr(record))}",
            remedy='write {"prompt": ..., "response": ...} for each item',
        )
    return record


def is_blank(raw: bytes) -> bool:
    """Whether a line of a JSONL file is no row: white space, or a byte order mark alone."""
    return not raw.strip(_BOM + b" \t\r\n\v\f")


_MEND = (
    "mend or drop this line, or have it passed over (--on_bad_rows skip; not in evaluate and merge)"
)


def json_line(raw: bytes, place: str) -> Mapping[str, Any]:
    """The object on one line of a JSONL file.

    Raises:
        DataError: not UTF-8, not JSON, or no object; the message names ``place``.
    """
    try:
        line = raw.removeprefix(_BOM).decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise DataError(
            "the data file is not UTF-8",
            got=f"{place}: byte 0x{error.object[error.start]:02x} at column {error.start + 1}",
            remedy="convert the file to UTF-8",
        ) from None
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            "broken JSON line",
            got=f"{place}, column {error.colno}: {error.msg}: {short(line)}",
            remedy=f"each line must be one JSON object; {_MEND}",
        ) from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond all bounds
        raise DataError(
            "a JSON line cannot be read", got=f"{place}: {error}", remedy=_MEND
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            "a JSON line is not an object",
            got=f"{place}: {short(line)}",
            remedy='write {"prompt": ..., "response": ...} on each line',
        )
    return record


@dataclass(frozen=True)
class JsonLines(RowSource):
    """A JSONL file; ``marks`` are byte and line of every ``STRIDE``-th row."""

    marks: tuple[tuple[int, int], ...]

    def _read(self, start: int, stop: int) -> Iterator[Found]:
        name = Path(self.path).name
        offset, line = self.marks[start // STRIDE]
        index = start // STRIDE * STRIDE
        with open(self.path, "rb") as file:
            file.seek(offset)
            for number, raw in enumerate(file, start=line):
                if is_blank(raw):
                    continue
                if index >= stop:
                    return
                if index >= start:
                    place = f"{name}, line {number}"
                    yield Found(index, place, _caught(lambda r=raw, p=place: json_line(r, p)))
                index += 1


def _caught(read: Callable[..., Mapping[str, Any]]) -> Mapping[str, Any] | DataError:
    try:
        return read()
    except DataError as error:
        return error


def _find_lines(path: Path, stamp: tuple[int, int]) -> JsonLines:
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
    return JsonLines(str(path), rows, digest.hexdigest(), stamp, tuple(marks))


@dataclass(frozen=True)
class JsonList(RowSource):
    """A JSON file of one list, which no reader can enter in the middle: it is read as a whole."""

    def _read(self, start: int, stop: int) -> Iterator[Found]:
        name = Path(self.path).name
        for index, item in enumerate(_items(self.path, self.stamp)[start:stop], start=start):
            place = f"{name}, item {index + 1}"
            record = _caught(lambda i=item, p=place: require_object(i, p))
            yield Found(index, place, record)


@lru_cache(maxsize=1)
def _items(path: str, stamp: tuple[int, int]) -> Sequence[Any]:
    """All items; read once as long as the file is the same."""
    return json_items(Path(path))


# --- columns --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParquetRows(RowSource):
    """A Parquet file; ``groups`` are the rows of its row groups."""

    groups: tuple[int, ...]

    def _read(self, start: int, stop: int) -> Iterator[Found]:
        name = Path(self.path).name
        ends = list(accumulate(self.groups))
        first, last = bisect_right(ends, start), bisect_right(ends, stop - 1)
        index = ends[first] - self.groups[first]
        with _parquet_file(Path(self.path)) as file:
            wanted = list(range(first, last + 1))
            for batch in file.iter_batches(batch_size=_CHUNK, row_groups=wanted):
                low, high = max(start - index, 0), min(stop - index, batch.num_rows)
                if low < high:  # whole batches before it are passed over as columns
                    records = batch.slice(low, high - low).to_pylist()
                    for own, record in enumerate(records, start=index + low):
                        yield Found(own, f"{name}, row {own + 1}", record)
                index += batch.num_rows


def parquet_modules(path: Path) -> tuple[Any, Any]:
    """``pyarrow`` and ``pyarrow.parquet``, to read ``path``.

    Raises:
        DataError: they are not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError(
            "reading Parquet needs pyarrow",
            got=str(path),
            remedy="pip install pyarrow, or give the rows as JSONL",
        ) from None
    return pa, pq


class _parquet_file:  # noqa: N801, a context manager by its use
    """An open Parquet file; whatever is wrong with it, also while it is read, names it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Any:
        pa, pq = parquet_modules(self._path)
        self._errors = (pa.ArrowException, OSError)
        try:
            self._file = pq.ParquetFile(self._path)
        except self._errors as error:
            raise self._named(error) from None
        return self._file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()
        if isinstance(error, self._errors):
            raise self._named(error) from None

    def _named(self, error: BaseException) -> DataError:
        return DataError(
            "the Parquet file cannot be read",
            got=f"{self._path}: {short(str(error))}",
            remedy="write the file again; it may be truncated",
        )


def _find_parquet(path: Path, stamp: tuple[int, int]) -> ParquetRows:
    with _parquet_file(path) as file:
        meta = file.metadata
        groups = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
    return ParquetRows(str(path), sum(groups), _digest([path]), stamp, tuple(groups))


@dataclass(frozen=True)
class SavedDataset(RowSource):
    """A folder that ``datasets`` wrote with ``save_to_disk``."""

    def _stamp_now(self) -> tuple[int, int]:
        return _saved_stamp(Path(self.path))

    def _read(self, start: int, stop: int) -> Iterator[Found]:
        data, name = _load_saved(Path(self.path)), Path(self.path).name
        for low in range(start, stop, _CHUNK):
            columns = data[low : min(low + _CHUNK, stop)]
            for own, values in enumerate(zip(*columns.values(), strict=True), start=low):
                record = dict(zip(columns, values, strict=True))
                yield Found(own, f"{name}, row {own + 1}", record)


def _saved_files(path: Path) -> list[Path]:
    """What a saved data set consists of; caches of ``map`` beside it are no part of it."""
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        files = [path / one["filename"] for one in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            "the saved data set cannot be read",
            got=f"{path / 'state.json'}: {type(error).__name__}: {short(str(error))}",
            remedy="save it again with save_to_disk",
        ) from None
    return [path / "state.json", *files]


def _saved_stamp(path: Path) -> tuple[int, int]:
    stamps = [_stamp(file) for file in _saved_files(path)]
    return sum(size for size, _ in stamps), max(time for _, time in stamps)


def _load_saved(path: Path) -> Any:
    try:
        import datasets
    except ImportError:
        raise DataError(
            "reading a folder of datasets needs that package",
            got=str(path),
            remedy="pip install datasets, or give the rows as JSONL or Parquet",
        ) from None
    try:
        data = datasets.load_from_disk(str(path))
    except Exception as error:  # whatever Arrow and its files come up with
        raise DataError(
            "the saved data set cannot be read",
            got=f"{path}: {type(error).__name__}: {short(str(error))}",
            remedy="save it again with save_to_disk",
        ) from None
    if isinstance(data, datasets.DatasetDict):
        raise DataError(
            "the folder holds several data sets",
            got=f"{path}: {', '.join(data)}",
            remedy=f"give one of them, such as {path / next(iter(data), 'train')}",
        )
    return data


# --- folders --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined(RowSource):
    """The files of a folder, one after the other by name."""

    parts: tuple[RowSource, ...]

    def _read(self, start: int, stop: int) -> Iterator[Found]:
        first = 0
        for part in self.parts:
            for found in part.read(max(start - first, 0), stop - first):
                yield replace(found, index=found.index + first)
            first += part.rows
            if first >= stop:
                return

    def as_dict(self) -> dict[str, Any]:
        """As of any source, with its parts likewise."""
        own = super().as_dict()
        return own | {"parts": [part.as_dict() for part in self.parts]}


_KINDS: dict[str, type[RowSource]] = {
    kind.__name__: kind for kind in (JsonLines, JsonList, ParquetRows, SavedDataset, Joined)
}
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".pq")


def _folder(path: Path) -> RowSource:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        data = _load_saved(path)
        return SavedDataset(str(path), len(data), _digest(_saved_files(path)), _saved_stamp(path))
    names = sorted(os.listdir(path))
    files = [path / n for n in names if n.lower().endswith(_SUFFIXES) and not n.startswith(".")]
    if not files:
        raise DataError(
            "the folder holds no data files",
            got=str(path),
            remedy=f"files that end in {', '.join(_SUFFIXES)}, or a data set of save_to_disk",
        )
    parts = tuple(_file(file) for file in files)
    digest = hashlib.sha256(" ".join(f"{p.rows} {p.sha256}" for p in parts).encode())
    rows = sum(part.rows for part in parts)
    return Joined(str(path), rows, digest.hexdigest(), _stamp(path), parts)
