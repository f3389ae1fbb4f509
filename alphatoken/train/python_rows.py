"""Rows given from Python, in TRL's forms; refused where TRL would read them otherwise than meant.

Rows that teach nothing, such as empty responses, are left out or refused by ``on_empty``.

TRL reads ``prompt`` and ``completion``, ``messages``, ``text``, ``input_ids``, and pairs of
``prompt``, ``chosen`` and ``rejected``; what else a row says it passes over. For the other forms
that the command line knows, ``alphatoken.data.encode_row`` makes the tokens and labels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from alphatoken.data import Reading
from alphatoken.data.marks import require_learned, require_order
from alphatoken.data.pairs import WHOLE
from alphatoken.data.reading import Columns
from alphatoken.data.rows import CHANGING, CHATS, PROMPTS, RESPONSES, ROLES, THOUGHTS
from alphatoken.errors import DataError, InputError
from alphatoken.model.batch import IGNORE
from alphatoken.model.loading import (
    find_parts,
    load_tokenizer,
    model_name,
    rows_tokenizer,
    text_tokenizer,
)
from alphatoken.train.datasets import (
    columns_of,
    pair_problem,
    plain_rows,
    response_text,
    usable_rows,
)
from alphatoken.train.python_texts import (
    notes_of_texts,
    template_of,
    unwritten_column,
    unwritten_text,
)
from alphatoken.train.row_forms import (
    CHAT_COLUMNS,
    are_messages,
    as_dataset,
    fields_of_parts,
    has_several_turns,
    is_answer,
    lost_of_messages,
    messages_in,
    other_meaning,
    trls_form,
)
from alphatoken.train.token_rows import labels_of_tokens, lost_of_tokens, says_of_tokens

__all__ = ["form_of", "read_pairs", "read_rows", "require_tokens", "tokenizer_of"]

_TRLS = {"tools", "chat_template_kwargs", "image", "images"}
"""Columns that TRL reads beside these, or that are refused elsewhere."""
_TRLS_ROLES = {"tool", "function"}
_READ = {"role", "content", "from", "value"}
"""Fields of a message that every chat template writes."""
_LOOKED_AT = 1024
"""Rows of a stream that are looked at before any work; each is looked at as it is read."""


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
    if read == ("input_ids",):
        return _checked_tokens(dataset, name, given)
    other: set[str] = set()
    if "completion" in read:
        other = {*CHATS}
    elif read[0] in CHATS:
        other = {"prompt"}
    elif read == ("text",) and columns & {*PROMPTS} and columns & {*RESPONSES}:
        other = {*PROMPTS, *RESPONSES}
    response = "completion" if "completion" in read else read[0]

    def problem(row: Mapping[str, Any]) -> str | None:
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
        named = find_parts(model).tokenizer if isinstance(model, str) else model_name(model)
        tokenizer = load_tokenizer(named)
    return text_tokenizer(tokenizer)


def _checked(
    dataset: Any,
    name: str,
    read: set[str],
    other: set[str],
    given: Mapping[str, Any],
    problem: Callable[[Mapping[str, Any]], str | None],
) -> Any:
    """The data set without rows that cannot be trained on; what nothing reads is named.

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
    unread = sorted(columns - read - _TRLS) if _reads_no_more(given) else []
    beside = sorted((columns - read) & (other - _TRLS))
    tokenizer = rows_tokenizer(args, tokenizer_of(given))
    check = _RowCheck(
        name, read, unread, beside, tokenizer, template_of(args, tokenizer), _reading(rows, name)
    )
    problems: dict[str, list[int]] = {}
    changes_some = False
    for number, own in enumerate(islice(rows, None if whole else _LOOKED_AT)):
        changes = check(own, number)
        changes_some = changes_some or bool(changes)
        if whole and name != "Fisher" and (what := problem({**own, **changes})):
            problems.setdefault(what, []).append(number)
    check.reading.unread = dict.fromkeys([*unread, *check.reading.unread])
    _say(check.reading, args)
    if not whole:
        dataset = dataset.map(check, with_indices=True)
    elif changes_some:
        change = partial(trls_form, name=name)
        dataset = dataset.map(lambda row, number: change(row, number=number), with_indices=True)
    return usable_rows(problems, dataset, name, args.on_empty)


@dataclass(frozen=True)
class _RowCheck:
    """Refuses a row of which TRL would lose something; also a stream's, as it is read.

    Attributes:
        name: of the data set.
        read: columns that TRL reads.
        unread: columns that nothing reads.
        beside: those that change what a row says.
        tokenizer: of the trainer.
        template: the one that TRL puts in the tokenizer's place.
        reading: is told what the line about the rows says.
    """

    name: str
    read: set[str]
    unread: Sequence[str]
    beside: Sequence[str]
    tokenizer: Any
    template: str | None
    reading: Reading

    def __call__(self, own: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Columns of the row in TRL's form, where it has another one."""
        name, read, reading = self.name, self.read, self.reading
        row = {**own, **(changes := trls_form(own, name, number))}
        if lost := _lost(row, read, self.beside):
            raise other_meaning(lost, row, name, number)
        texts = {column: row[column] for column in read}
        reading.unread |= dict.fromkeys(fields_of_parts({column: own[column] for column in read}))
        lost = _unwritten(texts, self.tokenizer, reading)
        if lost := lost or unwritten_column(row, self.tokenizer, self.template):
            raise other_meaning(lost, row, name, number)
        lost, left_out = unwritten_text(row, self.tokenizer, self.template)
        if lost:
            raise InputError(
                f"the text of a {name} response would be lost",
                got=f"row {number}: {lost}",
                why="TRL trains on what the chat template writes of a message",
                remedy="a processing_class whose chat template writes it; or texts in place of the "
                "messages, with the template's markers in them, which TRL takes as they are",
            )
        rest = Columns({column: row.get(column) for column in self.unread}, f"row {number}")
        if name != "Fisher":  # of which prompts are read
            _require_unmarked(rest, name, document=not read & {*CHATS, "prompt", "chosen"})
        if has_several_turns(texts):
            rest.notes.append(WHOLE)
        rest.notes += left_out
        reading.notes.update({*rest.notes, *notes_of_texts(row, read, self.tokenizer)})
        reading.forms[", ".join(sorted(read))] += 1
        return changes


def _reading(rows: Any, name: str) -> Reading:
    """An empty record of how the rows are read; the line about a stream is of its first rows."""
    stream = not hasattr(rows, "__len__")
    return Reading(f"{name} rows" + f" (of a stream the first {_LOOKED_AT})" * stream)


def _say(reading: Reading, args: Any) -> None:
    """Log the line about the rows where it says of something that is lost, or noted."""
    if args.process_index == 0 and (reading.unread or reading.notes):
        reading.say()


def _checked_tokens(dataset: Any, name: str, given: Mapping[str, Any]) -> Any:
    """The same of rows that come tokenised, whose labels are taken as they are."""
    columns, args = columns_of(plain_rows(dataset), name), given["args"]
    read = {"input_ids", "labels"} & columns
    if "labels" not in columns:
        read |= {"assistant_masks"} & columns
        read |= {"completion_mask"} & columns if _completions_only(given) else set()
    if name == "training" and getattr(args, "padding_free", False) and not args.packing:
        read |= {"seq_lengths"} & columns
    dataset, empty = require_tokens(dataset, name, read, given)
    judges = name != "Fisher" and hasattr(plain_rows(dataset), "__len__")
    problems = {"the response is empty": empty} if judges and empty else {}
    return usable_rows(problems, dataset, name, args.on_empty)


def require_tokens(
    dataset: Any, name: str, read: Collection[str], given: Mapping[str, Any]
) -> tuple[Any, list[int]]:
    """Refuse tokenised rows of which something would be lost, and name the columns nothing reads.

    Args:
        dataset: of rows with ``input_ids``.
        name: of it, for messages.
        read: columns that the trainer below reads.
        given: its arguments; where its collator is the caller's own, that reads what it likes.

    Returns:
        The rows, of which those of a stream are looked at as they are read too; and the numbers of
        those that have no label.

    Raises:
        InputError: names the first row of which something would be lost.
    """
    rows, alone = plain_rows(dataset), _reads_no_more(given)
    unread = sorted(columns_of(rows, name) - {*read, "attention_mask"}) if alone else []
    check = _TokenCheck(name, read, unread, _reading(rows, name))
    check.reading.unread |= dict.fromkeys(unread)
    empty = []
    for number, row in enumerate(islice(rows, None if hasattr(rows, "__len__") else _LOOKED_AT)):
        if alone:
            check(row, number)
        if row.get("labels") == []:  # a collator of the caller's own makes them
            continue
        if not any(label != IGNORE for label in labels_of_tokens(row, read)[1:]):
            empty.append(number)
    _say(check.reading, given["args"])
    if alone and not hasattr(rows, "__len__") and hasattr(dataset, "map"):
        dataset = dataset.map(check, with_indices=True)
    return dataset, empty


@dataclass(frozen=True)
class _TokenCheck:
    """Refuses a tokenised row of which something would be lost; attributes as of the other one."""

    name: str
    read: Collection[str]
    unread: Sequence[str]
    reading: Reading

    def __call__(self, row: Mapping[str, Any], number: int) -> dict[str, Any]:
        """Nothing that the row is to be changed in."""
        if lost := lost_of_tokens(row, self.read):
            raise InputError(
                f"a {self.name} row would be learned otherwise than it says",
                got=f"row {number}: {lost}",
                why="given labels are taken as they are, and positions count from 0",
                remedy="write -100 into 'labels' where nothing is to be learned; give one document "
                "a row, without padding; drop columns that say something else",
            )
        of_row = {c: row.get(c) for c in self.unread if not isinstance(row.get(c), list)}
        rest = Columns(of_row, f"row {number}")
        if self.name != "Fisher":
            _require_unmarked(rest, self.name)
        notes = {*rest.notes, *filter(None, [says_of_tokens(row, self.read)])}
        self.reading.notes.update(notes)
        self.reading.forms[", ".join(sorted(self.read))] += 1
        return {}


def _reads_no_more(given: Mapping[str, Any]) -> bool:
    """True if nothing but the trainer below reads columns: no collator of the caller's own."""
    return given.get("data_collator") is None and bool(given["args"].remove_unused_columns)


def _completions_only(given: Mapping[str, Any]) -> bool:
    """True if TRL labels the completion alone: it decides by the first training row."""
    only = given["args"].completion_only_loss
    if only is not None:
        return bool(only)
    train = given.get("train_dataset")
    first = next(iter(train), None) if train is not None else None
    return isinstance(first, Mapping) and {"prompt", "completion"} <= set(first)


def _require_unmarked(columns: Columns, name: str, *, document: bool = False) -> None:
    """Refuse a row whose columns say that it is not to be learned so."""
    try:
        require_learned(columns, document=document)
        require_order(columns)
    except DataError as error:
        raise InputError(
            f"a {name} row is not to be learned so: {error.what}",
            got=error.got,
            why=error.why,
            remedy="drop such rows (dataset.filter), or the column, where it says something else "
            "(dataset.remove_columns)",
        ) from None


def _lost(row: Mapping[str, Any], read: set[str], beside: Sequence[str]) -> str:
    """Content of a row that TRL would ignore, or ""."""
    for column in sorted(read):
        if row.get(column) is None:
            return f"{column!r} is null"
        if not isinstance(row[column], str) and not are_messages(row[column]):
            return f"{column!r} is neither text nor a list of messages"
    for column in beside:
        if row.get(column):
            return f"column {column!r}"
    texts = {name: value for name, value in row.items() if name in {*read, "image", "images"}}
    if lost := lost_of_messages(texts):
        return lost
    if are_messages(row.get("completion")) and not is_answer(row["completion"]):
        return "a completion that begins with another turn than the assistant's"
    roles = {str(one.get("role") or one.get("from")) for one in messages_in(texts)}
    known = {*ROLES, *_TRLS_ROLES}
    if read & {*CHATS} and not roles <= known and "assistant" not in map(ROLES.get, roles):
        return f"roles {', '.join(sorted(roles))}, of which none is the assistant"
    return ""


def _unwritten(row: Mapping[str, Any], tokenizer: Any, reading: Reading) -> str:
    """What messages say beside their texts and the chat template does not write, or "".

    A field that changes the conversation is such; others are named in the reading.
    """
    for column, chat in _chats(row):
        extra = {k for one in chat for k, v in one.items() if v not in (None, "", [], {})} - _READ
        if not extra:
            continue
        if extra & {*THOUGHTS} and not _writes(chat, extra & {*THOUGHTS}, tokenizer):
            return "a thought, which the chat template does not write"
        for field in sorted((extra & {*CHANGING}) - {*THOUGHTS}):
            if not _writes(chat, {field}, tokenizer):
                return f"{field!r} of a message, which the chat template does not write"
        template = str(getattr(tokenizer, "chat_template", ""))
        reading.unread |= {
            f"{column}.{field}": None
            for field in sorted(extra - {*THOUGHTS, *CHANGING})
            if re.search(rf"\b{re.escape(field)}\b", template) is None
        }
    return ""


def _chats(row: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Conversations of a row as TRL hands them to the chat template, each with its column."""
    names = {"from": "role", "value": "content"}
    before = row["prompt"] if are_messages(row.get("prompt")) else []
    for column in CHAT_COLUMNS[1:]:
        if are_messages(row.get(column)):
            chat = [*before, *row[column]]
            yield column, [{names.get(k, k): v for k, v in one.items()} for one in chat]


def _writes(chat: Sequence[Mapping[str, Any]], fields: Collection[str], tokenizer: Any) -> bool:
    """True if the chat template writes one of these fields, or refuses the chat as TRL will."""
    bare = [{k: v for k, v in one.items() if k not in fields} for one in chat]
    with suppress(Exception):  # raised where TRL writes the row
        write = partial(tokenizer.apply_chat_template, tokenize=False)
        return bool(write(list(chat)) != write(bare))
    return True
