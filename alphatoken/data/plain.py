"""Texts to tokens without a chat template, as TRL makes them of prompt and completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alphatoken.data.messages import common_length
from alphatoken.data.rows import Turn

__all__ = [
    "IGNORE",
    "PLAIN_FORMAT",
    "added_start",
    "bare_ids",
    "open_text",
    "text_pieces",
    "whole_text",
]

IGNORE = -100
"""Label of a token that is not learned; here too, since texts are read without torch."""

PLAIN_FORMAT = (
    "the tokenizer's start token (if it uses one); then, turn by turn, the text of a turn that is "
    "not the assistant's followed by a line break, and the text of an assistant turn followed by "
    "the end token (if there is one, and the text does not end with it). All of it is tokenised as "
    "one text; labels are the assistant turns with their end tokens, from the first token that "
    "the text before them would not have"
)
"""Format of rows if the tokenizer has no chat template."""


def text_pieces(turns: Sequence[Turn], tokenizer: Any, *, verbatim: bool = False) -> list[str]:
    """Text that each turn adds without a template; ``verbatim`` texts stay as they are.

    An end token follows each answer that does not end with one.
    """
    end = getattr(tokenizer, "eos_token", None) or ""
    pieces = []
    for turn in turns:
        has_end = bool(end) and turn.text.rstrip().endswith(end)
        if turn.role == "assistant":
            pieces.append(turn.text.rstrip() if has_end else turn.text + end)
        else:
            pieces.append(turn.text if verbatim or not turn.text else turn.text + "\n")
    return pieces


def whole_text(
    pieces: Sequence[str], labelled: Sequence[int], tokenizer: Any
) -> tuple[list[int], list[int]]:
    """Ids of the text as one, and labels of the pieces ``labelled``.

    A piece begins where the tokens of the whole leave those of the text before it, as in TRL: a
    token over the border belongs to the later piece.
    """
    ids = _tokens("".join(pieces), tokenizer)

    def border(count: int) -> int:
        before = _tokens("".join(pieces[:count]), tokenizer)
        return common_length(ids, before)

    labels = [IGNORE] * len(ids)
    for index in labelled:
        start, last = border(index), index + 1 == len(pieces)
        stop = len(ids) if last else border(index + 1)
        labels[start:stop] = ids[start:stop]
    return ids, labels


def _tokens(text: str, tokenizer: Any) -> list[int]:
    """Ids of a text, with what the tokenizer puts around it of its own accord.

    A start or end token that it adds to a text which has one is left out.
    """
    ids = [int(i) for i in tokenizer(text, verbose=False)["input_ids"]]
    start, end = (
        (getattr(tokenizer, f"{name}_id", None), getattr(tokenizer, name, None) or "")
        for name in ("bos_token", "eos_token")
    )
    if start[1] and text.startswith(start[1]) and ids[:2] == [start[0]] * 2:
        ids = ids[1:]
    if end[1] and text.endswith(end[1]) and ids[-2:] == [end[0]] * 2:
        ids = ids if text.endswith(end[1] * 2) else ids[:-1]
    return ids


def open_text(text: str, tokenizer: Any) -> list[int]:
    """Ids of a text that is to be continued: nothing that the tokenizer puts after a text."""
    ids, inner = _tokens(text, tokenizer), bare_ids(tokenizer, text)
    if not inner:
        return ids[:1] if added_start(tokenizer) else []
    while len(ids) > len(inner) and ids[-len(inner) :] != inner:
        ids = ids[:-1]
    return ids


def added_start(tokenizer: Any) -> str:
    """The start token, if the tokenizer puts it before each text of its own accord; or ""."""
    start = getattr(tokenizer, "bos_token", None) or ""
    if not start:
        return ""
    first = list(tokenizer("", verbose=False)["input_ids"])[:1]
    return start if first == [tokenizer.bos_token_id] else ""


def bare_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, and nothing around it."""
    return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
