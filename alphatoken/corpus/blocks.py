"""The rows of one block to one value file, and a note of what became of them.

A block is a fixed stretch of the source, its batches are made within it, and its file is written
whole or not at all. So any process may value any block, in any order and more than once, and the
files are the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from alphatoken import Scorer, select_top
from alphatoken.corpus.job import Job
from alphatoken.corpus.rows import CorpusRow
from alphatoken.corpus.spec import on_device
from alphatoken.data import Example, collate
from alphatoken.errors import DataError, ModelError
from alphatoken.report import COMPONENTS, ScoredExample, write_values
from alphatoken.support.storage import write_json

__all__ = ["BlockFacts", "BlockValuer", "example_digest", "read_facts"]


@dataclass(frozen=True)
class BlockFacts:
    """What became of the rows of a block.

    Attributes:
        job: digest of the settings that it was valued with.
        values_sha256: digest of rows, ids, labels and values, in order.
        bad: index, place and reason of each row that cannot be read or written as tokens.
    """

    job: str
    values_sha256: str
    bad: list[dict[str, Any]] = field(default_factory=list)


def read_facts(job: Job, number: int) -> BlockFacts:
    """The facts of a finished block.

    Raises:
        DataError: they are missing or cannot be read.
    """
    path = job.facts(number)
    try:
        facts = BlockFacts(**json.loads(path.read_text(encoding="utf-8")))
        if facts.job != job.digest:
            raise ValueError("it is of a run with other settings")
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            "the note about a value file cannot be read",
            got=f"{path}: {type(error).__name__}: {error}",
            remedy="remove the value file of the same number, and go on with --resume",
        ) from None
    return facts


def example_digest(digest: Any, example: ScoredExample) -> None:
    """Feed a scored example, its selection left out, to a digest."""
    digest.update(f"{example.row} {len(example.ids)}".encode())
    digest.update(np.asarray(example.ids, np.int32).tobytes())
    digest.update(np.asarray(example.labels, np.int32).tobytes())
    digest.update(np.asarray(example.values["total"], np.float64).tobytes())


class BlockValuer:
    """Values blocks of a job, one at a time.

    Args:
        job: opened or prepared in this process.
        scorer: of the same job, with its G.
    """

    def __init__(self, job: Job, scorer: Scorer) -> None:
        self._job, self._scorer = job, scorer

    def run(self, number: int, report: Callable[[int], None] = lambda _: None) -> None:
        """Value block ``number``: write its file, and then its facts.

        Args:
            number: of the block.
            report: is told after each batch how many rows of the block are done.

        Raises:
            DataError: a row that must not be passed over, or a file that cannot be written.
            ModelError: out of memory.
        """
        job, digest, bad = self._job, hashlib.sha256(), list[dict[str, Any]]()
        first = number * job.block

        def valued() -> Iterator[ScoredExample]:
            for batch in self._batches(first):
                bad.extend(_bad(row) for row in batch if row.outcome == "bad_rows")
                for example in self._scored([row.example for row in batch if row.example]):
                    example_digest(digest, example)
                    yield example
                if batch:
                    report(batch[-1].index + 1 - first)

        write_values(job.part(number), valued())
        facts = BlockFacts(job.digest, digest.hexdigest(), bad)
        write_json(job.facts(number), asdict(facts))

    def _batches(self, first: int) -> Iterator[list[CorpusRow]]:
        """Rows of the block, until so many of them are valued; then the next ones."""
        rows, valued = list[CorpusRow](), 0
        for row in self._job.corpus.rows(first, first + self._job.block):
            rows.append(row)
            valued += row.example is not None
            if valued == self._job.spec.batch_size:
                yield rows
                rows, valued = [], 0
        yield rows

    def _scored(self, examples: Sequence[Example]) -> Iterator[ScoredExample]:
        if not examples:
            return
        spec = self._job.spec
        try:
            values = self._scorer.score(on_device(collate(examples), self._job.model))
        except torch.OutOfMemoryError as error:
            raise ModelError(
                "out of memory",
                got=str(error)[:200],
                remedy="a smaller --per_device_train_batch_size or --max_length",
            ) from None
        scope = "batch" if spec.scope == "dataset" else spec.scope
        kept = select_top(values.total, values.mask, spec.ratio, scope=scope)
        keys = [c.key for c in COMPONENTS if spec.components or c.key == "total"]
        columns = {key: getattr(values, key) for key in keys}
        for index, example in enumerate(examples):
            length = len(example.input_ids)
            yield ScoredExample(
                row=example.row.index,
                place=example.row.place,
                tokens=[],
                ids=example.input_ids,
                labels=example.labels,
                kept=kept[index, :length].cpu().numpy(),
                values={
                    key: column[index, :length].cpu().numpy()
                    for key, column in columns.items()
                    if column is not None
                },
            )


def _bad(row: CorpusRow) -> dict[str, Any]:
    return {"index": row.index, "place": row.place, "reason": row.reason}
