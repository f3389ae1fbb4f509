"""Kinds of data files, told by their first bytes and by the ending of their name.

Compressed files are read as what is in them. A file that holds no rows (a web page, a pointer of
Git LFS, an archive) is refused by what it is, whatever its name says.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from alphatoken.errors import DataError
from alphatoken.support.storage import LFS

__all__ = ["DESCRIPTIONS", "READ", "SUFFIXES", "kind_of", "open_bytes", "suffix_of"]

_JSON, _TABLES, _PARQUET = (".jsonl", ".ndjson", ".json"), (".csv", ".tsv"), (".parquet", ".pq")
SUFFIXES = (*_JSON, *_TABLES, *_PARQUET)
"""Endings of the names of data files, which may be followed by one of ``_PACKED``."""

_PACKED = (".gz", ".bz2", ".xz", ".zst")
READ = f"{', '.join(SUFFIXES)}, each also with {', '.join(_PACKED)} behind it (but for Parquet)"
"""Endings that are read, for messages."""

DESCRIPTIONS = frozenset({"dataset_infos.json", "dataset_info.json"})
"""Names of files that describe a data set of the hub."""

_HEAD = 1024
"""Bytes of a file that are looked at."""

_UNPACK = "unpack it, and name the file or folder that comes out"
_AGAIN = "download the file itself"
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
"""First bytes of files that are refused: what such a file is, and the remedy."""

_WIDE = {
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
"""Byte order marks of encodings that are not read."""

_FIRST = (b"", b"{", b"[")
"""First characters of JSON, white space apart."""


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


_HEADER = re.compile(r'("?)[A-Za-z_][\w .-]*\1(?:[,;\t]("?)[\w .-]+\2)+')
"""Pattern of the first line of a table: names of columns."""


def _refuse_table(path: Path, head: bytes) -> None:
    """Raise for a table that is named as JSON."""
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
    """Raise for content that holds no rows, or none in UTF-8."""
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


_OPENERS: dict[bytes, Callable[[Path], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
    b"\x28\xb5\x2f\xfd": _zstd,
}
"""First bytes of compressed files, and what opens them."""


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
