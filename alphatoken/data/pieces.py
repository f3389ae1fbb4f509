"""Tokens back to text: of single tokens, for people to read, and of what is learned of a row.

Decoding a token by itself loses leading spaces and breaks characters that span several tokens, so
each token gets what it adds to the text decoded so far.

Templates cut, split and strip the texts that they write. So what is learned of a row is decoded,
and each response must be in it, but for white space and for what the tokenizer itself does to a
text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from alphatoken.data.markers import bare
from alphatoken.data.plain import IGNORE, bare_ids

__all__ = ["LEFT_OUT", "decode", "lost_text", "token_texts"]

_LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 character: more pending tokens than that never become one."""
LEFT_OUT = "text of turns that are not learned is left out"
_LEAD = 64
"""Tokens before what is learned in which a response may begin, where the template opens it."""


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


# --- what is learned of a row --------------------------------------------------------------------


def lost_text(
    parts: Sequence[tuple[int, str]], ids: Sequence[int], labels: Sequence[int], tokenizer: Any
) -> tuple[int, str, str] | None:
    """The first part that is not in what is learned: its turn, its text, and what is learned.

    A part is looked for in the labels of its turn, but for white space: as it is, and as the
    tokenizer writes it by itself. It may begin before them, where the prompt opens a thought.

    Args:
        parts: texts to look for, each with the number of its turn, in their order.
        ids: of the row.
        labels: of the row, unshifted.
        tokenizer: of both.
    """
    spans, turns = list(_runs(labels)), list(dict.fromkeys(turn for turn, _ in parts))
    runs = [decode(tokenizer, ids[start:stop]) for start, stop in spans]
    apart = len(runs) == len(turns)  # otherwise turns touch, and are looked through together
    for turn, part in parts:
        number = turns.index(turn)
        own = slice(number, number + 1) if apart else slice(None)
        text = "".join(runs[own])
        forms = [bare(part)]
        if forms[0] in bare(text):
            continue
        forms.append(bare(decode(tokenizer, bare_ids(tokenizer, part))))
        leads = [decode(tokenizer, ids[max(0, at - _LEAD) : at]) for at, _ in spans[own]]
        within = zip(leads, runs[own], strict=True)
        if not any(_ends_in(bare(run), bare(lead), form) for lead, run in within for form in forms):
            return turn, part, text
    return None


def _ends_in(run: str, lead: str, text: str) -> bool:
    """True if the text stands in the run, or begins in what leads to it and ends in it."""
    place = (lead + run).rfind(text)
    return place >= 0 and place + len(text) > len(lead)


def _runs(labels: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last place (exclusive) of each run of labels."""
    start = None
    for place, label in enumerate([*labels, IGNORE]):
        if label != IGNORE and start is None:
            start = place
        elif label == IGNORE and start is not None:
            yield start, place
            start = None
