"""Text of single tokens, for people to read.

Decoding a token by itself loses leading spaces and breaks characters that span several tokens, so
each token is given what it adds to the text decoded so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["decode", "token_texts"]

_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character: more pending tokens than that never become one."""


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text each token adds, in order; one entry a token.

    A token that ends inside a character has the vocabulary's name of it (``<0xF0>``) or a
    placeholder; the token that completes the character shows it.
    """
    ids = list(ids)
    result: list[str] = []
    start = read = 0  # ids[start:read] is decoded text that gives the next token its context
    for index, token in enumerate(ids):
        before = decode(tokenizer, ids[start:read])
        after = decode(tokenizer, ids[start : index + 1])
        pending = index + 1 - read
        if after.endswith("\ufffd") and pending < _LONGEST_CHARACTER:
            result.append(_name(tokenizer, token))
            continue
        result.append(after[len(before) :])
        start, read = read, index + 1
    return result


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text of the tokens, control tokens included."""
    text = tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return str(text)


def _name(tokenizer: Any, token: int) -> str:
    name = str(tokenizer.convert_ids_to_tokens([token])[0])
    return name if name.startswith("<0x") and name.endswith(">") else "\u27e8\u2026\u27e9"
