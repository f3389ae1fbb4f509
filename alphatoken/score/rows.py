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
from alphatoken.data.encode import survey_of
from alphatoken.data.rows import UNLEARNED, Fields, Row, row_of
from alphatoken.data.source import RowSource, each_row
from alphatoken.data.split import check_draw, none_left, repeated_in
from alphatoken.data.survey import Survey
from alphatoken.errors import DataError

__all__ = ["OUTCOMES", "Corpus", "CorpusRow", "CorpusSurvey", "draw_rows", "encode_some"]

OUTCOMES = (
    "drawn_validation",
    "removed_same_as_validation",
    "removed_same_as_fisher",
    "bad_rows",
    "train",
    "without_response",
)
"""Outcome of a row; only "train" is valued."""


@dataclass(frozen=True)
class CorpusRow:
    """One row of a source, and what becomes of it.

    Attributes:
        index: its number in the source.
        place: how a person finds it.
        outcome: one of :data:`OUTCOMES`.
        reason: what is wrong with a bad row, and where.
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
class CorpusSurvey:
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
        validation: ``leak_keys`` of the validation rows.
        fisher: those of the rows that the Fisher was fitted on.
        leak_key: rows repeat each other by their "prompt", or by the "conversation" only.
    """

    source: RowSource
    fields: Fields
    tokenizer: Any
    how: EncodeOptions = field(default_factory=EncodeOptions)
    drawn: frozenset[int] = frozenset()
    validation: frozenset[str] = frozenset()
    fisher: frozenset[str] = frozenset()
    leak_key: str = "prompt"

    def rows(
        self, start: int = 0, stop: int | None = None, survey: Survey | None = None
    ) -> Iterator[CorpusRow]:
        """Outcome of each row; ``survey`` counts how rows were read, and those left out.

        Raises:
            DataError: a row that is to stop the run, by ``how``.
        """
        survey = survey or self.source.survey()
        make = partial(row_of, fields=self.fields, survey=survey)
        records = self.source.read(start, stop)
        for record, row in each_row(records, make, self.how.on_bad_rows):
            if isinstance(row, DataError):
                survey.leave_out(row.what, record.place)
                yield CorpusRow(record.index, record.place, "bad_rows", str(row))
            else:
                yield self._outcome(row, survey)

    def row(self, index: int) -> Row | DataError:
        """One row, also of those that are drawn, or what is wrong with it."""
        records = self.source.read(index, index + 1)
        ((_, row),) = each_row(records, partial(row_of, fields=self.fields), "skip")
        return row

    def _outcome(self, row: Row, survey: Survey) -> CorpusRow:
        """Outcome of a row that could be read."""
        if row.index in self.drawn:
            return CorpusRow(row.index, row.place, "drawn_validation")
        pools = {"validation": self.validation, "fisher": self.fisher}
        if (pool := repeated_in(row, pools, self.leak_key)) is not None:
            return CorpusRow(row.index, row.place, f"removed_same_as_{pool}")
        examples, report = encode_rows([row], self.tokenizer, self.how, survey)
        if report.skipped_bad:
            reason = report.first_skipped[0].removeprefix(f"{row.place}: ")
            return CorpusRow(row.index, row.place, "bad_rows", reason)
        if examples:
            return CorpusRow(row.index, row.place, "train", "", examples[0], report)
        return CorpusRow(row.index, row.place, "without_response", encoded=report)

    def survey(self, report: Callable[[int], None] = lambda _: None) -> CorpusSurvey:
        """Go through all rows once, before any work; one line says what was read and left out.

        Args:
            report: is told how many rows were read, now and then.

        Raises:
            DataError: as of :meth:`rows`; or no row is left.
        """
        outcomes, encoded, bad = Counter[str](), EncodeReport(), list[dict[str, Any]]()
        survey = self.source.survey()
        for number, row in enumerate(self.rows(survey=survey)):
            outcomes[row.outcome] += 1
            if row.outcome == "bad_rows":
                bad.append({"index": row.index, "place": row.place, "reason": row.reason})
            if row.encoded is not None:
                encoded.add(row.encoded)
            if number % 256 == 0:
                report(number)
        report(self.source.rows)  # so that what was read has a line of its own
        survey.log()
        always = OUTCOMES[: OUTCOMES.index("train") + 1]
        shown = [name for name in OUTCOMES if outcomes[name] or name in always]
        counts = {"rows": self.source.rows, **{name: outcomes[name] for name in shown}}
        if not outcomes["train"]:
            raise none_left(counts, marked=UNLEARNED in survey.left)
        return CorpusSurvey(counts, encoded, bad)


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
    rows: dict[int, Row] = {}
    while left := sorted(chosen - rows.keys()):
        for index in left:
            row = corpus.row(index)
            if isinstance(row, Row):
                rows[index] = row
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
    return [rows[index] for index in sorted(rows)]


def encode_some(
    rows: Sequence[Row], tokenizer: Any, how: EncodeOptions, what: str
) -> tuple[list[Example], EncodeReport]:
    """Rows to examples, of which there must be some.

    Raises:
        DataError: none is left; the message says of ``what``.
    """
    survey = survey_of(rows)
    examples, report = encode_rows(rows, tokenizer, how, survey)
    if survey.notes:
        survey.log()
    if not examples:
        raise DataError(
            f"no {what} row is left",
            got="; ".join([f"{len(rows)} rows", *survey.left_out()]),
            remedy="look at --response_column, --max_length, --on_empty and --on_bad_rows, or give "
            "other rows",
        )
    return examples, report
