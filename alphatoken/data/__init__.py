"""From files to batches: rows, tokens and labels, held-out pools, padding.

Four small steps, each usable by itself:

* :func:`read_rows` reads JSONL or Parquet rows (prompt and response, or chat messages);
* :func:`encode_rows` turns them into token ids and labels, through the tokenizer's chat template
  where it has one, through one stated plain format where it has none;
* :func:`split_pools` keeps validation rows and Fisher prompts out of the training rows;
* :func:`collate` pads encoded rows to a batch as transformers uses it.
"""

from __future__ import annotations

from alphatoken.data.collate import batches, collate
from alphatoken.data.encode import (
    PLAIN_FORMAT,
    EncodeOptions,
    EncodeReport,
    Example,
    encode_prompt,
    encode_row,
    encode_rows,
)
from alphatoken.data.pieces import TokenText, token_texts
from alphatoken.data.rows import Fields, Row, Turn, read_rows
from alphatoken.data.split import Pools, leak_keys, split_pools

__all__ = [
    "PLAIN_FORMAT",
    "EncodeOptions",
    "EncodeReport",
    "Example",
    "Fields",
    "Pools",
    "Row",
    "TokenText",
    "Turn",
    "batches",
    "collate",
    "encode_prompt",
    "encode_row",
    "encode_rows",
    "leak_keys",
    "read_rows",
    "split_pools",
    "token_texts",
]
