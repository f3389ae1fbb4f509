"""A run over a corpus: read and save the job, have its blocks valued, write what follows.

A block is a fixed stretch of the source, its batches are made within it, and its file is written
whole or not at all. So any process may value any block, in any order and more than once, and the
files hold the same values. (The error beside label values is that which the process measured last.)
An engine does no more than hand out the numbers of missing blocks: to this process, to the
processes of a launcher, or to Ray's actors.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from alphatoken import Scorer, TokenValues, select_top
from alphatoken.config import WALK, ValueOptions
from alphatoken.data import Example, collate
from alphatoken.errors import ConfigError, ModelError, collected_warnings, counted
from alphatoken.model.batch import IGNORE, label_mask
from alphatoken.presets import preset_of
from alphatoken.score.job import Job, load_job, on_device, prepare_job, save_job
from alphatoken.score.options import ScoreOptions
from alphatoken.score.results import write_results
from alphatoken.score.values import COMPONENTS, LOSS, ScoredExample, query_key, write_values
from alphatoken.select.masks import keep_count
from alphatoken.support.precision import float16_named
from alphatoken.support.progress import Tracker, shown_progress
from alphatoken.support.resume import (
    check_output_folder,
    read_run,
    refuse_other_run,
    require_writable,
)
from alphatoken.support.storage import no_empty_folder, try_lock, write_json

_T = TypeVar("_T")


def score_corpus(options: ScoreOptions) -> None:
    """Value ``options.train_file`` and write everything to ``options.output_dir``.

    Every process of a launcher calls it, with the same options.

    Raises:
        AlphaTokenError: wrong input, with what and where. KeyboardInterrupt: says how to go on.
    """
    here = _this_process()
    # Their errors come now, and neither after the first batch nor after a folder was made.
    keep_count(options.ratio, 1, name="--keep_ratio")
    options.scorer_config()
    require_writable(options.output_dir)
    _check_engine(options, here)
    if find_spec("pyarrow") is None:  # missed now, and not after the work
        raise ConfigError("value files need pyarrow", remedy="pip install 'alphatoken[data]'")
    options = here.share_of(options)
    with here.together(), shown_progress(not options.quiet):
        if here.rank == 0:
            _run_first(options, here)
        else:
            _run_other(options, here)


def _run_first(options: ScoreOptions, here: _LaunchedProcess) -> None:
    start, folder = time.monotonic(), options.folder
    with no_empty_folder(folder), _locked_folder(folder), collected_warnings() as warned:
        check_output_folder(
            folder / "run.json",
            [folder / "values", folder / "job", folder / "rows.jsonl"],
            "score",
            resume=options.resume,
            overwrite=options.overwrite_output,
        )
        if not options.quiet:
            print(f"note: values: {options.values_in_words()}", file=sys.stderr)
        job = prepare_job(options)
        _prepare_folder(job)
        scorer = job.scorer()
        numbers = job.missing()
        if numbers:
            save_job(job)
        here.wait()
        if options.engine == "ray" and numbers:
            _value_with_ray(job, numbers)
        else:
            _value_blocks(job, scorer, here.share(numbers))
            _value_trusted(job, scorer)
        here.wait()
        write_results(job, scorer, warned, start)


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Holds the output folder against other runs, for as long as this one is at work."""
    handle = try_lock(folder / "lock")
    if handle is None:
        raise ConfigError(
            "another run is at work in this folder",
            got=str(folder),
            why="values of two runs would be mixed in it",
            remedy="wait for it, or another --output_dir; several processes of one run are started "
            "by torchrun or accelerate",
        )
    try:
        yield
    finally:
        if [path.name for path in folder.iterdir()] == ["lock"]:  # nothing was written
            (folder / "lock").unlink()
        os.close(handle)


def _run_other(options: ScoreOptions, here: _LaunchedProcess) -> None:
    here.wait()  # until the job is saved
    job = load_job(options)
    if numbers := here.share(job.missing()):
        _value_blocks(job, job.scorer(), numbers)
    here.wait()


def _prepare_folder(job: Job) -> None:
    """Make the folder ready: a new run, an earlier one to continue, or one to replace."""
    folder = job.options.folder
    manifest = folder / "run.json"
    if job.options.overwrite_output and manifest.exists():
        manifest.unlink()
        for name in ("values", "job", "trusted"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in ("summary.json", "report.html", "bad_rows.jsonl", "rows.jsonl"):
            (folder / name).unlink(missing_ok=True)
    if manifest.exists():
        earlier = read_run(manifest)["settings"]
        refuse_other_run(earlier, job.settings, remedy=_remedy(earlier, job.settings))
    (folder / "values").mkdir(parents=True, exist_ok=True)
    for leftover in (folder / "values").glob(".part-*.tmp"):  # of a process that was killed
        leftover.unlink()
    if not manifest.exists():
        write_json(manifest, {"command": "score", "settings": job.settings}, default=str)


def _value_trusted(job: Job, scorer: Scorer) -> None:
    """Value some of the rows that a walk was taken on, to be marked on the page."""
    options, path = job.options, job.trusted_file
    compared = options.scorer_config().estimator == "walk" and not options.query
    if not compared or not options.report or not job.validation or path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    rows = job.validation[:_MARKED]
    size = options.per_device_train_batch_size
    with Tracker("Valuing trusted rows", len(rows), not options.quiet) as tracker:

        def report(share: float) -> None:
            tracker.report(round(share * len(rows)))

        write_values(path, score_rows(scorer, rows, size, ratio=options.ratio, report=report))


def _remedy(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The preset of the earlier values, where they are others: the default was once the paper's."""
    if earlier.get("estimator") == now["estimator"]:
        return ""
    name = preset_of(SimpleNamespace(**{**asdict(ValueOptions()), **earlier}))
    return "" if name is None else f"--value {name} goes on with the earlier values; else "


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
    block, options = job.block_rows(number), job.options
    size, scope = options.per_device_train_batch_size, options.keep_scope
    examples, count = job.examples(block), max(_WINDOW // size, 1) * size

    def scored() -> Iterator[ScoredExample]:
        for window in _read_ahead(iter(lambda: list(islice(examples, count)), [])):
            first, last = (window[place].row.index - block.start for place in (0, -1))

            def share_done(share: float, first: int = first, last: int = last) -> None:
                report(first + round(share * (last + 1 - first)))

            yield from score_rows(
                scorer,
                window,
                size,
                ratio=options.ratio,
                scope="batch" if scope == "dataset" else scope,
                queries=len(options.query),
                report=share_done,
            )

    write_values(job.value_file(number), scored())


def _read_ahead(items: Iterator[_T]) -> Iterator[_T]:
    """The items; a thread makes the next one while the last is in use."""
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = reader.submit(next, items, None)
            yield item


_MARKED = 64
"""Trusted rows that are valued too."""

_WINDOW = 512
"""Rows that are batched by their lengths; fewer of a file that has fewer."""


def _values_by_query(values: TokenValues, queries: int) -> dict[str, Tensor]:
    if not queries:
        return {}
    if queries == 1:
        assert values.adaptation is not None
        return {query_key(0): values.adaptation}
    return {query_key(n): one for n, one in enumerate(values.by_batch().unbind(-1))}


def score_rows(
    scorer: Scorer,
    examples: Sequence[Example],
    size: int,
    *,
    ratio: float,
    scope: Literal["batch", "sequence"] = "batch",
    queries: int = 0,
    report: Callable[[float], None] = lambda _: None,
) -> Iterator[ScoredExample]:
    """Values of these rows, in their order, from batches of rows of like lengths.

    Args:
        scorer: of the values.
        examples: rows with a response.
        size: rows of a batch.
        ratio: share of the tokens to keep, by the batches of the file's order.
        scope: within which tokens are ranked.
        queries: number of queries, whose values are told apart.
        report: is told the share that is done.

    Raises:
        ModelError: out of memory.
    """
    # A padded position costs what a token costs. The longest rows come first: where they do not
    # fit into memory, that shows at once.
    order = sorted(range(len(examples)), key=lambda i: -len(examples[i].input_ids))
    scored: dict[int, ScoredExample] = {}
    for start in range(0, len(order), size):
        places = order[start : start + size]
        rows = _score_batch(scorer, [examples[place] for place in places], queries)
        scored |= zip(places, rows, strict=True)
        report(min(start + size, len(order)) / len(order))
    for start in range(0, len(order), size):
        batch = [scored[place] for place in range(start, min(start + size, len(order)))]
        yield from _kept(scorer, batch, ratio, scope)


def _kept(
    scorer: Scorer,
    batch: Sequence[ScoredExample],
    ratio: float,
    scope: Literal["batch", "sequence"],
) -> Iterator[ScoredExample]:
    totals = pad_sequence([torch.from_numpy(one.values["total"]) for one in batch], True)
    labels = [torch.tensor(one.labels) for one in batch]
    mask = label_mask(pad_sequence(labels, True, padding_value=IGNORE))
    with float16_named(scorer.arguments.model):
        kept = select_top(totals, mask, ratio, scope=scope).numpy()
    for one, own in zip(batch, kept, strict=True):
        yield replace(one, kept=own[: len(one.ids)])


@contextmanager
def _memory_named(scorer: Scorer) -> Iterator[None]:
    """Inside, a device that is out of memory is an error with a remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        walks = scorer.config.estimator == "walk"
        raise ModelError(
            "out of memory",
            got=str(error)[:200],
            remedy="a smaller --per_device_train_batch_size"
            + " (which takes another walk)" * walks
            + " or --max_length"
            + "; or --value paper, which moves no weight" * walks,
        ) from None


def _score_batch(scorer: Scorer, examples: Sequence[Example], queries: int) -> list[ScoredExample]:
    with _memory_named(scorer):
        values = scorer.score(on_device(collate(examples), scorer.arguments.model))
    columns = {key: getattr(values, key) for key in COMPONENTS}
    columns |= {LOSS: values.losses, **_values_by_query(values, queries)}
    present = {key: column for key, column in columns.items() if column is not None}
    # In one transfer, since each waits for the device.
    together = torch.stack(list(present.values())).cpu().numpy()
    rows = []
    for index, example in enumerate(examples):
        own = together[:, index, : len(example.input_ids)]
        rows.append(
            ScoredExample(
                row=example.row.index,
                place=example.row.place,
                tokens=[],
                ids=example.input_ids,
                labels=example.labels,
                kept=np.zeros(len(example.input_ids), bool),  # until its batch is whole
                values=dict(zip(present, own, strict=True)),
                derivative=values.derivative,
                error=values.error,
            )
        )
    return rows


# Processes wait for each other as long as the slowest one values.
_PATIENCE = timedelta(days=30)


@dataclass(frozen=True)
class _LaunchedProcess:
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
        if self.world > 1:
            dist.barrier()

    def share(self, numbers: Sequence[int]) -> list[int]:
        return [number for number in numbers if number % self.world == self.rank]

    def share_of(self, options: ScoreOptions) -> ScoreOptions:
        """The job of this process: with a GPU of its own, and one process that speaks."""
        if self.world == 1:
            return options
        if options.device in ("auto", "cuda") and torch.cuda.is_available():
            options = replace(options, device=f"cuda:{self.local_rank}")
        return options if self.rank == 0 else replace(options, quiet=True)


def _this_process() -> _LaunchedProcess:
    """Processes that the launcher's environment describes; one process without a launcher."""
    numbers = [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]
    if None in numbers:
        return _LaunchedProcess()
    return _LaunchedProcess(*(int(str(number)) for number in numbers))


def _check_engine(options: ScoreOptions, here: _LaunchedProcess) -> None:
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


@contextmanager
def _block_progress(
    job: Job, left: Sequence[int], prepare: Callable[[], object] = lambda: None
) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Shows rows that are finished: reports of rows of the block at work, and of a block's end.

    What ``prepare`` does, such as a walk, is no part of the time that a row takes.
    """
    rows = job.corpus.source.rows
    out = 0 if job.survey is None else rows - job.survey.counts["train"]
    label = f"Scoring ({counted(out, 'rows')} left out)" if out else "Scoring"

    def rows_outside(numbers: Sequence[int]) -> int:
        return rows - sum(len(job.block_rows(number)) for number in numbers)

    done = rows_outside(left)

    def report(part: int) -> None:
        tracker.report(done + part)

    def finish(number: int) -> None:
        nonlocal done
        done += len(job.block_rows(number))
        report(0)

    try:
        if left:
            prepare()
        tracker = Tracker(label, rows, not job.options.quiet)
        tracker.resume(done)
        if left:  # it is shown before the first batch is done
            report(0)
        yield report, finish
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{rows_outside(job.missing())} of {rows} rows are finished and kept; the same command "
            "with --resume continues after them"
        ) from None


def _value_blocks(job: Job, scorer: Scorer, numbers: Sequence[int]) -> None:
    def prepare() -> None:
        if scorer.config.estimator == WALK:
            with _memory_named(scorer):
                scorer.estimator.prepare()

    with _block_progress(job, numbers, prepare) as (report, finish):
        for number in numbers:
            value_block(job, scorer, number, report)
            finish(number)


class _Actor:
    """One of Ray's workers: a model of its own, which values the blocks that it is handed."""

    def __init__(self, options: ScoreOptions) -> None:
        self._job = load_job(options)
        self._scorer = self._job.scorer()

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for number in batch["block"]:
            value_block(self._job, self._scorer, int(number))
        return {"block": batch["block"]}


def _value_with_ray(job: Job, numbers: Sequence[int]) -> None:
    # Ray hands a lost actor's block to another one. Where this process dies, finished blocks stay.
    import ray
    import ray.data

    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    options = job.options
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
        with _block_progress(job, numbers) as (_, finish):
            for finished in valued.iter_rows():
                finish(int(finished["block"]))
    except ray.exceptions.RayError as error:
        raise ModelError(
            "Ray gave up", got=str(error).strip().splitlines()[-1][:300],
            remedy="what is finished is kept: --resume goes on",
        ) from error  # fmt: skip
    finally:
        ray.shutdown()
