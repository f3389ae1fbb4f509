"""The outcome of each row of a source: tokens to value, or the reason for leaving it out.

What :func:`alphatoken.data.split_pools` does to a list, done row by row: what becomes of a row
depends on itself and on the held-out keys, so that any process can start at any row.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from alphatoken.data import EncodeOptions, EncodeReport, Example, encode_rows
from alphatoken.data.encode import encode_silently
from alphatoken.data.reading import Reading
from alphatoken.data.rows import UNLEARNED, Fields, Row, row_of
from alphatoken.data.source import RowSource, each_row
from alphatoken.data.split import check_draw, none_left, repeated_in
from alphatoken.errors import DataError

__all__ = ["OUTCOMES", "Corpus", "CorpusRow", "Survey", "draw_rows", "encode_some"]

OUTCOMES = (
    "drawn_validation",
    "removed_same_as_validation",
    "removed_same_as_fisher",
    "bad_rows",
    "train",
    "without_response",
)
"""Outcome of a row; only "train" is valued."""

_LEFT = {
    "bad_rows": "cannot be read or written as tokens",
    "without_response": "no response within the length",
}
"""Sentences about rows that are left out."""


@dataclass(frozen=True)
class CorpusRow:
    """One row of a source, and what becomes of it.

    Attributes:
        index: its number in the source.
        place: how a person finds it.
        outcome: one of :data:`OUTCOMES`.
        reason: what is wrong with a bad row, or why one without response has none.
        example: its tokens, where it is valued.
        encoded: what was cut or dropped, where it could be written as tokens.
    """

    index: int
    place: str
    outcome: str
    reason: str = ""
    example: Example | None = None
    encoded: EncodeReport | None = None

    @property
    def what(self) -> str:
        """Reason why a row is left out, as the line about the file says it: no place, no remedy."""
        return self.reason.partition(". Got: ")[0] or _LEFT[self.outcome]


@dataclass(frozen=True)
class Survey:
    """Outcomes of all rows of a source.

    Attributes:
        counts: of rows, by what becomes of them.
        encoded: sums up those that became tokens.
        bad: index, place and reason of each row that cannot be read or written as tokens.
    """

    counts: dict[str, int]
    encoded: EncodeReport
    bad: list[dict[str, Any]]


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
        leak_key: rows repeat each other by their "prompt", or by the "conversation" only.
    """

    source: RowSource
    fields: Fields
    tokenizer: Any
    how: EncodeOptions = field(default_factory=EncodeOptions)
    drawn: frozenset[int] = frozenset()
    held: frozenset[str] = frozenset()
    fisher: frozenset[str] = frozenset()
    leak_key: str = "prompt"

    def rows(
        self, start: int = 0, stop: int | None = None, reading: Reading | None = None
    ) -> Iterator[CorpusRow]:
        """Outcome of each row; ``reading`` records how columns were read.

        Raises:
            DataError: a row that is to stop the run, by ``how``.
        """
        make = partial(row_of, fields=self.fields, reading=reading)
        records = self.source.read(start, stop)
        for found, row in each_row(records, make, self.how.on_bad_rows):
            if isinstance(row, DataError):
                yield CorpusRow(found.index, found.place, "bad_rows", str(row))
            else:
                yield self._become(row)

    def row(self, index: int) -> Row | DataError:
        """One row, also of those that are drawn, or what is wrong with it."""
        records = self.source.read(index, index + 1)
        ((_, row),) = each_row(records, partial(row_of, fields=self.fields), "skip")
        return row

    def _become(self, row: Row) -> CorpusRow:
        """Outcome of a row that could be read."""
        if row.index in self.drawn:
            return CorpusRow(row.index, row.place, "drawn_validation")
        pools = {"validation": self.held, "fisher": self.fisher}
        if (pool := repeated_in(row, pools, self.leak_key)) is not None:
            return CorpusRow(row.index, row.place, f"removed_same_as_{pool}")
        examples, report = encode_silently([row], self.tokenizer, self.how)
        if report.skipped_bad:
            reason = report.first_skipped[0].removeprefix(f"{row.place}: ")
            return CorpusRow(row.index, row.place, "bad_rows", reason)
        if examples:
            return CorpusRow(row.index, row.place, "train", "", examples[0], report)
        reason = "" if row.is_learned else UNLEARNED
        return CorpusRow(row.index, row.place, "without_response", reason, encoded=report)

    def survey(self, report: Callable[[int], None] = lambda _: None) -> Survey:
        """Go through all rows once, before any work; one line says what was read and left out.

        Args:
            report: is told how many rows were read, now and then.

        Raises:
            DataError: as of :meth:`rows`; or no row is left.
        """
        outcomes, encoded, bad = Counter[str](), EncodeReport(), list[dict[str, Any]]()
        reading = self.source.reading()
        for number, row in enumerate(self.rows(reading=reading)):
            outcomes[row.outcome] += 1
            if row.outcome in _LEFT:
                reading.leave(row.what, row.place)
            if row.outcome == "bad_rows":
                bad.append({"index": row.index, "place": row.place, "reason": row.reason})
            if row.encoded is not None:
                encoded.add(row.encoded)
                reading.notes.update(row.encoded.notes)
            if number % 256 == 0:
                report(number)
        report(self.source.rows)  # so that what was read has a line of its own
        reading.say()
        always = OUTCOMES[: OUTCOMES.index("train") + 1]
        shown = [name for name in OUTCOMES if outcomes[name] or name in always]
        counts = {"rows": self.source.rows, **{name: outcomes[name] for name in shown}}
        if not outcomes["train"]:
            raise none_left(counts, marked=UNLEARNED in reading.left)
        return Survey(counts, encoded, bad)


def draw_rows(corpus: Corpus, count: int, seed: int) -> list[Row]:
    """Draw so many rows of the corpus, without replacement, among those that can be read.

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
            row = corpus.row(index)
            if isinstance(row, Row):
                found[index] = row
                continue
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
            got=f"{len(rows)} rows, {report.skipped_empty} without response within the length, "
            f"{report.skipped_bad} that cannot be written as tokens",
            remedy="look at --response_column, --max_length, --on_empty and --on_bad_rows, or give "
            "other rows",
        )
    return examples, report
