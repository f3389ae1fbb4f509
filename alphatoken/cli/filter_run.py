"""``alphatoken filter``: value rows one batch at a time, judge them, write them out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from alphatoken import Scorer
from alphatoken.cli.filter import FilterOptions
from alphatoken.corpus.folder import check_output_file, examples_digest, same_settings
from alphatoken.corpus.job import on_device, prepare_rows
from alphatoken.corpus.options import ScoreOptions
from alphatoken.corpus.rows import OUTCOMES, Corpus, encode_some
from alphatoken.data import Example, collate
from alphatoken.data.source import RowSource
from alphatoken.errors import ConfigError, DataError
from alphatoken.select.confidence import select_harmless
from alphatoken.select.masks import keep_count, response_values
from alphatoken.support.progress import Tracker
from alphatoken.support.storage import file_digest, replacing, weights_digest, write_jsonl
from alphatoken.values import standard_error

__all__ = ["run"]

FIELDS = ("value", "value_error", "verdict")
_OTHERS = {
    "drawn_validation": "held out",
    "removed_same_as_validation": "leak",
    "removed_same_as_fisher": "leak",
    "bad_rows": "cannot be read",
    "without_response": "empty",
}
"""Verdicts on rows that are not valued, by what becomes of them."""


@dataclass(frozen=True)
class _Judged:
    """One valued row: its index in the file, what it is worth, and how many tokens it has."""

    row: int
    value: float
    error: float
    tokens: int


def run(options: FilterOptions) -> None:
    """Judge ``options.train_file`` and write ``options.output_file``.

    Raises:
        AlphaTokenError: wrong input, with what and where. KeyboardInterrupt: says how to go on.
    """
    out = Path(options.output_file)
    _check(options, out)
    known = {one.name for one in fields(ScoreOptions)}
    said: dict[str, Any] = {name: value for name, value in vars(options).items() if name in known}
    of_score = ScoreOptions(**said | {"output_dir": str(out.parent), "ratio": 1.0})
    corpus, rows, fisher = prepare_rows(of_score)
    config = replace(options.config, standard_errors=True)
    _check_records(corpus.source)
    survey = corpus.survey()
    validation, _ = encode_some(rows, corpus.tokenizer, corpus.how, "validation")
    parts = min(options.validation_batches, len(validation))
    if parts < 2:
        raise DataError(
            "errors of values need at least two validation rows",
            got=f"{len(validation)} with a response",
            remedy="more rows in --validation_file, or a larger --validation_rows",
        )
    model = options.model()
    held = [on_device(collate(validation[k::parts]), model) for k in range(parts)]
    scorer = Scorer(model, validation=held, retention=fisher, config=config)
    scorer.pin("job")  # nothing is trained, so the weights need not be read to see it
    settings = {
        "config": repr(config),
        "model": weights_digest(model),
        "train": corpus.source.sha256,
        "rows_read": repr((corpus.fields, corpus.how, corpus.leak_key)),
        "validation": examples_digest(validation),
        "fisher": "none" if options.fisher_file is None else file_digest(options.fisher_file),
        "parts": parts,
        "batch_size": options.batch_size,
    }
    journal = _journal(out)
    earlier = _earlier(journal, settings, options)
    found = _valued(scorer, corpus, journal, earlier, options, survey.counts["train"])
    _write(out, corpus.source, survey.outcomes, found, _kept(found, parts, options))
    journal.unlink()


# --- before the work ------------------------------------------------------------------------------


def _check(options: FilterOptions, out: Path) -> None:
    """Check all that can be checked before a model is loaded."""
    if options.ratio is not None:
        keep_count(options.ratio, 1, name="--keep_ratio")
    if options.estimator == "walk":
        raise ConfigError(
            "filter does not value rows along a walk",
            got="--estimator walk",
            why="a verdict needs the errors of values, and those of a walk are not known",
            remedy="leave --estimator out, or --estimator label; alphatoken score takes the walk",
        )
    if not 0.5 <= options.confidence < 1:
        raise ConfigError("--confidence must lie in [0.5, 1)", got=repr(options.confidence))
    if out.suffix.lower() in (".parquet", ".pq", ".arrow", ".csv"):
        raise ConfigError(
            "filter can only write JSONL",
            got=f"--output_file {out}",
            why="by its name the file would be read as something else",
            remedy=f"--output_file {out.with_suffix('.jsonl')}",
        )
    inputs = (options.train_file, options.validation_file, options.fisher_file)
    goes_on = options.resume and _journal(out).exists()
    check_output_file(out, inputs, replace=options.overwrite_output or goes_on)


def _check_records(source: RowSource) -> None:
    """Check that every record can be written again, with our fields beside its own."""
    for one in source.read():
        record = {} if isinstance(one.record, DataError) else one.record
        taken = [name for name in FIELDS if name in record]
        if taken:
            raise DataError(
                "a row has a field of ours already",
                got=f"{one.place}: {', '.join(taken)}",
                why="it would be overwritten",
                remedy="rename it",
            )
        try:
            json.dumps(record)
        except TypeError as error:
            raise DataError(
                "a row cannot be written as JSON",
                got=f"{one.place}: {error}",
                remedy="turn dates, decimals and bytes into text first",
            ) from None


def _journal(out: Path) -> Path:
    """File that keeps rows until all are valued."""
    return out.with_name(f".{out.name}.partial")


# --- the work -------------------------------------------------------------------------------------


def _earlier(path: Path, settings: dict[str, Any], options: FilterOptions) -> list[_Judged]:
    """Rows that an interrupted run has valued; from now on ``path`` holds them and the settings."""
    found = list[_Judged]()
    if path.exists() and not options.overwrite_output:
        if not options.resume:
            raise ConfigError(
                "an earlier run was interrupted here",
                got=str(path),
                remedy="--resume to go on with it, or --overwrite_output to begin anew",
            )
        head, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        same_settings(json.loads(head), settings)
        # The last line of a process that was killed may be half a line.
        found = [_Judged(**json.loads(line)) for line in lines if line.endswith("\n")]
    write_jsonl(path, [settings, *map(vars, found)])
    return found


def _valued(
    scorer: Scorer, corpus: Corpus, journal: Path, found: list[_Judged], options: FilterOptions,
    count: int,
) -> list[_Judged]:  # fmt: skip
    """All ``count`` rows that can be valued, after those that were ``found`` in the journal."""
    tracker = Tracker("Valuing rows", count, not options.quiet)
    tracker.resume(len(found))
    start = found[-1].row + 1 if found else 0
    left = (row.example for row in corpus.rows(start) if row.example is not None)
    try:
        while some := list(islice(left, options.batch_size)):
            valued = list(_of_batch(scorer, some))
            with journal.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(vars(one)) + "\n" for one in valued)
            found += valued
            tracker.report(len(found))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{len(found)} of {count} rows are valued and kept; the same command "
            "with --resume goes on after them"
        ) from None
    return found


def _of_batch(scorer: Scorer, examples: Sequence[Example]) -> Iterator[_Judged]:
    """Mean value of each response, and its standard error."""
    values = scorer.score(on_device(collate(examples), scorer.adapter.model))
    assert values.parts is not None
    assert values.part_shares is not None
    mask = values.mask
    totals = response_values(values.total, mask)
    parts = torch.stack([response_values(p, mask) for p in values.parts.unbind(-1)], -1)
    errors = standard_error(parts, values.part_shares)
    for index, example in enumerate(examples):
        first = int(mask[index].nonzero()[0])  # a response has one value, at all of its tokens
        value, error = float(totals[index, first]), float(errors[index, first])
        yield _Judged(example.row.index, value, error, int(mask[index].sum()))


# --- verdicts -------------------------------------------------------------------------------------


def _kept(found: Sequence[_Judged], parts: int, options: FilterOptions) -> set[int]:
    """Rows that are kept, by their numbers."""
    if options.ratio is not None:
        return _best(found, options.ratio)
    values, errors = (
        torch.tensor([[getattr(one, name) for one in found]], dtype=torch.float64)
        for name in ("value", "error")
    )
    harmless = select_harmless(
        values,
        errors,
        torch.ones_like(values, dtype=torch.bool),
        parts=parts,
        confidence=options.confidence,
    )
    return {one.row for one, keep in zip(found, harmless[0].tolist(), strict=True) if keep}


def _best(found: Sequence[_Judged], ratio: float) -> set[int]:
    """Best rows by value, of equals the first, as long as they fit the budget; at least one."""
    budget = keep_count(ratio, sum(one.tokens for one in found))
    kept: set[int] = set()
    for one in sorted(found, key=lambda one: (-one.value, one.row)):
        if one.tokens > budget and kept:
            break
        budget -= one.tokens
        kept.add(one.row)
    return kept


def _write(
    out: Path,
    rows: RowSource,
    outcomes: bytearray,
    found: Sequence[_Judged],
    kept: set[int],
) -> None:
    """Write every row with its verdict, and say in one line what became of all of them."""
    judged, others, broken = {one.row: one for one in found}, Counter[str](), 0
    with replacing(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for source, outcome in zip(rows.read(), outcomes, strict=True):
            if isinstance(source.record, DataError):  # not a record, so that none can be written
                broken += 1
                continue
            one = judged.get(source.index)
            verdict = "keep" if source.index in kept else "drop"
            if one is None:
                verdict = _OTHERS[OUTCOMES[outcome]]
                others[verdict] += 1
            value, error = (None, None) if one is None else (one.value, one.error)
            more = dict(zip(FIELDS, (value, error, verdict), strict=True))
            file.write(_line({**source.record, **more}))
    total = len(judged) + others.total() + broken
    said = [f"{total} rows: {len(judged)} valued, {len(kept)} to keep"]
    if others:
        kinds = ", ".join(f"{count} {kind}" for kind, count in others.items())
        said.append(f"{kinds}: not valued")
    if broken:
        said.append(f"{broken} without a record: not written")
    print(f"{'; '.join(said)}: {out}")


def _line(record: Mapping[str, Any]) -> str:
    """One line of JSON; half a character stays the escape that it was."""
    text = json.dumps(record, ensure_ascii=False)
    whole = not any("\ud800" <= character <= "\udfff" for character in text)
    return (text if whole else json.dumps(record)) + "\n"
