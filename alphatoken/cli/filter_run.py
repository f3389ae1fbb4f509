"""``alphatoken filter``: value rows one batch at a time, judge them, write them out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alphatoken import FisherDrift, Scorer
from alphatoken.cli.filter import FilterOptions
from alphatoken.cli.folder import (
    check_output_file,
    examples_digest,
    file_digest,
    same_settings,
)
from alphatoken.cli.reading import (
    encode_some,
    encoded_row,
    encoding,
    on_device,
    read_file,
    read_model,
    read_pools,
    read_tokenizer,
    scorer_config,
)
from alphatoken.data import EncodeOptions, Example, Pools, Row, batches
from alphatoken.data.source import find_source
from alphatoken.errors import ConfigError, DataError
from alphatoken.select.confidence import select_harmless
from alphatoken.select.masks import keep_count, response_values
from alphatoken.support.progress import Tracker
from alphatoken.support.storage import replacing, weights_digest
from alphatoken.values import standard_error

__all__ = ["run"]

FIELDS = ("value", "value_error", "verdict")
UNREADABLE = "cannot be read"
"""Verdict on a row that cannot be read, or written as tokens."""


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
    records, broken = _records(options)
    tokenizer, how = read_tokenizer(options), encoding(options)
    rows = read_file(options.train_file, options, limit=options.limit)
    fisher = None if options.fisher_file is None else FisherDrift.load(options.fisher_file)
    pools = read_pools(rows, fisher, options)
    examples, others = _encoded(pools.train, tokenizer, how)
    validation, _ = encode_some(pools.validation, tokenizer, how, "validation")
    parts = min(options.validation_batches, len(validation))
    if parts < 2:
        raise DataError(
            "errors of values need at least two validation rows",
            got=f"{len(validation)} with a response",
            remedy="more rows in --validation_file, or a larger --validation_rows",
        )
    config = scorer_config(options, standard_errors=True)
    model = read_model(options)
    held = [
        on_device(batch, model)
        for k in range(parts)
        for batch in batches(validation[k::parts], len(validation))
    ]
    scorer = Scorer(model, validation=held, retention=fisher, config=config)
    scorer.pin("job")  # nothing is trained, so the weights need not be read to see it
    settings = {
        "config": repr(config),
        "model": weights_digest(model),
        "train": examples_digest(examples),
        "validation": examples_digest(validation),
        "fisher": "none" if options.fisher_file is None else file_digest(options.fisher_file),
        "parts": parts,
        "batch_size": options.batch_size,
    }
    journal = Journal(
        _journal(out),
        settings,
        resume=options.resume,
        overwrite=options.overwrite_output,
    )
    found = _valued(scorer, examples, journal, options)
    verdicts = _verdicts(found, parts, options)
    # A record that gave no row cannot be read; what is said of rows takes its place.
    others = dict.fromkeys(records, UNREADABLE) | others | _left_out(rows, pools)
    others = {number: why for number, why in others.items() if number not in verdicts}
    _write(out, records, {one.row: one for one in found}, verdicts, others, options)
    journal.path.unlink()
    _say(out, verdicts, others, broken)


# --- before the work ------------------------------------------------------------------------------


def _check(options: FilterOptions, out: Path) -> None:
    """What can be said before a model is loaded."""
    if options.ratio is not None:
        keep_count(options.ratio, 1, name="--keep_ratio")
    if not 0.5 <= options.confidence < 1:
        raise ConfigError("--confidence must lie in [0.5, 1)", got=repr(options.confidence))
    if out.suffix.lower() in (".parquet", ".pq", ".arrow", ".csv"):
        raise ConfigError(
            "what filter writes is JSONL",
            got=f"--output_file {out}",
            why="by its name the file would be read as something else",
            remedy=f"--output_file {out.with_suffix('.jsonl')}",
        )
    inputs = (options.train_file, options.validation_file, options.fisher_file)
    goes_on = options.resume and _journal(out).exists()
    check_output_file(out, inputs, replace=options.overwrite_output or goes_on)


def _records(options: FilterOptions) -> tuple[dict[int, Mapping[str, Any]], int]:
    """The rows as they are in the file, by number; and how many lines are no records."""
    found: dict[int, Mapping[str, Any]] = {}
    broken = 0
    for one in find_source(options.train_file).limited(options.limit).read():
        place, record = one.place, one.record
        if isinstance(record, DataError):
            if options.on_bad_rows == "error":
                raise record
            broken += 1
            continue
        taken = [name for name in FIELDS if name in record]
        if taken and not options.kept_only:
            raise DataError(
                "a row has a field of ours already",
                got=f"{place}: {', '.join(taken)}",
                why="it would be overwritten",
                remedy="rename it, or --kept_only",
            )
        try:
            json.dumps(record)
        except TypeError as error:
            raise DataError(
                "a row cannot be written as JSON",
                got=f"{place}: {error}",
                remedy="turn dates, decimals and bytes into text first",
            ) from None
        found[one.index] = record
    return found, broken


def _encoded(
    rows: Sequence[Row], tokenizer: Any, how: EncodeOptions
) -> tuple[list[Example], dict[int, str]]:
    """Rows as tokens; and by row, why one is none.

    Raises:
        DataError: no row is left, or one that is to stop the run.
    """
    examples: list[Example] = []
    others: dict[int, str] = {}
    for row in rows:
        found, report = encoded_row(row, tokenizer, how)
        if isinstance(found, Example):
            examples.append(found)
        elif found is not None:
            others[row.index] = UNREADABLE
        else:
            long = report.skipped_long or row.response.strip()
            others[row.index] = "too long" if long else "empty"
    if not examples:
        encode_some(rows, tokenizer, how, "training")  # says why
    return examples, others


def _journal(out: Path) -> Path:
    """Where rows are kept until all are valued."""
    return out.with_name(f".{out.name}.partial")


# --- the work -------------------------------------------------------------------------------------


class Journal:
    """Lines of rows that are valued, beside the output, so that an interrupted run goes on.

    Args:
        path: of the file.
        settings: what values depend on.
        resume: keep what an earlier run left, if its settings were the same.
        overwrite: begin anew.

    Raises:
        ConfigError: an earlier run and no word on it, or one with other settings.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], *, resume: bool, overwrite: bool
    ) -> None:
        self.path, self.found = path, list[_Judged]()
        if path.exists() and not resume and not overwrite:
            raise ConfigError(
                "an earlier run was interrupted here",
                got=str(path),
                remedy="--resume to go on with it, or --overwrite_output to begin anew",
            )
        if path.exists() and resume:
            head, *lines = path.read_text(encoding="utf-8").splitlines(keepends=True) or [""]
            try:
                earlier = json.loads(head)
            except ValueError:
                earlier, lines = dict(settings), []  # killed before it had written a line
            same_settings(earlier, settings)
            # The last line of a process that was killed may be half a line.
            self.found = [_Judged(**json.loads(line)) for line in lines if line.endswith("\n")]
        with replacing(path) as temporary:
            self._write(temporary, "w", [settings, *(vars(one) for one in self.found)])

    def add(self, found: Sequence[_Judged]) -> None:
        """Rows that are valued now."""
        self.found += found
        self._write(self.path, "a", [vars(one) for one in found])

    @staticmethod
    def _write(path: Path, mode: str, lines: Sequence[Mapping[str, Any]]) -> None:
        with path.open(mode, encoding="utf-8") as file:
            file.writelines(json.dumps(dict(line)) + "\n" for line in lines)


def _valued(
    scorer: Scorer, examples: Sequence[Example], journal: Journal, options: FilterOptions
) -> list[_Judged]:
    """Every example, those that the journal holds first."""
    tracker = Tracker("Valuing rows", len(examples), not options.quiet)
    tracker.resume(len(journal.found))
    try:
        for start in range(len(journal.found), len(examples), options.batch_size):
            some = examples[start : start + options.batch_size]
            journal.add(list(_of_batch(scorer, some)))
            tracker.report(len(journal.found))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"{len(journal.found)} of {len(examples)} rows are valued and kept; the same command "
            "with --resume goes on after them"
        ) from None
    return journal.found


def _of_batch(scorer: Scorer, examples: Sequence[Example]) -> Iterator[_Judged]:
    """Mean value of each response, and its standard error."""
    (batch,) = batches(examples, len(examples))
    values = scorer.score(on_device(batch, scorer.adapter.model))
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


def _verdicts(found: Sequence[_Judged], parts: int, options: FilterOptions) -> dict[int, str]:
    """By row: keep or drop."""
    if options.ratio is not None:
        kept = _best(found, options.ratio)
    else:
        values, errors = (
            torch.tensor([[getattr(one, name) for one in found]], dtype=torch.float64)
            for name in ("value", "error")
        )
        everywhere = torch.ones_like(values, dtype=torch.bool)
        harmless = select_harmless(
            values, errors, everywhere, parts=parts, confidence=options.confidence
        )
        kept = {one.row for one, keep in zip(found, harmless[0].tolist(), strict=True) if keep}
    return {one.row: "keep" if one.row in kept else "drop" for one in found}


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


def _left_out(rows: Sequence[Row], pools: Pools) -> dict[int, str]:
    """By row: why it was no training row."""
    left = {row.index for row in pools.train}
    # Rows of a validation file have numbers of their own; drawn ones are the very rows.
    drawn = {id(row) for row in pools.validation}
    return {
        row.index: "held out" if id(row) in drawn else "leak"
        for row in rows
        if row.index not in left
    }


def _write(
    out: Path,
    records: Mapping[int, Mapping[str, Any]],
    found: Mapping[int, _Judged],
    verdicts: Mapping[int, str],
    others: Mapping[int, str],
    options: FilterOptions,
) -> None:
    with replacing(out) as temporary, temporary.open("w", encoding="utf-8") as file:
        for number, record in records.items():
            verdict = verdicts.get(number) or others[number]
            one = found.get(number)
            if options.kept_only and verdict != "keep":
                continue
            more: dict[str, Any] = {}
            if not options.kept_only:
                more = {
                    "value": None if one is None else one.value,
                    "value_error": None if one is None else one.error,
                    "verdict": verdict,
                }
            file.write(_line({**record, **more}))


def _line(record: Mapping[str, Any]) -> str:
    """One line of JSON; half a character stays the escape that it was."""
    text = json.dumps(record, ensure_ascii=False)
    whole = not any("\ud800" <= character <= "\udfff" for character in text)
    return (text if whole else json.dumps(record)) + "\n"


def _say(out: Path, verdicts: Mapping[int, str], others: Mapping[int, str], broken: int) -> None:
    """One line, in which every line of the file is counted."""
    kept = sum(verdict == "keep" for verdict in verdicts.values())
    total = len(verdicts) + len(others) + broken
    said = [f"{total} rows: {len(verdicts)} valued, {kept} to keep"]
    if others:
        kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(others.values()).items())
        said.append(f"{kinds}: not valued")
    if broken:
        said.append(f"{broken} without a record: not written")
    print(f"{'; '.join(said)}: {out}")
