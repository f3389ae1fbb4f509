"""Rows given from Python, in TRL's forms; refused where TRL would read them otherwise than meant.

TRL reads ``prompt`` and ``completion``, ``messages``, ``text``, ``input_ids``, and pairs of
``prompt``, ``chosen`` and ``rejected``; what else a row says it passes over. For the other forms
that the command line knows, ``alphatoken.data.encode_row`` makes the tokens and labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import chain, islice
from typing import Any

from alphatoken.data import Reading
from alphatoken.data.pairs import CHOSEN
from alphatoken.data.rows import CHANGING, CHATS, PROMPTS, RESPONSES, ROLES, THOUGHTS, is_marked
from alphatoken.errors import InputError
from alphatoken.train.datasets import columns_of
from alphatoken.train.loading import load_tokenizer, rows_tokenizer

__all__ = ["as_dataset", "pairs_in_trl_form", "rows_in_trl_form", "tokenizer_of"]

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


def rows_in_trl_form(dataset: Any, name: str, given: Mapping[str, Any]) -> Any:
    """A data set for ``SFTTrainer``, of which TRL loses nothing.

    Args:
        dataset: of :func:`as_dataset`.
        name: of it, for messages.
        given: arguments of the trainer.

    Raises:
        InputError: TRL would read a row otherwise; the message names it.
    """
    columns, text = columns_of(dataset, name), given["args"].dataset_text_field
    chat = columns & set(CHATS)
    if "input_ids" in columns or "input_ids" in next(iter(dataset), {}):  # of a transform
        return dataset
    if {"prompt", "completion"} <= columns:
        read, other = {"prompt", "completion"}, {*CHATS}
    elif chat:
        read, other = chat, {"prompt"}
    elif text in columns:
        asked = columns & {*PROMPTS} and columns & {*RESPONSES}
        read, other = {text}, {*PROMPTS, *RESPONSES} if asked and text == "text" else set()
    else:
        return dataset  # whose columns are refused by ``check_sft_rows``
    return _checked(dataset, name, read, other | {*CHANGING}, given)


def pairs_in_trl_form(dataset: Any, name: str, given: Mapping[str, Any]) -> Any:
    """Pairs for ``DPOTrainer``, of which TRL loses nothing.

    A prompt by another name would not be refused by TRL: it would look for a common beginning of
    the two responses instead.

    Args:
        dataset: of :func:`as_dataset`.
        name: of it, for messages.
        given: arguments of the trainer.

    Raises:
        InputError: TRL would read a pair otherwise; the message names it.
    """
    columns = columns_of(dataset, name)
    if CHOSEN[0] not in columns or "prompt_ids" in columns:
        return dataset
    read = columns & {"prompt", "chosen", "rejected"}
    other = {*CHANGING} if "prompt" in columns else {*CHANGING, *PROMPTS, *CHATS}
    return _checked(dataset, name, read, other, given)


def tokenizer_of(given: Mapping[str, Any]) -> Any:
    """The trainer's; one that was not handed over is the model's."""
    tokenizer, model = given.get("processing_class"), given.get("model")
    if tokenizer is None and model is not None:
        tokenizer = load_tokenizer(model if isinstance(model, str) else model.config._name_or_path)
    return getattr(tokenizer, "tokenizer", tokenizer)


def _checked(
    dataset: Any, name: str, read: set[str], other: set[str], given: Mapping[str, Any]
) -> Any:
    """The data set as it is; columns that nothing reads are named.

    Args:
        dataset: of rows.
        name: of it.
        read: columns that TRL reads.
        other: columns that change what a row says, and that TRL does not read.
        given: arguments of the trainer.
    """
    columns, args = columns_of(dataset, name), given["args"]
    beside = sorted((columns - read) & (other - _TRLS))

    @cache
    def tokenizer() -> Any:
        return rows_tokenizer(args, tokenizer_of(given))

    looked = islice(dataset, None if hasattr(dataset, "__len__") else _LOOKED_AT)
    for number, row in enumerate(looked):
        lost = _lost(row, read, beside) or _unwritten_thought(row, tokenizer)
        if lost:
            raise InputError(
                f"TRL would read a {name} row otherwise than it is meant",
                got=f"row {number}: {lost}",
                why="it would be passed over without a word",
                remedy="mend or drop it, or hand in the tokens and labels that "
                "alphatoken.data.encode_row makes of such a row, as input_ids and labels",
            )
    unread = sorted(columns - read - _TRLS)
    if unread and given.get("data_collator") is None and args.remove_unused_columns:
        reading = Reading(f"{name} rows")
        reading.forms[", ".join(sorted(read))] += 1
        reading.unread |= dict.fromkeys(unread)
        if args.process_index == 0:
            reading.say()
    return dataset


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
