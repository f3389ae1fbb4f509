"""Walk values of a corpus from log-probabilities that any engine wrote; no model runs here.

    value of token i  =  log p_after(z_i | z_<i)  -  log p_before(z_i | z_<i)

Two Parquet files, one row an example, in the same order: lists ``input_ids``, ``labels`` (-100
where nothing is valued) and ``logprobs`` (entry i of token i; the first is not read). ``row``
numbers them; without such a column they are numbered from 0.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from alphatoken.corpus.folder import refuse_foreign, require_writable
from alphatoken.corpus.options import LogprobOptions
from alphatoken.corpus.results import keep_over_all
from alphatoken.data import token_texts
from alphatoken.errors import ConfigError, DataError, quoted
from alphatoken.report import ScoredExample, read_values, summarise, write_report, write_values
from alphatoken.report.examples import IGNORE, responses
from alphatoken.report.files import pyarrow_modules
from alphatoken.select.masks import keep_count, select_top
from alphatoken.support.progress import Tracker
from alphatoken.support.storage import file_digest, write_json
from alphatoken.train.loading import load_tokenizer

__all__ = ["read_pair", "score_logprobs"]

_LISTS = ("input_ids", "labels", "logprobs")
_UNREADABLE = (OSError, ValueError, TypeError, OverflowError, KeyError)
"""Errors of pyarrow and numpy for a file or a list of another form."""
_NUMBERS, _IDS = 2**63, 2**31
"""Rows and tokens that a value file can number."""
_ROWS = 256
"""Rows of a file that are in memory at a time."""
_BLOCK = 8_192
"""Rows of a value file."""
_NOTE = (
    "Values are log-probabilities after the walk less those before it, in nats, as two files "
    "have them: exact for the whole way, up to the rounding of the engine that wrote them."
)


@contextmanager
def _opened(path: str) -> Iterator[Any]:
    """A Parquet file; whatever goes wrong inside names it."""
    _, pq = pyarrow_modules()
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except DataError:
        raise
    except _UNREADABLE as error:
        raise _bad(path, quoted(error)) from error


def _rows(path: str) -> Iterator[ScoredExample]:
    """The rows of one file, each checked by itself; an error names file, row and position."""
    with _opened(path) as file:
        names = file.schema_arrow.names
        lacking = [name for name in _LISTS if name not in names]
        if lacking:
            raise _bad(path, f"no column {lacking[0]!r}; it has {', '.join(names)}")
        twice = [name for name in (*_LISTS, "row") if names.count(name) > 1]
        if twice:
            raise _bad(path, f"more than one column {twice[0]!r}")
        wanted = [name for name in (*_LISTS, "row") if name in names]
        batches = file.iter_batches(batch_size=_ROWS, columns=wanted)
        for number, own in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield _row(path, own.get("row", number), own)


def _row(path: str, number: Any, own: dict[str, Any]) -> ScoredExample:
    place = f"{Path(path).name}, row {number}"
    missing = [name for name in _LISTS if own[name] is None]
    if missing or number is None:
        raise _bad(place, f"no {missing[0] if missing else 'number'}")
    if type(number) is not int or not 0 <= number < _NUMBERS:
        raise _bad(place, "its number is no row of a file")
    ids, labels = (_list(place, name, own[name], np.int64) for name in ("input_ids", "labels"))
    logprobs = _list(place, "logprobs", own["logprobs"], np.float64)  # None becomes NaN
    if not len(ids) == len(labels) == len(logprobs):
        raise _bad(place, f"{len(ids)} input_ids, {len(labels)} labels, {len(logprobs)} logprobs")
    read = responses(labels)
    faults = {
        "a token that is no id": (ids, (ids < 0) | (ids >= _IDS)),
        "a label that is neither -100 nor the token": (
            labels,
            (labels != IGNORE) & (labels != ids),
        ),
        "a log-probability that is missing, NaN or infinite": (
            logprobs,
            read & ~np.isfinite(logprobs),
        ),
        "a log-probability above 0": (logprobs, read & (logprobs > 1e-3)),
    }
    for what, (shown, wrong) in faults.items():
        if wrong.any():
            position = int(wrong.argmax())
            raise _bad(f"{place}, position {position}", f"{what}: {shown[position]}")
    return ScoredExample(
        row=number,
        place=place,
        tokens=[],
        ids=ids.tolist(),
        labels=labels.tolist(),
        kept=np.zeros(len(ids), bool),
        values={"logprobs": logprobs},
    )


def _list(place: str, name: str, given: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """One number a token, none of them rounded to a whole one."""
    try:
        found = np.asarray(given, dtype)
        whole = dtype is np.float64 or bool((found == np.asarray(given)).all())
    except _UNREADABLE as error:
        raise _bad(f"{place}, {name}", quoted(error)) from error
    if found.ndim != 1 or not whole:
        raise _bad(f"{place}, {name}", "no list of numbers" if whole else "no whole numbers")
    return found


def _bad(place: str, got: str) -> DataError:
    return DataError(
        "log-probabilities cannot be read",
        got=f"{place}: {got}",
        why="a value would be a difference of something else",
        remedy="Parquet with lists input_ids, labels (-100 outside the response) and logprobs of "
        "natural logarithms, one row an example; docs/walks.md shows how an engine writes them",
    )


def read_pair(before: str, after: str) -> Iterator[ScoredExample]:
    """Examples with their walk values, nothing selected yet.

    Raises:
        DataError: a bad row, or two rows that are not of the same tokens; the place is named.
    """
    for first, second in zip_longest(_rows(before), _rows(after)):
        if first is None or second is None:
            longer = first or second
            raise _unlike(f"{longer.place}: the other file ends before it")
        both = f"{first.place}; {second.place}"
        if first.row != second.row:
            raise _unlike(f"{both}: other rows, or another order")
        for name in ("ids", "labels"):
            one, two = (np.asarray(getattr(row, name)) for row in (first, second))
            if len(one) != len(two):
                raise _unlike(f"{both}: {len(one)} and {len(two)} tokens")
            if (one != two).any():
                position = int((one != two).argmax())
                what = "token" if name == "ids" else "label"
                raise _unlike(f"{both}: {what} {one[position]} and {two[position]} at {position}")
        change = second.values["logprobs"] - first.values["logprobs"]
        values = np.where(first.response, change, 0.0)
        place = f"row {first.row}"
        yield replace(first, place=place, values={"total": values, "adaptation": values})


def _unlike(got: str) -> DataError:
    return DataError(
        "the two files are not of the same examples",
        got=got,
        why="log-probabilities of different tokens would be subtracted",
        remedy="write both from the same rows, in the same order, with the same tokenizer",
    )


def _selected(options: LogprobOptions) -> Iterator[ScoredExample]:
    """Add the selection of each batch, as a run with models has it."""
    waiting, done = read_pair(*options.logprobs), 0
    with _opened(options.logprobs[0]) as file:
        rows = int(file.metadata.num_rows)
    tracker = Tracker("Reading log-probabilities", rows, not options.quiet)
    while batch := list(islice(waiting, options.batch_size)):
        totals = [torch.from_numpy(example.values["total"]) for example in batch]
        read = [torch.from_numpy(example.response) for example in batch]
        values, mask = (pad_sequence(one, batch_first=True) for one in (totals, read))
        scope = "batch" if options.scope == "dataset" else options.scope
        kept = select_top(values, mask, options.ratio, scope=scope).numpy()
        for index, example in enumerate(batch):
            yield replace(example, kept=kept[index, : len(example.ids)])
        done += len(batch)
        tracker.report(done)


def score_logprobs(options: LogprobOptions) -> None:
    """Write values, summary and page of two files of log-probabilities.

    Raises:
        ConfigError: the folder holds something else. DataError: see ``read_pair``; what was written
            until then is removed.
    """
    start, folder = time.monotonic(), Path(options.output_dir)
    keep_count(options.ratio, 1, name="--keep_ratio")
    require_writable(folder)
    name = options.model_name_or_path
    tokenizer = None if name is None else load_tokenizer(name)
    manifest, values = folder / "run.json", folder / "values"
    lost = [one for one in options.logprobs if values.resolve() in Path(one).resolve().parents]
    if lost:
        raise ConfigError(
            "a file of log-probabilities lies where the values will be",
            got=lost[0],
            why="an earlier run's values are removed first",
            remedy="another --output_dir",
        )
    refuse_foreign(manifest, [values], resume=None, overwrite=options.overwrite_output)
    settings = {
        "estimator": "walk",
        "logprobs": list(options.logprobs),
        "logprobs_sha256": [file_digest(path) for path in options.logprobs],
        "keep_ratio": options.ratio,
        "keep_scope": options.scope,
        "per_device_train_batch_size": options.batch_size,
        "seed": options.seed,
    }
    shutil.rmtree(values, ignore_errors=True)
    values.mkdir(parents=True)
    write_json(manifest, {"settings": settings})
    examples, parts = _selected(options), 0
    try:
        while (first := next(examples, None)) is not None:
            path = values / f"part-{parts:05d}.parquet"
            write_values(path, chain([first], islice(examples, _BLOCK - 1)))
            parts += 1
        if not parts:
            raise ConfigError("there is no row to value", got=", ".join(options.logprobs))
    except BaseException:
        shutil.rmtree(values, ignore_errors=True)
        manifest.unlink()
        raise
    if options.scope == "dataset":
        keep_over_all(folder, options.ratio)
    texts = partial(map, str) if tokenizer is None else partial(token_texts, tokenizer)
    summary = summarise(read_values(values), seed=options.seed, texts=lambda ids: list(texts(ids)))
    document = {
        "settings": settings,
        "values": summary.as_dict(),
        "notes": [_NOTE],
        "seconds": round(time.monotonic() - start, 3),
    }
    write_json(folder / "summary.json", document)
    if options.report:
        title = f"Token values of {Path(options.logprobs[0]).name}"
        write_report(folder / "report.html", summary, title=title, settings=settings, notes=[_NOTE])
    print(
        f"{summary.response_tokens} response tokens valued, {summary.kept_tokens} kept; "
        f"values: {values}"
    )
