"""A run over a corpus: read and seal the job, have its blocks valued, write what follows."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from alphatoken.corpus.engines import (
    Launched,
    check_engine,
    launched,
    value_blocks,
    value_with_ray,
)
from alphatoken.corpus.folder import (
    collected_warnings,
    read_manifest,
    refuse_foreign,
    require_writable,
    same_settings,
)
from alphatoken.corpus.job import Job, open_job, prepare_job, seal_job
from alphatoken.corpus.options import EngineOptions, ResultOptions
from alphatoken.corpus.results import write_results
from alphatoken.corpus.spec import JobSpec
from alphatoken.errors import ConfigError
from alphatoken.select.masks import keep_count
from alphatoken.support.locks import try_lock
from alphatoken.support.storage import write_json

__all__ = ["score_corpus"]


def score_corpus(
    spec: JobSpec,
    wanted: ResultOptions | None = None,
    engine: EngineOptions | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Value the rows of ``spec`` and write everything to its folder.

    Every process of a launcher calls it, with the same arguments.

    Args:
        spec: what is valued.
        wanted: what is made of the values.
        engine: who values.
        resume: keep what an earlier run in the folder has finished, and do the rest.
        overwrite: replace an earlier run.

    Raises:
        AlphaTokenError: wrong input, with what and where. KeyboardInterrupt: says how to go on.
    """
    wanted, engine = wanted or ResultOptions(), engine or EngineOptions()
    here = launched()
    keep_count(spec.ratio, 1, name="--keep_ratio")  # its error now, not after the first batch
    require_writable(spec.output_dir)
    check_engine(engine, here)
    if spec.config.estimator == "walk" and wanted.verify is not None:
        raise ConfigError(
            "values along a walk have no certificate",
            got=f"--verify {wanted.verify}, --estimator walk",
            why="each is one loss less another, and nothing in it is approximated",
            remedy="leave --verify out",
        )
    if find_spec("pyarrow") is None:  # missed now, and not after the work
        raise ConfigError("value files need pyarrow", remedy="pip install 'alphatoken[data]'")
    spec = here.share_of(spec)
    with here.together():
        if here.rank == 0:
            _lead(spec, wanted, engine, here, resume=resume, overwrite=overwrite)
        else:
            _follow(spec, here)


def _lead(
    spec: JobSpec,
    wanted: ResultOptions,
    engine: EngineOptions,
    here: Launched,
    *,
    resume: bool,
    overwrite: bool,
) -> None:
    """The first process: all but the blocks of others."""
    start, folder = time.monotonic(), spec.folder
    with _alone(folder), collected_warnings() as warned:
        made = [folder / "values", folder / "job", folder / "dataset"]
        refuse_foreign(folder / "run.json", made, resume=resume, overwrite=overwrite)
        job = prepare_job(spec)
        _open(job, overwrite=overwrite)
        scorer = job.scorer()
        numbers = job.missing()
        if numbers:
            seal_job(job)
        here.wait()
        if engine.engine == "ray" and numbers:
            value_with_ray(job, engine, numbers)
        else:
            value_blocks(job, scorer, here.share(numbers))
        here.wait()
        write_results(job, scorer, wanted, warned, start)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Check that no other run is at work in the output folder, for as long as this one is.

    Raises:
        ConfigError: one is.
    """
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


def _follow(spec: JobSpec, here: Launched) -> None:
    """Any other process that a launcher started."""
    here.wait()  # until the job is sealed
    job = open_job(spec)
    if numbers := here.share(job.missing()):
        value_blocks(job, job.scorer(), numbers)
    here.wait()


def _open(job: Job, *, overwrite: bool) -> None:
    """Make the folder ready: a new run, an earlier one to continue, or one to replace."""
    folder = job.folder
    manifest = folder / "run.json"
    if overwrite and manifest.exists():
        manifest.unlink()
        for name in ("values", "job", "dataset"):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in ("summary.json", "report.html", "bad_rows.jsonl"):
            (folder / name).unlink(missing_ok=True)
    if manifest.exists():
        same_settings(read_manifest(manifest)["settings"], job.settings)
    (folder / "values").mkdir(parents=True, exist_ok=True)
    for leftover in (folder / "values").glob(".part-*.tmp"):  # of a process that was killed
        leftover.unlink()
    if not manifest.exists():
        write_json(manifest, {"settings": job.settings}, default=str)
