"""Distribution of blocks: this process, the processes of a launcher, or Ray's actors.

Blocks do not depend on each other and their files are whole or not there, so that an engine needs
to do nothing but hand out the numbers of those that are missing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from alphatoken import Scorer
from alphatoken.corpus.blocks import BlockValuer
from alphatoken.corpus.job import Job, load_job
from alphatoken.corpus.options import ScoreOptions
from alphatoken.errors import ConfigError, ModelError
from alphatoken.support.progress import Tracker

__all__ = ["Launched", "check_engine", "launched", "value_blocks", "value_with_ray"]

_PATIENCE = timedelta(days=30)
"""Time that processes wait for each other: as long as the slowest one values."""


@dataclass(frozen=True)
class Launched:
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


def launched() -> Launched:
    """Processes that the launcher's environment describes; one process without a launcher."""
    known = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    if None in known.values():
        return Launched()
    return Launched(*(int(str(number)) for number in known.values()))


def check_engine(options: ScoreOptions, here: Launched) -> None:
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


class _Done:
    """Rows that are finished, as progress says them and as an interrupted run is told."""

    def __init__(self, job: Job, left: Sequence[int]) -> None:
        self._job, self._rows = job, job.corpus.source.rows
        out = 0 if job.survey is None else self._rows - job.survey.counts["train"]
        label = f"Scoring ({out} rows are left out)" if out else "Scoring"
        self._tracker = Tracker(label, self._rows, not job.options.quiet)
        self._done = self._without(left)
        self._tracker.resume(self._done)
        if left:  # it is shown before the first batch is done
            self._tracker.report(self._done)

    def _without(self, left: Sequence[int]) -> int:
        """Rows of all blocks but these."""
        return self._rows - sum(len(self._job.stretch(number)) for number in left)

    def within(self, rows: int) -> None:
        """Count so many rows of the block at work as done."""
        self._tracker.report(self._done + rows)

    def finish(self, number: int) -> None:
        """A block is done."""
        self._done += len(self._job.stretch(number))
        self.within(0)

    def interrupted(self) -> KeyboardInterrupt:
        """Message about the finished part, and how to continue."""
        done = self._without(self._job.missing())
        return KeyboardInterrupt(
            f"{done} of {self._rows} rows are finished and kept; the same command with --resume "
            "continues after them"
        )


def value_blocks(job: Job, scorer: Scorer, numbers: Sequence[int]) -> None:
    """Value these blocks in this process, one after the other.

    Raises:
        KeyboardInterrupt: says how to go on. DataError, ModelError: of :class:`BlockValuer`.
    """
    valuer, done = BlockValuer(job, scorer), _Done(job, numbers)
    try:
        for number in numbers:
            valuer.run(number, done.within)
            done.finish(number)
    except KeyboardInterrupt:
        raise done.interrupted() from None


class _Actor:
    """One of Ray's workers: a model of its own, which values the blocks that it is handed."""

    def __init__(self, options: ScoreOptions) -> None:
        job = load_job(options)
        self._valuer = BlockValuer(job, job.scorer())

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for number in batch["block"]:
            self._valuer.run(int(number))
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
    options, done = job.options, _Done(job, numbers)
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
            done.finish(int(finished["block"]))
    except KeyboardInterrupt:
        raise done.interrupted() from None
    except ray.exceptions.RayError as error:
        raise ModelError(
            "Ray gave up", got=str(error).strip().splitlines()[-1][:300],
            remedy="what is finished is kept: --resume goes on",
        ) from error  # fmt: skip
    finally:
        ray.shutdown()
