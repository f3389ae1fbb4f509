"""Who values which block: this process, the processes of a launcher, or Ray's actors.

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
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from alphatoken import Scorer
from alphatoken.cli.score import ScoreOptions
from alphatoken.cli.score_blocks import BlockValuer
from alphatoken.cli.score_job import Job, gradient_file, open_job
from alphatoken.errors import ConfigError, ModelError
from alphatoken.support.progress import Tracker

__all__ = ["Launched", "check_engine", "launched", "value_blocks", "value_with_ray"]

_PATIENCE = timedelta(days=30)
"""How long processes wait for each other: as long as the slowest one values."""


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
        """Until all processes are here."""
        if self.world > 1:
            dist.barrier()

    def share(self, numbers: Sequence[int]) -> list[int]:
        """The blocks of this process: dealt by number, whatever is missing."""
        return [number for number in numbers if number % self.world == self.rank]

    def on_device(self, options: ScoreOptions) -> ScoreOptions:
        """With a GPU of its own for each process, and one that speaks."""
        if self.world == 1:
            return options
        if options.device in ("auto", "cuda") and torch.cuda.is_available():
            options = replace(options, device=f"cuda:{self.local_rank}")
        return options if self.rank == 0 else replace(options, quiet=True)


def launched() -> Launched:
    """What the launcher says in the environment; one process without any."""
    known = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    if None in known.values():
        return Launched()
    return Launched(*(int(str(number)) for number in known.values()))


def check_engine(options: ScoreOptions, here: Launched) -> None:
    """See that the engine is there, before any work.

    Raises:
        ConfigError: it is not, or two of them were asked for.
    """
    if options.engine == "local":
        if options.workers is not None:
            raise ConfigError(
                "--workers is of --engine ray",
                got=f"--workers {options.workers}",
                remedy="--engine ray, or torchrun --nproc-per-node N -m alphatoken.cli score ...",
            )
        return
    if here.world > 1:
        raise ConfigError(
            "two engines at a time",
            got=f"--engine ray under a launcher of {here.world} processes",
            remedy="one of them",
        )
    if find_spec("ray") is None:
        raise ConfigError("--engine ray needs Ray", remedy="pip install 'alphatoken[ray]'")


def value_blocks(job: Job, scorer: Scorer, numbers: Sequence[int]) -> None:
    """Value these blocks in this process, one after the other.

    Raises:
        KeyboardInterrupt: says how to go on. DataError, ModelError: of :class:`BlockValuer`.
    """
    valuer = BlockValuer(job, scorer)
    tracker, done = _begun(job, numbers)
    try:
        for number in numbers:
            valuer.run(number, partial(_tell, tracker, done))
            done += _size(job, number)
        tracker.report(done)
    except KeyboardInterrupt:
        done = _done(job, job.missing())
        raise _interrupted(job, done) from None


def _begun(job: Job, left: Sequence[int]) -> tuple[Tracker, int]:
    """Progress over all rows, and how many of them are valued already."""
    rows = job.corpus.source.rows
    out = rows - job.counts.get("train", rows)
    label = f"Scoring ({out} rows are left out)" if out else "Scoring"
    tracker = Tracker(label, rows, not job.options.quiet)
    done = _done(job, left)
    tracker.resume(done)
    return tracker, done


def _done(job: Job, left: Sequence[int]) -> int:
    """Rows of all other blocks."""
    return job.corpus.source.rows - sum(_size(job, number) for number in left)


def _interrupted(job: Job, done: int) -> KeyboardInterrupt:
    return KeyboardInterrupt(
        f"{done} of {job.corpus.source.rows} rows are finished and kept; the same command with "
        "--resume continues after them"
    )


def _tell(tracker: Tracker, before: int, rows: int) -> None:
    tracker.report(before + rows)


def _size(job: Job, number: int) -> int:
    first = number * job.block
    return min(first + job.block, job.corpus.source.rows) - first


class _Actor:
    """One of Ray's workers: a model of its own, which values the blocks that it is handed."""

    def __init__(self, options: ScoreOptions) -> None:
        job = open_job(options)
        scorer = job.scorer()
        scorer.load_gradient(gradient_file(job.folder))
        self._valuer = BlockValuer(job, scorer)

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

    options = job.options
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    tracker, done = _begun(job, numbers)
    gpus = options.gpus_per_worker
    # Each block is an item of its own, so that all workers have some and little is lost with one.
    rows = ray.data.from_items([{"block": n} for n in numbers], override_num_blocks=len(numbers))
    valued = rows.map_batches(
        _Actor,
        fn_constructor_args=(replace(options, quiet=True, device="cuda" if gpus else "cpu"),),
        batch_size=1,
        concurrency=options.workers or 1,
        num_gpus=gpus,
        num_cpus=None if gpus else options.cpus_per_worker,
    )
    try:
        for finished in valued.iter_rows():
            done += _size(job, int(finished["block"]))
            tracker.report(done)
    except KeyboardInterrupt:
        raise _interrupted(job, done) from None
    except ray.exceptions.RayError as error:
        raise ModelError(
            "Ray gave up", got=str(error).strip().splitlines()[-1][:300],
            remedy="what is finished is kept: --resume goes on",
        ) from error  # fmt: skip
    finally:
        ray.shutdown()
