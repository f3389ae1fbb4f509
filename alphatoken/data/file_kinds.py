"""Kinds of data files, told by their first bytes and by the ending of their name.

Compressed files are read as what is in them. A file that holds no rows (a web page, a pointer of
Git LFS, an archive) is refused by what it is, whatever its name says.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from alphatoken.data.messages import CHATS, PROMPTS, RESPONSES
from alphatoken.errors import DataError
from alphatoken.support.storage import LFS

_JSON, _TABLES, _PARQUET = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv"), (".parquet", ".pq")
SUFFIXES = (*_JSON, *_TABLES, *_PARQUET)
"""Endings of the names of data files, which may be followed by one of ``_PACKED``."""

_PACKED = (".gz", ".bz2", ".xz", ".zst")
READ = f"{', '.join(SUFFIXES)}, each also with {', '.join(_PACKED)} behind it (but for Parquet)"
"""Endings that are read, for messages."""

DESCRIPTIONS = frozenset({"dataset_infos.json", "dataset_info.json"})
"""Names of files that describe a data set of the hub."""

# Bytes of a file that are looked at.
_HEAD = 1024

_UNPACK = "unpack it, and name the file or folder that comes out"
_AGAIN = "download the file itself"
# First bytes of files that are refused: what such a file is, and the remedy.
_FOREIGN: dict[bytes, tuple[str, str]] = {
    LFS: (
        "a pointer of Git LFS, in place of the file itself",
        f"`git lfs pull` in its folder, or {_AGAIN}",
    ),
    b"PK\x03\x04": ("a zip archive, or an office document", f"{_UNPACK}; save a sheet as CSV"),
    b"7z\xbc\xaf'\x1c": ("a 7z archive", _UNPACK),
    b"ARROW1": (
        "an Arrow file",
        "datasets.Dataset.from_file(FILE).to_parquet('rows.parquet')",
    ),
    b"SQLite format 3": ("an SQLite database", "write its rows as CSV or JSONL"),
    b"%PDF": ("a PDF document", "write its rows as JSONL"),
    b"GGUF": ("a model's weights", "name a file of rows"),
}

# Byte order marks of encodings that are not read.
_WIDE = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}

# First characters of JSON, white space apart.
_FIRST = (b"", b"{", b"[")


def suffix_of(path: Path) -> str:
    """The ending of a name, in lower case, without that of a compression."""
    name = path.name.lower()
    return Path(name.removesuffix(Path(name).suffix) if name.endswith(_PACKED) else name).suffix


def kind_of(path: Path) -> str:
    """Kind of a data file: "json", "table" or "parquet".

    Raises:
        DataError: says what the file is instead, and what to do.
    """
    with path.open("rb") as file:
        head = file.read(_HEAD)
    packed = _opener(head) is not None
    if packed:
        with open_bytes(path) as file:
            head = file.read(_HEAD)
        if _opener(head) is not None:
            raise DataError(
                "the data file is compressed twice",
                got=str(path),
                why="what is unpacked once is a compressed file again, and holds no rows",
                remedy=f"{_UNPACK}; what comes out is read as it is",
            )
    _refuse_foreign(path, head)
    if head.startswith(b"PAR1"):
        if packed:
            raise DataError("the data file is compressed Parquet", got=str(path), remedy=_UNPACK)
        return "parquet"
    suffix = suffix_of(path)
    if suffix in _JSON:
        _refuse_table(path, head)
        return "json"
    if suffix in _TABLES:
        return "table"
    if suffix in _PARQUET:
        return "parquet"
    raise DataError(
        "unknown kind of data file",
        got=str(path),
        remedy='write {"prompt": ..., "response": ...} on each line of a .jsonl file; read are '
        f"{READ}, and folders of them",
    )


# Pattern of the first line of a table: names of columns.
_HEADER = re.compile(r'("?)[A-Za-z_][\w .-]*\1(?:[,;\t]("?)[\w .-]+\2)+')


def _refuse_table(path: Path, head: bytes) -> None:
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0]
    line = first.decode(errors="replace").strip()
    if _HEADER.fullmatch(line):
        kind = ".tsv" if "\t" in line else ".csv"
        new = re.sub(rf"\{suffix_of(path)}(?=\.|$)", kind, path.name, flags=re.IGNORECASE)
        raise DataError(
            "the data file looks like a table, and is named as JSON",
            got=f"{path}: {line[:60]}",
            why="its lines are no JSON objects",
            remedy=f"rename it to {new}",
        )


def _refuse_foreign(path: Path, head: bytes) -> None:
    for start, (what, remedy) in _FOREIGN.items():
        if head.startswith(start):
            raise DataError(f"the data file is {what}", got=str(path), remedy=remedy)
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:9].lower().startswith((b"<!doctype", b"<html")):
        raise DataError(
            "the data file is a web page",
            got=f"{path}: {' '.join(head[:60].decode(errors='replace').split())}",
            why="a download that fails often leaves one",
            remedy=f"{_AGAIN} (of the hub: .../resolve/main/..., not .../blob/main/...)",
        )
    code = next((name for mark, name in _WIDE.items() if head.startswith(mark)), None)
    if code is None and head[:2].count(0) == 1 and head[:2].strip(b"\0 \r\n") in _FIRST:
        code = "UTF-16"
    if code is not None:
        raise DataError(
            f"the data file is {code}, and not UTF-8",
            got=str(path),
            remedy="{1}iconv -f {2} -t UTF-8 {0} > utf8{3}".format(
                *unpacked(path), code, suffix_of(path)
            ),
        )


# --- compressed files -----------------------------------------------------------------------------


def _zstd(path: Path) -> IO[bytes]:
    try:
        import pyarrow as pa
    except ImportError:
        raise DataError(
            "reading zstd needs pyarrow", got=str(path), remedy=f"pip install pyarrow, or {_UNPACK}"
        ) from None
    stream: Any = pa.input_stream(str(path), compression="zstd")
    return io.BufferedReader(stream)


# First bytes of compressed files, and what opens them.
_OPENERS: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": _zstd,
}


def _opener(head: bytes) -> Callable[[Path], Any] | None:
    return next((open_ for mark, open_ in _OPENERS.items() if head.startswith(mark)), None)


def unpacked(path: Path) -> tuple[Path, str]:
    """The file that a remedy is for, and what comes before it: a compressed one is unpacked."""
    with path.open("rb") as file:
        if _opener(file.read(8)) is None:
            return path, ""
    name = path.with_suffix("") if path.name.lower().endswith(_PACKED) else path
    return name, f"unpack it as {name}; then "


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked where it is compressed.

    Raises:
        DataError: it is compressed and cut short or damaged, also while it is read.
    """
    with path.open("rb") as file:
        opener = _opener(file.read(8))
    try:
        with path.open("rb") if opener is None else opener(path) as file:
            yield file
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if opener is None:
            raise
        raise DataError(
            "the compressed file cannot be unpacked",
            got=f"{path}: {error}",
            why="what is behind the damaged place would be missing",
            remedy="download or write it again; it may be cut short",
        ) from None


# Columns by which an object is seen to be a row.
_ROWS = frozenset((*PROMPTS, *RESPONSES, *CHATS, "text", "chosen", "rejected"))


def json_layout(path: Path) -> str:
    """Layout of a JSON file: "lines", one object each; or "list", a document that is read whole.

    Raises:
        DataError: the document is an object around the rows, or a table by columns; or broken.
    """
    with open_bytes(path) as file:
        texts = (line.decode("utf-8", "replace").strip("\ufeff \t\r\n\v\f") for line in file)
        lines = filter(None, texts)
        first, alone = next(lines, ""), next(lines, None) is None
    try:
        document = json.loads(first)
    except json.JSONDecodeError as error:
        if first.startswith("[") or (alone and error.msg == "Extra data"):
            return "list"
        if error.pos < len(first) or alone:
            return "lines"  # its first line is broken
        return "list" if _goes_on(path, first) else "lines"
    except (ValueError, RecursionError):
        return "lines"
    if alone and isinstance(document, dict):
        _require_row(document, path)
    return "list" if alone and isinstance(document, list) else "lines"


def _goes_on(path: Path, first: str) -> bool:
    # An object that is printed with indentation ends on a later line.
    if first[-1] in "{[,":
        return True
    try:
        return bool(json_items(path))
    except DataError as error:
        return error.what == _TWICE


_TWICE = "a key stands twice in one object"


def placed(error: DataError, place: str, more: str = "") -> DataError:
    """The same error of the row at ``place``, with ``more`` ways to mend it."""
    return DataError(
        error.what, got=f"{place}: {error.got}", why=error.why, remedy=f"{error.remedy}{more}"
    )


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        keys = [key for key, _ in pairs]
        raise DataError(
            _TWICE,
            got=", ".join(repr(key) for key in members if keys.count(key) > 1),
            why="all but the last of its values would be lost",
            remedy="keep one of them, or rename the others",
        )
    return members


JSON = json.JSONDecoder(object_pairs_hook=_once_each)
"""Decodes rows; made once, it is as fast as ``json.loads``."""


def json_items(path: Path) -> list[Any]:
    """The items of a list; or the objects of a file that holds one after the other.

    Raises:
        DataError: not UTF-8, broken, an object around the rows, a table by columns, or an object
            with a key that stands twice.
    """
    try:
        with open_bytes(path) as file:
            text = file.read().decode("utf-8-sig")
        documents, place = list[Any](), 0
        while (place := _next(text, place)) < len(text):
            document, place = JSON.raw_decode(text, place)
            documents.append(document)
    except DataError as error:
        raise placed(error, f"{path.name}, item {_items_before(text) + 1}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
        raise DataError(
            "broken JSON file",
            got=f"{path.name}: {error}",
            remedy="mend the file there: a list of objects, or one object after the other",
        ) from None
    if len(documents) > 1:
        return documents
    whole = documents[0] if documents else []
    if isinstance(whole, dict):
        _require_row(whole, path)
        return documents
    return whole if isinstance(whole, list) else documents


def _items_before(text: str) -> int:
    """Number of items of a file before the one that has a key twice."""
    start = re.match(r"[\s,]*\[?", text)
    place, items = start.end() if start else 0, 0
    with suppress(DataError):
        while place < len(text):
            place = JSON.raw_decode(text, _next(text, place))[1]
            items += 1
    return items


def _next(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n,":
        place += 1
    return place


def _require_row(document: Mapping[str, Any], path: Path) -> None:
    """Refuse the one object of a file where it holds the rows, and is none itself."""
    lists = {
        name: value
        for name, value in document.items()
        if isinstance(value, list) and value and all(_is_row(item) for item in value)
    }
    file, first = unpacked(path)
    if lists and not _is_row(document):
        name, other = next(iter(lists)), path.with_name(f"rows-{file.stem}.json")
        raise DataError(
            "the JSON file is one object around its rows, and no list of rows",
            got=f"{path.name}: "
            + ", ".join(f"{key!r} holds {len(value)} rows" for key, value in lists.items()),
            remedy=f'{first}write one of the lists: python -c "import json; '
            f"from pathlib import Path; text = Path('{file}').read_text('utf-8-sig'); "
            f"Path('{other}').write_text(json.dumps(json.loads(text)['{name}']))\"{_aside(path)}",
        )
    by_column = _by_column(document)
    if by_column:
        how = ", orient='split'" if by_column == "split" else ""
        other = path.with_name(f"rows-{file.stem}.jsonl")
        raise DataError(
            "the JSON file is a table written by columns, and not by rows",
            got=f"{path.name} has {', '.join(map(repr, list(document)[:6]))}",
            remedy=f"{first}python -c \"import pandas; pandas.read_json('{file}', "
            f"encoding='utf-8-sig'{how}).to_json('{other}', "
            f"orient='records', lines=True)\"{_aside(path)}",
        )


def _aside(path: Path) -> str:
    # Where a folder is read, the new file will lie in it beside the old one.
    return f"; then name that file, or move {path.name} out of the folder, where that is named"


def _is_row(item: Any) -> bool:
    return isinstance(item, dict) and not _ROWS.isdisjoint(item) and not _by_column(item)


def _by_column(document: Mapping[str, Any]) -> str:
    """How pandas or datasets wrote a table by columns: "split" or "columns"; "" for an object."""
    if {"columns", "data"} <= set(document):
        return "split"
    values = list(document.values())
    if not values or _ROWS.isdisjoint(document):
        return ""
    indexed = all(isinstance(v, dict) and v and all(k.isdigit() for k in v) for v in values)
    texts = all(
        isinstance(v, list) and v and len(v) == len(values[0]) and not isinstance(v[0], dict)
        for v in values
    )
    return "columns" if indexed or texts else ""
