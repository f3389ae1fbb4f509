"""Comparison of what is learned of a row with the text of its responses.

Templates cut, split and strip what they are given. So the tokens are decoded, and each response
must be found in them, but for white space and for what the tokenizer itself does to a text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from alphatoken.data.markers import bare
from alphatoken.data.pieces import decode
from alphatoken.data.plain import IGNORE, bare_ids

__all__ = ["LEFT_OUT", "lost_text"]

LEFT_OUT = "text of turns that are not learned is left out"
_LEAD = 64
"""Tokens before what is learned in which a response may begin, where the template opens it."""


def lost_text(
    parts: Sequence[tuple[int, str]], ids: Sequence[int], labels: Sequence[int], tokenizer: Any
) -> tuple[int, str, str] | None:
    """The first part that is not in what is learned: its turn, its text, and what is learned.

    A part is looked for in the labels of its turn, but for white space: as it is, and as the
    tokenizer writes it by itself. It may begin before them, where the prompt opens a thought.

    Args:
        parts: texts to be found, each with the number of its turn, in their order.
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
