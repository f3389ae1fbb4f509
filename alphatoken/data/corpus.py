"""Which rows of a source are valued: all but held-out ones, those that repeat them, and bad ones.

What :func:`alphatoken.data.split_pools` does to a list, done row by row: what becomes of a row
depends on itself and on the held-out keys, so that any process can start at any row.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from alphatoken.data.reading import Reading
from alphatoken.data.rows import Fields, Row, row_of
from alphatoken.data.source import Found, RowSource
from alphatoken.data.split import check_draw, leak_keys, none_left, refuse_leaks
from alphatoken.errors import ColumnsError, DataError

__all__ = ["BadRow", "Corpus", "draw_rows"]


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be valued: where it is, and why."""

    index: int
    place: str
    reason: str

    @classmethod
    def of(cls, index: int, place: str, error: DataError) -> BadRow:
        """From what reading or encoding it raised."""
        return cls(index, place, str(error))


@dataclass(frozen=True)
class Corpus:
    """Rows of a source, less those that must not be valued.

    Attributes:
        source: all rows.
        fields: which columns are read.
        drawn: rows that are validation rows themselves.
        held: ``leak_keys`` of the validation rows.
        fisher: those of the rows that the Fisher was fitted on.
        on_leak: "remove" or "error" for rows that repeat held-out ones.
        leak_key: rows repeat each other by their "prompt", or by the "conversation" only.
        on_bad_rows: "error", or "skip" to pass over rows that cannot be read, and name them.
    """

    source: RowSource
    fields: Fields
    drawn: frozenset[int] = frozenset()
    held: frozenset[str] = frozenset()
    fisher: frozenset[str] = frozenset()
    on_leak: str = "remove"
    leak_key: str = "prompt"
    on_bad_rows: str = "error"

    def rows(
        self, start: int = 0, stop: int | None = None, reading: Reading | None = None
    ) -> Iterator[Row | BadRow | str]:
        """What becomes of each row: a row to value, a bad row, or why it is left out.

        ``reading`` is told which columns were read as what.

        The reasons are "drawn_validation", "removed_same_as_validation" and
        "removed_same_as_fisher".

        Raises:
            DataError: a bad row under "error"; a leak under ``on_leak="error"``.
        """
        for found in self.source.read(start, stop):
            if found.index in self.drawn:
                yield "drawn_validation"
                continue
            row = self.row(found, reading)
            yield row if isinstance(row, BadRow) else self._checked(row)

    def row(self, found: Found, reading: Reading | None = None) -> Row | BadRow:
        """What was found as a row, or what is wrong with it.

        Raises:
            DataError: it cannot be read, under "error".
        """
        try:
            if isinstance(found.record, DataError):
                raise found.record
            return row_of(found.record, found.index, found.place, self.fields, reading)
        except DataError as error:
            return self.bad(found.index, found.place, error)

    def bad(self, index: int, place: str, error: DataError) -> BadRow:
        """A row that cannot be valued, where such rows are passed over.

        Raises:
            DataError: ``error`` itself, where they are not.
        """
        if self.on_bad_rows == "error" or isinstance(error, ColumnsError):
            raise error
        return BadRow.of(index, place, error)

    def _checked(self, row: Row) -> Row | str:
        keys = leak_keys(row, self.leak_key)
        for name, pool in (("validation", self.held), ("fisher", self.fisher)):
            if pool & keys:
                if self.on_leak == "error":
                    refuse_leaks({name: [row]})
                return f"removed_same_as_{name}"
        return row

    def survey(
        self,
        report: Callable[[int], None] | None = None,
        look: Callable[[Row], str | BadRow] = lambda _: "train",
    ) -> dict[str, int]:
        """Go through all rows once, before any work: how many are valued, and what is left out.

        Says which columns were read as what.

        Args:
            report: is told how many rows were read, now and then.
            look: says of each row that could be read what becomes of it.

        Raises:
            DataError: as of :meth:`rows` and ``look``; or no row is left.
        """
        counts: Counter[str] = Counter()
        reading = Reading(Path(self.source.path).name)
        for number, row in enumerate(self.rows(reading=reading)):
            kind = look(row) if isinstance(row, Row) else row
            counts["bad_rows" if isinstance(kind, BadRow) else kind] += 1
            if report is not None and number % 256 == 0:
                report(number)
        reading.say()
        names = (
            "drawn_validation",
            "removed_same_as_validation",
            "removed_same_as_fisher",
            "bad_rows",
        )
        found = {"rows": self.source.rows, **{n: counts[n] for n in (*names, "train")}}
        found |= {kind: count for kind, count in counts.items() if kind not in found}
        if not counts["train"]:
            raise none_left(found)
        return found


def draw_rows(corpus: Corpus, count: int, seed: int) -> list[Row]:
    """So many rows of the corpus, drawn without replacement among those that can be read.

    The draw is that of ``split_pools`` where no row is bad.

    Raises:
        ConfigError: they cannot be drawn, or none would remain.
        DataError: as of :meth:`Corpus.row`.
    """
    total = corpus.source.rows
    check_draw(count, total, "validation rows")
    draw, lenient = random.Random(seed), replace(corpus, on_bad_rows="skip")
    chosen, bad = set(draw.sample(range(total), count)), set[int]()
    found: dict[int, Row] = {}
    while left := sorted(chosen - found.keys()):
        for one in _at(corpus.source, left):
            row = lenient.row(one)
            if isinstance(row, Row):
                found[one.index] = row
                continue
            if corpus.on_bad_rows == "error":
                corpus.survey()  # stops at the first bad row of the file, not of the draw
            # A bad row is passed over: another one is drawn in its place.
            bad.add(one.index)
            check_draw(count, total - len(bad), "validation rows")
            chosen.remove(one.index)
            while len(chosen) < count:
                other = draw.randrange(total)
                if other not in bad:
                    chosen.add(other)
    return [found[index] for index in sorted(found)]


def _at(source: RowSource, places: Sequence[int]) -> Iterator[Found]:
    for index in places:
        yield from source.read(index, index + 1)
