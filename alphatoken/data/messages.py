"""Names of columns and roles, and the messages of a chat: one reader for files and for Python.

A message is ``{"role", "content"}``, or ``{"from", "value"}`` in ShareGPT's form. Its content is a
text, or a list of parts, of which those of type ``text`` are text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeGuard

__all__ = [
    "answer_text",
    "are_messages",
    "chats_of",
    "common_length",
    "content_of",
    "content_parts",
    "is_answer",
    "is_chat",
    "is_prompt",
    "part_text",
    "role_of",
    "texts_of",
    "with_standard_names",
]

PROMPTS = ("prompt", "instruction", "question", "query")
RESPONSES = ("response", "output", "answer", "completion")
THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought", "thoughts")
CHATS = ("messages", "conversations")
ADDED = ("input", "context")
"""Columns that are written under the prompt."""
SYSTEMS = ("system", "system_prompt", "system_message")
CHANGING = (
    *ADDED, *SYSTEMS, *THOUGHTS, "tools", "documents", "chat_template_kwargs", "history",
    "functions", "function_call", "tool_calls", "tool_results", "document", "image", "images",
    "image_url", "image_urls", "image_path", "img", "audio", "audios", "audio_path", "video",
    "videos", "video_path", "files", "attachments",
)  # fmt: skip
"""Columns, and fields of messages, that change the conversation: read, or the row is refused."""

TRL_RESPONSES = ("completion", "chosen", "rejected")
"""Columns of which TRL learns all, whoever says it: a completion's mask is 1 from end to end."""
TRL_CHATS = ("prompt", *TRL_RESPONSES, *CHATS)
"""Columns in which TRL reads messages."""

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
SHAREGPT = {"from": "role", "value": "content"}
"""Names of a message's fields in ShareGPT's form, and the names that templates know."""
ROLE_FIELDS, CONTENT_FIELDS = ("role", "from"), ("content", "value")
_TEXT_TYPES = (None, "text", "input_text", "output_text")
"""Types of the parts of a content that are text."""


def are_messages(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    """True for a list of messages."""
    return isinstance(value, list) and all(isinstance(message, Mapping) for message in value)


def is_chat(value: Any) -> bool:
    """True for a list of messages that each say whose they are."""
    return are_messages(value) and all(
        not message.keys().isdisjoint(ROLE_FIELDS) for message in value
    )


def role_of(message: Mapping[str, Any]) -> str:
    """Role of a message by the name that templates know; one that nobody knows as it is."""
    role = str(message.get("role") or message.get("from"))
    return ROLES.get(role, role)


def is_answer(message: Mapping[str, Any]) -> bool:
    """True for a message of the assistant, by one of its names.

    A role that nobody knows is no answer, and neither is a tool's: where TRL marks answers
    (``assistant_only_loss``) a template's generation marks stand around the assistant's turns.
    """
    return role_of(message) == "assistant"


def is_prompt(message: Mapping[str, Any]) -> bool:
    """True for a message of the user or the system, with which no response begins."""
    return role_of(message) in ("user", "system")


def content_of(message: Mapping[str, Any]) -> Any:
    """Content of a message, under either of its names."""
    return message.get("content", message.get("value"))


def content_parts(content: Any) -> Sequence[Any]:
    """Parts of a content; a text is one part."""
    if isinstance(content, str):
        return [{"text": content}]
    if isinstance(content, Sequence):
        return content
    return [] if content is None else [content]


def part_text(part: Any) -> str | None:
    """Text of a part of a content; None where it is a picture or the like."""
    if not isinstance(part, Mapping) or part.get("type") not in _TEXT_TYPES:
        return None
    text = part.get("text")
    return text if isinstance(text, str) else None


def texts_of(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message: its thoughts and its content."""
    values = [*map(message.get, THOUGHTS), content_of(message)]
    return ["".join(part_text(part) or "" for part in content_parts(value)) for value in values]


def answer_text(value: Any) -> str:
    """The text of a response, stripped: of a string, or of the assistant's messages and calls."""
    if isinstance(value, str):
        return value.strip()
    texts = []
    for message in filter(is_answer, value or []):
        texts.append(texts_of(message)[-1])
        texts += [str(call) for call in message.get("tool_calls") or ()]
    return "".join(texts).strip()


def with_standard_names(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with the names ``role`` and ``content``.

    TRL takes ``from`` for the role also where that is null, so that none is left.
    """
    standard = {k: v for k, v in message.items() if k not in SHAREGPT}
    for other, name in SHAREGPT.items():
        if standard.get(name) is None and message.get(other) is not None:
            standard[name] = message[other]
    return standard


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Number of first items in which two sequences agree."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def chats_of(
    row: Mapping[str, Any],
) -> Iterator[tuple[str, list[dict[str, Any]], list[dict[str, Any]]]]:
    """Conversations of a row as TRL hands them to the chat template.

    Two conversations without a prompt begin with it.

    Returns:
        The column of each, the messages of the prompt before it, and its own.
    """
    chats = {column: chat for column in TRL_CHATS if are_messages(chat := row.get(column))}
    prompt = chats.pop("prompt", [])
    shared = 0
    if row.get("prompt") is None and {"chosen", "rejected"} <= chats.keys():
        shared = common_length(chats["chosen"], chats["rejected"])
    for column, messages in chats.items():
        before, chat = prompt if column in TRL_RESPONSES else [], messages
        if column in ("chosen", "rejected"):
            before, chat = [*before, *messages[:shared]], messages[shared:]
        yield column, list(map(with_standard_names, before)), list(map(with_standard_names, chat))
