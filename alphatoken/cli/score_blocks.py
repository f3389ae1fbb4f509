"""The rows of one block to one value file, and a note of what became of each.

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

from alphatoken import Scorer, TokenValues, select_top
from alphatoken.cli.reading import encoded_row, on_device
from alphatoken.cli.score_job import Job, block_facts
from alphatoken.data import EncodeReport, Example, collate
from alphatoken.data.corpus import BadRow
from alphatoken.errors import DataError, ModelError
from alphatoken.report import COMPONENTS, ScoredExample, write_values
from alphatoken.support.storage import write_json

__all__ = ["BlockFacts", "BlockValuer", "example_digest", "read_facts"]


@dataclass
class BlockFacts:
    """What became of the rows of a block.

    Attributes:
        rows: of the source.
        left_out: reason -> rows.
        encoded: of the others.
        bad: rows that cannot be read or encoded, under "skip".
        values_sha256: digest of rows, ids, labels and values, in order.
        job: digest of the settings that it was valued with.
    """

    job: str = ""
    rows: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    encoded: EncodeReport = field(default_factory=EncodeReport)
    bad: list[BadRow] = field(default_factory=list)
    values_sha256: str = ""


def read_facts(job: Job, number: int) -> BlockFacts:
    """The facts of a finished block.

    Raises:
        DataError: they are missing or cannot be read.
    """
    path = block_facts(job.folder, number)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["job"] != job.digest:
            raise ValueError("it is of a run with other settings")
        return BlockFacts(
            found["job"],
            found["rows"],
            found["left_out"],
            EncodeReport(**found["encoded"]),
            [BadRow(**row) for row in found["bad"]],
            found["values_sha256"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            "the note about a value file cannot be read",
            got=f"{path}: {type(error).__name__}: {error}",
            remedy="remove the value file of the same number, and go on with --resume",
        ) from None


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

    def run(self, number: int, report: Callable[[int], None] | None = None) -> BlockFacts:
        """Value block ``number`` and write its file.

        Args:
            number: of the block.
            report: is told after each batch how many rows of the block are done.

        Raises:
            DataError: a row that must not be passed over, or a file that cannot be written.
            ModelError: out of memory.
        """
        job, facts, digest = self._job, BlockFacts(self._job.digest), hashlib.sha256()
        first = number * job.block

        def scored() -> Iterator[ScoredExample]:
            for batch in self._batches(first, facts):
                for example in self._scored(batch):
                    example_digest(digest, example)
                    yield example
                if report is not None:
                    report(facts.rows)

        write_values(job.part(number), self._noted(number, facts, digest, scored()))
        return facts

    def _noted(
        self, number: int, facts: BlockFacts, digest: Any, examples: Iterator[ScoredExample]
    ) -> Iterator[ScoredExample]:
        """The examples; after the last one the facts are written, before the file has its name."""
        yield from examples
        facts.values_sha256 = digest.hexdigest()
        write_json(block_facts(self._job.folder, number), asdict(facts))

    def _batches(self, first: int, facts: BlockFacts) -> Iterator[list[Example]]:
        """Encoded rows of the block, so many at a time."""
        size = self._job.options.batch_size
        waiting: list[Example] = []
        for row in self._job.corpus.rows(first, first + self._job.block):
            facts.rows += 1
            if isinstance(row, str):
                facts.left_out[row] = facts.left_out.get(row, 0) + 1
                continue
            found = row if isinstance(row, BadRow) else self._encoded(row, facts)
            if isinstance(found, BadRow):
                facts.bad.append(found)
            elif found is not None:
                waiting.append(found)
            if len(waiting) == size:
                yield waiting
                waiting = []
        if waiting:
            yield waiting

    def _encoded(self, row: Any, facts: BlockFacts) -> Example | BadRow | None:
        found, report = encoded_row(row, self._job.tokenizer, self._job.how)
        if not isinstance(found, BadRow):
            facts.encoded.add(report)
        return found

    def _scored(self, examples: Sequence[Example]) -> Iterator[ScoredExample]:
        options = self._job.options
        try:
            values = self._scorer.score(on_device(collate(examples), self._job.model))
        except torch.OutOfMemoryError as error:
            raise ModelError(
                "out of memory",
                got=str(error)[:200],
                remedy="a smaller --per_device_train_batch_size or --max_length",
            ) from None
        scope = "batch" if options.scope == "dataset" else options.scope
        kept = select_top(values.total, values.mask, options.ratio, scope=scope)
        keys = [c.key for c in COMPONENTS if options.components or c.key == "total"]
        for index, example in enumerate(examples):
            yield _one(example, index, values, kept, keys)


def _one(
    example: Example, index: int, values: TokenValues, kept: torch.Tensor, keys: Sequence[str]
) -> ScoredExample:
    length = len(example.input_ids)
    columns = {key: getattr(values, key) for key in keys}
    return ScoredExample(
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
