"""Scored sequences as a data set that any trainer reads: ids, labels with -100, weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alphatoken.report.examples import IGNORE, ScoredExample
from alphatoken.report.files import Record, read_values, value_files, write_parquet
from alphatoken.support.storage import write_json, write_text

__all__ = ["CARD", "DatasetCounts", "write_dataset"]

_TYPES = {
    "input_ids": "[int64]",
    "attention_mask": "[int64]",
    "labels": "[int64]",
    "loss_weights": "[float]",
    "row": "int64",
}

CARD = """# Rows with token weights

Written by `alphatoken score --write_dataset`. One row an example, unshifted:

| column | what |
|---|---|
| `input_ids` | tokens |
| `attention_mask` | 1 at all of them: nothing is padded |
| `labels` | the token where it is trained on; -100 at prompts and at dropped response tokens |
| `loss_weights` | factor on each token's loss; 0 where the label is -100 |
| `row` | number of the row in the training file, from 0 |

A row without any weight is left out. Read it with
`datasets.load_dataset("parquet", data_files="{folder}/*.parquet", split="train")`. Trainers that
know -100 need nothing else while the weights are 0 and 1. TRL, Axolotl and LLaMA-Factory drop
`loss_weights` in silence; `alphatoken.data.WeightedCollator` brings other weights to the loss.
"""


@dataclass
class DatasetCounts:
    """What was written."""

    rows: int = 0
    rows_without_weight: int = 0
    response_tokens: int = 0
    trained_tokens: int = 0


def write_dataset(values: Path, folder: Path) -> DatasetCounts:
    """Write ``part-*.parquet``, ``README.md`` and, last, ``dataset.json``, each whole or not.

    Args:
        values: folder of value files, with a mask; each becomes a file of the data set.
        folder: is made; an earlier data set in it is replaced.

    Raises:
        ConfigError: pyarrow is missing. DataError: a value file cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in (folder / "dataset.json", *folder.glob("part-*.parquet")):
        earlier.unlink(missing_ok=True)
    counts = DatasetCounts()
    for path in value_files(values):
        part = folder / f"{path.stem}.parquet"
        write_parquet(part, _TYPES, _counted(read_values(path), counts))
    write_text(folder / "README.md", CARD.format(folder=folder.name))
    write_json(folder / "dataset.json", vars(counts))
    return counts


def _counted(examples: Iterable[ScoredExample], counts: DatasetCounts) -> Iterator[Record]:
    """The rows that have a weight, counted."""
    for example in examples:
        weights = np.where(example.response, example.kept, 0).astype(np.float32)
        counts.response_tokens += int(example.response.sum())
        if not weights.any():
            counts.rows_without_weight += 1
            continue
        ids = np.asarray(example.ids, np.int64)
        labels = np.where(weights != 0, np.asarray(example.labels, np.int64), IGNORE)
        counts.rows += 1
        counts.trained_tokens += int((weights != 0).sum())
        yield {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "labels": labels,
            "loss_weights": weights,
            "row": example.row,
        }
