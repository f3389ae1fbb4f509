"""Rows in whatever form they are given from Python, as a data set in one of TRL's forms.

TRL reads ``prompt`` and ``completion``, ``messages``, ``text``, ``input_ids``, and pairs of
``chosen`` and ``rejected``. Rows in these forms stay as they are, to the bit, and columns that TRL
does not read are named. The command line reads more (``question`` and ``answer``, ``instruction``
and ``output``, ``system`` and ``history``, turns marked as untrained); such rows become the tokens
and labels that it makes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any

from alphatoken.data import Fields, Reading, encode_row, pair_of, row_of
from alphatoken.data.pairs import CHOSEN, REJECTED
from alphatoken.data.rows import (
    CHANGING,
    CHATS,
    PROMPTS,
    RESPONSES,
    ROLES,
    is_marked,
    require_whole,
)
from alphatoken.errors import DataError, InputError, quoted
from alphatoken.train.datasets import preference_records
from alphatoken.train.loading import load_tokenizer, rows_tokenizer
from alphatoken.train.prepared import require_thoughts

__all__ = ["as_dataset", "pairs_in_trl_form", "rows_in_trl_form", "tokenizer_of", "uses_template"]

_TRLS = {"tools", "chat_template_kwargs", "image", "images"}
"""Columns that TRL reads beside these, or that are refused elsewhere."""

_TRLS_ROLES = {"tool", "function"}

_LOOKED_AT = 1024
"""Rows by which it is said what is read; of a stream, those that are looked at at all."""


def as_dataset(rows: Any, name: str) -> Any:
    """A list of records or of texts as a ``datasets.Dataset``; a data set as it is.

    Args:
        rows: as given.
        name: of the data set, for messages.

    Raises:
        InputError: no rows, a path, or a mapping; the message says what to give.
    """
    wanted = (
        "give a datasets.Dataset, a list of records or a list of texts; "
        "load_dataset('json', data_files=FILE, split='train') reads a file"
    )
    if isinstance(rows, (str, Mapping)):
        kind = "one split of it, or " if hasattr(rows, "num_rows") else ""
        raise InputError(
            f"the {name} data set is no set of rows",
            got=f"{type(rows).__name__}: {str(rows)[:60]!r}",
            remedy=kind + wanted,
        )
    if not isinstance(rows, (list, tuple)):
        return rows
    kinds = sorted({type(row).__name__ for row in rows})
    if rows and all(isinstance(row, str) for row in rows):
        return _of_records([{"text": row} for row in rows], name)
    if rows and all(isinstance(row, Mapping) for row in rows):
        return _of_records(rows, name)
    raise InputError(
        f"the {name} data set is no set of rows",
        got=f"{type(rows).__name__} of {' and '.join(kinds) or 'nothing'}",
        remedy=wanted,
    )


def _of_records(rows: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Records as a data set of all their columns; ``Dataset.from_list`` takes the first one's."""
    from datasets import Dataset
    from pyarrow import ArrowException

    columns = dict.fromkeys(column for row in rows for column in row)
    try:
        return Dataset.from_dict({c: [row.get(c) for row in rows] for c in columns})
    except UnicodeEncodeError:
        for index, row in enumerate(rows):
            for text in _texts(row):
                require_whole(text, f"{name} row {index}")
        raise
    except ArrowException as error:
        raise DataError(
            f"a column of the {name} data set holds values of several kinds",
            got=quoted(error),
            why="a data set has one kind of value in a column",
            remedy="write it alike in every row, or give other forms of row columns of their own",
        ) from None


def _texts(value: Any) -> Iterator[str]:
    """Every text in a record."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def rows_in_trl_form(dataset: Any, name: str, given: Mapping[str, Any]) -> Any:
    """A data set for ``SFTTrainer``: rows that TRL would read otherwise than we do, as tokens.

    Args:
        dataset: of :func:`as_dataset`.
        name: of it, for messages.
        given: arguments of the trainer.

    Raises:
        DataError: a record cannot be read; the message names it.
    """
    args, columns = given["args"], _columns(dataset)
    pair = {"prompt", "completion"}
    chat, text = columns & set(CHATS), args.dataset_text_field
    asked, answered = columns & set(PROMPTS), columns & set(RESPONSES)
    if "input_ids" in columns or "input_ids" in next(iter(dataset), {}):  # of a transform
        return dataset
    if pair <= columns:
        read, plain = pair, not chat
    elif chat:
        read, plain = chat, "prompt" not in columns
    elif text in columns:
        read, plain = {text}, text != "text" or not (asked and answered)
    else:
        read, plain = columns, not (asked and answered)
    if plain and not _read_otherwise(dataset, read, columns):
        return _as_trl_reads(dataset, read, columns, name, given)
    tokenizer = rows_tokenizer(args, tokenizer_of(given))
    whole, reading = args.completion_only_loss is False, Reading(f"{name} rows")
    options = {"name": name, "tokenizer": tokenizer, "whole": whole, "text": text}
    for index, record in enumerate(islice(dataset, _LOOKED_AT)):
        row_of(record, index, f"{name} row {index}", Fields(text=text), reading)
    _say(reading, given)
    return _mapped(dataset, _record, columns, options)


def pairs_in_trl_form(
    dataset: Any, name: str, chat: Callable[[], bool], given: Mapping[str, Any] | None = None
) -> Any:
    """Pairs that TRL would read otherwise than we do, as it has them, for ``DPOTrainer``.

    A prompt by another name would not be refused by TRL: it would look for a common beginning of
    the two responses instead.

    Args:
        dataset: of :func:`as_dataset`.
        name: of it, for messages.
        chat: whether pairs become messages; asked only where it matters.
        given: arguments of the trainer.

    Raises:
        DataError: a record is no pair; the message names it.
    """
    columns = _columns(dataset)
    plain = "prompt" in columns or not {*PROMPTS, *CHATS} & columns
    named, other = ({*names} <= columns for names in zip(CHOSEN, REJECTED, strict=True))
    if not (named or other) or "prompt_ids" in columns:
        return dataset
    read = columns & {"prompt", "chosen", "rejected"}
    if plain and named and not _read_otherwise(dataset, read, columns):
        return _as_trl_reads(dataset, read, columns, name, given)
    reading = Reading(f"{name} rows")
    for index, record in enumerate(islice(dataset, _LOOKED_AT)):
        pair_of(record, index, f"{name} row {index}", reading=reading)
    _say(reading, given)
    return _mapped(dataset, _pair_record, columns, {"name": name, "chat": chat()})


def uses_template(given: Mapping[str, Any]) -> bool:
    """Whether rows of a trainer with these arguments become chats: its tokenizer has a template."""
    cloned = getattr(given["args"], "chat_template_path", None) is not None
    return cloned or getattr(tokenizer_of(given), "chat_template", None) is not None


def tokenizer_of(given: Mapping[str, Any]) -> Any:
    """The trainer's; one that was not handed over is the model's."""
    tokenizer, model = given.get("processing_class"), given.get("model")
    if tokenizer is None and model is not None:
        tokenizer = load_tokenizer(model if isinstance(model, str) else model.config._name_or_path)
    return getattr(tokenizer, "tokenizer", tokenizer)


def _read_otherwise(dataset: Any, read: Collection[str], columns: set[str]) -> bool:
    """Whether our reader finds more in rows of TRL's form: nulls, marked turns, other columns."""
    beside = (columns - set(read)) & {*CHANGING} - _TRLS
    looked = [c for c in (*read, *beside) if c in columns]
    for record in islice(dataset, None if hasattr(dataset, "__len__") else _LOOKED_AT):
        if any(record.get(name) is None for name in read):
            return True
        if any(record.get(name) for name in beside):
            return True
        lists = (value for name in looked if isinstance(value := record[name], list))
        if any(isinstance(m, Mapping) and is_marked(m) for m in chain.from_iterable(lists)):
            return True
        if any(_nobody_answers(record[name]) for name in {*CHATS} & {*read}):
            return True
    return False


def _nobody_answers(messages: Any) -> bool:
    """Whether a chat has no assistant, and roles that neither TRL nor we know."""
    if not isinstance(messages, list):
        return False
    roles = {str(m.get("role") or m.get("from")) for m in messages if isinstance(m, Mapping)}
    known = {*ROLES, *_TRLS_ROLES}
    return not roles <= known and not any(ROLES.get(role) == "assistant" for role in roles)


def _as_trl_reads(
    dataset: Any, read: set[str], columns: set[str], name: str, given: Mapping[str, Any] | None
) -> Any:
    """The data set as it is; columns that nothing reads are named."""
    if given is not None and any(isinstance(v, list) for v in next(iter(dataset), {}).values()):
        looked = islice(dataset, None if hasattr(dataset, "__len__") else _LOOKED_AT)
        require_thoughts(looked, lambda: rows_tokenizer(given["args"], tokenizer_of(given)), name)
    reading = Reading(f"{name} rows")
    reading.forms[", ".join(sorted(read))] += 1
    own = given is not None and (
        given.get("data_collator") is not None or not given["args"].remove_unused_columns
    )
    reading.unread |= dict.fromkeys(() if own else sorted(columns - read - _TRLS))
    if reading.unread:
        _say(reading, given)
    return dataset


def _say(reading: Reading, given: Mapping[str, Any] | None) -> None:
    if given is None or given["args"].process_index == 0:
        reading.say()


def _columns(dataset: Any) -> set[str]:
    """Column names; of a stream that does not know them, those of its first row."""
    names: Sequence[str] | None = getattr(dataset, "column_names", None)
    if names is None:
        first: Iterator[Mapping[str, Any]] = iter(dataset)
        names = list(next(first, {}))
    return set(names)


# Of the module, with all they need as arguments: datasets keys its cache by their content.


def _record(
    row: Mapping[str, Any],
    index: int,
    *,
    name: str,
    tokenizer: Any,
    whole: bool,
    text: str,
) -> dict[str, Any]:
    found = row_of(row, index, f"{name} row {index}", Fields(text=text))
    ids, labels = encode_row(found, tokenizer)
    return {"input_ids": ids, "labels": ids if whole else labels}


def _pair_record(row: Mapping[str, Any], index: int, *, name: str, chat: bool) -> dict[str, Any]:
    return preference_records([pair_of(row, index, f"{name} row {index}")], chat=chat)[0]


def _mapped(
    dataset: Any, record: Callable[..., dict[str, Any]], columns: set[str], options: dict[str, Any]
) -> Any:
    more = {"load_from_cache_file": False} if hasattr(dataset, "__len__") else {}
    return dataset.map(
        record, with_indices=True, fn_kwargs=options, remove_columns=sorted(columns), **more
    )
