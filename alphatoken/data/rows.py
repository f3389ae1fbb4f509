"""Records as rows: prompt and response, chat messages, or plain text.

A row is a conversation. A prompt with its response is a conversation of two turns, so everything
after this file knows one shape only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NoReturn

from alphatoken.data.messages import (
    ADDED,
    CHANGING,
    CHATS,
    CONTENT_FIELDS,
    PROMPTS,
    RESPONSES,
    ROLE_FIELDS,
    ROLES,
    SYSTEMS,
    THOUGHTS,
    content_parts,
    is_chat,
    is_learned,
    message_weight,
    part_text,
    require_learned,
    row_weight,
)
from alphatoken.data.survey import Columns, Survey
from alphatoken.errors import ColumnsError, DataError, short

# Texts about a text, beside which it is a document still.
_ASIDE = ("title", "url", "source", "author", "date", "time", "timestamp", "created", "license",
          "category", "domain", "topic", "subject", "language", "meta", "metadata")  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation; the ``assistant`` turns are the response.

    Attributes:
        role: ``user``, ``assistant`` or ``system``.
        text: what is said.
        thought: what is thought before it, which only a chat template can write.
        learned: False where the data mark the turn as one not to be trained on.
        weight: by which the losses of its tokens are multiplied; None where it has none.
        message: it came as a message, which is put into the chat template whatever it says.
    """

    role: str
    text: str
    thought: str = ""
    learned: bool = True
    message: bool = field(default=False, compare=False)
    weight: float | None = field(default=None, compare=False)


UNLEARNED = "no turn is to be learned by its marks"
"""Why a row without labels is left out, where its responses are not empty."""
ASKED = "a turn of the user or the system is marked as learned, and is not"
"""Note on a mark that says nothing where answers alone are learned."""
KEEP_MARKS = (
    "mend the marks of the messages, or leave them aside: --unread_columns with their names, such "
    "as train,weight (in Python Fields(unread=...))"
)


@dataclass(frozen=True)
class Row:
    """One row of a data file.

    ``index`` counts rows of the file from 0 (blank JSONL lines are not rows); ``place`` is how a
    message names it, for example ``train.jsonl, line 12``. ``weight`` is a factor on the losses of
    all its tokens; None where the row has none.
    """

    index: int
    place: str
    turns: tuple[Turn, ...]
    weight: float | None = field(default=None, compare=False)

    @property
    def prompt(self) -> str:
        """Text of all turns before the first assistant turn, joined by line breaks."""
        before = takewhile(lambda turn: turn.role != "assistant", self.turns)
        return "\n".join(turn.text for turn in before)

    @property
    def response(self) -> str:
        """Text of all assistant turns, joined by line breaks."""
        return "\n".join(turn.text for turn in self.turns if turn.role == "assistant")

    @property
    def is_weighted(self) -> bool:
        """True if the row brings a weight, of its own or of a turn; not to be learned is 0."""
        turns = (turn.weight is not None or not turn.learned for turn in self.turns)
        return self.weight is not None or any(turns)

    @property
    def is_learned(self) -> bool:
        """False if the data mark every response as one not to be trained on."""
        return any(turn.learned for turn in self.turns if turn.role == "assistant")


@dataclass(frozen=True)
class Fields:
    """Names of the fields to read; None means: the first known name that the row has.

    With ``response`` given, a row without any known prompt field is plain text: a response to an
    empty prompt.

    Known names: prompt, instruction, question, query, each with an optional ``input`` or
    ``context``; response, output, answer, completion; messages, conversations; system,
    system_prompt, system_message. Of a pair: those of a prompt, or none, where both
    responses are whole conversations; chosen, chosen_response; rejected, rejected_response.
    """

    prompt: str | None = None
    response: str | None = None
    messages: str | None = None
    chosen: str | None = None
    rejected: str | None = None
    prompt_only: bool = False
    """A row may have no response (it is then empty): enough to draw the model's own ones."""
    unread: tuple[str, ...] = ()
    """Columns, and fields of messages, to be left aside, also where they change what is learned."""
    text: str = "text"
    """Column of plain text, of a row that has no prompt and no chat."""
    optional: bool = False
    """A row without a named field is read by the known names: held-out rows of another form."""
    weights: str = "refused"
    """Weights of messages and rows: "refused", "read", or read with a sign ("signed")."""


def row_of(
    record: Mapping[str, Any],
    index: int,
    place: str,
    fields: Fields | None = None,
    survey: Survey | None = None,
) -> Row:
    """One record, of a file or of any other source, as a row.

    Args:
        record: columns and what they hold; null counts as absent.
        index: its number, from 0.
        place: how a message names it.
        fields: field names, where they are not among the known ones.
        survey: counts which columns were read as what.

    Raises:
        DataError: a missing or wrong field, or one that would be lost; a row that is marked as a
            bad one, or by a weight; the message names ``place``.
    """
    fields = fields or Fields()
    columns = Columns(record, place, fields.unread, fields.weights)
    turns = _turns(columns, columns.present(fields))
    weight = row_weight(columns)
    require_read(columns)
    if not fields.prompt_only:
        require_learned(columns, document=len(turns) == 1 and not turns[0].message)
    require_text(turns, place)
    if survey is not None:
        survey.add_columns(columns)
    return Row(index, place, turns, weight)


def require_text(turns: Sequence[Turn], place: str) -> None:
    """Refuse half of a surrogate pair, which no tokenizer can read."""
    for turn in turns:
        try:
            (turn.text + turn.thought).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                "a text holds half of a character",
                got=f"{place}: {error.object[error.start]!r} at character {error.start}",
                why="a surrogate without its other half is no text that a tokenizer can read",
                remedy="mend or drop the row; the text may have been cut in the middle of a pair",
            ) from None


def require_read(columns: Columns, what: str = "the column") -> None:
    """Refuse a row, or a message, that would lose a field that changes the conversation."""
    for name, value in columns.left.items():
        if name in CHANGING and value not in ("", [], {}):
            raise DataError(
                f"{what} {name!r} has no place in this row",
                got=f"{columns.place}: {short(repr(value), 40)}",
                why="without it the conversation would be another one",
                remedy=f"write it into the prompt or the messages, or leave it aside: "
                f"--unread_columns {name} (in Python Fields(unread=({name!r},)))",
            )


def _turns(columns: Columns, fields: Fields) -> tuple[Turn, ...]:
    """The conversation in one record; explicit field names win over the known ones."""
    named = fields.prompt is not None or fields.response is not None
    chat = fields.messages or (None if named else columns.first(CHATS))
    if chat is not None:
        return _chat(columns, chat, fields.prompt_only)
    usual = columns.first(PROMPTS)
    if fields.prompt is None and usual is None:
        if fields.response is not None:
            return (Turn("assistant", columns.text(fields.response, "plain text")),)
        if columns.first([fields.text]):
            return _plain_text(columns, fields.text)
    name = fields.prompt or usual or missing(columns, "prompt", PROMPTS)
    response = fields.response or columns.first(RESPONSES)
    if fields.prompt is None:
        name = _unfilled(columns, name, response)
    prompt = prompt_turns(columns, name)
    if response is None:
        if not fields.prompt_only:
            missing(columns, "response", RESPONSES)
        return (*prompt, _with_thought(columns, Turn("assistant", "")))
    turns = value_turns(columns.take(response, "response"), "assistant", response, columns)
    turns = _after(prompt, turns, columns.place)
    turns = (*turns[:-1], _with_thought(columns, turns[-1]))
    answer = turns[-1].text.strip()
    if answer and prompt[-1].text.rstrip().endswith(answer):
        columns.notes.append("the prompt ends with the response")
    return _require_answer((*prompt, *turns), columns.place, fields.prompt_only)


def _with_thought(columns: Columns, turn: Turn) -> Turn:
    """A response with the thought that stands in a column of its own, unless it holds it."""
    name = next((name for name in THOUGHTS if name in columns.left), None)
    if name is None or turn.message or not columns.peek(name):
        return turn
    thought = columns.text(name, "thought")
    return turn if _begins_with(thought, turn.text) else replace(turn, thought=thought)


# Pattern of what opens a thought within a text.
_TAG = r"[<\[◁](?i:[^<>\[\]◁▷\s]*(?:think|thought|reason)[^<>\[\]◁▷\s]*)[>\]▷]"


def _begins_with(thought: str, text: str) -> bool:
    """True if the text holds this thought already: at its head, or in the tags of a thought."""
    # Elsewhere it proves nothing: a short thought, such as a number, may stand in any answer.
    pattern = rf"(?:\A|{_TAG})\s*{re.escape(thought.strip())}(?!\w)"
    return re.search(pattern, text) is not None


def missing(columns: Columns, kind: str, names: Sequence[str]) -> NoReturn:
    """Refuse a row without a prompt or response, or a pair without one of its responses."""
    got = f"{columns.place} has {columns}"
    words = kind if kind in ("prompt", "response") else f"{kind} response"
    if columns.first(["input_ids"]):
        raise DataError(
            "the row is tokenised, and commands read texts",
            got=got,
            remedy="give the texts; in Python the trainers take input_ids and labels, and Scorer "
            "takes batches of them",
        )
    if any(name in columns.null for name in names):
        raise DataError(
            f"the row has no {words}",
            got=got,
            why="null counts as absent",
            remedy="mend or drop the row, or have it passed over (--on_bad_rows skip; not in "
            "evaluate and merge)",
        )
    chats = [name for name, value in columns.left.items() if is_chat(value)]
    if chats and kind == "prompt":
        raise DataError(
            "the row has no prompt, and no chat of a known name",
            got=got,
            remedy=f"name the chat: --messages_column {chats[0]} (in Python "
            f"Fields(messages={chats[0]!r})); or mend the row, if others have another name",
        )
    if words != kind:
        raise DataError(
            f"the row has no {words}",
            got=got,
            remedy=f"name its column with --{kind}_column (known: {', '.join(names)})",
        )
    raise DataError(
        f"the row has no {kind} field",
        got=got,
        remedy=f"name it: --{kind}_column NAME; of a set in diagnose --retention_set: "
        f"FILE,{kind}=NAME; in Python "
        f"Fields({kind}=NAME) (known: {', '.join(names)}; chats: messages; plain texts: text)",
    )


def _plain_text(columns: Columns, name: str) -> tuple[Turn, ...]:
    """A document: every token is response; refused where another text stands beside it."""
    text = columns.text(name, "plain text")
    others = [
        other
        for other, value in columns.left.items()
        if isinstance(value, str)
        and (other in RESPONSES or (other not in _ASIDE and len(value.split()) > 1))
    ]
    if others:
        raise ColumnsError(
            f"the row has {name!r} and other texts",
            got=f"{columns.place} has {columns}",
            why="as plain text the others would be lost, and the question learned",
            remedy=f"--prompt_column {name} --response_column {others[0]}, or whichever they are; "
            f"--response_column {name} reads {name!r} alone, as plain text",
        )
    return (Turn("assistant", text),)


def prompt_turns(columns: Columns, name: str) -> tuple[Turn, ...]:
    """System text and prompt of a record, the prompt with what is put under it."""
    value = columns.take(name, "prompt")
    turns = value_turns(value, "user", name, columns)
    if isinstance(value, str):
        added = [columns.text(n, "prompt") for n in ADDED if n != name and columns.first([n])]
        turns = (Turn("user", "\n".join([value, *filter(None, added)])),)
    return with_system(columns, turns)


def with_system(columns: Columns, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The turns with the record's system text before them, unless they have another one."""
    name = columns.first(SYSTEMS)
    if name is None or not (text := columns.text(name, "system")):
        return turns
    system = Turn("system", text)
    if turns[0].role != "system":
        return (system, *turns)
    if turns[0].text == text:
        return turns
    raise DataError(
        "the row has two system texts",
        got=f"{columns.place}: in {name!r} and in the chat",
        remedy=f"--unread_columns {name} keeps the chat's",
    )


def _after(prompt: tuple[Turn, ...], turns: tuple[Turn, ...], place: str) -> tuple[Turn, ...]:
    """The turns of a response, without the prompt that a whole conversation repeats."""
    if turns[: len(prompt)] == prompt and len(turns) > len(prompt):
        turns = turns[len(prompt) :]
    if turns[0].role == "assistant":
        return turns
    raise DataError(
        "the response begins with another turn than the assistant's",
        got=f"{place}: {turns[0].role}: {short(turns[0].text, 40)!r}",
        why="what is asked would stand in the conversation twice, or between two turns",
        remedy="the conversation after the prompt alone, or all of it as messages",
    )


def _unfilled(columns: Columns, name: str, response: str | None) -> str:
    """The column of the prompt; another one where this is a filled template, answer included."""
    filled, answer = columns.peek(name), columns.peek(response)
    for other in PROMPTS:
        question = columns.peek(other)
        if other != name and question and answer and question in filled and answer in filled:
            return other
    return name


def _chat(columns: Columns, name: str, prompt_only: bool) -> tuple[Turn, ...]:
    messages, place = columns.take(name, "chat"), columns.place
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise DataError(
            f"field {name!r} is not a list of messages",
            got=f"{place}: {short(repr(messages))}",
            remedy='write [{"role": "user", "content": ...}, {"role": "assistant", ...}]',
        )
    turns = tuple(_turn(message, name, columns) for message in messages)
    return _require_answer(with_system(columns, turns), place, prompt_only)


def _require_answer(turns: tuple[Turn, ...], place: str, prompt_only: bool) -> tuple[Turn, ...]:
    if any(turn.role == "assistant" for turn in turns):
        return turns
    if prompt_only:
        return (*turns, Turn("assistant", ""))
    raise DataError(
        "the chat has no assistant turn",
        got=f"{place}: roles {', '.join(turn.role for turn in turns)}",
        why="the assistant turns are the response whose tokens are valued",
        remedy="check the role names, or drop the row, or have it passed over (--on_bad_rows skip; "
        "not in evaluate and merge)",
    )


def value_turns(value: Any, role: str, name: str, columns: Columns) -> tuple[Turn, ...]:
    """A text of ``role``; a message, or a list of messages; from the column ``name``."""
    if isinstance(value, str):
        return (Turn(role, value),)
    if isinstance(value, Mapping):
        return (_turn(value, name, columns),)
    if isinstance(value, Sequence) and value:
        return tuple(_turn(message, name, columns) for message in value)
    raise DataError(
        f"field {name!r} is neither text nor a list of messages",
        got=f"{columns.place}: {type(value).__name__}: {short(repr(value), 40)}",
        remedy='write a text, or [{"role": ..., "content": ...}]',
    )


def _turn(message: Any, name: str, columns: Columns) -> Turn:
    """One message, ``{"role", "content"}`` or ``{"from", "value"}``, as a turn.

    Its fields are read, refused or named as not read, as those of the row are.
    """
    place = columns.place
    if not isinstance(message, Mapping):
        raise DataError("a message is not an object", got=f"{place}: {short(repr(message))}")
    fields = Columns(message, place, columns.unread, columns.weights)
    role = fields.take_first(ROLE_FIELDS, "role")
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(
            "a message has an unknown role",
            got=f"{place}: {role!r}",
            remedy=f"use one of {', '.join(ROLES)}",
        )
    if fields.left.get("tool_calls") or fields.left.get("function_call"):
        raise DataError(
            "a message holds tool calls",
            got=place,
            why="they are not text, and dropping them would change the conversation",
            remedy="write them into the content as text",
        )
    content = fields.take_first(CONTENT_FIELDS, "content")
    if ROLES[role] != "assistant" and content in (None, []):  # an answer may be calls alone
        raise DataError(
            f"a message of the {ROLES[role]} has no content",
            got=f"{place} has {fields}",
            why="null and an empty list count as absent, and the turn would be empty",
            remedy="write the text as its 'content', or drop the message or the row, or have such "
            "rows passed over (--on_bad_rows skip; not in evaluate and merge)",
        )
    text, parts_learned = _content(content, name, columns)
    thoughts = {key: fields.left[key] for key in THOUGHTS if fields.left.get(key)}
    thought = next(iter(thoughts.values()), "")
    for key in (key for key, other in thoughts.items() if other == thought):
        fields.take(key, "thought")
    weight = message_weight(fields)
    if weight is not None:
        columns.notes.append("turns have weights")
    learned = is_learned(fields, rejected=name == "rejected")
    if ROLES[role] != "assistant" and learned and "mark" in fields.form:
        columns.notes.append(ASKED)
    require_read(fields, "a message's field")
    columns.leave(name, fields)
    thought, _ = _content(thought, name, columns)
    learned = learned and parts_learned
    return Turn(ROLES[role], text, thought, learned, message=True, weight=weight)


def _content(content: Any, name: str, columns: Columns) -> tuple[str, bool]:
    """Text of a message, and whether it is learned; text parts are joined, others are refused."""
    if isinstance(content, str):
        return content, True
    texts, marks = list[str](), set[bool]()
    for part in content_parts(content):
        text = part_text(part)
        if text is None or "text" in columns.unread:
            raise DataError(
                "the content of a message is not text",
                got=f"{columns.place}: {short(repr(content))}",
                remedy="only text can be valued; drop images and other parts",
            )
        fields = Columns(part, columns.place, columns.unread)
        fields.take_first(("text", "value"), "text")
        fields.take_first(("type",), "type")
        marks.add(is_learned(fields, rejected=name == "rejected"))
        require_read(fields, "a field of a message's content")
        columns.leave(f"{name}.content", fields)
        texts.append(text)
    if len(marks) > 1:
        raise DataError(
            "a turn is marked as trained in part",
            got=f"{columns.place}: {short(repr(content))}",
            why="a turn is learned whole, or not at all",
            remedy="mark all parts of a message alike, or the message; or leave the field aside "
            "with --unread_columns (in Python Fields(unread=...))",
        )
    return "".join(texts), False not in marks
