"""What becomes of each row of a source: tokens to value, or why it is left out.

What :func:`alphatoken.data.split_pools` does to a list, done row by row: what becomes of a row
depends on itself and on the held-out keys, so that any process can start at any row.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alphatoken.data import EncodeOptions, EncodeReport, Example, encode_rows
from alphatoken.data.reading import Reading
from alphatoken.data.rows import Fields, Row, row_of
from alphatoken.data.source import Found, RowSource, find_source
from alphatoken.data.split import check_draw, leak_keys, none_left, refuse_leaks
from alphatoken.errors import ColumnsError, DataError

__all__ = ["OUTCOMES", "Corpus", "CorpusRow", "Survey", "draw_rows", "encode_some", "read_rows"]

OUTCOMES = (
    "drawn_validation",
    "removed_same_as_validation",
    "removed_same_as_fisher",
    "bad_rows",
    "train",
    "too_long",
    "without_response",
)
"""What becomes of a row; "train" alone is valued."""


@dataclass(frozen=True)
class CorpusRow:
    """One row of a source, and what becomes of it.

    Attributes:
        index: its number in the source.
        place: how a person finds it.
        outcome: one of :data:`OUTCOMES`.
        reason: what is wrong with a bad row.
        example: its tokens, where it is valued.
        encoded: what was cut or dropped, where it could be written as tokens.
    """

    index: int
    place: str
    outcome: str
    reason: str = ""
    example: Example | None = None
    encoded: EncodeReport | None = None


@dataclass(frozen=True)
class Survey:
    """What becomes of all rows, by number; ``encoded`` sums up those that became tokens."""

    counts: dict[str, int]
    encoded: EncodeReport


@dataclass(frozen=True)
class Corpus:
    """Rows of a source, less those that must not be valued, as tokens.

    Attributes:
        source: all rows.
        fields: which columns are read.
        tokenizer: of the model.
        how: rows become tokens, and which of them stop the run.
        drawn: rows that are validation rows themselves.
        held: ``leak_keys`` of the validation rows.
        fisher: those of the rows that the Fisher was fitted on.
        on_leak: "remove" or "error" for rows that repeat held-out ones.
        leak_key: rows repeat each other by their "prompt", or by the "conversation" only.
    """

    source: RowSource
    fields: Fields
    tokenizer: Any
    how: EncodeOptions = field(default_factory=EncodeOptions)
    drawn: frozenset[int] = frozenset()
    held: frozenset[str] = frozenset()
    fisher: frozenset[str] = frozenset()
    on_leak: str = "remove"
    leak_key: str = "prompt"

    def rows(
        self, start: int = 0, stop: int | None = None, reading: Reading | None = None
    ) -> Iterator[CorpusRow]:
        """What becomes of each row; ``reading`` is told which columns were read as what.

        Raises:
            DataError: a row that is to stop the run, by ``how`` or ``on_leak``.
        """
        for found in self.source.read(start, stop):
            if found.index in self.drawn:
                yield CorpusRow(found.index, found.place, "drawn_validation")
                continue
            try:
                row = self.read(found, reading)
            except DataError as error:
                if self.how.on_bad_rows == "error" or isinstance(error, ColumnsError):
                    raise
                yield CorpusRow(found.index, found.place, "bad_rows", str(error))
            else:
                yield self._become(row)

    def read(self, found: Found, reading: Reading | None = None) -> Row:
        """What was found as a row.

        Raises:
            DataError: it cannot be read.
        """
        if isinstance(found.record, DataError):
            raise found.record
        return row_of(found.record, found.index, found.place, self.fields, reading)

    def _become(self, row: Row) -> CorpusRow:
        """What becomes of a row that could be read."""
        keys = leak_keys(row, self.leak_key)
        for name, pool in (("validation", self.held), ("fisher", self.fisher)):
            if pool & keys:
                if self.on_leak == "error":
                    refuse_leaks({name: [row]})
                return CorpusRow(row.index, row.place, f"removed_same_as_{name}")
        examples, report = encode_rows([row], self.tokenizer, self.how)
        if report.skipped_bad:
            reason = report.first_skipped[0].removeprefix(f"{row.place}: ")
            return CorpusRow(row.index, row.place, "bad_rows", reason)
        if examples:
            return CorpusRow(row.index, row.place, "train", "", examples[0], report)
        outcome = "too_long" if report.skipped_long else "without_response"
        return CorpusRow(row.index, row.place, outcome, encoded=report)

    def survey(self, report: Callable[[int], None] | None = None) -> Survey:
        """Go through all rows once, before any work, and say which columns were read as what.

        Args:
            report: is told how many rows were read, now and then.

        Raises:
            DataError: as of :meth:`rows`; or no row is left.
        """
        seen, encoded = Counter[str](), EncodeReport()
        reading = Reading(Path(self.source.path).name)
        for number, row in enumerate(self.rows(reading=reading)):
            seen[row.outcome] += 1
            if row.encoded is not None:
                encoded.add(row.encoded)
            if report is not None and number % 256 == 0:
                report(number)
        reading.say()
        always = OUTCOMES[: OUTCOMES.index("train") + 1]
        counts = {name: seen[name] for name in OUTCOMES if seen[name] or name in always}
        counts = {"rows": self.source.rows, **counts}
        if not seen["train"]:
            raise none_left(counts)
        return Survey(counts, encoded)


def draw_rows(corpus: Corpus, count: int, seed: int) -> list[Row]:
    """So many rows of the corpus, drawn without replacement among those that can be read.

    The draw is that of ``split_pools`` where no row is bad.

    Raises:
        ConfigError: they cannot be drawn, or none would remain.
        DataError: a row that cannot be read, where such rows stop the run.
    """
    total = corpus.source.rows
    check_draw(count, total, "validation rows")
    draw = random.Random(seed)
    chosen, bad = set(draw.sample(range(total), count)), set[int]()
    found: dict[int, Row] = {}
    while left := sorted(chosen - found.keys()):
        for index in left:
            (one,) = corpus.source.read(index, index + 1)
            try:
                found[index] = corpus.read(one)
                continue
            except ColumnsError:
                raise
            except DataError:
                if corpus.how.on_bad_rows == "error":
                    corpus.survey()  # stops at the first bad row of the file, not of the draw
            # A bad row is passed over: another one is drawn in its place.
            bad.add(index)
            check_draw(count, total - len(bad), "validation rows")
            chosen.remove(index)
            while len(chosen) < count:
                other = draw.randrange(total)
                if other not in bad:
                    chosen.add(other)
    return [found[index] for index in sorted(found)]


def read_rows(
    path: str | Path,
    fields: Fields,
    *,
    on_bad_rows: str = "error",
    limit: int | None = None,
    quiet: bool = False,
) -> list[Row]:
    """All rows of a small file; those that cannot be read are counted on stderr under "skip".

    Raises:
        DataError: a row that cannot be read, under "error"; or no row can.
    """
    reading, source = Reading(Path(path).name), find_source(path).limited(limit)
    corpus = Corpus(source, fields, None)
    rows, errors = list[Row](), list[DataError]()
    for found in source.read():
        try:
            rows.append(corpus.read(found, reading))
        except ColumnsError:
            raise
        except DataError as error:
            errors.append(error)
            if on_bad_rows == "error":
                break
    reading.say()
    if errors and (on_bad_rows == "error" or not rows):
        raise errors[0]
    if errors and not quiet:
        print(
            f"note: {len(errors)} rows of {path} cannot be read and are left out; "
            f"the first: {errors[0]}",
            file=sys.stderr,
        )
    return rows


def encode_some(
    rows: Sequence[Row], tokenizer: Any, how: EncodeOptions, what: str
) -> tuple[list[Example], EncodeReport]:
    """Rows to examples, of which there must be some.

    Raises:
        DataError: none is left; the message says of ``what``.
    """
    examples, report = encode_rows(rows, tokenizer, how)
    if not examples:
        raise DataError(
            f"no {what} row is left",
            got=f"{len(rows)} rows, {report.skipped_long} too long, "
            f"{report.skipped_empty} without response within the length, "
            f"{report.skipped_bad} that cannot be written as tokens",
            remedy="look at --response_column, --max_length, --on_long, --on_empty and "
            "--on_bad_rows, or give other rows",
        )
    return examples, report
