"""Rows given from Python in the form that TRL reads, where they have one that means the same.

TRL's own errors on such rows are bare, or it writes what a template makes of a list. What a command
reads of such a row, a trainer reads too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeGuard

from alphatoken.data import pair_of
from alphatoken.data.marks import mark_of
from alphatoken.data.plain import common_length
from alphatoken.data.rows import CHANGING, CHATS, ROLES, TEXTS
from alphatoken.data.template import messages_of
from alphatoken.errors import DataError, InputError

__all__ = [
    "CHAT_COLUMNS",
    "are_messages",
    "as_dataset",
    "fields_of_parts",
    "has_several_turns",
    "is_answer",
    "lost_of_messages",
    "messages_in",
    "other_meaning",
    "trls_form",
]

_RESPONSES = ("completion", "chosen", "rejected")
CHAT_COLUMNS = ("prompt", *_RESPONSES, *CHATS)
"""Columns that may hold messages."""
_SHARED = {"role": "from", "content": "value"}
"""Names of a message's fields in ShareGPT's form."""


def as_dataset(rows: Any, name: str) -> Any:
    """A list of records or of texts as a ``datasets.Dataset``; a data set as it is.

    Args:
        rows: as given.
        name: of the data set, for messages.

    Raises:
        InputError: no rows, a path, or a mapping; records that are not of one form; the message
            says what to give.
    """
    if not isinstance(rows, (str, Mapping, list, tuple)):
        return rows
    if isinstance(rows, (list, tuple)) and rows:
        from datasets import Dataset

        if all(isinstance(row, str) for row in rows):
            return Dataset.from_dict({"text": list(rows)})
        if all(isinstance(row, Mapping) for row in rows):
            records = [{**row, **trls_form(row, name, n)} for n, row in enumerate(rows)]
            # ``Dataset.from_list`` would take the first record's columns for all.
            columns = dict.fromkeys(column for row in records for column in row)
            return _of_columns({c: [row.get(c) for row in records] for c in columns}, name, records)
    raise InputError(
        f"the {name} data set is no set of rows",
        got=f"{type(rows).__name__}: {str(rows)[:60]!r}",
        remedy="give a datasets.Dataset (one split of it), a list of records or a list of texts; "
        "load_dataset('json', data_files=FILE, split='train') reads a file",
    )


def _of_columns(columns: Mapping[str, list[Any]], name: str, rows: Sequence[Any]) -> Any:
    """A data set of these columns, each of which holds values of one kind.

    Raises:
        InputError: one holds several; the message names what is lost of ``rows`` first.
    """
    import pyarrow as pa
    from datasets import Dataset

    try:
        return Dataset.from_dict(columns)
    except pa.ArrowException as error:
        for number, row in enumerate(rows):
            if lost := lost_of_messages(row):
                raise other_meaning(lost, row, name, number) from None
        kinds = {c: {type(v).__name__ for v in own if v is not None} for c, own in columns.items()}
        several = {c: " and ".join(sorted(k)) for c, k in kinds.items() if len(k) > 1}
        raise InputError(
            f"the {name} rows are of several forms",
            got="; ".join(f"{c!r} holds {own}" for c, own in several.items()) or str(error),
            why="a column of a data set holds values of one kind",
            remedy="write a column in one kind for all rows: texts, or messages of which each "
            "field is of one kind",
        ) from None


def trls_form(row: Mapping[str, Any], name: str, number: int) -> dict[str, Any]:
    """Columns of a row in TRL's form, where it has another one that means the same.

    Roles have the names that the commands know them by, and a content of text parts is one text. A
    text beside messages is a message. A prompt beside two conversations that hold it stands before
    what follows it in each of them, as in the commands.
    """
    changes = dict[str, Any]()
    for column in CHAT_COLUMNS:
        value = row.get(column)
        if not are_messages(value):
            continue
        messages = list(map(_trls_message, value))
        if column == "conversations":  # which TRL reads by these names alone
            messages = [{_SHARED.get(k, k): v for k, v in one.items()} for one in messages]
        if messages != value:
            changes[column] = messages
    row = {**row, **changes}
    responses = [column for column in _RESPONSES if column in row]
    values = {column: row.get(column) for column in ("prompt", *responses)}
    kinds = [isinstance(value, str) for value in values.values()]
    readable = all(isinstance(v, (str, Mapping)) or are_messages(v) for v in values.values())
    if not responses or not readable or all(kinds):
        return changes
    for column, value in values.items():
        messages = _as_messages(value, "user" if column == "prompt" else "assistant")
        if messages != value:
            changes[column] = messages
    row = {**row, **changes}
    if not all(is_answer(row[column]) for column in responses):
        changes |= _after_prompt(row, responses, name, number)
    return changes


def _as_messages(value: Any, role: str) -> list[Any]:
    """A text, a message or a list of messages as a list, by the names that TRL reads."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [_trls_message(one) for one in ([value] if isinstance(value, Mapping) else value)]


def _trls_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message by the names that TRL reads; a content of text parts is one text.

    TRL takes ``from`` for the role also where that is null, so that none is left.
    """
    own = {k: v for k, v in message.items() if k not in _SHARED.values()}
    for name, other in _SHARED.items():
        if own.get(name) is None and message.get(other) is not None:
            own[name] = message[other]
    if isinstance(own.get("role"), str):
        own["role"] = ROLES.get(own["role"], own["role"])
    parts = own.get("content")
    if isinstance(parts, list) and all(map(_is_text, parts)):
        own["content"] = "".join(part["text"] for part in parts)
    return own


def _is_text(part: Any) -> bool:
    """True for a part of a content that is a text, learned with the others."""
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return False
    changing = {name for name, value in part.items() if value} & {*CHANGING}
    return part.get("type") in TEXTS and not changing and not mark_of(part)


def _after_prompt(
    row: Mapping[str, Any], responses: Sequence[str], name: str, number: int
) -> dict[str, Any]:
    """Messages of a row whose responses begin with the prompt: the prompt, and what follows it."""
    if "completion" in responses:
        prompt, whole = (
            [(message.get("role"), message.get("content")) for message in row[column]]
            for column in ("prompt", "completion")
        )
        after = row["completion"][len(prompt) :]
        return {"completion": after} if whole[: len(prompt)] == prompt else {}
    try:
        pair = pair_of({k: row[k] for k in ("prompt", "chosen", "rejected")}, number, "")
    except DataError as error:
        raise InputError(
            f"a {name} row is no pair: {error.what}",
            got=f"row {number}{error.got}",
            why=error.why,
            remedy="mend or drop the row",
        ) from None
    shared = len(row["chosen"]) - len(pair.chosen)
    first = messages_of(pair.prompt[: len(pair.prompt) - shared])
    return {
        "prompt": [*first, *row["chosen"][:shared]],
        "chosen": row["chosen"][shared:],
        "rejected": row["rejected"][len(row["rejected"]) - len(pair.rejected) :],
    }


# --- messages -------------------------------------------------------------------------------------


def are_messages(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    """True for a list of messages."""
    return isinstance(value, list) and all(isinstance(one, Mapping) for one in value)


def is_answer(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True for messages of which the first is not the user's or the system's."""
    role = str(messages[0].get("role", messages[0].get("from"))) if messages else "assistant"
    return ROLES.get(role, "assistant") == "assistant"


def messages_in(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All messages of a row."""
    columns = (row.get(column) for column in CHAT_COLUMNS)
    return chain.from_iterable(value for value in columns if are_messages(value))


def has_several_turns(row: Mapping[str, Any]) -> bool:
    """True if a response holds a turn of the user, which TRL learns as it learns the rest.

    Two conversations without a prompt begin with it, and it is no part of the responses.
    """
    responses = [row[column] for column in _RESPONSES if are_messages(row.get(column))]
    if row.get("prompt") is None and len(responses) > 1:
        responses = [one[common_length(*responses) :] for one in responses]
    return any(not is_answer([message]) for message in chain.from_iterable(responses))


def fields_of_parts(row: Mapping[str, Any]) -> Iterator[str]:
    """Fields that text parts of contents have beside their text, each with its column."""
    for column in CHAT_COLUMNS:
        for message in messages_in({column: row.get(column)}):
            parts = message.get("content", message.get("value"))
            for part in filter(_is_text, parts if isinstance(parts, list) else ()):
                more = {k for k, v in part.items() if v is not None} - {"type", "text"}
                yield from (f"{column}.content.{field}" for field in sorted(more))


def lost_of_messages(row: Mapping[str, Any]) -> str:
    """Field of a row's messages that TRL would ignore, or write as what it is not; or ""."""
    pictures = bool(row.keys() & {"image", "images"})  # such rows are refused as a whole
    for column in CHAT_COLUMNS:
        for message in messages_in({column: row.get(column)}):
            if mark := mark_of(message, rejected=column == "rejected"):
                return f"a turn that is marked as not to be trained on: {mark}"
            if isinstance(message.get("content", message.get("value")), list) and not pictures:
                return "a content that is no text"
    return ""


def other_meaning(lost: str, row: Mapping[str, Any], name: str, number: int) -> InputError:
    """The error about a row of which TRL would lose something."""
    tokens = (
        ", or hand in the tokens and labels that alphatoken.data.encode_row makes of such a row, "
        "as input_ids and labels"
    )
    return InputError(
        f"TRL would read a {name} row otherwise than it is meant",
        got=f"row {number}: {lost}",
        why="it would be passed over without a word",
        remedy=f"mend or drop it{'' if 'chosen' in row else tokens}",
    )
