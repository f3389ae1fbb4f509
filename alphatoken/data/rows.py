"""Rows from JSONL and Parquet files: prompt and response, or chat messages.

A row is a conversation. A prompt with its response is a conversation of two turns, so everything
after this file knows one shape only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphatoken.errors import DataError

__all__ = ["Fields", "Row", "Turn", "read_records", "read_rows", "row_of", "text_or_row"]

PROMPTS = ("prompt", "instruction", "question", "query")
RESPONSES = ("response", "output", "answer", "completion")
CHATS = ("messages", "conversations")
_BOM = b"\xef\xbb\xbf"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation; the ``assistant`` turns are the response."""

    role: str
    text: str


@dataclass(frozen=True)
class Row:
    """One row of a data file.

    ``index`` counts rows of the file from 0 (blank JSONL lines are not rows); ``place`` is how a
    message names it, for example ``train.jsonl, line 12``.
    """

    index: int
    place: str
    turns: tuple[Turn, ...]

    @property
    def prompt(self) -> str:
        """Text of all turns before the first assistant turn, joined by line breaks."""
        texts = []
        for turn in self.turns:
            if turn.role == "assistant":
                break
            texts.append(turn.text)
        return "\n".join(texts)

    @property
    def response(self) -> str:
        """Text of all assistant turns, joined by line breaks."""
        return "\n".join(turn.text for turn in self.turns if turn.role == "assistant")


@dataclass(frozen=True)
class Fields:
    """Names of the fields to read; None means: the first known name that the row has.

    With ``response`` given, a row without any known prompt field is plain text: a response to an
    empty prompt.

    Known names: prompt, instruction (with an optional ``input``), question, query; response,
    output, answer, completion; messages, conversations.
    """

    prompt: str | None = None
    response: str | None = None
    messages: str | None = None
    prompt_only: bool = False
    """A row may have no response (it is then empty): enough to draw the model's own ones."""


def read_rows(
    path: str | Path, *, fields: Fields | None = None, limit: int | None = None
) -> list[Row]:
    """The rows of a ``.jsonl``, ``.json`` or ``.parquet`` file; plain texts as all response.

    Args:
        path: the file; its suffix decides the format.
        fields: field names, where they are not among the known ones.
        limit: read at most this many rows.

    Raises:
        DataError: no such file, unknown suffix, not UTF-8, a broken line, a missing or wrong
            field, a file without rows, an unreadable Parquet file. The message names file and line.
    """
    fields = fields or Fields()
    rows: list[Row] = []
    for place, record in read_records(path):
        if limit is not None and len(rows) >= limit:
            break
        rows.append(text_or_row(record, len(rows), place, fields))
    if not rows:
        raise DataError("the data file has no rows", got=str(path), remedy="give a non-empty file")
    return rows


def row_of(record: Mapping[str, Any], index: int, place: str, fields: Fields | None = None) -> Row:
    """One record, of a file or of any other source, as a row.

    Raises:
        DataError: a missing or wrong field; the message names ``place``.
    """
    row = Row(index, place, _turns(record, fields or Fields(), place))
    for turn in row.turns:
        try:
            turn.text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                "a text holds half of a character",
                got=f"{place}: {error.object[error.start]!r} at character {error.start}",
                why="a surrogate without its other half is no text that a tokenizer can read",
                remedy="mend or drop the row; the text may have been cut in the middle of a pair",
            ) from None
    return row


def text_or_row(
    record: Mapping[str, Any], index: int, place: str, fields: Fields, text: str = "text"
) -> Row:
    """One record as a row; of plain text every token is response.

    Plain text is a record with the column ``text`` and none of a prompt or a chat, where the
    fields name no columns either.

    Raises:
        DataError: as :func:`row_of`, or the column holds no text.
    """
    named = fields.prompt or fields.response or fields.messages
    if named or text not in record or any(name in record for name in (*PROMPTS, *CHATS)):
        return row_of(record, index, place, fields)
    if not isinstance(record[text], str):
        raise DataError(f"field {text!r} is not text", got=place)
    return Row(index, place, (Turn("assistant", record[text]),))


def read_records(path: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place, record) of every row of a ``.jsonl``, ``.json`` or ``.parquet`` file, as they are.

    A ``.json`` file is one list of objects, or one object a line.

    Raises:
        DataError: as for :func:`read_rows`, but for the fields.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError("no such data file", got=str(path), remedy="check the path")
    suffix = path.suffix.lower()
    if suffix == ".json" and starts_with_list(path):
        return _json(path)
    if suffix in (".jsonl", ".json", ".ndjson"):
        return _jsonl(path)
    if suffix in (".parquet", ".pq"):
        return _parquet(path)
    raise DataError(
        "unknown kind of data file",
        got=str(path),
        remedy="give a .jsonl, a .json or a .parquet file",
    )


def starts_with_list(path: Path) -> bool:
    """Whether a JSON file is one list, and not one object a line."""
    with path.open("rb") as file:
        return file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _json(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The objects of one JSON list."""
    for number, record in enumerate(json_items(path), start=1):
        place = f"{path.name}, item {number}"
        yield place, require_object(record, place)


def json_items(path: Path) -> Sequence[Any]:
    """The items of one JSON list.

    Raises:
        DataError: the file is none.
    """
    try:
        records: Sequence[Any] = json.loads(path.read_text(encoding="utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(
            "broken JSON file", got=f"{path.name}: {error}", remedy="mend the file"
        ) from None
    return records


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


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not is_blank(raw):
                place = f"{path.name}, line {number}"
                yield place, json_line(raw, place)


def is_blank(raw: bytes) -> bool:
    """Whether a line of a JSONL file is no row: white space, or a byte order mark alone."""
    return not raw.strip(_BOM + b" \t\r\n\v\f")


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
            remedy="each line must be one JSON object; mend or drop this line",
        ) from None
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond all bounds
        raise DataError(
            "a JSON line cannot be read", got=f"{place}: {error}", remedy="mend or drop this line"
        ) from None
    if not isinstance(record, dict):
        raise DataError(
            "a JSON line is not an object",
            got=f"{place}: {short(line)}",
            remedy='write {"prompt": ..., "response": ...} on each line',
        )
    return record


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    pa, pq = parquet_modules(path)
    try:
        number = 0
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path.name}, row {number}", record
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            "the Parquet file cannot be read",
            got=f"{path}: {short(str(error))}",
            remedy="write the file again; it may be truncated",
        ) from None


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


def short(text: str, length: int = 80) -> str:
    """One line of at most ``length`` characters, for a message."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


def _turns(record: Mapping[str, Any], fields: Fields, place: str) -> tuple[Turn, ...]:
    """The conversation in one record; explicit field names win over the known ones."""
    pair_asked = fields.prompt is not None or fields.response is not None
    chat = fields.messages
    if chat is None and not pair_asked:
        chat = next((name for name in CHATS if record.get(name) is not None), None)
    if chat is not None:
        return _chat(_field(record, chat, place), chat, place, fields.prompt_only)
    plain = fields.prompt is None and fields.response is not None
    if plain and not any(name in record for name in PROMPTS):
        return (Turn("assistant", _text(record, str(fields.response), place)),)
    prompt_name = fields.prompt or _known(record, PROMPTS, "prompt", place)
    absent = fields.response is None and not any(name in record for name in RESPONSES)
    if fields.prompt_only and absent:
        response = ""
    else:
        response_name = fields.response or _known(record, RESPONSES, "response", place)
        response = _text(record, response_name, place)
    prompt = _text(record, prompt_name, place)
    if prompt_name == "instruction" and record.get("input"):
        prompt = f"{prompt}\n{_text(record, 'input', place)}"
    return (Turn("user", prompt), Turn("assistant", response))


def _known(record: Mapping[str, Any], names: Sequence[str], kind: str, place: str) -> str:
    for name in names:
        if name in record:
            return name
    raise DataError(
        f"the row has no {kind} field",
        got=f"{place} has {', '.join(map(repr, record)) or 'no fields'}",
        remedy=f"name it: --{kind}_column NAME; after a --retention FILE: {kind}=NAME; in Python "
        f"Fields({kind}=NAME) (known: {', '.join(names)}; chats: messages; plain texts: text)",
    )


def _field(record: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in record:
        raise DataError(
            f"the row has no field {name!r}",
            got=f"{place} has {', '.join(map(repr, record)) or 'no fields'}",
            remedy="check the name of the column",
        )
    return record[name]


def _text(record: Mapping[str, Any], name: str, place: str) -> str:
    value = _field(record, name, place)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise DataError(
            f"field {name!r} is not text",
            got=f"{place}: {type(value).__name__}",
            remedy="use a text field, or messages for a chat",
        )
    return value


def _chat(messages: Any, name: str, place: str, prompt_only: bool) -> tuple[Turn, ...]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(
            f"field {name!r} is not a list of messages",
            got=f"{place}: {short(repr(messages))}",
            remedy='write [{"role": "user", "content": ...}, {"role": "assistant", ...}]',
        )
    turns = tuple(turn_of(message, place) for message in messages)
    if all(turn.role != "assistant" for turn in turns):
        if prompt_only:
            return (*turns, Turn("assistant", ""))
        raise DataError(
            "the chat has no assistant turn",
            got=f"{place}: roles {', '.join(turn.role for turn in turns)}",
            why="the assistant turns are the response whose tokens are valued",
            remedy="drop the row, or check the role names",
        )
    return turns


def turn_of(message: Any, place: str) -> Turn:
    """One message, ``{"role", "content"}`` or ``{"from", "value"}``, as a turn."""
    if not isinstance(message, Mapping):
        raise DataError("a message is not an object", got=f"{place}: {short(repr(message))}")
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str) or role not in _ROLES:
        raise DataError(
            "a message has an unknown role",
            got=f"{place}: {role!r}",
            remedy=f"use one of {', '.join(_ROLES)}",
        )
    if message.get("tool_calls"):
        raise DataError(
            "a message holds tool calls",
            got=place,
            why="they are not text, and dropping them would change the conversation",
            remedy="write them into the content as text",
        )
    return Turn(_ROLES[role], _content(content, place))


def _content(content: Any, place: str) -> str:
    """Text of a message; a list of text parts is joined, other parts are refused."""
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    if isinstance(content, Sequence):
        texts = [part.get("text") for part in content if isinstance(part, Mapping)]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(str(text) for text in texts)
    raise DataError(
        "the content of a message is not text",
        got=f"{place}: {short(repr(content))}",
        remedy="only text can be valued; drop images and other parts",
    )
