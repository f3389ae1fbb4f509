"""Results made from value files: selection, rows to train on, notes, summary, page.

A row has the mean and the sum of the values of its response tokens, which stand in the value files
as ``value_mean`` and ``value_sum``.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from alphatoken import FisherDrift, Scorer
from alphatoken.config import walk_words
from alphatoken.data import EncodeReport, Row, collate, token_texts
from alphatoken.data.encode import about_encoding
from alphatoken.data.source import RowSource
from alphatoken.data.split import about_pools
from alphatoken.data.texts import TOKENS_DIGEST, tokens_digest
from alphatoken.errors import DataError, ModelError, counted, short
from alphatoken.model.batch import IGNORE
from alphatoken.score.job import CorpusSurvey, Job, on_device
from alphatoken.score.meaning import meaning_of
from alphatoken.score.page import number as written
from alphatoken.score.queries import QueryRank, rank_rows, write_query_report
from alphatoken.score.summary import (
    HIGHEST,
    HIGHEST_LOSS,
    LOWEST,
    ValueSummary,
    end_places,
    mean_of,
    summarise,
)
from alphatoken.score.value_page import write_report
from alphatoken.score.values import (
    ScoredExample,
    read_row_values,
    read_values,
    value_files,
    write_values,
)
from alphatoken.select.masks import keep_count, top_mask
from alphatoken.support.storage import open_line, replacing, write_json, write_jsonl
from alphatoken.values import Certificate, derivative_notes, derivative_text

Unit = Literal["tokens", "mean", "sum"]
"""What ``--rows`` keeps: tokens within their rows, or whole rows by the mean or sum of values."""

# Rows at each end that are printed and stand in the summary.
_ENDS = 3

FEWEST_OF_VERDICT = 8
"""Trusted rows, and rows to judge, that ``alphatoken diagnose data`` needs."""

_SIDES = {"worst": LOWEST, "highest_loss": HIGHEST_LOSS, "best": HIGHEST}
"""What the summary file calls each end, in the order in which they are printed."""


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
        _keep_over_all(folder, options.ratio)
    written = _write_rows(job)
    ranks = [QueryRank() for _ in options.query]
    texts = partial(token_texts, job.corpus.tokenizer)
    summary = summarise(rank_rows(_checked_examples(job), ranks), seed=options.seed, texts=texts)
    rows = _row_ends(folder / "values", options.rows or "mean", summary)
    notes = _notes_of(job, survey, summary, warned)
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
        _write_page(job, summary, ranks, certificate, notes, warned)
    # Rows that are left out were counted aloud before the work.
    told = about_encoding("train", replace(survey.encoded, truncated_rows=0))
    if not options.quiet:
        _say_ends(job, rows)
    _say(job, summary, certificate, [note for note in notes if note not in told])


def _write_page(
    job: Job,
    summary: ValueSummary,
    ranks: Sequence[QueryRank],
    certificate: Certificate | None,
    notes: Sequence[str],
    warned: Sequence[str],
) -> None:
    certified = {} if certificate is None else {"certificate": str(certificate)}
    survey = job.survey or CorpusSurvey()
    encoded, removed = survey.encoded, about_pools(survey.counts, places=survey.removed)
    lost = [*_lost("train", encoded, job), *_lost("validation", job.encoded, job), *removed]
    said_again = {*about_encoding("train", encoded), *about_encoding("validation", job.encoded)}
    queries = len(ranks)
    trusted = f"the {written(len(job.validation))} trusted rows" if job.validation else ""
    if queries:
        trusted = "the query" if queries == 1 else f"the {queries} queries"
    more: dict[str, Any] = {
        "meaning": meaning_of(job.settings, trusted),
        "about": _about(job, summary),
        "settings": job.settings | certified,
        "notes": [note for note in notes if note not in {*warned, *said_again, *removed}],
        "warnings": [*lost, *warned],
    }
    page, name = job.options.folder / "report.html", Path(job.options.train_file).name
    if not ranks:
        selects = job.options.keep_ratio is not None or job.options.rows is not None
        title = f"Token values of {name}"
        path = job.trusted_file
        trusted_rows = read_values(path) if path.exists() else ()
        means = [mean_of(one, "total") for one in trusted_rows]
        write_report(page, summary, title=title, trusted=means, selection=selects, **more)
        return
    write_query_report(
        page,
        job.validation,
        ranks,
        rows=summary.sequences,
        title=f"Rows of {name} for and against "
        + ("a query" if queries == 1 else f"{queries} queries"),
        texts=partial(token_texts, job.corpus.tokenizer),
        **more,
    )


def _lost(name: str, report: EncodeReport, job: Job) -> list[str]:
    """Sentences on rows that were cut or left out, as a page says it."""
    cut = []
    if report.truncated_rows:
        cut.append(
            f"{written(report.truncated_rows)} of {written(report.rows)} "
            f"{'rows' if name == 'train' else 'validation rows'} "
            f"{'was' if report.truncated_rows == 1 else 'were'} longer "
            f"than {written(job.corpus.how.max_length)} tokens: {written(report.truncated_tokens)} "
            f"token{'s'[: report.truncated_tokens != 1]} cut."
        )
    return cut + about_encoding(name, replace(report, truncated_rows=0))


def _about(job: Job, summary: ValueSummary) -> dict[str, object]:
    """The run as a person would write it."""
    options, settings = job.options, job.settings
    model = Path(options.model_name_or_path).name or options.model_name_or_path
    adapter = f" with the adapter {Path(options.adapter).name}" if options.adapter else ""
    rows, tokens = written(summary.sequences), written(summary.response_tokens)
    about: dict[str, object] = {
        "Model": f"{model}{adapter}, {settings['dtype']}",
        "Rows": f"{Path(options.train_file).name}: {rows} rows, {tokens} response tokens",
    }
    if job.validation and not options.query:
        file = "drawn from the rows"
        if options.validation_file:
            file = Path(options.validation_file).name
        about["Trusted rows"] = (
            f"{file}: {written(len(job.validation))} rows, "
            f"{written(job.encoded.response_tokens)} response tokens"
        )
    about["Estimator"] = settings["estimator"]
    return about


def _checked_examples(job: Job) -> Iterator[ScoredExample]:
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
    # The totals of all response tokens are in memory: 8 bytes a token, and as much again to rank.
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


# --- rows by their values -------------------------------------------------------------------------


def _row_ends(values: Path, unit: Unit, summary: ValueSummary) -> dict[str, list[dict[str, float]]]:
    """The odd rows: "worst" are of lowest value, "best" of highest; "highest_loss" where known."""
    columns = read_row_values(values) | {"loss_mean": np.asarray(summary.row_losses)}
    losses = columns["loss_mean"]
    if np.isnan(losses).any():
        del columns["loss_mean"]
    count = min(_ENDS, max(1, len(losses) // 2))
    places = end_places(columns[_column(unit)], losses, count)
    return {
        side: [{name: column[at].item() for name, column in columns.items()} for at in places[end]]
        for side, end in _SIDES.items()
        if end in places
    }


def best_rows(
    values: NDArray[np.float64], tokens: NDArray[np.int64], ratio: float
) -> NDArray[np.bool_]:
    """(n,) True for the best rows, as long as they fit the budget of tokens; at least for one.

    The budget is ``keep_count(ratio, tokens.sum())``. Rows are taken by falling value, of equal
    values the first, up to the first one that no longer fits.

    Args:
        values: (n,) of the rows.
        tokens: (n,) numbers of their response tokens.
        ratio: share of all response tokens, in (0, 1].

    Raises:
        InputError: ratio outside (0, 1].

    Oracle: the rule by a loop, in the tests.
    """
    order = _ranked(values)
    budget = keep_count(ratio, int(tokens.sum()))
    count = int(np.searchsorted(np.cumsum(tokens[order]), budget, side="right"))
    kept = np.zeros(len(values), bool)
    kept[order[: max(1, count)]] = True
    return kept


def _write_rows(job: Job) -> dict[str, int] | None:
    """Write the rows that are kept as JSONL; the counts of rows and tokens, None without --rows.

    By "tokens" a row has ``input_ids``, ``attention_mask``, ``labels``, ``loss_weights``, ``row``
    and ``tokens_digest``: labels are -100 and weights 0 at prompts and at dropped response tokens,
    and rows without a kept token are left out. By "mean" or "sum" each row of :func:`best_rows` is
    written as it stands in the source.
    """
    options, unit = job.options, job.options.rows
    if unit is None:
        return None
    values, path = options.folder / "values", options.folder / "rows.jsonl"
    columns = read_row_values(values)
    if unit == "tokens":
        records = _weighted(values, job.corpus.tokenizer)
    else:
        kept = best_rows(columns[_column(unit)], columns["response_tokens"], options.ratio)
        records = _whole(job.corpus.source, columns, kept)
    rows = kept_tokens = 0
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for record, tokens in records:
            file.write(_line(record))
            rows += 1
            kept_tokens += tokens
    counts = {
        "rows": rows,
        "rows_left_out": len(columns["row"]) - rows,
        "response_tokens": int(columns["response_tokens"].sum()),
        "kept_tokens": kept_tokens,
    }
    if not options.quiet:
        print(
            f"{counted(rows, 'rows')} with {kept_tokens} of {counts['response_tokens']} response "
            f"tokens; {counted(counts['rows_left_out'], 'rows')} left out: {path}",
            file=sys.stderr,
        )
    return counts


def _column(unit: Unit) -> str:
    return "value_sum" if unit == "sum" else "value_mean"


def _ranked(values: NDArray[np.float64]) -> NDArray[np.int64]:
    # Stable, so that of equal values the first comes first: rows stand in the source's order.
    return np.argsort(-values, kind="stable")


def _weighted(values: Path, tokenizer: Any) -> Iterator[tuple[Mapping[str, Any], int]]:
    for example in read_values(values):
        weights = np.where(example.response, example.kept, 0).astype(float)
        if weights.any():
            record = {
                "input_ids": list(example.ids),
                "attention_mask": [1] * len(example.ids),
                "labels": np.where(weights != 0, example.labels, IGNORE).tolist(),
                "loss_weights": weights.tolist(),
                "row": example.row,
                TOKENS_DIGEST: tokens_digest(example.ids, tokenizer),
            }
            yield record, int(weights.sum())


def _whole(
    source: RowSource, columns: Mapping[str, NDArray[Any]], kept: NDArray[np.bool_]
) -> Iterator[tuple[Mapping[str, Any], int]]:
    tokens = np.zeros(source.rows, np.int64)
    tokens[columns["row"][kept]] = columns["response_tokens"][kept]
    for row in source.read():
        if tokens[row.index]:
            assert not isinstance(row.record, DataError)  # it was valued
            yield row.record, int(tokens[row.index])


def _line(record: Mapping[str, Any]) -> str:
    # Readable in any script; half a character, which UTF-8 has no bytes for, stays an escape.
    text = json.dumps(record, ensure_ascii=False)
    whole = not any("\ud800" <= character <= "\udfff" for character in text)
    return (text if whole else json.dumps(record)) + "\n"


# --- notes ----------------------------------------------------------------------------------------

_APPROXIMATE = (
    "The estimator is the paper's: the direct part is exact, the causal part (Value-Propagation) "
    "is approximate. --value exact gives the exact value that a loss mask acts on, and `alphatoken "
    "diagnose estimators` says how far the two are apart on this model."
)


def _notes_of(
    job: Job, survey: CorpusSurvey, summary: ValueSummary, warned: Sequence[str]
) -> list[str]:
    """Sentences for the report, the summary and the console; what is trivially so is left out."""
    estimator, queries = job.options.estimator, len(job.options.query)
    notes = [_APPROXIMATE] if estimator == "alphatoken" else []
    notes += derivative_notes(summary.derivatives)
    if estimator != "walk" and (job.fisher is not None or not queries):
        notes += _about_stability(job.fisher, summary)
    validation, counts = job.encoded, survey.counts
    if queries > 1:
        notes.append(
            f"Value and adaptation are against all {queries} queries together, each counted by its "
            "tokens."
        )
    elif validation.examples and not queries:
        what = "Values are" if job.fisher is None else "Adaptation is"
        notes.append(
            f"{what} measured against {counted(validation.response_tokens, 'response tokens')} of "
            f"{counted(validation.examples, 'validation rows')}."
        )
    notes += about_pools(counts, places=survey.removed)
    if counts.get("bad_rows"):
        bad = counted(counts["bad_rows"], "rows")
        notes.append(f"{bad} cannot be read; bad_rows.jsonl names them.")
    notes += about_encoding("train", survey.encoded) + about_encoding("validation", validation)
    return [*notes, *warned]


def _about_stability(fisher: FisherDrift | None, summary: ValueSummary) -> list[str]:
    if fisher is None:
        return ["No Fisher was given: stability is zero and the total is adaptation alone."]
    notes = []
    stability = summary.components.get("stability", {})
    if (stability.get("minimum"), stability.get("maximum")) == (0.0, 0.0):
        notes.append(
            "The retention term is exactly zero: the model's weights are the Fisher's reference, "
            "as at the first step of training. Stability begins to count once they have moved."
        )
    if "row_keys" not in fisher.metadata:
        notes.append(
            "The Fisher does not say which prompts it was fitted on, so training rows could not be "
            "checked against them."
        )
    return notes


# --- certificate and last words -------------------------------------------------------------------


def _certificate(scorer: Scorer, job: Job) -> Certificate | None:
    options = job.options
    if options.verify is None:
        return None
    rows = range(job.corpus.source.rows)
    few = islice(job.examples(rows), min(options.per_device_train_batch_size, 2))
    return scorer.verify(
        on_device(collate(list(few)), job.model),
        tokens=options.verify,
        seed=options.seed,
        fisher_file=options.fisher_file,
        progress=not options.quiet,
    )


def _say_ends(job: Job, rows: Mapping[str, Sequence[Mapping[str, float]]]) -> None:
    by = "sum of values" if job.options.rows == "sum" else "mean value"
    for side, ends in rows.items():
        print(f"{_SIDES[side].replace('mean value', by)}:")
        for one in ends:
            row = job.corpus.row(int(one["row"]))
            assert isinstance(row, Row)  # it was valued
            loss = f", mean loss {one['loss_mean']:.4g}" if "loss_mean" in one else ""
            print(
                f"  mean value {one['value_mean']:+.4g}, sum {one['value_sum']:+.4g} of "
                f"{counted(int(one['response_tokens']), 'tokens')}{loss}  "
                f"{short(row.response, 60)!r}  ({row.place})"
            )


def _say_next(job: Job) -> None:
    """The line that opens the page, and the command that one types next."""
    options, words = job.options, job.options.words
    if options.report:
        print(open_line(options.folder / "report.html"))
    if not words or options.query or options.reference:
        return
    words += "" if options.validation_file else " --validation_file TRUSTED"
    words += walk_words(options)
    few = min(len(job.validation), job.corpus.source.rows) < FEWEST_OF_VERDICT
    more = f", with {FEWEST_OF_VERDICT} rows or more in each file" * few
    folder = shlex.quote(options.output_dir)
    print(f"next{more}: alphatoken diagnose data {words} --output_dir {folder}")


def _say(
    job: Job,
    summary: ValueSummary,
    certificate: Certificate | None,
    notes: Sequence[str],
) -> None:
    folder = job.options.folder
    if certificate is not None:
        print(certificate)
    for note in () if job.options.quiet else notes:
        print(f"note: {note}", file=sys.stderr)
    report = f"; report: {folder / 'report.html'}" if job.options.report else ""
    ways = "; ".join(derivative_text(way, error) for way, error in summary.derivatives.items())
    kept = "" if job.options.keep_ratio is None else f", {summary.kept_tokens} kept"
    tokens = counted(summary.response_tokens, "response tokens")
    print(
        f"{tokens} valued{f' ({ways})' if ways else ''}{kept}; values: {folder / 'values'}{report}"
    )
    if not job.options.quiet:
        _say_next(job)
    if certificate is not None and not certificate.passed:
        raise ModelError(
            "the values do not agree with the oracle",
            got="; ".join(str(check) for check in certificate.failures),
            why="what is wrong for the verified tokens is wrong for others too",
            remedy="do not use these values; report the certificate above, which is in "
            f"{folder / 'summary.json'} as well",
        )
