"""Training rows that an option or an arm of a race names by numbers, and that are left out."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from alphatoken.data.source import RowSource, SourceRow
from alphatoken.data.survey import Survey
from alphatoken.errors import ConfigError, InputError, first_few, short

OPTION = "--without_rows"
_NAMED = f"named by {OPTION}"
_PART = re.compile("([0-9]{1,18})( *- *([0-9]{1,18}))?")
# Numbers that an error names, and files.
_SHOWN = 4


def as_typed(said: Any) -> str | None:
    """Numbers that a recipe may say as a list, as they are typed; an empty list says none.

    >>> as_typed([4, "15-18"]), as_typed(4), as_typed([])
    ('4,15-18', '4', None)
    """
    entries = said if isinstance(said, list) else [said]
    return None if said in (None, []) else ",".join(map(str, entries))


def read_numbers(said: str, by: str = OPTION) -> tuple[range, ...]:
    """Numbers of rows, and ranges of them, as they are typed; ``by`` says where, for messages.

    >>> read_numbers("4,15-18")
    (range(4, 5), range(15, 19))

    Raises:
        ConfigError: a word that is neither a number nor a range of them.
    """
    return tuple(_range(part, by) for part in said.split(","))


def _range(part: str, by: str) -> range:
    match = _PART.fullmatch(part.strip())
    if match is not None:
        first, last = int(match[1]), int(match[3] or match[1])
    if match is None or first > last:
        raise ConfigError(
            "a word is no number of a row, and no range of them",
            got=f"{part[:40]!r} in {by}",
            remedy="numbers as messages and pages name them, joined by commas: "
            f"{OPTION} 4,13,15-18, of an arm NAME:without_rows=4,13,15-18",
        )
    return range(first, last + 1)


def rows_but_named(
    source: RowSource,
    said: str | None,
    limit: int | None,
    survey: Survey,
    others: Mapping[str, str] | None = None,
) -> Iterator[SourceRow]:
    """The first rows of a source but those that are named, which the survey counts and names.

    All numbers are looked at before the first row is given.

    Args:
        source: of the rows.
        said: which of them are left out, as :func:`read_numbers` reads it; None for none.
        limit: how many rows are read, those that are left out among them; None for all.
        survey: of the rows.
        others: numbers that are checked as well, by what names them in messages; their rows stay.

    Raises:
        ConfigError: a source of several files.
        InputError: a number that no row has, or no row that is left.
    """
    own = {} if said is None else {OPTION: said}
    named = _named(source, {**(others or {}), **own}, limit).get(OPTION, set())
    for row in islice(source.read(), limit):
        if named and row.number in named:
            survey.leave_out(_NAMED, row.place)
        else:
            yield row


def _named(source: RowSource, texts: Mapping[str, str], limit: int | None) -> dict[str, set[int]]:
    """The numbers of each text, by what names them; each number is that of a row."""
    there, ends = set[int](), list[str]()
    if not texts:
        return {}
    if len(source.parts) > 1:
        by, said = next(iter(texts.items()))
        files = [Path(part.path).name for part in source.parts]
        raise of_no_file(said, f"files of {source.path}: {first_few(files, _SHOWN)}", by)
    for row in islice(source.read(), limit):
        there.add(row.number)
        ends = [*ends[:1], row.place]
    first = f"first {len(there)} " * (len(there) < source.rows)
    named = dict[str, set[int]]()
    for by, said in texts.items():
        numbers = read_numbers(said, by)
        refuse_missing(numbers, there, by, f"{first}rows are {' to '.join(ends)}")
        named[by] = {number for part in numbers for number in part}
        if named[by] == there:
            raise InputError(
                "every training row is left out",
                got=f"{by} {short(said)}, of {len(there)} rows",
                remedy="name fewer of them",
            )
    return named


def refuse_missing(numbers: Sequence[range], there: Container[int], by: str, rows: str) -> None:
    """Refuse numbers that no row has.

    Args:
        numbers: that are named.
        there: numbers of the rows.
        by: what names them, for messages.
        rows: which rows there are, in words.

    Raises:
        InputError: there is such a number.
    """
    missing = (number for part in numbers for number in part if number not in there)
    # A range may be longer than any file: it is walked no further than to what an error names.
    if few := list(dict.fromkeys(islice(missing, _SHOWN + 1))):
        names = ", ".join(["..." if i == _SHOWN else str(n) for i, n in enumerate(few)])
        raise InputError(
            "no row has this number",
            got=f"{by}: {names}; the {rows}",
            why="the row that is meant would be trained on",
            remedy="the numbers that messages and pages name; an empty line is no row, and a row "
            "of several lines has the number of its first",
        )


def of_no_file(said: str, rows: str, by: str = OPTION) -> ConfigError:
    """The error of numbers beside training rows that are not those of one file."""
    return ConfigError(
        "without_rows leaves out rows of one file",
        got=f"{by} {short(said)}, {rows}",
        why="a number does not say in which of several files or data sets its row is",
        remedy="--train_file with that file, or leave without_rows out",
    )
