"""Values of the rows of a block, written to one file; and who values which block.

A block is a fixed stretch of the source, its batches are made within it, and its file is written
whole or not at all. So any process may value any block, in any order and more than once, and the
files hold the same values. (The error beside label values is that which the process measured last.)
An engine does no more than hand out the numbers of missing blocks: to this process, to the
processes of a launcher, or to Ray's actors.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alphatoken import Scorer, TokenValues, select_top
from alphatoken.data import Example, collate
from alphatoken.errors import ConfigError, ModelError
from alphatoken.score.job import Job, load_job, on_device
from alphatoken.score.options import ScoreOptions
from alphatoken.score.values import COMPONENTS, ScoredExample, query_key, write_values
from alphatoken.support.precision import float16_named
from alphatoken.support.progress import Tracker

__all__ = [
    "LaunchedProcess",
    "check_engine",
    "this_process",
    "value_block",
    "value_blocks",
    "value_with_ray",
]


def value_block(
    job: Job, scorer: Scorer, number: int, report: Callable[[int], None] = lambda _: None
) -> None:
    """Value block ``number`` and write its file.

    Args:
        job: loaded or prepared in this process.
        scorer: of the same job, with its G.
        number: of the block.
        report: called after each batch with the number of rows of the block that are done.

    Raises:
        DataError: a row that must not be passed over, or a file that cannot be written.
        ModelError: out of memory.
    """
    block = job.block_rows(number)
    rows = job.corpus.rows(block.start, block.stop)
    examples = (row.example for row in rows if row.example is not None)

    def scored() -> Iterator[ScoredExample]:
        while batch := list(islice(examples, job.options.per_device_train_batch_size)):
            yield from _score_batch(job, scorer, batch)
            report(batch[-1].row.index + 1 - block.start)

    write_values(job.value_file(number), scored())


def _values_by_query(values: TokenValues, queries: int) -> dict[str, Tensor]:
    """Values (b, t) against each query; none where there are no queries."""
    if not queries:
        return {}
    if queries == 1:
        assert values.adaptation is not None
        return {query_key(0): values.adaptation}
    return {query_key(n): one for n, one in enumerate(values.by_batch().unbind(-1))}


def _score_batch(job: Job, scorer: Scorer, examples: Sequence[Example]) -> Iterator[ScoredExample]:
    options = job.options
    try:
        values = scorer.score(on_device(collate(examples), job.model))
    except torch.OutOfMemoryError as error:
        raise ModelError(
            "out of memory",
            got=str(error)[:200],
            remedy="a smaller --per_device_train_batch_size or --max_length",
        ) from None
    scope = "batch" if options.keep_scope == "dataset" else options.keep_scope
    with float16_named(job.model):
        kept = select_top(values.total, values.mask, options.keep_ratio, scope=scope)
    columns = {c.key: getattr(values, c.key) for c in COMPONENTS}
    columns |= _values_by_query(values, len(options.query))
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


_PATIENCE = timedelta(days=30)
"""Time that processes wait for each other: as long as the slowest one values."""


@dataclass(frozen=True)
class LaunchedProcess:
    """This process among those that torchrun or accelerate started."""

    rank: int = 0
    local_rank: int = 0
    world: int = 1

    @contextmanager
    def together(self) -> Iterator[None]:
        """Inside, the processes can wait for each other."""
        if self.world > 1:
            dist.init_process_group("gloo", timeout=_PATIENCE)
        try:
            yield
        finally:
            if self.world > 1:
                dist.destroy_process_group()

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.world > 1:
            dist.barrier()

    def share(self, numbers: Sequence[int]) -> list[int]:
        """The blocks of this process: dealt by number, whatever is missing."""
        return [number for number in numbers if number % self.world == self.rank]

    def share_of(self, options: ScoreOptions) -> ScoreOptions:
        """The job of this process: with a GPU of its own, and one process that speaks."""
        if self.world == 1:
            return options
        if options.device in ("auto", "cuda") and torch.cuda.is_available():
            options = replace(options, device=f"cuda:{self.local_rank}")
        return options if self.rank == 0 else replace(options, quiet=True)


def this_process() -> LaunchedProcess:
    """Processes that the launcher's environment describes; one process without a launcher."""
    numbers = [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    if None in numbers:
        return LaunchedProcess()
    return LaunchedProcess(*(int(str(number)) for number in numbers))


def check_engine(options: ScoreOptions, here: LaunchedProcess) -> None:
    """Check that the engine is there, before any work.

    Raises:
        ConfigError: it is not, or two of them were asked for.
    """
    if options.engine == "local":
        if options.workers is not None:
            raise ConfigError(
                "--workers needs --engine ray",
                got=f"--workers {options.workers}",
                remedy="--engine ray, or torchrun --nproc-per-node N -m alphatoken.cli score ...",
            )
        return
    if here.world > 1:
        raise ConfigError(
            "only one engine can run at a time",
            got=f"--engine ray under a launcher of {here.world} processes",
            remedy="one of them",
        )
    if find_spec("ray") is None:
        raise ConfigError("--engine ray needs Ray", remedy="pip install 'alphatoken[ray]'")


class _BlockProgress:
    """Rows that are finished, as progress says them and as an interrupted run is told."""

    def __init__(self, job: Job, left: Sequence[int]) -> None:
        self._job, self._rows = job, job.corpus.source.rows
        out = 0 if job.survey is None else self._rows - job.survey.counts["train"]
        label = f"Scoring ({out} rows are left out)" if out else "Scoring"
        self._tracker = Tracker(label, self._rows, not job.options.quiet)
        self._done = self._rows_outside(left)
        self._tracker.resume(self._done)
        if left:  # it is shown before the first batch is done
            self._tracker.report(self._done)

    def _rows_outside(self, left: Sequence[int]) -> int:
        """Rows of all blocks but these."""
        return self._rows - sum(len(self._job.block_rows(number)) for number in left)

    def report(self, rows: int) -> None:
        """Count so many rows of the block at work as done."""
        self._tracker.report(self._done + rows)

    def finish(self, number: int) -> None:
        """A block is done."""
        self._done += len(self._job.block_rows(number))
        self.report(0)

    def interrupted(self) -> KeyboardInterrupt:
        """Message about the finished part, and how to continue."""
        done = self._rows_outside(self._job.missing())
        return KeyboardInterrupt(
            f"{done} of {self._rows} rows are finished and kept; the same command with --resume "
            "continues after them"
        )


def value_blocks(job: Job, scorer: Scorer, numbers: Sequence[int]) -> None:
    """Value these blocks in this process, one after the other.

    Raises:
        KeyboardInterrupt: says how to go on. DataError, ModelError: of :func:`value_block`.
    """
    progress = _BlockProgress(job, numbers)
    try:
        for number in numbers:
            value_block(job, scorer, number, progress.report)
            progress.finish(number)
    except KeyboardInterrupt:
        raise progress.interrupted() from None


class _Actor:
    """One of Ray's workers: a model of its own, which values the blocks that it is handed."""

    def __init__(self, options: ScoreOptions) -> None:
        self._job = load_job(options)
        self._scorer = self._job.scorer()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for number in batch["block"]:
            value_block(self._job, self._scorer, int(number))
        return {"block": batch["block"]}


def value_with_ray(job: Job, numbers: Sequence[int]) -> None:
    """Value these blocks with a pool of Ray's actors.

    A lost actor's block is handed to another one. Where this process dies, finished blocks stay.

    Raises:
        KeyboardInterrupt: says how to go on. ModelError: Ray gave up.
    """
    import ray
    import ray.data

    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    options, progress = job.options, _BlockProgress(job, numbers)
    gpus, device = options.gpus_per_worker, "cuda" if options.gpus_per_worker else "cpu"
    # Each block is an item of its own, so that all workers have some and little is lost with one.
    rows = ray.data.from_items([{"block": n} for n in numbers], override_num_blocks=len(numbers))
    valued = rows.map_batches(
        _Actor,
        fn_constructor_args=(replace(options, quiet=True, device=device),),
        batch_size=1,
        concurrency=options.workers or 1,
        num_gpus=gpus,
        num_cpus=None if gpus else 1,
    )
    try:
        for finished in valued.iter_rows():
            progress.finish(int(finished["block"]))
    except KeyboardInterrupt:
        raise progress.interrupted() from None
    except ray.exceptions.RayError as error:
        raise ModelError(
            "Ray gave up", got=str(error).strip().splitlines()[-1][:300],
            remedy="what is finished is kept: --resume goes on",
        ) from error  # fmt: skip
    finally:
        ray.shutdown()
