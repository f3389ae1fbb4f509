"""The contents of a report: scored sequences, token by token."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "COMPONENTS",
    "Component",
    "ScoredExample",
    "Visits",
    "query_key",
    "responses",
    "visible",
]

IGNORE = -100


@dataclass(frozen=True)
class Component:
    """One column of values: its key, its name on the page, and what it says in a sentence."""

    key: str
    name: str
    meaning: str


COMPONENTS: tuple[Component, ...] = (
    Component("total", "Total", "adaptation plus lambda times stability: the value that ranks"),
    Component(
        "adaptation",
        "Adaptation",
        "how much training on the token lowers the validation objective",
    ),
    Component(
        "stability",
        "Stability",
        "how much training on the token keeps the model near what it was (before lambda)",
    ),
    Component(
        "adaptation_direct", "Adaptation, direct", "adaptation through the token's own position"
    ),
    Component(
        "adaptation_causal",
        "Adaptation, causal",
        "adaptation through later positions that attend to it",
    ),
    Component(
        "stability_direct",
        "Stability, direct",
        "stability through the token's own position (before lambda)",
    ),
    Component(
        "stability_causal",
        "Stability, causal",
        "stability through later positions that attend to it (before lambda)",
    ),
)
"""All columns in the order of the page."""


def query_key(number: int) -> str:
    """Key, and column, of the values against query ``number``, from 0: "query_1" of the first."""
    return f"query_{number + 1}"


def responses(labels: Sequence[int] | NDArray[Any]) -> NDArray[np.bool_]:
    """(t,) True where a label is learned; the first token, which nothing predicts, never is."""
    mask: NDArray[np.bool_] = np.asarray(labels) != IGNORE
    mask[:1] = False
    return mask


@dataclass(frozen=True)
class Visits:
    """Visits of a training run to a sequence.

    Attributes:
        count: how often it was trained on.
        last_step: the optimizer step of the last time, from 0.
        branch: "chosen" or "rejected" of a pair; else None.
        rows: the training rows that hold it.
        kept_share: (t,) mean weight of each token over the visits.
    """

    count: int
    last_step: int
    branch: str | None
    rows: Sequence[int]
    kept_share: NDArray[np.float64]


@dataclass(frozen=True)
class ScoredExample:
    """One sequence of t tokens with its values.

    Attributes:
        row: row number in the training file, from 0.
        place: how a person finds the row, such as ``train.jsonl, line 7``.
        tokens: text of each token, length t; empty where nobody has asked for it.
        ids: their token ids.
        labels: their labels, -100 where nothing is learned.
        kept: (t,) boolean, True where the selection keeps the token.
        values: component key -> (t,) values; components that the estimator does not split off
            are left out. Of a run with queries also ``query_key`` -> values against that query.
        visits: of a training run, whose values are added up over them; None of any other.
        derivative: of label values, how they were differentiated, as in ``TokenValues``.
        error: of differences, the estimated relative error (norm over a batch of rows), as the
            process that valued the row had last looked at it.
    """

    row: int
    place: str
    tokens: Sequence[str]
    ids: Sequence[int]
    labels: Sequence[int]
    kept: NDArray[np.bool_]
    values: Mapping[str, NDArray[np.floating[Any]]]
    visits: Visits | None = None
    derivative: str | None = None
    error: float = 0.0

    @property
    def response(self) -> NDArray[np.bool_]:
        """(t,) True where the token is a valued response token; the first one never is."""
        return responses(self.labels)


# Joiners are format characters too, but emoji and many scripts need them: only these are marked.
_STEERING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def visible(text: str) -> str:
    r"""Token text with a mark for every character that would be unseen, or would steer the page.

    Line breaks and tabs get a mark and stay; other control characters, and characters that
    override the direction of writing, are written out by number.

    >>> visible("a\n")
    'a↵\n'
    """
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character == "\n":
        return "\u21b5\n"
    if character == "\t":
        return "\u21e5\t"
    code = ord(character)
    steering = unicodedata.bidirectional(character) in _STEERING
    if steering or code < 0x20 or 0x7F <= code < 0xA0 or 0xD800 <= code < 0xE000:
        return f"\u27e8U+{code:04X}\u27e9"
    return character
