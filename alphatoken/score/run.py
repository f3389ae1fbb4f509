"""A run over a corpus: read and save the job, have its blocks valued, write what follows."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from alphatoken.errors import ConfigError, collected_warnings
from alphatoken.score.engines import (
    LaunchedProcess,
    check_engine,
    this_process,
    value_blocks,
    value_with_ray,
)
from alphatoken.score.job import Job, load_job, prepare_job, save_job
from alphatoken.score.options import ScoreOptions
from alphatoken.score.results import write_results
from alphatoken.select.masks import keep_count
from alphatoken.support.locks import try_lock
from alphatoken.support.progress import shown_progress
from alphatoken.support.resume import (
    check_output_folder,
    read_run,
    refuse_other_run,
    require_writable,
)
from alphatoken.support.storage import write_json

__all__ = ["score_corpus"]


def score_corpus(options: ScoreOptions) -> None:
    """Value ``options.train_file`` and write everything to ``options.output_dir``.

    Every process of a launcher calls it, with the same options.

    Raises:
        AlphaTokenError: wrong input, with what and where. KeyboardInterrupt: says how to go on.
    """
    here = this_process()
    keep_count(
        options.keep_ratio, 1, name="--keep_ratio"
    )  # its error now, not after the first batch
    require_writable(options.output_dir)
    check_engine(options, here)
    if options.scorer_config().estimator == "walk" and options.verify is not None:
        raise ConfigError(
            "values along a walk have no certificate",
            got=f"--verify {options.verify}, --estimator walk",
            why="each is one loss less another, and nothing in it is approximated",
            remedy="leave --verify out",
        )
    if find_spec("pyarrow") is None:  # missed now, and not after the work
        raise ConfigError("value files need pyarrow", remedy="pip install 'alphatoken[data]'")
    options = here.share_of(options)
    with here.together(), shown_progress(not options.quiet):
        if here.rank == 0:
            _run_first(options, here)
        else:
            _run_other(options, here)


def _run_first(options: ScoreOptions, here: LaunchedProcess) -> None:
    """The first process: all but the blocks of others."""
    start, folder = time.monotonic(), options.folder
    with _locked_folder(folder), collected_warnings() as warned:
        check_output_folder(
            folder / "run.json",
            [folder / "values", folder / "job", folder / "rows.jsonl"],
            "score",
            resume=options.resume,
            overwrite=options.overwrite_output,
        )
        job = prepare_job(options)
        _prepare_folder(job)
        scorer = job.scorer()
        numbers = job.missing()
        if numbers:
            save_job(job)
        here.wait()
        if options.engine == "ray" and numbers:
            value_with_ray(job, numbers)
        else:
            value_blocks(job, scorer, here.share(numbers))
        here.wait()
        write_results(job, scorer, warned, start)


@contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    """Check that no other run is at work in the output folder, for as long as this one is."""
    there = folder.exists()
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
            if not there:
                folder.rmdir()
        os.close(handle)


def _run_other(options: ScoreOptions, here: LaunchedProcess) -> None:
    """Any other process that a launcher started."""
    here.wait()  # until the job is saved
    job = load_job(options)
    if numbers := here.share(job.missing()):
        value_blocks(job, job.scorer(), numbers)
    here.wait()


def _prepare_folder(job: Job) -> None:
    """Make the folder ready: a new run, an earlier one to continue, or one to replace."""
    folder = job.options.folder
    manifest = folder / "run.json"
    if job.options.overwrite_output and manifest.exists():
        manifest.unlink()
        for name in ("values", "job"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in ("summary.json", "report.html", "bad_rows.jsonl", "rows.jsonl"):
            (folder / name).unlink(missing_ok=True)
    if manifest.exists():
        refuse_other_run(read_run(manifest)["settings"], job.settings)
    (folder / "values").mkdir(parents=True, exist_ok=True)
    for leftover in (folder / "values").glob(".part-*.tmp"):  # of a process that was killed
        leftover.unlink()
    if not manifest.exists():
        write_json(manifest, {"command": "score", "settings": job.settings}, default=str)
