"""``alphatoken score``: read and seal the job, have its blocks valued, write what follows."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from alphatoken import Scorer
from alphatoken.cli.folder import (
    collected_warnings,
    file_digest,
    read_manifest,
    refuse_foreign,
    require_writable,
    same_settings,
)
from alphatoken.cli.score import ScoreOptions
from alphatoken.cli.score_engines import (
    Launched,
    check_engine,
    launched,
    value_blocks,
    value_with_ray,
)
from alphatoken.cli.score_job import (
    Job,
    gradient_file,
    open_job,
    prepare_job,
    score_config,
    seal_job,
)
from alphatoken.cli.score_results import write_results
from alphatoken.errors import ConfigError
from alphatoken.report.page import missing_libraries
from alphatoken.select.masks import keep_count
from alphatoken.support.locks import try_lock
from alphatoken.support.storage import read_json, write_json

__all__ = ["run"]


def run(options: ScoreOptions) -> None:
    """Value ``options.train_file`` and write everything to ``options.output_dir``.

    Raises:
        AlphaTokenError: wrong input, with what and where. KeyboardInterrupt: says how to go on.
    """
    here = launched()
    score_config(options)
    keep_count(options.ratio, 1, name="--keep_ratio")  # its error now, not after the first batch
    require_writable(options.output_dir)
    if options.write_dataset is not None:
        require_writable(options.write_dataset, "--write_dataset")
    _check_dataset(options)
    check_engine(options, here)
    options = here.on_device(replace(options, format=_kind(options)))
    with here.together():
        if here.rank == 0:
            _lead(options, here)
        else:
            _follow(options, here)


def _lead(options: ScoreOptions, here: Launched) -> None:
    """The first process: all but the blocks of others."""
    start, folder = time.monotonic(), Path(options.output_dir)
    with _alone(folder), collected_warnings() as warned:
        refuse_foreign(folder / "run.json", options, [folder / "values", folder / "job"])
        job = prepare_job(options)
        _open(job)
        scorer = job.scorer()
        numbers = job.missing()
        if numbers:
            _seal(job, scorer)
        here.wait()
        if options.engine == "ray" and numbers:
            value_with_ray(job, numbers)
        else:
            value_blocks(job, scorer, here.share(numbers))
        here.wait()
        write_results(job, scorer, warned, start)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """See that no other run is at work in the output folder, for as long as this one is.

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


def _follow(options: ScoreOptions, here: Launched) -> None:
    """Any other process that a launcher started."""
    here.wait()  # until the job is sealed
    job = open_job(options)
    scorer = job.scorer()
    if numbers := here.share(job.missing()):
        scorer.load_gradient(gradient_file(job.folder))
        value_blocks(job, scorer, numbers)
    here.wait()


def _seal(job: Job, scorer: Scorer) -> None:
    """The job in the folder, with G; an earlier run's G is used again."""
    seal_job(job)
    path = gradient_file(job.folder)
    if path.exists():
        scorer.load_gradient(path)
    else:
        scorer.save_gradient(path)


def _kind(options: ScoreOptions) -> Literal["parquet", "jsonl"]:
    """The format of the value files; what is not installed is missed now, not after the work."""
    arrow = find_spec("pyarrow") is not None
    if (options.format == "parquet" or options.write_dataset) and not arrow:
        raise ConfigError("Parquet needs pyarrow", remedy="pip install pyarrow, or --format jsonl")
    if options.report and (missing := missing_libraries()):
        raise ConfigError(
            f"the HTML report needs {' and '.join(missing)}",
            remedy="pip install 'alphatoken[report]', or leave it out: --no_report",
        )
    return options.format or ("parquet" if arrow else "jsonl")


def _check_dataset(options: ScoreOptions) -> None:
    """See that the data set goes to a folder of its own."""
    if options.write_dataset is None:
        return
    folder, values = Path(options.write_dataset), Path(options.output_dir) / "values"
    if folder.resolve() in (values.resolve(), Path(options.output_dir).resolve()):
        raise ConfigError(
            "the data set needs a folder of its own",
            got=f"--write_dataset {folder}",
            why="the values of --output_dir lie there",
            remedy="another folder for --write_dataset",
        )
    foreign = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if foreign and not (folder / "dataset.json").is_file():
        raise ConfigError(
            "the data set's folder holds something else",
            got=str(folder),
            remedy="another folder for --write_dataset",
        )
    if foreign and not (options.overwrite_output or (options.resume and _wrote(options, folder))):
        raise ConfigError(
            "the data set's folder holds an earlier data set",
            got=f"--write_dataset {folder}",
            remedy="--overwrite_output to replace it and the run in --output_dir, or another "
            "folder for --write_dataset",
        )


def _wrote(options: ScoreOptions, folder: Path) -> bool:
    """Whether a data set, or what a killed process left of one, is of the run in ``output_dir``."""
    found, own = read_json(folder / "dataset.json") or {}, Path(options.output_dir) / "run.json"
    return own.is_file() and found.get("run") == file_digest(own)


def _open(job: Job) -> None:
    """Make the folder ready: a new run, an earlier one to continue, or one to replace."""
    folder, options = job.folder, job.options
    manifest = folder / "run.json"
    if options.overwrite_output and manifest.exists():
        manifest.unlink()
        for name in ("values", "job"):
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
