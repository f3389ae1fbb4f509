"""Real rows for the measurements on real language models, in the model's own tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from alphatoken.data import EncodeOptions, Row, collate, encode_rows
from alphatoken.data.rows import Turn
from benchmarks.frontier.draws import FORMATS


def source() -> str:
    """Where the rows come from: ``$ALPHATOKEN_DATA``, or the Python standard library."""
    return "GSM8K" if os.environ.get("ALPHATOKEN_DATA") else "functions of the standard library"


def batches(tokenizer: Any, rows: int, length: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A batch of ``rows`` x ``length`` tokens without padding, and another one to value it against.

    Each row is a conversation of as many problems and their solutions as it takes, in the plain
    format; the solutions are its response.
    """
    options = EncodeOptions(max_length=length, chat_template=False, on_empty="skip")
    # A few more than are needed: a long first problem may leave no room for its solution.
    examples, _ = encode_rows(list(_conversations(4 * rows, length)), tokenizer, options)
    examples = [example for example in examples if len(example.input_ids) == length]
    if len(examples) < 2 * rows:
        raise RuntimeError(f"{len(examples)} of {2 * rows} rows of real text have {length} tokens")
    both = collate(examples[:rows]), collate(examples[rows : 2 * rows])
    for batch in both:  # nothing is padded, and a mask of ones would only cost attention its kernel
        del batch["attention_mask"]
    return both


def _conversations(count: int, length: int) -> Iterator[Row]:
    """Rows joined until their text is long enough for ``length`` tokens of any tokenizer here."""
    rows = iter(FORMATS["gsm8k" if os.environ.get("ALPHATOKEN_DATA") else "library"].rows())
    for index in range(count):
        turns: list[Turn] = []
        # Fewer than eight characters a token: what is over is cut off.
        while sum(len(turn.text) for turn in turns) < 8 * length:
            turns += next(rows).turns
        yield Row(index, f"conversation {index}", tuple(turns))
