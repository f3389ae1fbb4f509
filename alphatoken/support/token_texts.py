"""Tokens back to text: what each adds, which make whole characters together, what is unseen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

# Bytes of the longest UTF-8 character: more pending tokens than that never become one.
_LONGEST_CHARACTER = 4
BROKEN = "\u27e8\u2026\u27e9"
"""Stands for tokens that are a part of a character."""

# Controls, separators of lines, marks that turn the direction of the text around them, and halves
# of a character. Joiners are format characters too, but emoji and many scripts need them.
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_MARKS = {"\n": "\u21b5\n", "\t": "\u21e5\t"}


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text each token adds, in order; one entry a token.

    Decoding a token by itself loses leading spaces and breaks characters that span several tokens,
    so each token gets what it adds to the text decoded so far. A token that ends inside a character
    has the vocabulary's name of it (``<0xF0>``) or a placeholder; the token that completes the
    character shows it.
    """
    result: list[str] = []
    for start, stop, text in text_groups(tokenizer, ids):
        whole = text is not None
        for token in ids[start : stop - whole]:
            name = str(tokenizer.convert_ids_to_tokens([token])[0])
            is_byte = name.startswith("<0x") and name.endswith(">")
            result.append(name if is_byte else BROKEN)
        result += [text] if text is not None else []
    return result


def text_groups(tokenizer: Any, ids: Sequence[int]) -> Iterator[tuple[int, int, str | None]]:
    """Consecutive tokens that add whole characters together: first, last (exclusive), text.

    The groups cover all tokens, and their texts are the decoded text. The last one has None where
    the tokens end inside a character.
    """
    ids = list(ids)
    start = read = 0  # ids[start:read] is decoded text that gives the next token its context
    for stop in range(1, len(ids) + 1):
        before, after = decoded(tokenizer, ids[start:read]), decoded(tokenizer, ids[start:stop])
        if after.endswith("\ufffd") and stop - read < _LONGEST_CHARACTER:
            continue
        yield read, stop, after[len(before) :]
        start, read = read, stop
    if read < len(ids):
        yield read, len(ids), None


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """All that the tokens say, special tokens and spaces included."""
    text = tokenizer.decode(
        list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    return str(text)


def visible(text: str) -> str:
    r"""The text with a mark for each character that is unseen, or steers a terminal or a page.

    Line breaks and tabs have a mark and stay; the others are written by number.

    >>> visible("a\n\x1b[1m")
    'a↵\n⟨U+001B⟩[1m'
    """
    return _UNSEEN.sub(lambda match: _mark(match.group()), text)


def _mark(character: str) -> str:
    return _MARKS.get(character, f"\u27e8U+{ord(character):04X}\u27e9")
