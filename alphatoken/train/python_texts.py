"""Texts of rows given from Python: what a chat template leaves out of them, and what they hold.

TRL trains on whatever a template writes of messages, and on texts as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from alphatoken.data import Row, Turn
from alphatoken.data.learned import LEFT_OUT
from alphatoken.data.markers import bare, control_notes, is_filled, verbatim_note
from alphatoken.data.reading import short
from alphatoken.data.rows import ROLES, THOUGHTS
from alphatoken.train.row_forms import are_messages

__all__ = [
    "notes_of_texts",
    "template_of",
    "unwritten_column",
    "unwritten_text",
]

_CHATS = ("messages", "conversations", "completion", "chosen", "rejected")
_RESPONSES = ("completion", "chosen", "rejected")


def template_of(args: Any, tokenizer: Any) -> str | None:
    """The template that TRL puts in the tokenizer's place where it marks the answers; or None."""
    own = str(getattr(tokenizer, "chat_template", None))
    if not getattr(args, "assistant_only_loss", False) or re.search(r"{%-?\s*generation", own):
        return None
    from trl import get_training_chat_template

    with suppress(ValueError):  # raised where TRL makes the rows
        return get_training_chat_template(tokenizer)
    return None


def unwritten_text(
    row: Mapping[str, Any], tokenizer: Any, template: str | None = None
) -> tuple[str, set[str]]:
    """Find text of a row that the chat template does not write.

    Args:
        row: in one of TRL's forms.
        tokenizer: with the chat template.
        template: another one that TRL writes with.

    Returns:
        Text or thought of a response that is lost, or ""; and a note where something beside the
        responses is left out, as a command's.
    """
    notes = set[str]()
    for column, head, chat in _conversations(row):
        text = _written([*head, *chat], row, tokenizer, template)
        if text is None:
            continue
        packed = bare(text)
        answers = [one for one in chat if _is_answer(one)]
        for part in (part for one in answers for part in _parts(one) if part.strip()):
            if bare(part) not in packed:
                return f"{short(part, 60)!r} of {column!r} is not in {short(text, 120)!r}", notes
        others = [*head, *(one for one in chat if not _is_answer(one))]
        if any(bare(part) not in packed for one in others for part in _parts(one)):
            notes.add(LEFT_OUT)
    return "", notes


def unwritten_column(row: Mapping[str, Any], tokenizer: Any, template: str | None = None) -> str:
    """Column for the chat template that it makes nothing of, in words; or "".

    Arguments are those of :func:`unwritten_text`.
    """
    source = str(template or getattr(tokenizer, "chat_template", None) or "")
    for column in ("tools", "chat_template_kwargs"):
        value = row.get(column)
        if value in (None, "", "[]", [], {}):
            continue
        if isinstance(value, Mapping):  # one that a template knows may change other rows only
            names = [name for name, own in value.items() if own is not None]
            known = [re.search(rf"\b{re.escape(str(name))}\b", source) for name in names]
            if not names or any(known):
                continue
        chats = [[*head, *chat] for _, head, chat in _conversations(row)]
        without = {**row, column: None}
        texts = (
            {_written(chat, own, tokenizer, template) for own in (row, without)} for chat in chats
        )
        if all(len(written) == 1 and None not in written for written in texts):
            return f"column {column!r}, which the chat template does not write"
    return ""


def _conversations(
    row: Mapping[str, Any],
) -> Iterator[tuple[str, list[Mapping[str, Any]], list[Mapping[str, Any]]]]:
    """Columns with messages: the name, the messages of the prompt before them, and themselves."""
    before = row.get("prompt")
    for column in _CHATS:
        chat = row.get(column)
        if are_messages(chat):
            head = before if isinstance(before, list) and column in _RESPONSES else []
            yield column, head, chat


def notes_of_texts(row: Mapping[str, Any], read: Collection[str], tokenizer: Any) -> list[str]:
    """Notes about the texts of a row: control tokens in them, and doubled ones.

    Args:
        row: in one of TRL's forms.
        read: columns that TRL reads.
        tokenizer: of the model.
    """
    texts = {name: value for name in read if isinstance(value := row.get(name), str)}
    responses = [texts[name] for name in texts if name != "prompt"]
    if not responses:
        chats = [row[name] for name in read if isinstance(row.get(name), list)]
        messages = [one for chat in chats for one in chat if isinstance(one, Mapping)]
        return control_notes([part for one in messages for part in _parts(one)], tokenizer)
    prompt = (Turn("user", texts["prompt"]),) if "prompt" in texts else ()
    rows = [Row(0, "", (*prompt, Turn("assistant", text))) for text in responses]
    verbatim = any(is_filled(one, tokenizer) for one in rows)
    notes = [verbatim_note(tokenizer)] if verbatim else control_notes([*texts.values()], tokenizer)
    return [*notes, *_doubled(texts.get("prompt", responses[0]), responses, tokenizer)]


def _doubled(first: str, said: Sequence[str], tokenizer: Any) -> Iterator[str]:
    """Notes of texts to which a start or end token is added that they have."""
    start, end = (getattr(tokenizer, name, None) or "" for name in ("bos_token", "eos_token"))
    if (
        start
        and first.startswith(start)
        and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    ):
        yield f"a text begins with {start}, and the tokenizer puts another one before it"
    if end and any(text.rstrip().endswith(end) and not text.endswith(end) for text in said):
        yield f"a response ends with {end} and white space, and TRL puts another one behind it"


def _written(
    chat: list[Any], row: Mapping[str, Any], tokenizer: Any, template: str | None
) -> str | None:
    """The chat as TRL writes it; None where the template refuses it, as it will TRL."""
    chat = [{_TRLS.get(k, k): v for k, v in one.items()} for one in chat]
    try:
        tools = row.get("tools")
        tools = json.loads(tools) if isinstance(tools, str) else tools
        more = {
            "chat_template": template,
            "tools": tools,
            **(row.get("chat_template_kwargs") or {}),
        }
        return str(tokenizer.apply_chat_template(chat, tokenize=False, **more))
    except Exception:  # templates raise whatever their author wrote
        return None


_TRLS = {"from": "role", "value": "content"}
"""What TRL makes of the fields of other forms."""


def _is_answer(message: Mapping[str, Any]) -> bool:
    return ROLES.get(str(message.get("role") or message.get("from"))) == "assistant"


def _parts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message: its thoughts and its content."""
    values = [*map(message.get, THOUGHTS), message.get("content", message.get("value"))]
    lists = [value if isinstance(value, list) else [{"text": value}] for value in values]
    texts = ("".join(_text(part) for part in parts) for parts in lists)
    return [*texts]


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""
