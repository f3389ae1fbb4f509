"""Scored sequences as a data set that any trainer reads: ids, labels with -100, weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alphatoken.report.examples import IGNORE, ScoredExample
from alphatoken.report.files import Record, read_values, value_files, write_parquet

__all__ = ["DatasetCounts", "write_dataset"]

_TYPES = {
    "input_ids": "[int64]",
    "attention_mask": "[int64]",
    "labels": "[int64]",
    "loss_weights": "[float]",
    "row": "int64",
}


@dataclass
class DatasetCounts:
    """Counts of the rows and tokens written."""

    rows: int = 0
    rows_without_weight: int = 0
    response_tokens: int = 0
    trained_tokens: int = 0


def write_dataset(values: Path, folder: Path) -> DatasetCounts:
    """Write ``part-*.parquet``, each whole or not, one row an example that has a weight.

    ``labels`` are -100 and ``loss_weights`` 0 at prompts and at dropped response tokens; ``row``
    numbers the rows of the training file from 0.

    Args:
        values: folder of value files, with a mask; each becomes a file of the data set.
        folder: is made; an earlier data set in it is replaced.

    Raises:
        ConfigError: pyarrow is missing. DataError: a value file cannot be read.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("part-*.parquet"):
        earlier.unlink()
    counts = DatasetCounts()
    for path in value_files(values):
        part = folder / f"{path.stem}.parquet"
        write_parquet(part, _TYPES, _counted(read_values(path), counts))
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
