"""Rows handed over in Python, in TRL's forms; refused where TRL would read them otherwise.

Rows that teach nothing, such as empty responses, are left out or refused by ``on_empty``.

TRL reads ``prompt`` and ``completion``, ``messages``, ``text``, ``input_ids``, and pairs of
``prompt``, ``chosen`` and ``rejected``; what else a row says it passes over. For the other forms
that the command line knows, ``alphatoken.data.encode_row`` makes the tokens and labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import Any

from alphatoken.data import Survey
from alphatoken.data.messages import CHANGING, CHATS, PROMPTS, RESPONSES, answer_text
from alphatoken.data.pairs import pair_problem
from alphatoken.data.token_rows import check_tokens, has_labels
from alphatoken.data.trl_rows import check_row, in_trls_form
from alphatoken.errors import InputError
from alphatoken.model.loading import (
    find_parts,
    load_tokenizer,
    model_name,
    rows_tokenizer,
    text_tokenizer,
)
from alphatoken.train.datasets import as_dataset, columns_of, plain_rows, without_rows

__all__ = ["form_of", "read_pairs", "read_rows", "require_tokens", "tokenizer_of"]

_TRLS = {"tools", "chat_template_kwargs", "image", "images"}
"""Columns that TRL reads beside these, or that are refused elsewhere."""
_LOOKED_AT = 1024
"""Rows of a stream that are looked at before any work; each is looked at as it is read."""

Problem = Callable[[Mapping[str, Any]], str | None]
"""Gives the reason for which a row cannot be trained on; None for one that can."""


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


def read_rows(rows: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    """Rows for ``SFTTrainer``, of which TRL loses nothing, without those that teach nothing.

    Args:
        rows: as the caller handed them over.
        name: of them, for messages.
        arguments: of the trainer.

    Raises:
        InputError: no rows; no column that TRL reads; TRL would read a row otherwise than it is
            meant; rows with an empty response (a call of a tool is one), by ``on_empty``.
    """
    dataset, text = as_dataset(rows, name), arguments["args"].dataset_text_field
    columns = columns_of(plain_rows(dataset), name)
    read = form_of(columns, text)
    if not read:
        raise InputError(
            f"the {name} data set has none of the columns that SFT needs",
            got=", ".join(sorted(columns)),
            remedy="input_ids, messages, conversations, prompt and completion, or "
            f"{text} (dataset_text_field)",
        )
    if read == ("input_ids",):
        return _tokens(dataset, name, arguments)
    other: set[str] = set()
    if "completion" in read:
        other = {*CHATS}
    elif read[0] in CHATS:
        other = {"prompt"}
    elif read == ("text",) and columns & {*PROMPTS} and columns & {*RESPONSES}:
        other = {*PROMPTS, *RESPONSES}
    response = "completion" if "completion" in read else read[0]

    def problem(row: Mapping[str, Any]) -> str | None:
        empty = not answer_text(row[response])
        return f"the {'text' if response == text else 'response'} is empty" if empty else None

    return _texts(dataset, name, {*read}, other | {*CHANGING}, arguments, problem)


def read_pairs(rows: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    """Pairs for ``DPOTrainer``, of which TRL loses nothing, without those that teach nothing.

    A prompt by another name would not be refused by TRL: it would look for a common beginning of
    the two responses instead. Arguments are those of :func:`read_rows`.

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
    return _texts(dataset, name, read, other, arguments, pair_problem)


def require_tokens(
    dataset: Any,
    name: str,
    read: Collection[str],
    arguments: Mapping[str, Any],
    problem: Problem | None = None,
) -> Any:
    """Refuse tokenised rows of which something would be lost, and name the columns nothing reads.

    Args:
        dataset: of rows with ``input_ids``.
        name: of it, for messages.
        read: columns that the trainer below reads.
        arguments: its arguments; a collator of the caller's own reads what it likes.
        problem: looked for in each row, except in those of a stream.

    Returns:
        The rows, of which those of a stream are looked at as they are read too.

    Raises:
        InputError: names the first row of which something would be lost.
    """
    rows = plain_rows(dataset)
    if not _reads_no_more(arguments):
        return _looked_at(dataset, name, arguments, None, _survey_of(rows, name), problem)
    unread = sorted(columns_of(rows, name) - {*read, "attention_mask"})
    survey = _survey_of(rows, name, unread)
    check = partial(check_tokens, name=name, read=read, unread=unread, survey=survey)
    return _looked_at(dataset, name, arguments, check, survey, problem)


def tokenizer_of(arguments: Mapping[str, Any]) -> Any:
    """The trainer's; where none was handed over, the model's."""
    tokenizer, model = arguments.get("processing_class"), arguments.get("model")
    if tokenizer is None and model is not None:
        name = find_parts(model).tokenizer if isinstance(model, str) else model_name(model)
        tokenizer = load_tokenizer(name)
    return text_tokenizer(tokenizer)


# --- a data set, row by row -----------------------------------------------------------------------


def _looked_at(
    dataset: Any,
    name: str,
    arguments: Mapping[str, Any],
    check: Callable[[Mapping[str, Any], int], dict[str, Any]] | None,
    survey: Survey,
    problem: Problem | None,
) -> Any:
    """The data set in TRL's form, without rows that cannot be trained on; logs the survey.

    ``check`` refuses a row, or gives its columns in TRL's form; of a stream as it is read, too. A
    ``problem`` is looked for in each row but a Fisher's, whose responses are not read.
    """
    rows, args = plain_rows(dataset), arguments["args"]
    whole = hasattr(rows, "__len__")
    problems, any_changes = dict[int, str](), False
    for number, row in enumerate(islice(rows, None if whole else _LOOKED_AT)):
        changes = {} if check is None else check(row, number)
        any_changes = any_changes or bool(changes)
        judged = problem if whole and name != "Fisher" else None
        if judged is not None and (reason := judged({**row, **changes})):
            problems[number] = reason
    if args.process_index == 0 and (survey.unread or survey.notes):
        survey.log()
    if not whole and check is not None and hasattr(dataset, "map"):
        dataset = dataset.map(check, with_indices=True)
    elif any_changes:
        dataset = dataset.map(partial(in_trls_form, name=name), with_indices=True)
    return without_rows(problems, dataset, name, args.on_empty)


def _survey_of(rows: Any, name: str, unread: Sequence[str] = ()) -> Survey:
    """A survey without rows yet; the line about a stream is of its first rows."""
    stream = not hasattr(rows, "__len__")
    survey = Survey(f"{name} rows" + f" (of a stream the first {_LOOKED_AT})" * stream)
    survey.unread |= dict.fromkeys(unread)
    return survey


def _reads_no_more(arguments: Mapping[str, Any]) -> bool:
    """True if nothing but the trainer below reads columns: no collator of the caller's own."""
    return arguments.get("data_collator") is None and bool(arguments["args"].remove_unused_columns)


# --- texts and messages ---------------------------------------------------------------------------


def _texts(
    dataset: Any,
    name: str,
    read: set[str],
    other: set[str],
    arguments: Mapping[str, Any],
    problem: Problem,
) -> Any:
    """The data set of texts or messages, checked; ``other`` columns change what a row says."""
    rows = plain_rows(dataset)
    columns = columns_of(rows, name)
    unread = sorted(columns - read - _TRLS) if _reads_no_more(arguments) else []
    survey = _survey_of(rows, name, unread)
    check = partial(
        check_row,
        name=name,
        read=read,
        unread=unread,
        beside=sorted((columns - read) & (other - _TRLS)),
        tokenizer=_with_trls_template(arguments["args"], tokenizer_of(arguments)),
        survey=survey,
    )
    return _looked_at(dataset, name, arguments, check, survey, problem)


def _with_trls_template(args: Any, tokenizer: Any) -> Any:
    """The tokenizer as TRL writes with it: where it marks the answers, by another template."""
    tokenizer = rows_tokenizer(args, tokenizer)
    template = getattr(tokenizer, "chat_template", None)
    marks = re.search(r"{%-?\s*generation", str(template))
    if getattr(args, "assistant_only_loss", False) and marks is None:
        from trl import get_training_chat_template

        with suppress(ValueError):  # raised where TRL makes the rows
            template = get_training_chat_template(tokenizer) or template
            tokenizer = deepcopy(tokenizer)
            tokenizer.chat_template = template
    return tokenizer


# --- tokens ---------------------------------------------------------------------------------------


def _tokens(dataset: Any, name: str, arguments: Mapping[str, Any]) -> Any:
    """The data set of tokenised rows, whose labels stay as they are, without those that have none.

    Their columns are those that ``SFTTrainer`` reads.
    """
    columns, args = columns_of(plain_rows(dataset), name), arguments["args"]
    read = {"input_ids", "labels"} & columns
    if "labels" not in columns:
        read |= {"assistant_masks"} & columns
        read |= {"completion_mask"} & columns if _completions_only(arguments) else set()
    if name == "training" and getattr(args, "padding_free", False) and not args.packing:
        read |= {"seq_lengths"} & columns

    def problem(row: Mapping[str, Any]) -> str | None:
        return None if has_labels(row, read) else "the response is empty"

    return require_tokens(dataset, name, read, arguments, problem)


def _completions_only(arguments: Mapping[str, Any]) -> bool:
    """True if TRL labels the completion alone: it decides by the first training row."""
    only = arguments["args"].completion_only_loss
    if only is not None:
        return bool(only)
    train = arguments.get("train_dataset")
    first = next(iter(train), None) if train is not None else None
    return isinstance(first, Mapping) and {"prompt", "completion"} <= set(first)
