"""Results made from value files: selection, data set, summary, page."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken import Scorer
from alphatoken.certificate.certify import Certificate
from alphatoken.corpus.job import Job, on_device
from alphatoken.corpus.notes import about_encoding, write_notes
from alphatoken.corpus.queries import read_as
from alphatoken.data import Example, collate, token_texts
from alphatoken.errors import DataError, ModelError
from alphatoken.report import (
    ScoredExample,
    ValueSummary,
    read_values,
    summarise,
    write_report,
    write_values,
)
from alphatoken.report.dataset import DatasetCounts, write_dataset
from alphatoken.report.examples import responses
from alphatoken.report.files import value_files
from alphatoken.report.queries import QueryRanks, ShownQuery, write_query_report
from alphatoken.select.masks import top_mask
from alphatoken.support.storage import write_json, write_jsonl
from alphatoken.values import derivative_text

__all__ = ["write_results"]


def write_results(job: Job, scorer: Scorer, warned: Sequence[str], start: float) -> None:
    """Write selection, data set, summary and page, all from the value files.

    Args:
        job: prepared; each of its blocks has a value file.
        scorer: of the job; for the certificate and the sizes of the two directions.
        warned: warnings that were collected.
        start: of the run, by the monotonic clock.

    Raises:
        DataError: the value files do not hold the rows of the job.
        ModelError: the certificate did not pass.
    """
    options, folder, survey = job.options, job.options.folder, job.survey
    assert survey is not None
    if survey.bad:
        write_jsonl(folder / "bad_rows.jsonl", survey.bad)
    certificate = _certificate(scorer, job)
    if options.scope == "dataset":
        _keep_over_all(folder, options.ratio)
    dataset = _dataset(job)
    ranks, texts = QueryRanks(len(options.queries)), partial(token_texts, job.corpus.tokenizer)
    summary = summarise(ranks.through(_checked(job)), seed=options.seed, texts=texts)
    notes = write_notes(job, survey, summary, warned)
    document = {
        "settings": job.settings,
        "pools": survey.counts,
        "encoded": {"train": asdict(survey.encoded), "validation": asdict(job.encoded)},
        "values": summary.as_dict(),
        "queries": ranks.as_dict(),
        "certificate": None if certificate is None else str(certificate),
        "dataset": None if dataset is None else vars(dataset),
        "notes": notes,
        "seconds": round(time.monotonic() - start, 3),
    }
    write_json(folder / "summary.json", document, default=str)
    if options.report:
        certified = {} if certificate is None else {"certificate": str(certificate)}
        more: dict[str, Any] = {
            "settings": job.settings | certified,
            "notes": [note for note in notes if note not in warned],
            "warnings": warned,
        }
        page, name = folder / "report.html", Path(options.train_file).name
        if options.queries:
            shown = [_shown(query, texts) for query in job.validation]
            asked = "a query" if len(shown) == 1 else f"{len(shown)} queries"
            title = f"Rows of {name} for and against {asked}"
            write_query_report(page, shown, ranks, title=title, texts=texts, **more)
        else:
            write_report(page, summary, title=f"Token values of {name}", **more)
    # Rows that are left out were counted aloud before the work.
    told = about_encoding("train", replace(survey.encoded, truncated_rows=0))
    _say(job, summary, certificate, [note for note in notes if note not in told])


def _shown(query: Example, texts: Callable[[Sequence[int]], list[str]]) -> ShownQuery:
    return ShownQuery(texts(query.input_ids), responses(query.labels).tolist(), read_as(query))


def _checked(job: Job) -> Iterator[ScoredExample]:
    """Read everything back, and see that each file holds rows of its own stretch of the data."""
    for number in job.blocks:
        for example in read_values(job.part(number)):
            if example.row not in job.stretch(number):
                raise DataError(
                    "the value files do not hold the training rows",
                    got=str(job.part(number)),
                    why="it was exchanged or changed since it was written",
                    remedy="remove it and go on with --resume",
                )
            yield example


# --- selection ------------------------------------------------------------------------------------


def _keep_over_all(folder: Path, ratio: float) -> None:
    """Rank all tokens of all files together and write the files again, each whole or not.

    The totals of all response tokens are in memory: 8 bytes a token, and as much again to rank.
    """
    values = folder / "values"
    totals = np.concatenate(
        [example.values["total"][example.response] for example in read_values(values)],
        dtype=np.float64,
    )
    kept, start = top_mask(totals, ratio), 0

    def selected(path: Path) -> Iterator[ScoredExample]:
        nonlocal start
        for example in read_values(path):
            response = example.response
            end = start + int(response.sum())
            mask = np.zeros_like(response)
            mask[response] = kept[start:end]
            start = end
            yield replace(example, kept=mask)

    for path in value_files(values):
        write_values(path, selected(path))


def _dataset(job: Job) -> DatasetCounts | None:
    """The rows with their weights, for other trainers, where that is asked for."""
    if not job.options.write_dataset:
        return None
    folder = job.options.folder
    counts = write_dataset(folder / "values", folder / "dataset")
    if not job.options.quiet:
        print(
            f"{counts.rows} rows with {counts.trained_tokens} of {counts.response_tokens} response "
            f"tokens; {counts.rows_without_weight} rows without weight left out: "
            f"{folder / 'dataset'}",
            file=sys.stderr,
        )
    return counts


# --- certificate and last words -------------------------------------------------------------------


def _certificate(scorer: Scorer, job: Job) -> Certificate | None:
    """Certificate of the first rows that have values."""
    options = job.options
    if options.verify is None:
        return None
    valued = (row.example for row in job.corpus.rows() if row.example is not None)
    return scorer.verify(
        on_device(collate(list(islice(valued, min(options.batch_size, 2)))), job.model),
        tokens=options.verify,
        seed=options.seed,
        fisher_file=options.fisher_file,
        progress=not options.quiet,
    )


def _say(
    job: Job,
    summary: ValueSummary,
    certificate: Certificate | None,
    notes: Sequence[str],
) -> None:
    """Say what was made, and refuse values that the oracle does not agree with."""
    folder = job.options.folder
    if certificate is not None:
        print(certificate)
    for note in () if job.options.quiet else notes:
        print(f"note: {note}", file=sys.stderr)
    report = f"; report: {folder / 'report.html'}" if job.options.report else ""
    ways = "; ".join(derivative_text(way, error) for way, error in summary.derivatives.items())
    print(
        f"{summary.response_tokens} response tokens valued{f' ({ways})' if ways else ''}, "
        f"{summary.kept_tokens} kept; "
        f"values: {folder / 'values'}{report}"
    )
    if certificate is not None and not certificate.passed:
        raise ModelError(
            "the values do not agree with the oracle",
            got="; ".join(str(check) for check in certificate.failures),
            why="what is wrong for the verified tokens is wrong for others too",
            remedy="do not use these values; report the certificate above, which is in "
            f"{folder / 'summary.json'} as well",
        )
