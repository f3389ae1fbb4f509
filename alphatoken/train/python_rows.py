"""Rows given from Python, in TRL's forms; refused where TRL would read them otherwise than meant.

Rows that teach nothing, such as empty responses, are left out or refused by ``on_empty``.

TRL reads ``prompt`` and ``completion``, ``messages``, ``text``, ``input_ids``, and pairs of
``prompt``, ``chosen`` and ``rejected``; what else a row says it passes over. For the other forms
that the command line knows, ``alphatoken.data.encode_row`` makes the tokens and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import chain, islice
from typing import Any

from alphatoken.data import Reading
from alphatoken.data.rows import CHANGING, CHATS, PROMPTS, RESPONSES, ROLES, THOUGHTS, is_marked
from alphatoken.errors import InputError
from alphatoken.model.batch import IGNORE
from alphatoken.train.datasets import (
    columns_of,
    pair_problem,
    plain_rows,
    response_text,
    usable_rows,
)
from alphatoken.train.loading import load_tokenizer, rows_tokenizer, text_tokenizer

__all__ = ["as_dataset", "form_of", "read_pairs", "read_rows", "tokenizer_of"]

_TRLS = {"tools", "chat_template_kwargs", "image", "images"}
"""Columns that TRL reads beside these, or that are refused elsewhere."""
_TRLS_ROLES = {"tool", "function"}
_LOOKED_AT = 1024
"""Rows of a stream that are looked at."""


def as_dataset(rows: Any, name: str) -> Any:
    """A list of records or of texts as a ``datasets.Dataset``; a data set as it is.

    Args:
        rows: as given.
        name: of the data set, for messages.

    Raises:
        InputError: no rows, a path, or a mapping; the message says what to give.
    """
    if not isinstance(rows, (str, Mapping, list, tuple)):
        return rows
    if isinstance(rows, (list, tuple)) and rows:
        from datasets import Dataset

        if all(isinstance(row, str) for row in rows):
            return Dataset.from_dict({"text": list(rows)})
        if all(isinstance(row, Mapping) for row in rows):
            # ``Dataset.from_list`` would take the first record's columns for all.
            columns = dict.fromkeys(column for row in rows for column in row)
            return Dataset.from_dict({c: [row.get(c) for row in rows] for c in columns})
    raise InputError(
        f"the {name} data set is no set of rows",
        got=f"{type(rows).__name__}: {str(rows)[:60]!r}",
        remedy="give a datasets.Dataset (one split of it), a list of records or a list of texts; "
        "load_dataset('json', data_files=FILE, split='train') reads a file",
    )


def form_of(columns: Collection[str], text_field: str) -> tuple[str, ...]:
    """Columns of a row without a pair that TRL reads; none of a form that it does not know.

    Args:
        columns: of the row.
        text_field: TRL's ``dataset_text_field``.
    """
    if "input_ids" in columns:
        return ("input_ids",)
    if "prompt" in columns and "completion" in columns:
        return ("prompt", "completion")
    chats = tuple(name for name in CHATS if name in columns)
    return chats or ((text_field,) if text_field in columns else ())


def read_rows(rows: Any, name: str, given: Mapping[str, Any]) -> Any:
    """Rows for ``SFTTrainer``, of which TRL loses nothing, without those that teach nothing.

    Args:
        rows: as given.
        name: of them, for messages.
        given: arguments of the trainer.

    Raises:
        InputError: no rows; no column that TRL reads; TRL would read a row otherwise than it is
            meant; rows with an empty response (a call of a tool is one), by ``on_empty``.
    """
    dataset, text = as_dataset(rows, name), given["args"].dataset_text_field
    columns = columns_of(plain_rows(dataset), name)
    read = form_of(columns, text)
    if not read:
        raise InputError(
            f"the {name} data set has none of the columns that SFT needs",
            got=", ".join(sorted(columns)),
            remedy="input_ids, messages, conversations, prompt and completion, or "
            f"{text} (dataset_text_field)",
        )
    other: set[str] = set()
    if "completion" in read:
        other = {*CHATS}
    elif read[0] in CHATS:
        other = {"prompt"}
    elif read == ("text",) and columns & {*PROMPTS} and columns & {*RESPONSES}:
        other = {*PROMPTS, *RESPONSES}
    response = "completion" if "completion" in read else read[0]

    def problem(row: Mapping[str, Any]) -> str | None:
        if response == "input_ids":
            labels = row.get("labels", row["input_ids"])
            empty = all(label == IGNORE for label in labels[1:])
        else:
            empty = not response_text(row[response])
        return f"the {'text' if response == text else 'response'} is empty" if empty else None

    return _checked(dataset, name, set(read), other | {*CHANGING}, given, problem)


def read_pairs(rows: Any, name: str, given: Mapping[str, Any]) -> Any:
    """Pairs for ``DPOTrainer``, of which TRL loses nothing, without those that teach nothing.

    A prompt by another name would not be refused by TRL: it would look for a common beginning of
    the two responses instead.

    Args:
        rows: as given.
        name: of them, for messages.
        given: arguments of the trainer.

    Raises:
        InputError: no rows; a needed column is missing; TRL would read a pair otherwise than it is
            meant; pairs with an empty response or two equal ones, by ``on_empty``.
    """
    dataset = as_dataset(rows, name)
    columns = columns_of(plain_rows(dataset), name)
    missing = [column for column in ("chosen", "rejected") if column not in columns]
    if missing:
        raise InputError(
            f"the {name} data set has no column {' and no column '.join(map(repr, missing))}",
            got=", ".join(sorted(columns)),
            why="DPO compares two responses to one prompt",
            remedy="give prompt, chosen and rejected",
        )
    read = columns & {"prompt", "chosen", "rejected"}
    other = {*CHANGING} if "prompt" in columns else {*CHANGING, *PROMPTS, *CHATS}
    return _checked(dataset, name, read, other, given, pair_problem)


def tokenizer_of(given: Mapping[str, Any]) -> Any:
    """The trainer's; one that was not handed over is the model's."""
    tokenizer, model = given.get("processing_class"), given.get("model")
    if tokenizer is None and model is not None:
        tokenizer = load_tokenizer(model if isinstance(model, str) else model.config.name_or_path)
    return text_tokenizer(tokenizer)


def _checked(
    dataset: Any,
    name: str,
    read: set[str],
    other: set[str],
    given: Mapping[str, Any],
    problem: Callable[[Mapping[str, Any]], str | None],
) -> Any:
    """The data set without rows that cannot be trained on; columns that nothing reads are named.

    Args:
        dataset: of rows; a Fisher's may have empty responses, which are not read.
        name: of it.
        read: columns that TRL reads.
        other: columns that change what a row says, and that TRL does not read.
        given: arguments of the trainer.
        problem: row -> reason for which it cannot be trained on; of a stream none is looked for.
    """
    rows, args = plain_rows(dataset), given["args"]
    columns, whole = columns_of(rows, name), hasattr(rows, "__len__")
    written = not {"input_ids", "prompt_ids"} & columns  # else TRL reads the tokens as they are
    beside = sorted((columns - read) & (other - _TRLS))
    problems: dict[str, list[int]] = {}

    @cache
    def tokenizer() -> Any:
        return rows_tokenizer(args, tokenizer_of(given))

    for number, row in enumerate(islice(rows, None if whole else _LOOKED_AT)):
        lost = written and (_lost(row, read, beside) or _unwritten_thought(row, tokenizer))
        if lost:
            raise InputError(
                f"TRL would read a {name} row otherwise than it is meant",
                got=f"row {number}: {lost}",
                why="it would be passed over without a word",
                remedy="mend or drop it, or hand in the tokens and labels that "
                "alphatoken.data.encode_row makes of such a row, as input_ids and labels",
            )
        if whole and name != "Fisher" and (found := problem(row)):
            problems.setdefault(found, []).append(number)
    unread = sorted(columns - read - _TRLS)
    if written and unread and given.get("data_collator") is None and args.remove_unused_columns:
        reading = Reading(f"{name} rows")
        reading.forms[", ".join(sorted(read))] += 1
        reading.unread |= dict.fromkeys(unread)
        if args.process_index == 0:
            reading.say()
    return usable_rows(problems, dataset, name, args.on_empty)


def _lost(row: Mapping[str, Any], read: set[str], beside: Sequence[str]) -> str:
    """Content of a row that TRL would ignore, or ""."""
    for column in sorted(read):
        if row.get(column) is None:
            return f"{column!r} is null"
    for column in beside:
        if row.get(column):
            return f"column {column!r}"
    lists = [value for column in sorted(read) if isinstance(value := row[column], list)]
    messages = [one for one in chain.from_iterable(lists) if isinstance(one, Mapping)]
    if any(is_marked(one) for one in messages):
        return "a turn that is marked as not to be trained on"
    roles = {str(one.get("role") or one.get("from")) for one in messages}
    known = {*ROLES, *_TRLS_ROLES}
    if read & {*CHATS} and not roles <= known and "assistant" not in map(ROLES.get, roles):
        return f"roles {', '.join(sorted(roles))}, of which none is the assistant"
    return ""


def _unwritten_thought(row: Mapping[str, Any], tokenizer: Callable[[], Any]) -> str:
    """The thoughts of a row's chats, where they are written no otherwise without them; or ""."""
    prompt = row.get("prompt")
    before = prompt if isinstance(prompt, list) else []
    for column in ("messages", "completion", "chosen", "rejected"):
        chat = row.get(column)
        if not isinstance(chat, list):
            continue
        chat = [*before, *chat]
        if not any(one.get(name) for one in chat for name in THOUGHTS):
            continue
        bare = [{k: v for k, v in one.items() if k not in THOUGHTS} for one in chat]
        write = partial(tokenizer().apply_chat_template, tokenize=False)
        with suppress(Exception):  # raised where TRL writes the row
            if write(chat) == write(bare):
                return "a thought, which the chat template does not write"
    return ""
