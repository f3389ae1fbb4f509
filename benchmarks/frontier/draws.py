"""Draws of real rows in several formats: what is valued, and against what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from alphatoken.data import Example, read_rows
from alphatoken.data.encode import EncodeOptions, encode_rows
from alphatoken.data.rows import Fields, Row
from alphatoken.data.stdlib import code_rows
from alphatoken.errors import DataError
from benchmarks.data import data_folder

VALUED, VALIDATION = 4, 8
"""Rows of a draw: those that are valued, and others that the direction is built from."""

_LEAST = 24  # response tokens of a row that is drawn
_POOL = 600  # rows of a file that draws are taken from, where it has as many


# --- formats -------------------------------------------------------------------------------------


def _options(length: int, *, template: bool = False) -> EncodeOptions:
    return EncodeOptions(max_length=length, on_empty="skip", chat_template=template)


def _file(
    name: str, response: str | None = None, prompt: str | None = None
) -> Callable[[], list[Row]]:
    def read() -> list[Row]:
        return read_rows(data_folder() / name, fields=Fields(prompt, response), limit=_POOL)

    return read


FORMATS: dict[str, tuple[Callable[[], list[Row]], EncodeOptions]] = {
    "gsm8k-chat": (_file("gsm8k/train.jsonl"), _options(128, template=True)),
    "gsm8k": (_file("gsm8k/train.jsonl"), _options(112)),
    "stories": (_file("tinystories/stories.jsonl", response="text"), _options(80)),
    "mbpp": (_file("mbpp/train.jsonl", prompt="text", response="code"), _options(96)),
    "library": (lambda: code_rows(400), _options(96)),  # functions of the standard library
}
"""Kinds of rows, and how they become tokens."""


def formats_of(tokenizer: Any) -> list[str]:
    """The formats that a tokenizer can write."""
    chat = getattr(tokenizer, "chat_template", None) is not None
    return [name for name, (_, how) in FORMATS.items() if chat or not how.chat_template]


def draw_rows(name: str, number: int, tokenizer: Any) -> tuple[list[Example], list[Example]]:
    """The draw of this number: no two draws of a format share a row.

    Returns:
        Rows to value, and rows to value them against.

    Raises:
        DataError: the data do not hold so many rows.
    """
    rows_of, how = FORMATS[name]
    examples, _ = encode_rows(rows_of(), tokenizer, how)
    usable = [example for example in examples if example.response_tokens >= _LEAST]
    order = np.random.default_rng(0).permutation(len(usable))
    rows = VALUED + VALIDATION
    places = order[rows * number : rows * (number + 1)]
    if len(places) < rows:
        raise DataError(
            "too few rows for another draw",
            got=f"{name}: {len(usable)} rows of at least {_LEAST} response tokens, draw {number}",
            why="a row that is valued twice counts twice",
            remedy=f"at most --draws {len(usable) // rows}",
        )
    drawn = [usable[place] for place in places]
    return drawn[:VALUED], drawn[VALUED:]
