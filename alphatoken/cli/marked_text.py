"""Tokens as text in which those that are trained on are marked, for a terminal or a file."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, TextIO

from alphatoken.data.texts import BROKEN, text_groups

OPEN, CLOSE = "\u27e6", "\u27e7"
"""Around text that is trained on, where there are no colours."""

_DIM, _ONE, _LESS, _MORE, _NEGATIVE = "2", "1;32", "33", "1;35", "1;31"
# Marks that turn the direction of the text around them.
_TURNING = "\u202a-\u202e\u2066-\u2069"
_HIDDEN = re.compile(rf"[\x00-\x1f\x7f-\x9f\u2028\u2029{_TURNING}]")

Weights = tuple[float, ...]
"""Weights of the tokens that a piece of text is made of, each once; () for untrained text."""


def has_colour(stream: TextIO, choice: str = "auto") -> bool:
    """True if text written to the stream is coloured; "auto" follows terminal and NO_COLOR."""
    if choice != "auto":
        return choice == "always"
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


def marked_text(
    tokenizer: Any, ids: Sequence[int], weights: Sequence[float | None], *, colour: bool
) -> str:
    """The text of tokens, with marks where it is trained on.

    Tokens of one character are marked together: as trained if one of them is.

    Args:
        tokenizer: of the tokens.
        ids: (t,) tokens.
        weights: (t,) weight of each token; None or 0 where it is not trained on.
        colour: marks are ANSI colours, and not brackets.
    """
    pieces = _pieces(tokenizer, ids, weights)
    spans = groupby(pieces, key=lambda piece: piece[0])
    return "".join(_span(own, "".join(text for _, text in some), colour) for own, some in spans)


def _pieces(
    tokenizer: Any, ids: Sequence[int], weights: Sequence[float | None]
) -> Iterator[tuple[Weights, str]]:
    for start, stop, text in text_groups(tokenizer, ids):
        own = tuple(dict.fromkeys(weight for weight in weights[start:stop] if weight))
        yield own, BROKEN if text is None else text


def _span(weights: Weights, text: str, colour: bool) -> str:
    factor = "" if weights in ((), (1.0,)) else "\u00d7" + "|".join(f"{w:g}" for w in weights)
    if not colour:
        text = _visible(re.sub(f"[{OPEN}{CLOSE}]", r"\\\g<0>", text))
        return f"{OPEN}{text}{CLOSE}{factor}" if weights else text
    return _painted(_visible(text), _code(weights)) + (_painted(factor, _DIM) if factor else "")


def _code(weights: Weights) -> str:
    if not weights:
        return _DIM
    if min(weights) < 0:
        return _NEGATIVE
    return _ONE if weights == (1.0,) else _MORE if max(weights) > 1 else _LESS


def _painted(text: str, code: str) -> str:
    # Line by line, since a pager forgets a colour at the end of a line.
    return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in text.split("\n"))


def _visible(text: str) -> str:
    """Line breaks with a mark; characters that a terminal would obey by their names."""
    return _HIDDEN.sub(lambda match: _name(match.group()), text)


def _name(character: str) -> str:
    if character == "\n":
        return "\u21b5\n"
    width = 2 if unicodedata.category(character) == "Cc" else 4
    short = {"\t": "\\t", "\r": "\\r"}
    return short.get(character, f"\\{'xu'[width == 4]}{ord(character):0{width}x}")
