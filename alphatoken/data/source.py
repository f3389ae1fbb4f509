"""Rows of a data file of any size: counted once, then read from any row on, in bounded memory.

Every command and every reader in Python takes its rows here.

A source is a JSON, CSV or Parquet file (``file_kinds``), or a folder of such files. Finding it
reads everything once, for the number of rows and a digest; a source fits a small JSON document,
with which another process reads the same rows at once.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import IO, Any, TypeVar

from alphatoken.data.file_kinds import (
    DESCRIPTIONS,
    JSON,
    READ,
    SUFFIXES,
    json_items,
    json_layout,
    kind_of,
    open_bytes,
    placed,
    suffix_of,
)
from alphatoken.data.rows import Fields, Row, row_of
from alphatoken.data.survey import Survey
from alphatoken.errors import ColumnsError, DataError, short
from alphatoken.support.resume import file_digest

STRIDE = 256
"""Rows between two places of a JSONL file that are remembered."""

# Rows of a column format that are in memory at a time.
_CHUNK = 1024

_BOM = b"\xef\xbb\xbf"
# Characters of a cell of a table; Python's own limit is 131,072.
_LONGEST = 2**30

Record = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class SourceRow:
    """One record of a source, before a row is made of it.

    Attributes:
        index: its number, from 0.
        place: how a person finds it.
        record: its columns, by name; or the error, where it cannot be read. The next ones can be.
    """

    index: int
    place: str
    record: Record | DataError

    @property
    def number(self) -> int:
        """That of its line, item or row."""
        return number_of(self.place)


def number_of(place: str) -> int:
    """The number of a line, item or row, with which its place ends.

    >>> number_of("rows.jsonl, line 4")
    4
    """
    return int(place.rpartition(" ")[2])


# --- rows of records ------------------------------------------------------------------------------


def each_row(
    records: Iterable[SourceRow],
    make: Callable[[Record, int, str], T],
    on_bad_rows: str = "error",
) -> Iterator[tuple[SourceRow, T | DataError]]:
    """Every record with the row that is made of it, or with what is wrong with it.

    ``make`` gives a row of the columns of a record, its index and its place. ``on_bad_rows``
    "error" stops at the first record that is no row, "skip" goes on after it.

    Raises:
        DataError: such a record, under "error"; a choice about the columns of all rows, always.
    """
    for source_row in records:
        row: T | DataError
        try:
            if isinstance(source_row.record, DataError):
                raise source_row.record
            row = make(source_row.record, source_row.index, source_row.place)
        except ColumnsError:
            raise
        except DataError as error:
            if on_bad_rows == "error":
                raise
            row = error
        yield source_row, row


def usable_rows(
    records: Iterable[SourceRow],
    make: Callable[[Record, int, str], T | None],
    survey: Survey,
    on_bad_rows: str = "error",
) -> list[T]:
    """The rows that ``make`` makes of records, without those that are left out; logs the survey.

    Other arguments are those of :func:`each_row`; ``make`` gives None where it has left a row out
    itself, and told the survey.

    Raises:
        DataError: as of :func:`each_row`; the first record's, where none is a row.
    """
    rows, first = list[T](), None
    for source_row, row in each_row(records, make, on_bad_rows):
        if isinstance(row, DataError):
            first = first or row
            survey.leave_out(row.what, source_row.place)
            survey.bad_rows += 1
        elif row is not None:
            rows.append(row)
    survey.log()
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
    source = find_source(path)
    survey = source.survey()
    make = partial(row_of, fields=fields, survey=survey)
    return usable_rows(source.read(0, limit), make, survey, on_bad_rows)


def read_records(path: str | Path) -> Iterator[tuple[str, Record]]:
    """(place, record) of every row of a data file or folder, as they are.

    Raises:
        DataError: as for :func:`read_rows`, but for the fields.
    """
    source = find_source(path)
    source.survey().log()  # files that are not read; of columns nothing is known here
    for row, record in each_row(source.read(), lambda record, *_: record):
        assert not isinstance(record, DataError)
        yield row.place, record


# --- sources --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowSource:
    """Rows that can be read from any one on.

    Attributes:
        kind: "lines" or "list" of JSON, "table", "parquet" or "folder".
        path: of the file or folder.
        rows: how many there are.
        sha256: digest of what the rows were read from.
        stamp: size and time of change of the file when its rows were counted.
        marks: where rows can be reached: byte and line of every ``STRIDE``-th row of "lines", the
            rows of each row group of "parquet".
        parts: the files of a "folder", one after the other by name.
        unread: files of a "folder" that are not read, each with the reason.
        over: rows of a table by tabs of which a quoted text runs over lines.
    """

    kind: str
    path: str
    rows: int
    sha256: str
    stamp: tuple[int, int]
    marks: Sequence[Any] = ()
    parts: tuple[RowSource, ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    over: int = 0

    def read(self, start: int = 0, stop: int | None = None) -> Iterator[SourceRow]:
        """Rows ``start`` to ``stop`` (the last one excluded), in order.

        Raises:
            DataError: the file changed since its rows were counted, or cannot be read at all.
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

    def survey(self) -> Survey:
        """An empty survey of the rows, which knows the files of a folder."""
        files = [Path(part.path).name for part in self.parts]
        survey = Survey(Path(self.path).name or str(self.path), files, self.unread)
        if over := self.over + sum(part.over for part in self.parts):
            survey.notes[_OVER] = over
        return survey

    def limited(self, rows: int | None) -> RowSource:
        """The first rows alone; None leaves all."""
        if rows is None or rows >= self.rows:
            return self
        digest = hashlib.sha256(f"{self.sha256} {rows}".encode()).hexdigest()
        return replace(self, rows=rows, sha256=digest, over=min(self.over, rows))


def source_of(document: Mapping[str, Any]) -> RowSource:
    """The source that ``dataclasses.asdict`` wrote down, for another process to read the rows."""
    parts = tuple(source_of(part) for part in document["parts"])
    unread = tuple((name, why) for name, why in document["unread"])
    return RowSource(
        **{**document, "stamp": tuple(document["stamp"]), "parts": parts, "unread": unread}
    )


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
    stamp = _stamp(path)
    if path.name in DESCRIPTIONS:
        raise DataError(
            "the file describes a data set, and holds none of its rows",
            got=str(path),
            remedy="name the data files, or the folder that holds them",
        )
    kind = kind_of(path)
    if kind == "parquet":
        with _parquet_file(path) as file:
            meta = file.metadata
            _require_one_of_each(path, file.schema_arrow.names)
            groups = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
        return RowSource("parquet", str(path), sum(groups), file_digest(path), stamp, groups)
    if kind == "table":
        over = [over for _, over, _ in _cells(path)]
        digest = file_digest(path)
        return RowSource("table", str(path), len(over), digest, stamp, over=sum(over))
    if json_layout(path) == "list":
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
    files, unread = _files_of(path)
    _require_one_split(path, files)
    parts = tuple(map(_file, files))
    unread += [(Path(part.path).name, "no rows in it") for part in parts if not part.rows]
    parts = tuple(part for part in parts if part.rows)
    if not parts:
        deeper = [name for name, why in unread if why == _DEEPER]
        raise DataError(
            "the folder holds no data files",
            got=f"{path}: {', '.join(name for name, _ in unread[:8]) or 'nothing'}",
            remedy=f"name the folder that the files lie in: {(path / deeper[0]).parent}"
            if deeper
            else f"files that end in {READ}",
        )
    digest = hashlib.sha256(" ".join(f"{p.rows} {p.sha256}" for p in parts).encode()).hexdigest()
    rows = sum(part.rows for part in parts)
    return RowSource(
        "folder", str(path), rows, digest, _stamp(path), parts=parts, unread=tuple(unread)
    )


# Words in the names of files whose rows are not to be trained on.
_HELD_OUT = {"test", "validation", "valid", "val", "dev", "eval"}


def _require_one_split(folder: Path, files: Sequence[Path]) -> None:
    """Refuse a folder in which held-out rows lie beside training rows: all are read as one."""
    words = {file: set(re.split("[^a-z]+", file.name.lower())) for file in files}
    train = [file for file, own in words.items() if own & {"train", "training"}]
    others = [file for file, own in words.items() if own & _HELD_OUT and file not in train]
    if train and others:
        raise DataError(
            "the folder holds several splits of a data set",
            got=f"{folder}: {', '.join(file.name for file in others)} beside {train[0].name}",
            why="all of its files are read as one, and held-out rows would be trained on",
            remedy=f"name the file: {train[0]}; or move the others into a folder inside, which is "
            "not read",
        )


_DEEPER = "in a folder inside"
# Files of a folder inside that are looked for.
_NAMED = 1000


def _files_of(folder: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    """Data files of a folder, and its other files, each with the reason why it is not read."""
    files, unread = list[Path](), list[tuple[str, str]]()
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():  # not entered: a data set's splits often lie in folders inside
            deeper = islice((f for f in path.rglob("*") if suffix_of(f) in SUFFIXES), _NAMED)
            unread += [(str(file.relative_to(folder)), _DEEPER) for file in sorted(deeper)]
        elif path.name in DESCRIPTIONS:
            unread.append((path.name, "it describes a data set"))
        elif suffix_of(path) in SUFFIXES:
            files.append(path)
        else:
            unread.append((path.name, "another kind of file"))
    return files, unread


def _read_folder(source: RowSource, path: Path, start: int, stop: int) -> Iterator[SourceRow]:
    first = 0
    for part in source.parts:
        for row in part.read(max(start - first, 0), stop - first):
            yield replace(row, index=row.index + first)
        first += part.rows
        if first >= stop:
            return


# --- JSON -----------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _items(path: Path, stamp: tuple[int, int]) -> list[Any]:
    # Cached, since no reader can enter a list in the middle: each block would read it whole.
    return json_items(path)


def _read_list(source: RowSource, path: Path, start: int, stop: int) -> Iterator[SourceRow]:
    for index, item in enumerate(_items(path, source.stamp)[start:stop], start=start):
        place = f"{path.name}, item {index + 1}"
        if not isinstance(item, dict):
            item = DataError(
                "an item of the JSON list is not an object",
                got=f"{place}: {short(repr(item))}",
                remedy='write {"prompt": ..., "response": ...} for each item',
            )
        yield SourceRow(index, place, item)


def _lines(path: Path) -> tuple[list[tuple[int, int]], int, str]:
    marks, rows, offset = [], 0, 0
    digest = hashlib.sha256()
    with open_bytes(path) as file:
        for line, raw in enumerate(file, start=1):
            digest.update(raw)
            if not is_blank(raw):
                if rows % STRIDE == 0:
                    marks.append((offset, line))
                rows += 1
            offset += len(raw)
    return marks, rows, digest.hexdigest()


def _read_lines(source: RowSource, path: Path, start: int, stop: int) -> Iterator[SourceRow]:
    offset, line = source.marks[start // STRIDE]
    index = start // STRIDE * STRIDE
    with open_bytes(path) as file:
        _skip(file, offset)
        for number, raw in enumerate(file, start=line):
            if is_blank(raw):
                continue
            if index >= stop:
                return
            if index >= start:
                place = f"{path.name}, line {number}"
                yield SourceRow(index, place, _json_line(raw, place))
            index += 1


def _skip(file: IO[bytes], offset: int) -> None:
    # Some compressed files cannot seek: their bytes are read up to the offset.
    if file.seekable():
        file.seek(offset)
    while not file.seekable() and offset > 0:
        offset -= len(file.read(min(offset, 2**20)))


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
        return _not_utf8(place, error, f" at column {error.start + 1}")
    try:
        record = _object(line)
    except DataError as error:
        return placed(error, place, f"; or {_MEND}")
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


def _not_utf8(place: str, error: UnicodeDecodeError, column: str = "") -> DataError:
    return DataError(
        "the data file is not UTF-8",
        got=f"{place}: byte 0x{error.object[error.start]:02x}{column}",
        remedy="convert the file: iconv -f ENCODING -t UTF-8 FILE > NEW",
    )


def _object(line: str) -> Any:
    try:
        return JSON.decode(line)
    except json.JSONDecodeError as error:
        # The comma of a list without its brackets is no part of the row.
        if error.msg == "Extra data" and line[error.pos :].strip() == ",":
            return JSON.decode(line[: error.pos])
        raise


# --- columns --------------------------------------------------------------------------------------


# In tables by tabs quotes are often plain characters: one at the head of a text swallows all up to
# the next one. Others (pandas, datasets, spreadsheets) quote there as in CSV, and so does this.
_OVER = (
    'a quoted text runs over several lines of the table (one that begins with a plain " must stand '
    'in quotes, with "" for it)'
)


def _cells(path: Path) -> Iterator[tuple[int, bool, dict[str, str] | DataError]]:
    """First line and record of each row of a CSV or TSV file; all cells are texts.

    Between the two, whether a row of a table by tabs runs over lines.

    Raises:
        DataError: not UTF-8, quotes that do not close, or two columns of one name.
    """
    with open_bytes(path) as raw, io.TextIOWrapper(raw, "utf-8-sig", newline="") as file:
        before = csv.field_size_limit(_LONGEST)
        try:
            first = file.readline()
            marks = "\t" if suffix_of(path) == ".tsv" else ",;\t"
            mark, line = max(marks, key=first.count), 0
            table = csv.reader(chain([first], file), delimiter=mark, strict=True)
            header = next(table, [])
            _require_one_of_each(path, header)
            line = table.line_num
            for cells in table:
                first_line, line = line + 1, table.line_num
                if not cells:
                    continue
                record: dict[str, str] | DataError = dict(zip(header, cells, strict=False))
                if len(cells) != len(header):
                    record = DataError(
                        "a row of the table has not as many cells as the header",
                        got=f"{path.name}, line {first_line}: {len(cells)} cells, "
                        f"{len(header)} columns",
                        remedy=f'put texts that hold the delimiter into quotes ("..."); {_MEND}',
                    )
                yield first_line, mark == "\t" and line > first_line, record
        except UnicodeDecodeError as error:
            raise _not_utf8(path.name, error) from None
        except csv.Error as error:
            raise DataError(
                "the table cannot be read",
                got=f"{path.name}, from line {line + 1} on: {error}",
                remedy='close each quote, and double those inside a text ("a ""b"" c")',
            ) from None
        finally:
            csv.field_size_limit(before)


def _require_one_of_each(path: Path, header: Sequence[str]) -> None:
    if twice := [name for name in dict.fromkeys(header) if header.count(name) > 1]:
        raise DataError(
            "two columns of the table have one name",
            got=f"{path.name}: {', '.join(map(repr, twice))}",
            why="the rows would lose what stands in the first of them",
            remedy="rename or drop one of them",
        )


def _read_table(source: RowSource, path: Path, start: int, stop: int) -> Iterator[SourceRow]:
    for index, (line, _, record) in enumerate(islice(_cells(path), start, stop), start=start):
        yield SourceRow(index, f"{path.name}, line {line}", record)


def _read_parquet(source: RowSource, path: Path, start: int, stop: int) -> Iterator[SourceRow]:
    ends = list(accumulate(source.marks))
    first, last = bisect_right(ends, start), bisect_right(ends, stop - 1)
    index = ends[first] - source.marks[first]
    with _parquet_file(path) as file:
        wanted = list(range(first, last + 1))
        for batch in file.iter_batches(batch_size=_CHUNK, row_groups=wanted):
            low, high = max(start - index, 0), min(stop - index, batch.num_rows)
            if low < high:  # whole batches before it are passed over as columns
                records = batch.slice(low, high - low).to_pylist(maps_as_pydicts="strict")
                for own, record in enumerate(records, start=index + low):
                    yield SourceRow(own, f"{path.name}, row {own + 1}", _as_text(record))
            index += batch.num_rows


def _as_text(value: Any) -> Any:
    # Older writers name no text so in Parquet: bytes that are UTF-8 are texts.
    if isinstance(value, dict):
        return {name: _as_text(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_as_text(part) for part in value]
    if isinstance(value, bytes):
        with suppress(UnicodeDecodeError):
            return value.decode("utf-8")
    return value


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
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


_READERS: dict[str, Callable[[RowSource, Path, int, int], Iterator[SourceRow]]] = {
    "lines": _read_lines,
    "list": _read_list,
    "table": _read_table,
    "parquet": _read_parquet,
    "folder": _read_folder,
}
