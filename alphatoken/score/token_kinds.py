"""Kinds of tokens, as far as their text and their place in the response say."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache

from alphatoken.data.texts import marked_runs
from alphatoken.score.values import ScoredExample
from alphatoken.support.token_texts import BROKEN

KINDS = ("number", "start of a word", "inside a word", "punctuation or sign", "space", "other")
"""Kind of a token, as far as its text says."""

FIRST, END, BREAK = "first token", "end", "line break"

_PAGE = {
    "number": "number",
    "start of a word": "word",
    "inside a word": "word",
    "punctuation or sign": "punctuation",
    "space": "space",
    "other": "other",
}

PAGE_KINDS = ("number", "word", "punctuation", "space", BREAK, FIRST, END, "other")
"""Kind of a response token by its text and its place, in the order of a page."""


def kind_of(text: str) -> str:
    r"""One of ``KINDS``: by the token's characters that are no space.

    A token that ends inside a character has a placeholder for its text, and is "other".

    >>> [kind_of(text) for text in (" cat", "ing", "42", ".", "\n", BROKEN)]
    ['start of a word', 'inside a word', 'number', 'punctuation or sign', 'space', 'other']
    """
    if text == BROKEN or is_control(text):
        return "other"
    core = text.strip()
    if not core:
        return "space" if text else "other"
    if any(character.isdigit() for character in core):
        return "number"
    if any(character.isalpha() for character in core):
        return "start of a word" if text[0].isspace() else "inside a word"
    marks = all(unicodedata.category(character)[0] in "PS" for character in core)
    return "punctuation or sign" if marks else "other"


@lru_cache(1 << 16)
def is_control(text: str) -> bool:
    """Whether the text is that of a special token, or of one byte of a character.

    >>> [is_control(text) for text in ("<|im_end|>", "</s>", "<0xF0>", "[INST]", "<", "a > b")]
    [True, True, True, True, False, False]
    """
    core = text.strip()
    if core in ("[INST]", "[/INST]"):
        return True
    return len(core) > 2 and core[0] == "<" and core[-1] == ">" and " " not in core


def page_kinds(example: ScoredExample, text_of: Callable[[int], str]) -> list[str]:
    """The kind of each response token of an example, in their order.

    Args:
        example: of any length.
        text_of: position -> text of the token there; spaces around it may be missing.
    """
    kinds: list[str] = []
    for start, stop in marked_runs(example.response):
        own = [_page_kind(text_of(place)) for place in range(start, stop)]
        # An answer that is one token begins with it, and one that a limit cut has no end.
        if is_control(text_of(stop - 1)):
            own[-1] = END
        if own[0] != END:
            own[0] = FIRST
        kinds += own
    return kinds


@lru_cache(1 << 16)
def _page_kind(text: str) -> str:
    kind = kind_of(text)
    return BREAK if kind == "space" and "\n" in text else _PAGE[kind]


# --- prompts in one line --------------------------------------------------------------------------

_ROLES = ("system", "user", "assistant", "human", "model", "tool", "ipython")


def brief_prompt(tokens: Sequence[str]) -> str:
    r"""A prompt in one line, without special tokens and role names: its last turn that says more.

    >>> brief_prompt(["<s>", "system", "\n", "Be", " kind", "</s>", "\n", "<s>", "user\n", "Hi\n",
    ...               "you", "</s>", "<s>", "assistant", "\n"])
    'Hi you'
    >>> brief_prompt(["<s>", "assistant", "\n"]), brief_prompt(["2", " +", " 2"])
    ('', '2 + 2')
    """
    turns = [""]
    for token in tokens:
        if is_control(token):
            turns.append("")
        else:
            turns[-1] += token
    said = [_without_role(turn, first=not n) for n, turn in enumerate(turns)]
    return next((text for text in reversed(said) if text), "")


def _without_role(turn: str, *, first: bool) -> str:
    text = turn.strip()
    for role in () if first else _ROLES:  # before any special token there is no role
        rest = text.removeprefix(role)
        if rest != text and (not rest or rest[0] in "\n:"):
            text = rest.lstrip("\n:")
            break
    return " ".join(text.split())
