"""Results made from value files: selection, rows to train on, summary, page."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken import Scorer
from alphatoken.data import Row, collate, token_texts
from alphatoken.data.survey import short
from alphatoken.errors import DataError, ModelError
from alphatoken.score.job import Job, on_device
from alphatoken.score.kept_rows import row_ends, write_rows
from alphatoken.score.notes import about_encoding, write_notes
from alphatoken.score.queries import QueryRank, rank_rows, write_query_report
from alphatoken.score.statistics import ValueSummary, summarise
from alphatoken.score.value_page import write_report
from alphatoken.score.values import ScoredExample, read_values, value_files, write_values
from alphatoken.select.masks import top_mask
from alphatoken.support.storage import write_json, write_jsonl
from alphatoken.values import Certificate, derivative_text

__all__ = ["write_results"]


def write_results(job: Job, scorer: Scorer, warned: Sequence[str], start: float) -> None:
    """Write selection, rows, summary and page, all from the value files.

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
    if options.keep_scope == "dataset":
        _keep_over_all(folder, options.keep_ratio)
    rows = row_ends(folder / "values", options.rows or "mean")
    written = _written_rows(job)
    ranks = [QueryRank() for _ in options.query]
    texts = partial(token_texts, job.corpus.tokenizer)
    summary = summarise(rank_rows(_checked_examples(job), ranks), seed=options.seed, texts=texts)
    notes = write_notes(job, survey, summary, warned)
    document = {
        "settings": job.settings,
        "pools": survey.counts,
        "encoded": {"train": asdict(survey.encoded), "validation": asdict(job.encoded)},
        "values": summary.as_dict(),
        "queries": [rank.as_dict() for rank in ranks],
        "certificate": None if certificate is None else str(certificate),
        "rows": {**rows, "written": written},
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
        if options.query:
            count = len(job.validation)
            queries = "a query" if count == 1 else f"{count} queries"
            write_query_report(
                page,
                job.validation,
                ranks,
                rows=summary.sequences,
                title=f"Rows of {name} for and against {queries}",
                texts=texts,
                **more,
            )
        else:
            write_report(page, summary, title=f"Token values of {name}", **more)
    # Rows that are left out were counted aloud before the work.
    told = about_encoding("train", replace(survey.encoded, truncated_rows=0))
    if not options.quiet:
        _say_ends(job, rows)
    _say(job, summary, certificate, [note for note in notes if note not in told])


def _checked_examples(job: Job) -> Iterator[ScoredExample]:
    """Read everything back, and see that each file holds rows of its own stretch of the data."""
    for number in job.blocks:
        for example in read_values(job.value_file(number)):
            if example.row not in job.block_rows(number):
                raise DataError(
                    "the value files do not hold the training rows",
                    got=str(job.value_file(number)),
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


def _written_rows(job: Job) -> dict[str, int] | None:
    """Counts of the rows that were written to train on; None without ``--rows``."""
    options = job.options
    if options.rows is None:
        return None
    path = options.folder / "rows.jsonl"
    counts = write_rows(
        options.rows, options.folder / "values", job.corpus.source, options.keep_ratio, path
    )
    if not options.quiet:
        print(
            f"{counts['rows']} rows with {counts['kept_tokens']} of {counts['response_tokens']} "
            f"response tokens; {counts['rows_left_out']} rows left out: {path}",
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
    few = islice(valued, min(options.per_device_train_batch_size, 2))
    return scorer.verify(
        on_device(collate(list(few)), job.model),
        tokens=options.verify,
        seed=options.seed,
        fisher_file=options.fisher_file,
        progress=not options.quiet,
    )


def _say_ends(job: Job, rows: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    """Print the rows of highest and lowest value, each in one line."""
    unit = "sum" if job.options.rows == "sum" else "mean"
    for side, ends in rows.items():
        print(f"{side} rows by the {unit} of their values:")
        for one in ends:
            row = job.corpus.row(int(one["row"]))
            assert isinstance(row, Row)  # it was valued
            print(
                f"  mean {one['value_mean']:+.4g}, sum {one['value_sum']:+.4g} of "
                f"{one['response_tokens']} tokens  {short(row.response, 60)!r}  ({row.place})"
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
