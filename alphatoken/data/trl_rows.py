"""Rows of Python in the form that TRL reads, texts or tokens, and what TRL would lose of them.

TRL's own errors on other forms are bare, or it writes what a template makes of a list. What a
command reads of such a row, a trainer reads too. TRL trains on whatever a chat template writes of
messages, and on texts as they are: what it would pass over is looked for here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from alphatoken.data.markers import bare, control_notes, is_filled, verbatim_note
from alphatoken.data.messages import (
    CHANGING,
    CHATS,
    MESSAGE_WEIGHTS,
    ROLES,
    ROW_WEIGHTS,
    SHAREGPT,
    SIDE_WEIGHTS,
    THOUGHTS,
    TRAIN_BY_WEIGHTS,
    TRL_CHATS,
    TRL_RESPONSES,
    are_messages,
    chats_of,
    content_of,
    is_answer,
    is_prompt,
    mark_of,
    part_text,
    require_learned,
    require_order,
    role_of,
    texts_of,
    weighs,
    with_standard_names,
)
from alphatoken.data.pairs import WHOLE, pair_of
from alphatoken.data.rows import Fields, Row, Turn
from alphatoken.data.survey import Columns, Survey
from alphatoken.data.texts import (
    LEFT_OUT,
    TOKENS_DIGEST,
    added_start,
    messages_of,
    tokens_digest,
)
from alphatoken.errors import DataError, InputError, short
from alphatoken.model.batch import IGNORE, weighs_tokens

# Roles that TRL knows beside those of the commands.
_TOOLS = {"tool", "function"}


# --- TRL's form -----------------------------------------------------------------------------------


def in_trls_form(row: Mapping[str, Any], number: int, name: str) -> dict[str, Any]:
    """Columns of a row in TRL's form, where it has another one that means the same.

    Roles have the names that the commands know them by, and a content of text parts is one text. A
    text beside messages is a message. A prompt beside two conversations that hold it stands before
    what follows it in each of them, as in the commands.

    Args:
        row: as the caller wrote it.
        number: of the row, from 0.
        name: of its data set, for messages.

    Raises:
        InputError: two conversations whose prompt is another one.
    """
    changes = dict[str, Any]()
    for column in TRL_CHATS:
        value = row.get(column)
        if not are_messages(value):
            continue
        messages = list(map(_trl_message, value))
        if column == "conversations":  # which TRL reads by these names alone
            names = {standard: other for other, standard in SHAREGPT.items()}
            messages = [{names.get(k, k): v for k, v in own.items()} for own in messages]
        if messages != value:
            changes[column] = messages
    row = {**row, **changes}
    responses = [column for column in TRL_RESPONSES if column in row]
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
    if any(row[column] and is_prompt(row[column][0]) for column in responses):
        changes |= _after_prompt(row, responses, name, number)
    return changes


def _as_messages(value: Any, role: str) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    return [_trl_message(message) for message in ([value] if isinstance(value, Mapping) else value)]


def _trl_message(message: Mapping[str, Any]) -> dict[str, Any]:
    changed = with_standard_names(message)
    if isinstance(changed.get("role"), str):
        changed["role"] = role_of(changed)
    parts = changed.get("content")
    if isinstance(parts, list) and all(map(_is_plain_text, parts)):
        changed["content"] = "".join(part_text(part) or "" for part in parts)
    return changed


def _is_plain_text(part: Any) -> bool:
    if part_text(part) is None or mark_of(part):
        return False
    return not {name for name, value in part.items() if value} & {*CHANGING}


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
        # What weights there are is looked at with the other marks of a row.
        pair = pair_of(
            {k: row[k] for k in ("prompt", "chosen", "rejected")},
            number,
            "",
            Fields(weights="signed"),
        )
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


# --- what TRL would lose of a row -----------------------------------------------------------------


def check_row(
    own: Mapping[str, Any],
    number: int,
    *,
    name: str,
    read: set[str],
    unread: Sequence[str],
    beside: Sequence[str],
    tokenizer: Any,
    survey: Survey,
    weights: str = "refused",
) -> dict[str, Any]:
    """Refuse a row of which TRL would lose something; its columns in TRL's form otherwise.

    Args:
        own: the row as the caller wrote it.
        number: of the row, from 0.
        name: of its data set, for messages.
        read: columns that TRL reads.
        unread: columns that nothing reads.
        beside: columns that change what a row says, and that TRL does not read.
        tokenizer: with the chat template that TRL writes with.
        survey: counts the row.
        weights: that it brings: "refused", "read" or "signed", as for ``Columns``.

    Raises:
        InputError: says what would be lost, or which mark says that it is not to be learned so.
    """
    changes = in_trls_form(own, number, name)
    row = {**own, **changes}
    if lost := _lost_of_row(row, read, beside, tokenizer, weights):
        raise other_meaning(lost, row, name, number)
    texts = {column: row[column] for column in read}
    lost, notes = _lost_text(texts, row, tokenizer)
    if lost:
        raise InputError(
            f"the text of a {name} response would be lost",
            got=f"row {number}: {lost}",
            why="TRL trains on what the chat template writes of a message",
            remedy="a processing_class whose chat template writes it; or texts in place of the "
            "messages, with the template's markers in them, which TRL takes as they are",
        )
    rest = Columns({column: row.get(column) for column in unread}, f"row {number}")
    if name != "Fisher":  # of which prompts are read
        require_unmarked(rest, name, document=not read & {*CHATS, "prompt", "chosen"})
    form = [*sorted(read), *(_weights_of(row, read) if weights != "refused" else ())]
    fields = [*_fields_of_parts({column: own[column] for column in read})]
    fields += _fields_unnamed(texts, tokenizer)
    fields = [field for field in fields if field not in form]
    survey.add(", ".join(form), fields, [*rest.notes, *notes, *_notes(texts, tokenizer)])
    return changes


def _weights_of(row: Mapping[str, Any], read: Collection[str]) -> Iterator[str]:
    """Columns and fields of messages in which a row has weights."""
    names = (*ROW_WEIGHTS, *SIDE_WEIGHTS, "chosen_weights", "rejected_weights")
    yield from (name for name in names if row.get(name) is not None)
    for column in sorted(read):
        fields = {field for one in _messages_of({column: row.get(column)}) for field in one
                  if weighs(field, one[field])}  # fmt: skip
        yield from (f"{column}.{field}" for field in sorted(fields))


def require_unmarked(columns: Columns, name: str, *, document: bool = False) -> None:
    """Refuse a row whose unread columns say that it is not to be learned so.

    Raises:
        InputError: names the column; ``require_learned`` says what speaks against a row.
    """
    try:
        require_learned(columns, document=document)
        require_order(columns)
    except DataError as error:
        raise InputError(
            f"a {name} row is not to be learned so: {error.what}",
            got=error.got,
            why=error.why,
            remedy=f"drop such rows (dataset.filter), {_by_weights(error.got, name)}or the column, "
            "where it says something else (dataset.remove_columns)",
        ) from None


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
        remedy=f"{_by_weights(lost, name)}mend or drop it{'' if 'chosen' in row else tokens}",
    )


def _by_weights(lost: str, name: str) -> str:
    """The remedy for a weight of a training row, which one policy reads; or ""."""
    fields = (*ROW_WEIGHTS, *MESSAGE_WEIGHTS, "loss_weights")
    weighed = name == "training" and any(f"'{field}'" in lost for field in fields)
    return TRAIN_BY_WEIGHTS if weighed else ""


def _lost_of_row(
    row: Mapping[str, Any],
    read: set[str],
    beside: Sequence[str],
    tokenizer: Any,
    weights: str = "refused",
) -> str:
    """Content of a row that TRL would ignore, or its chat template not write; or ""."""
    for column in sorted(read):
        if row.get(column) is None:
            return f"{column!r} is null"
        if not isinstance(row[column], str) and not are_messages(row[column]):
            return f"{column!r} is neither text nor a list of messages"
    for column in beside:
        if row.get(column):
            return f"column {column!r}"
    texts = {column: row[column] for column in read}
    pictures = {k: row[k] for k in ("image", "images") if k in row}
    if lost := lost_of_messages({**texts, **pictures}, weights):
        return lost
    completion = row.get("completion")
    if are_messages(completion) and completion and is_prompt(completion[0]):
        return "a completion that begins with another turn than the assistant's"
    roles = set(map(role_of, _messages_of(texts)))
    if read & {*CHATS} and not roles <= {*ROLES.values(), *_TOOLS} and "assistant" not in roles:
        return f"roles {', '.join(sorted(roles))}, of which none is the assistant"
    return _lost_field(texts, tokenizer) or _lost_column(row, texts, tokenizer)


def lost_of_messages(row: Mapping[str, Any], weights: str = "refused") -> str:
    """Field of a row's messages that TRL would ignore, or write as what it is not; or ""."""
    pictures = bool(row.keys() & {"image", "images"})  # such rows are refused as a whole
    for column in TRL_CHATS:
        for message in _messages_of({column: row.get(column)}):
            if mark := mark_of(message, rejected=column == "rejected", weights=weights):
                return f"a turn that is marked as not to be trained on: {mark}"
            if is_prompt(message) and content_of(message) in (None, []):
                return f"a message of the {role_of(message)} without content"
            if isinstance(content_of(message), list) and not pictures:
                return "a content that is no text"
    return ""


def _messages_of(row: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    columns = (row.get(column) for column in TRL_CHATS)
    return chain.from_iterable(value for value in columns if are_messages(value))


def _lost_field(texts: Mapping[str, Any], tokenizer: Any) -> str:
    """Field that changes the conversation and that the chat template does not write; or ""."""
    for _, chat, fields in _fields_beside(texts):
        thoughts = fields & {*THOUGHTS}
        if thoughts and not _writes(chat, thoughts, tokenizer):
            return "a thought, which the chat template does not write"
        for field in sorted((fields & {*CHANGING}) - thoughts):
            if not _writes(chat, {field}, tokenizer):
                return f"{field!r} of a message, which the chat template does not write"
    return ""


def _fields_beside(
    texts: Mapping[str, Any],
) -> Iterator[tuple[str, list[dict[str, Any]], set[str]]]:
    """Column, conversation, and fields of its messages beside role and content."""
    for column, before, messages in chats_of(texts):
        chat = [*before, *messages]
        fields = {k for one in chat for k, v in one.items() if v not in (None, "", [], {})}
        yield column, chat, fields - {"role", "content"}


def _writes(chat: Sequence[Mapping[str, Any]], fields: Collection[str], tokenizer: Any) -> bool:
    """True if the chat template writes one of these fields, or refuses the chat as TRL will."""
    without = [{k: v for k, v in one.items() if k not in fields} for one in chat]
    text, other = (_text_of_chat(one, {}, tokenizer) for one in (chat, without))
    return text is None or other is None or text != other


def _lost_column(row: Mapping[str, Any], texts: Mapping[str, Any], tokenizer: Any) -> str:
    """Column for the chat template that it makes nothing of; or ""."""
    source = str(getattr(tokenizer, "chat_template", None) or "")
    for column in ("tools", "chat_template_kwargs"):
        value = row.get(column)
        if value in (None, "", "[]", [], {}):
            continue
        if isinstance(value, Mapping):  # one that a template knows may change other rows only
            names = [name for name, own in value.items() if own is not None]
            if not names or any(_is_named(name, source) for name in names):
                continue
        without = {**row, column: None}
        chats = [[*before, *chat] for _, before, chat in chats_of(texts)]
        pairs = ({_text_of_chat(chat, r, tokenizer) for r in (row, without)} for chat in chats)
        if all(len(pair) == 1 and None not in pair for pair in pairs):
            return f"column {column!r}, which the chat template does not write"
    return ""


def _is_named(name: Any, template: str) -> bool:
    return re.search(rf"\b{re.escape(str(name))}\b", template) is not None


def _text_of_chat(
    chat: Sequence[Mapping[str, Any]], row: Mapping[str, Any], tokenizer: Any
) -> str | None:
    """The chat as TRL writes it; None where the template refuses it, as it will TRL."""
    try:
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        more = {"tools": tools, **(row.get("chat_template_kwargs") or {})}
        return str(tokenizer.apply_chat_template(list(chat), tokenize=False, **more))
    except Exception:  # templates raise whatever their author wrote
        return None


# --- texts ----------------------------------------------------------------------------------------


def _lost_text(
    texts: Mapping[str, Any], row: Mapping[str, Any], tokenizer: Any
) -> tuple[str, list[str]]:
    # Of a response TRL learns every turn, whatever its role (`completion_mask` is 1 from end to
    # end); of a whole chat the assistant's turns are the responses. What is left out beside them is
    # noted.
    notes = list[str]()
    for column, before, chat in chats_of(texts):
        text = _text_of_chat([*before, *chat], row, tokenizer)
        if text is None:
            continue
        packed = bare(text)
        others = [*before]
        for message in chat:
            if column not in TRL_RESPONSES and not is_answer(message):
                others.append(message)
                continue
            for part in texts_of(message):
                if bare(part) not in packed:
                    return f"{short(part, 60)!r} of {column!r} is not in {short(text, 120)!r}", []
        if any(bare(part) not in packed for message in others for part in texts_of(message)):
            notes = [LEFT_OUT]
    return "", notes


def _fields_of_parts(own: Mapping[str, Any]) -> Iterator[str]:
    """Fields that text parts of contents have beside their text, each with its column."""
    for column in TRL_CHATS:
        for message in _messages_of({column: own.get(column)}):
            content = content_of(message)
            for part in filter(_is_plain_text, content if isinstance(content, list) else ()):
                more = {k for k, v in part.items() if v is not None} - {"type", "text", "value"}
                yield from (f"{column}.content.{field}" for field in sorted(more))


def _fields_unnamed(texts: Mapping[str, Any], tokenizer: Any) -> Iterator[str]:
    """Fields of messages that the chat template does not name, each with its column."""
    template = str(getattr(tokenizer, "chat_template", ""))
    for column, _, fields in _fields_beside(texts):
        for field in sorted(fields - {*CHANGING}):
            if not _is_named(field, template):
                yield f"{column}.{field}"


def _notes(columns: Mapping[str, Any], tokenizer: Any) -> Iterator[str]:
    responses_of = (chat for column, _, chat in chats_of(columns) if column in TRL_RESPONSES)
    if any(map(is_prompt, chain.from_iterable(responses_of))):
        yield WHOLE
    texts = {name: value for name, value in columns.items() if isinstance(value, str)}
    responses = [text for name, text in texts.items() if name != "prompt"]
    if not responses:
        messages = _messages_of(columns)
        yield from control_notes([part for one in messages for part in texts_of(one)], tokenizer)
        return
    prompt = (Turn("user", texts["prompt"]),) if "prompt" in texts else ()
    rows = [Row(0, "", (*prompt, Turn("assistant", text))) for text in responses]
    if any(is_filled(one, tokenizer) for one in rows):
        yield verbatim_note(tokenizer)
    else:
        yield from control_notes([*texts.values()], tokenizer)
    first, start = texts.get("prompt", responses[0]), added_start(tokenizer)
    if start and first.startswith(start):
        yield f"a text begins with {start}, and the tokenizer puts another one before it"
    end = getattr(tokenizer, "eos_token", None) or ""
    if end and any(text.rstrip().endswith(end) and not text.endswith(end) for text in responses):
        yield f"a response ends with {end} and white space, and TRL puts another one behind it"


# --- tokenised rows -------------------------------------------------------------------------------

# What a trainer does not read of a tokenised row must say no more than its tokens and labels do: a
# mask that agrees with the labels, positions that count from 0, padding after the last label. Any
# other mask, weight or position would change what is learned, and the row is refused.

# Columns that TRL makes labels of where a row has none; beside labels they say nothing.
_MASKS = ("completion_mask", "assistant_masks")
_BY_TOKEN = ("labels", "attention_mask", "position_ids", "token_type_ids", *_MASKS)


def check_tokens(
    row: Mapping[str, Any],
    number: int,
    *,
    name: str,
    read: Collection[str],
    unread: Sequence[str],
    tokenizer: Any,
    survey: Survey,
) -> dict[str, Any]:
    """Refuse a tokenised row of which something would be lost; nothing of it is to be changed.

    Arguments and errors are those of :func:`alphatoken.data.trl_rows.check_row`; a row that says
    which tokens its ids are must say those of the tokenizer.
    """
    digest = row.get(TOKENS_DIGEST)
    if digest is not None and digest != tokens_digest(row["input_ids"], tokenizer):
        raise InputError(
            f"the ids of a {name} row are tokens of another tokenizer",
            got=f"row {number}: {TOKENS_DIGEST!r} is {digest}",
            why="this model would be trained on other texts than those that were valued",
            remedy="the model that the rows were written for, or `alphatoken score` with this one",
        )
    if lost := _lost_of_tokens(row, read):
        raise InputError(
            f"a {name} row would be learned otherwise than it says",
            got=f"row {number}: {lost}",
            why="given labels are taken as they are, and positions count from 0",
            remedy=f"{_by_weights(lost, name)}write -100 into 'labels' where nothing is to be "
            "learned; give one document a row, without padding; drop columns that say something "
            "else",
        )
    of_row = {column: row.get(column) for column in unread}
    of_row = {column: value for column, value in of_row.items() if not isinstance(value, list)}
    rest = Columns(of_row, f"row {number}")
    if name != "Fisher":
        require_unmarked(rest, name)
    survey.add(", ".join(sorted(read)), notes=[*rest.notes, *_token_notes(row, read)])
    return {}


def _lost_of_tokens(row: Mapping[str, Any], read: Collection[str]) -> str:
    """Fault of a tokenised row: what the trainer would not read, or what is wrong; or ""."""
    length = len(row["input_ids"])
    own = {name: row[name] for name in _BY_TOKEN if row.get(name) is not None}
    for name, value in row.items():  # other lists of numbers are of the tokens too
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (int, float)):
            own[name] = value
    for name, numbers in own.items():
        if (name in _BY_TOKEN or weighs_tokens(name)) and len(numbers) != length:
            return f"{name!r} has {len(numbers)} entries, 'input_ids' {length}"
    for name, numbers in own.items():
        if name not in read and (lost := _lost_of_column(name, numbers, row, read)):
            return lost
    return ""


def _lost_of_column(
    name: str, numbers: Sequence[Any], row: Mapping[str, Any], read: Collection[str]
) -> str:
    if name == "position_ids":
        packed = row.get("seq_lengths") if "seq_lengths" in read else None
        usual = [place for length in packed or [len(numbers)] for place in range(length)]
        return "" if list(numbers) == usual else "'position_ids' do not count from 0"
    if name == "seq_lengths" and len(numbers) > 1:
        return f"'seq_lengths' packs {len(numbers)} documents, which would see each other"
    padding = name == "attention_mask" and 0 in numbers
    if not (padding or (weighs_tokens(name) and name not in _MASKS)):
        return ""
    weighs = [label != IGNORE for label in _labels(row, read)]
    weighs[:1] = numbers[:1]  # nothing predicts the first token
    if padding:
        behind = list(numbers).index(0)
        lost = any(weighs[behind:]) or any(numbers[behind:])
        return "'attention_mask' is 0 before the last label" if lost else ""
    return "" if list(numbers) == weighs else f"{name!r} says something else than the labels"


def _token_notes(row: Mapping[str, Any], read: Collection[str]) -> list[str]:
    pairs = zip(_labels(row, read), row["input_ids"], strict=True)
    if all(label in (IGNORE, token) for label, token in pairs):
        return []
    return ["a label is another token than the one at its place (the loss itself shifts labels)"]


def has_labels(row: Mapping[str, Any], read: Collection[str]) -> bool:
    """True if a label of the row is predicted by something, or a collator is to make them."""
    if row.get("labels") == []:  # a collator of the caller's own makes them
        return True
    return any(label != IGNORE for label in _labels(row, read)[1:])


def _labels(row: Mapping[str, Any], read: Collection[str]) -> Sequence[int]:
    """Labels of a tokenised row by TRL's rule: its own as they are, else by the masks, else all."""
    labels: Sequence[int] | None = row.get("labels")
    if labels is not None:
        return labels
    masks = [row[name] for name in _MASKS if name in read and row.get(name) is not None]
    marked = zip(row["input_ids"], *masks, strict=False)
    return [token if all(marks) else IGNORE for token, *marks in marked]
