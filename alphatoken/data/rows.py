"""Records as rows: prompt and response, chat messages, or plain text.

A row is a conversation. A prompt with its response is a conversation of two turns, so everything
after this file knows one shape only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from alphatoken.data.reading import Columns, Reading, short
from alphatoken.errors import ColumnsError, DataError

__all__ = ["Fields", "Row", "Turn", "row_of"]

PROMPTS = ("prompt", "instruction", "question", "query")
RESPONSES = ("response", "output", "answer", "completion")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
CHATS = ("messages", "conversations")
_ADDED = ("input", "context")
_SYSTEMS = ("system", "system_prompt", "system_message")
CHANGING = (
    *_ADDED, *_SYSTEMS, *THOUGHTS, "tools", "documents", "chat_template_kwargs", "history",
    "functions", "function_call", "tool_calls", "image", "images", "audio", "audios", "video",
    "videos",
)  # fmt: skip
"""Columns that change the conversation: read, or the row is refused."""

_ASIDE = ("title", "url", "source", "author", "date", "time", "timestamp", "created", "license",
          "category", "domain", "topic", "subject", "language", "meta", "metadata")  # fmt: skip
"""Texts about a text, beside which it is a document still."""

_MARKS = ("weight", "train", "loss", "trainable")
ROLES = {
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
    """One turn of a conversation; the ``assistant`` turns are the response.

    Attributes:
        role: ``user``, ``assistant`` or ``system``.
        text: what is said.
        thought: what is thought before it, which only a chat template can write.
        learned: False where the data mark the turn as one not to be trained on.
        message: it came as a message, which is put into the chat template whatever it says.
    """

    role: str
    text: str
    thought: str = ""
    learned: bool = True
    message: bool = field(default=False, compare=False)


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
        before = takewhile(lambda turn: turn.role != "assistant", self.turns)
        return "\n".join(turn.text for turn in before)

    @property
    def response(self) -> str:
        """Text of all assistant turns, joined by line breaks."""
        return "\n".join(turn.text for turn in self.turns if turn.role == "assistant")


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
    """Columns to be left aside, also where they change the conversation."""
    text: str = "text"
    """Column of plain text, of a row that has no prompt and no chat."""
    optional: bool = False
    """A row without a named field is read by the known names: held-out rows of another form."""


def row_of(
    record: Mapping[str, Any],
    index: int,
    place: str,
    fields: Fields | None = None,
    reading: Reading | None = None,
) -> Row:
    """One record, of a file or of any other source, as a row.

    Args:
        record: columns and what they hold; null counts as absent.
        index: its number, from 0.
        place: how a message names it.
        fields: field names, where they are not among the known ones.
        reading: is told which columns were read as what.

    Raises:
        DataError: a missing or wrong field, or one that would be lost; the message names ``place``.
    """
    fields = fields or Fields()
    columns = Columns(record, place, fields.unread)
    turns = _turns(columns, columns.present(fields))
    require_read(columns)
    require_text(turns, place)
    if reading is not None:
        reading.add(columns)
    return Row(index, place, turns)


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


def require_read(columns: Columns) -> None:
    """Refuse a row that would lose a column that changes the conversation."""
    for name, value in columns.left.items():
        if name in CHANGING and value not in ("", [], {}):
            raise DataError(
                f"the column {name!r} has no place in this row",
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
    known = columns.first(PROMPTS)
    if fields.prompt is None and known is None:
        if fields.response is not None:
            return (Turn("assistant", columns.text(fields.response, "plain text")),)
        if columns.first([fields.text]):
            return _plain_text(columns, fields.text)
    name = fields.prompt or known or _missing(columns, "prompt", PROMPTS)
    response = fields.response or columns.first(RESPONSES)
    if fields.prompt is None:
        name = _unfilled(columns, name, response)
    prompt = prompt_turns(columns, name)
    if response is None:
        if not fields.prompt_only:
            _missing(columns, "response", RESPONSES)
        return (*prompt, _with_thought(columns, Turn("assistant", "")))
    said = value_turns(columns.take(response, "response"), "assistant", response, columns.place)
    said = (*said[:-1], _with_thought(columns, said[-1]))
    answer = said[-1].text.strip()
    columns.holds_answer = bool(answer) and prompt[-1].text.rstrip().endswith(answer)
    return _answered((*prompt, *said), columns.place, fields.prompt_only)


def _with_thought(columns: Columns, turn: Turn) -> Turn:
    """A response with the thought that stands in a column of its own, unless it holds it."""
    name = next((name for name in THOUGHTS if name in columns.left), None)
    if name is None or turn.message or not columns.peek(name):
        return turn
    thought = columns.text(name, "thought")
    return turn if thought.strip() in turn.text else replace(turn, thought=thought)


def _missing(columns: Columns, kind: str, names: Sequence[str]) -> str:
    if any(name in columns.null for name in names):
        raise DataError(
            f"the row has no {kind}",
            got=f"{columns.place} has {columns}",
            why="null counts as absent",
            remedy="mend or drop the row, or have it passed over (--on_bad_rows skip; not in "
            "evaluate and merge)",
        )
    raise DataError(
        f"the row has no {kind} field",
        got=f"{columns.place} has {columns}",
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
    value, place = columns.take(name, "prompt"), columns.place
    asked = value_turns(value, "user", name, place)
    if isinstance(value, str):
        added = [columns.text(n, "prompt") for n in _ADDED if n != name and columns.first([n])]
        asked = (Turn("user", "\n".join([value, *filter(None, added)])),)
    return with_system(columns, asked)


def with_system(columns: Columns, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The turns with the record's system text before them, unless they have another one."""
    name = columns.first(_SYSTEMS)
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


def _unfilled(columns: Columns, name: str, response: str | None) -> str:
    """The column of the prompt; another one where this is a filled template, answer included."""
    filled, answer = columns.peek(name), columns.peek(response)
    for other in PROMPTS:
        asked = columns.peek(other)
        if other != name and asked and answer and asked in filled and answer in filled:
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
    turns = tuple(turn_of(message, place) for message in messages)
    return _answered(with_system(columns, turns), place, prompt_only)


def _answered(turns: tuple[Turn, ...], place: str, prompt_only: bool) -> tuple[Turn, ...]:
    """Turns of which one at least is the assistant's."""
    if any(turn.role == "assistant" for turn in turns):
        return turns
    if prompt_only:
        return (*turns, Turn("assistant", ""))
    raise DataError(
        "the chat has no assistant turn",
        got=f"{place}: roles {', '.join(turn.role for turn in turns)}",
        why="the assistant turns are the response whose tokens are valued",
        remedy="drop the row, or check the role names",
    )


def value_turns(value: Any, role: str, name: str, place: str) -> tuple[Turn, ...]:
    """A text, which is said by ``role``; a message, or a list of messages."""
    if isinstance(value, str):
        return (Turn(role, value),)
    if isinstance(value, Mapping):
        return (turn_of(value, place),)
    if isinstance(value, Sequence) and value:
        return tuple(turn_of(message, place) for message in value)
    raise DataError(
        f"field {name!r} is neither text nor a list of messages",
        got=f"{place}: {type(value).__name__}: {short(repr(value), 40)}",
        remedy='write a text, or [{"role": ..., "content": ...}]',
    )


def turn_of(message: Any, place: str) -> Turn:
    """One message, ``{"role", "content"}`` or ``{"from", "value"}``, as a turn."""
    if not isinstance(message, Mapping):
        raise DataError("a message is not an object", got=f"{place}: {short(repr(message))}")
    message = {name: value for name, value in message.items() if value is not None}
    role = message.get("role", message.get("from"))
    content = message.get("content", message.get("value"))
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(
            "a message has an unknown role",
            got=f"{place}: {role!r}",
            remedy=f"use one of {', '.join(ROLES)}",
        )
    if message.get("tool_calls") or message.get("function_call"):
        raise DataError(
            "a message holds tool calls",
            got=place,
            why="they are not text, and dropping them would change the conversation",
            remedy="write them into the content as text",
        )
    thought = next((message[name] for name in THOUGHTS if message.get(name)), "")
    said, thought = _content(content, place), _content(thought, place)
    return Turn(ROLES[role], said, thought, _learned(message, place), message=True)


def is_marked(message: Mapping[str, Any]) -> bool:
    """True if the message says that it is not to be trained on, or in part."""
    return any(message.get(name) not in (None, 1) for name in _MARKS)


def _learned(message: Mapping[str, Any], place: str) -> bool:
    """True if the message may be trained on, by whatever name it says so."""
    for name in _MARKS:
        if message.get(name, 1) not in (0, 1):
            raise DataError(
                "a turn is marked as trained in part",
                got=f"{place}: {name!r} is {short(repr(message[name]), 40)}",
                why="the labels of a turn are there or not",
                remedy="write 0 or 1, true or false, or drop the field",
            )
    return all(message.get(name, 1) for name in _MARKS)


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
