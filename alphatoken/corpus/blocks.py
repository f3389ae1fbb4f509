"""Values of the rows of one block, written to one file.

A block is a fixed stretch of the source, its batches are made within it, and its file is written
whole or not at all. So any process may value any block, in any order and more than once, and the
files hold the same values. The error that goes with them is that which the process had looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from alphatoken import Scorer, TokenValues, select_top
from alphatoken.corpus.job import Job, on_device
from alphatoken.data import Example, collate
from alphatoken.errors import ModelError
from alphatoken.report import COMPONENTS, ScoredExample, write_values
from alphatoken.report.examples import query_key
from alphatoken.support.precision import float16_named

__all__ = ["BlockValuer"]


class BlockValuer:
    """Values blocks of a job, one at a time.

    Args:
        job: opened or prepared in this process.
        scorer: of the same job, with its G.
    """

    def __init__(self, job: Job, scorer: Scorer) -> None:
        self._job, self._scorer = job, scorer

    def run(self, number: int, report: Callable[[int], None] = lambda _: None) -> None:
        """Value block ``number`` and write its file.

        Args:
            number: of the block.
            report: is told after each batch how many rows of the block are done.

        Raises:
            DataError: a row that must not be passed over, or a file that cannot be written.
            ModelError: out of memory.
        """
        block = self._job.stretch(number)
        rows = self._job.corpus.rows(block.start, block.stop)
        examples = (row.example for row in rows if row.example is not None)

        def valued() -> Iterator[ScoredExample]:
            while batch := list(islice(examples, self._job.options.per_device_train_batch_size)):
                yield from self._scored(batch)
                report(batch[-1].row.index + 1 - block.start)

        write_values(self._job.part(number), valued())

    def _by_query(self, values: TokenValues) -> dict[str, Tensor]:
        """Values (b, t) against each query; none where there are no queries."""
        count = len(self._job.options.query)
        if not count:
            return {}
        if count == 1:
            assert values.adaptation is not None
            return {query_key(0): values.adaptation}
        return {query_key(n): one for n, one in enumerate(values.by_batch().unbind(-1))}

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
        scope = "batch" if options.keep_scope == "dataset" else options.keep_scope
        with float16_named(self._job.model):
            kept = select_top(values.total, values.mask, options.keep_ratio, scope=scope)
        columns = {c.key: getattr(values, c.key) for c in COMPONENTS} | self._by_query(values)
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
                derivative=values.derivative,
                error=values.error,
            )
