"""From value files to everything else that a run leaves: selection, data set, summary, page."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken import Scorer
from alphatoken.certificate.certify import Certificate
from alphatoken.cli.folder import file_digest
from alphatoken.cli.notes import about_encoding, balance_by_layer, write_notes
from alphatoken.cli.reading import on_device
from alphatoken.cli.score import ScoreOptions
from alphatoken.cli.score_blocks import example_digest, read_facts
from alphatoken.cli.score_job import Job
from alphatoken.data import EncodeReport, Example, Row, collate, encode_rows, token_texts
from alphatoken.errors import DataError, ModelError
from alphatoken.report import (
    ScoredExample,
    read_values,
    summarise,
    write_report,
    write_values,
)
from alphatoken.report.dataset import DatasetCounts, write_dataset
from alphatoken.report.files import read_totals, value_files
from alphatoken.select.threshold import top_threshold
from alphatoken.support.storage import replacing, write_json

__all__ = ["write_results"]


@dataclass(frozen=True)
class _Rows:
    """What became of all rows."""

    counts: dict[str, int]
    encoded: EncodeReport


def write_results(job: Job, scorer: Scorer, warned: Sequence[str], start: float) -> None:
    """Write selection, data set, summary and page, all from the value files.

    Args:
        job: prepared; each of its blocks has a value file.
        scorer: of the job; for the certificate and the sizes of the two directions.
        warned: warnings that were collected.
        start: of the run, by the monotonic clock.

    Raises:
        DataError: value files are missing, or do not hold the rows of the job.
        ModelError: the certificate did not pass.
    """
    options, folder = job.options, job.folder
    rows = _what_became(job)
    certificate = _certificate(scorer, job)
    balance = balance_by_layer(scorer)
    if options.scope == "dataset":
        _keep_over_all(folder, options.ratio)
    dataset = _dataset(folder, options)
    summary = summarise(
        _checked(job),
        stability_weight=job.config.stability_weight,
        sample=options.report_rows,
        seed=options.seed,
        texts=partial(_texts, job.tokenizer),
    )
    encoded = {"train": rows.encoded, "validation": job.encoded}
    notes = write_notes(rows.counts, encoded, job.fisher, job.config, summary, warned)
    document = {
        "settings": job.settings,
        "pools": rows.counts,
        "encoded": {name: report.as_dict() for name, report in encoded.items()},
        "values": summary.as_dict(),
        "balance": balance,
        "certificate": None if certificate is None else str(certificate),
        "dataset": None if dataset is None else vars(dataset),
        "notes": notes,
        "seconds": round(time.monotonic() - start, 3),
    }
    write_json(folder / "summary.json", document, default=str)
    if options.report:
        certified = {} if certificate is None else {"certificate": str(certificate)}
        write_report(
            folder / "report.html",
            summary,
            title=f"Token values of {Path(options.train_file).name}",
            settings=job.settings | certified,
            notes=[note for note in notes if note not in warned],
            warnings=warned,
            balance=balance,
        )
    if certificate is not None:
        print(certificate)
    # Rows that are left out were counted aloud before the work.
    told = about_encoding("train", replace(rows.encoded, truncated_rows=0))
    new = [note for note in notes if note not in told]
    _say(options, folder, summary.response_tokens, summary.kept_tokens, new)
    if certificate is not None and not certificate.passed:
        raise ModelError(
            "the values do not agree with the oracle",
            got="; ".join(str(check) for check in certificate.failures),
            why="what is wrong for the verified tokens is wrong for others too",
            remedy="do not use these values; report the certificate above, which is in "
            f"{folder / 'summary.json'} as well",
        )


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    return [piece.text for piece in token_texts(tokenizer, ids)]


def _what_became(job: Job) -> _Rows:
    """The notes of all blocks together; bad rows go to a file of their own."""
    encoded, bad, missing = EncodeReport(format=job.encoded.format), 0, job.missing()
    if missing:
        raise DataError(
            "value files are missing",
            got=f"{len(missing)} in {job.folder / 'values'}, the first {job.part(missing[0]).name}",
            remedy="--resume values their rows",
        )
    path = job.folder / "bad_rows.jsonl"
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for number in job.blocks:
            facts = read_facts(job, number)
            encoded.add(facts.encoded)
            for row in facts.bad:
                file.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
            bad += len(facts.bad)
    if not bad:
        path.unlink()
    if not encoded.examples:
        raise DataError(
            "no training row is left",
            got=f"{encoded.rows} rows, {encoded.skipped_long} too long, "
            f"{encoded.skipped_empty} without response within the length, {bad} bad",
            remedy="look at --response_column, --max_length, --on_long and --on_empty, or give "
            "other rows",
        )
    late = bad - job.counts["bad_rows"]  # those that the tokenizer or its template refused
    counts = {"bad_rows": bad, "train": job.counts["train"] - late}
    return _Rows(job.counts | counts, encoded)


def _checked(job: Job) -> Iterator[ScoredExample]:
    """Read everything back, and see that each file holds what was valued for it."""
    for number in job.blocks:
        digest, facts = hashlib.sha256(), read_facts(job, number)
        for example in read_values(job.part(number)):
            example_digest(digest, example)
            yield example
        if digest.hexdigest() != facts.values_sha256:
            raise DataError(
                "the value files do not hold the training rows",
                got=str(job.part(number)),
                why="it was exchanged or changed since it was written",
                remedy="remove it and go on with --resume",
            )


# --- selection ------------------------------------------------------------------------------------


def _keep_over_all(folder: Path, ratio: float) -> None:
    """Rank all tokens of all files together and write the files again, each whole or not."""
    keeper = top_threshold(lambda: read_totals(folder / "values"), ratio).keeper()

    def kept(path: Path) -> Iterator[ScoredExample]:
        for example in read_values(path):
            response = example.response
            mask = np.zeros(len(example.ids), dtype=bool)
            mask[response] = keeper(example.values["total"][response])
            yield replace(example, kept=mask)

    for path in value_files(folder / "values"):
        write_values(path, kept(path))


def _dataset(folder: Path, options: ScoreOptions) -> DatasetCounts | None:
    """The rows with their weights, for other trainers, where that is asked for."""
    if options.write_dataset is None:
        return None
    counts = write_dataset(
        folder / "values", Path(options.write_dataset), run=file_digest(folder / "run.json")
    )
    if not options.quiet:
        print(
            f"{counts.rows} rows with {counts.trained_tokens} of {counts.response_tokens} response "
            f"tokens; {counts.rows_without_weight} rows without weight left out: "
            f"{options.write_dataset}",
            file=sys.stderr,
        )
    return counts


# --- certificate and last words -------------------------------------------------------------------


def _certificate(scorer: Scorer, job: Job) -> Certificate | None:
    options = job.options
    if options.verify is None:
        return None
    return scorer.verify(
        on_device(collate(_first(job, min(options.batch_size, 2))), job.model),
        tokens=options.verify,
        seed=options.seed,
        fisher_file=options.fisher_file,
        progress=not options.quiet,
    )


def _first(job: Job, count: int) -> list[Example]:
    """The first rows that have values."""
    found: list[Example] = []
    for row in job.corpus.rows():
        if isinstance(row, Row):
            try:
                found += encode_rows([row], job.tokenizer, job.how)[0]
            except DataError as error:
                job.corpus.bad(row.index, row.place, error)
        if len(found) == count:
            break
    return found


def _say(options: ScoreOptions, folder: Path, tokens: int, kept: int, notes: Sequence[str]) -> None:
    for note in () if options.quiet else notes:
        print(f"note: {note}", file=sys.stderr)
    report = "" if not options.report else f"; report: {folder / 'report.html'}"
    print(f"{tokens} response tokens valued, {kept} kept; values: {folder / 'values'}{report}")
