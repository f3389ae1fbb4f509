"""Tokens as text in which those that are trained on are marked, for a terminal or a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from alphatoken.support.terminal import CLOSE, OPEN, painted
from alphatoken.support.token_texts import BROKEN, text_groups, visible

_DIM, _ONE, _LESS, _MORE, _NEGATIVE = "2", "1;32", "33", "1;35", "1;31"

Weights = tuple[float, ...]
"""Weights of the tokens that a piece of text is made of, each once; () for untrained text."""


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
        text = visible(re.sub(f"[{OPEN}{CLOSE}]", r"\\\g<0>", text))
        return f"{OPEN}{text}{CLOSE}{factor}" if weights else text
    return painted(visible(text), _code(weights)) + (painted(factor, _DIM) if factor else "")


def _code(weights: Weights) -> str:
    if not weights:
        return _DIM
    if min(weights) < 0:
        return _NEGATIVE
    return _ONE if weights == (1.0,) else _MORE if max(weights) > 1 else _LESS
