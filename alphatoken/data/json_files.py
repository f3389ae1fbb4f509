"""JSON files: one object a line, or a document as a whole, and whether its rows are a list."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alphatoken.data.file_kinds import open_bytes, unpacked
from alphatoken.data.messages import CHATS, PROMPTS, RESPONSES
from alphatoken.errors import DataError

__all__ = ["json_items", "json_layout"]

_ROWS = frozenset((*PROMPTS, *RESPONSES, *CHATS, "text", "chosen", "rejected"))
"""Columns by which an object is seen to be a row."""


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
    """True if the object of the first line ends on a later one: it is printed with indentation."""
    if first[-1] in "{[,":
        return True
    try:
        return bool(json_items(path))
    except DataError:
        return False


def json_items(path: Path) -> list[Any]:
    """The items of a list; or the objects of a file that holds one after the other.

    Raises:
        DataError: not UTF-8, broken, an object around the rows, or a table by columns.
    """
    try:
        with open_bytes(path) as file:
            text = file.read().decode("utf-8-sig")
        documents, place, read = list[Any](), 0, json.JSONDecoder().raw_decode
        while (place := _next(text, place)) < len(text):
            document, place = read(text, place)
            documents.append(document)
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


def _next(text: str, place: int) -> int:
    """Place of the next document: behind white space, and the comma between two."""
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
    """What is to be done besides where a folder is read, in which the new file will lie too."""
    return f"; then name that file, or move {path.name} out of the folder, where that is named"


def _is_row(item: Any) -> bool:
    """True for an object with one of the known columns, as a row has."""
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
