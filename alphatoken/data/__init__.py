"""Files to batches: rows, tokens and labels, held-out pools, padding.

Small steps, each usable by itself:

* :func:`read_rows` reads JSONL, JSON, CSV, TSV or Parquet rows (prompt and response, or chat
  messages), and :func:`read_pairs` preference pairs; both log what was read as what, and what was
  not read;
* :func:`encode_rows` turns them into token ids and labels, through the tokenizer's chat template
  where it has one, through one stated plain format where it has none;
* :func:`split_pools` keeps validation rows and Fisher prompts out of the training rows;
* :func:`collate` pads encoded rows to a batch as transformers uses it.
"""

from __future__ import annotations

from alphatoken.data.collate import WeightedCollator, batches, collate
from alphatoken.data.encode import (
    EncodeOptions,
    EncodeReport,
    Example,
    encode_prompt,
    encode_row,
    encode_rows,
)
from alphatoken.data.pairs import Pair, pair_of, read_pairs
from alphatoken.data.rows import Fields, Row, Turn, row_of
from alphatoken.data.source import read_records, read_rows
from alphatoken.data.split import Pools, leak_keys, split_pools
from alphatoken.data.survey import Survey
from alphatoken.data.texts import PLAIN_FORMAT
from alphatoken.support.token_texts import token_texts

__all__ = [
    "PLAIN_FORMAT",
    "EncodeOptions",
    "EncodeReport",
    "Example",
    "Fields",
    "Pair",
    "Pools",
    "Row",
    "Survey",
    "Turn",
    "WeightedCollator",
    "batches",
    "collate",
    "encode_prompt",
    "encode_row",
    "encode_rows",
    "leak_keys",
    "pair_of",
    "read_pairs",
    "read_records",
    "read_rows",
    "row_of",
    "split_pools",
    "token_texts",
]
