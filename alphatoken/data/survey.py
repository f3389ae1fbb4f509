"""One line about a source of rows: how its columns were read, and which rows were left out."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from alphatoken.errors import DataError, counted, first_few

_log = logging.getLogger("alphatoken.data")
# Forms of row that are named one by one.
_FORMS = 4
# Files of a folder that are named one by one.
_FILES = 20
# Rows that are named of those that are left out for one reason.
_PLACES = 3
# The place of a row of one file.
_LINE = re.compile(r"(.*, |)line (\d+)")


def add_place(places: list[str], place: str) -> None:
    """Keep the place of a row that is left out, if it is one of the first few."""
    if place and len(places) < _PLACES:
        places.append(place)


def said_places(places: Sequence[str], count: int, most: int = _PLACES) -> str:
    """Places of the first of so many rows, ``most`` at most, in brackets; "" where none is known.

    >>> said_places(["a.jsonl, line 3"], 1), said_places(["line 1", "line 2", "line 5"], 7)
    (' (a.jsonl, line 3)', ' (lines 1, 2, 5, ...)')
    >>> said_places(["a.jsonl, line 9", "a.jsonl, line 2"], 2)
    ' (a.jsonl, lines 9, 2)'
    """
    shown = list(places[:most])
    lines = [match for place in shown if (match := _LINE.fullmatch(place))]
    if len(lines) == len(shown) > 1 and len({match[1] for match in lines}) == 1:
        file, first = lines[0].groups()
        shown = [f"{file}lines {first}", *(match[2] for match in lines[1:])]
    named = ", ".join([*shown, *["..."] * (count > len(shown))])
    return f" ({named})" if places else ""


class Columns:
    """The columns of one record that hold something, and what each of them was read as.

    A column that is null counts as absent: rows of several sources in one file have the union of
    their columns.

    Args:
        record: columns and their values, before anything was read of them.
        place: of it, for messages.
        unread: columns that count as absent.
        weights: whether weights in it are "refused", "read", or read with a sign ("signed").
    """

    def __init__(
        self,
        record: Mapping[str, Any],
        place: str,
        unread: Collection[str] = (),
        weights: str = "refused",
    ) -> None:
        self.place, self.unread, self.weights = place, unread, weights
        self.notes: list[str] = []
        """What else the survey says of the row: "in 3 of 10 rows", and the note."""
        self._values = {k: v for k, v in record.items() if v is not None and k not in unread}
        self.aside = [
            name for name, value in record.items() if value is not None and name in unread
        ]
        """Columns that were named as not to be read, and fields of messages that were not."""
        self.null = [name for name, value in record.items() if value is None]
        self._read: dict[str, list[str]] = {}

    def first(self, names: Sequence[str]) -> str | None:
        """The first of these columns that is there."""
        return next((name for name in names if name in self._values), None)

    def take_first(self, names: Sequence[str], role: str) -> Any:
        """The first of these columns, read as ``role``; None where none is there."""
        name = self.first(names)
        return None if name is None else self.take(name, role)

    def leave(self, name: str, message: Columns) -> None:
        """Name the fields of a message in the column ``name`` that were not read."""
        self.aside += [f"{name}.{field}" for field in (*message.aside, *message.left)]

    def peek(self, name: str | None) -> str:
        """The text of a column, stripped, which does not count as read; of any other, nothing."""
        value = self._values.get(name or "")
        return value.strip() if isinstance(value, str) else ""

    def present(self, fields: Any) -> Any:
        """The names of fields, without those that are optional and not there."""
        if not fields.optional:
            return fields
        named = ("prompt", "response", "messages", "chosen", "rejected")
        absent = [name for name in named if getattr(fields, name) not in self._values]
        return replace(fields, **dict.fromkeys(absent))

    def take(self, name: str, role: str) -> Any:
        """The column ``name``, read as ``role``; a DataError where there is none, or it is null."""
        if name in self.null:
            raise DataError(
                f"the field {name!r} of the row is null",
                got=f"{self.place} has {self}",
                why="null counts as absent",
                remedy="mend or drop the row, or have it passed over (--on_bad_rows skip; not in "
                "evaluate and merge)",
            )
        if name not in self._values:
            raise DataError(
                f"the row has no field {name!r}",
                got=f"{self.place} has {self}",
                remedy=_named_by(name, role, list(self._values)),
            )
        self._read.setdefault(role, []).append(name)
        return self._values[name]

    def text(self, name: str, role: str) -> str:
        """The same, which must be text; a DataError where it is not."""
        value = self.take(name, role)
        if not isinstance(value, str):
            raise DataError(
                f"field {name!r} is not text",
                got=f"{self.place}: {type(value).__name__}",
                remedy="use a text field, or messages for a chat",
            )
        return value

    @property
    def form(self) -> str:
        """Roles of the columns: ``prompt = instruction + input, response = output``."""
        return ", ".join(f"{role} = {' + '.join(names)}" for role, names in self._read.items())

    @property
    def left(self) -> dict[str, Any]:
        """Columns that were not read."""
        read = {name for names in self._read.values() for name in names}
        return {name: value for name, value in self._values.items() if name not in read}

    def __str__(self) -> str:
        """The columns, for messages; those that are null as such."""
        names = [*map(repr, self._values), *(f"{name!r} (null)" for name in self.null)]
        return ", ".join(names) or "no fields"


_NAMED = {
    "prompt": "prompt", "response": "response", "plain text": "response", "chat": "messages",
    "chosen": "chosen", "rejected": "rejected",
}  # fmt: skip
"""What a column is read as -> the field of ``Fields``, and the option, that names it."""


def _named_by(name: str, role: str, there: Sequence[str]) -> str:
    """What to do where a column that was named is not there.

    >>> _named_by("mesages", "chat", ["id", "messages"])
    "did you mean 'messages'? The column is named by --messages_column (Fields(messages=...))"
    """
    close = get_close_matches(name, there, n=1)
    near = f"did you mean {close[0]!r}? " if close else ""
    field = _NAMED.get(role)
    if field is None:
        return near.strip() or "check the name of the column"
    return f"{near}The column is named by --{field}_column (Fields({field}=...))"


class Survey:
    """Counts of the rows of one source: how they were read, and left out for which reason.

    Every reader of rows counts here what becomes of them, and every sentence about rows that were
    left out is written here. ``str`` gives one line:

    >>> survey = Survey("train.jsonl")
    >>> columns = Columns({"question": "2 + 2?", "answer": "4", "id": 7}, "line 1")
    >>> _ = columns.text("question", "prompt"), columns.text("answer", "response")
    >>> survey.add_columns(columns)
    >>> survey.leave_out("broken JSON line", "line 2")
    >>> print(survey)
    train.jsonl: prompt = question, response = answer; not read: id; 1 row left out: broken JSON \
line (line 2)

    Args:
        name: of the file, the folder or the data set.
        files: of a folder, those that are read.
        unread_files: of a folder, those that are not, each with the reason.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[str] = (),
        unread_files: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.name, self._files, self._unread_files = name, files, unread_files
        self.rows = 0
        """Rows that were read."""
        self.forms: Counter[str] = Counter()
        self.unread: dict[str, None] = {}
        """Columns, and fields of messages, that were not read."""
        self.left: Counter[str] = Counter()
        """Rows that were left out, by the reason."""
        self.bad_rows = 0
        """Those of them that cannot be read, which stop a command unless it leaves them out."""
        self.left_turns: Counter[str] = Counter()
        """Turns that were left out of rows that were not, by the reason."""
        self.notes: Counter[str] = Counter()
        """Rows by what else there is to say of them."""
        self._places: dict[str, list[str]] = {}

    def add(self, form: str, unread: Iterable[str] = (), notes: Iterable[str] = ()) -> None:
        """Count one row that was read in this form, the notes on it each once."""
        self.rows += 1
        self.forms[form] += 1
        self.unread |= dict.fromkeys(unread)
        self.notes.update(dict.fromkeys(notes, 1))

    def add_columns(self, columns: Columns) -> None:
        """Count one row by what its columns were read as."""
        self.add(columns.form, [*columns.aside, *columns.left], columns.notes)

    def leave_out(self, reason: str, place: str = "", count: int = 1) -> None:
        """Count rows that are left out for a reason; the places of the first few are named."""
        if count:
            self.left[reason] += count
            self._name(reason, place)

    def leave_out_turns(self, turns: Iterable[tuple[str, str]]) -> None:
        """Count turns that are left out of a row, each with its reason and its place."""
        for reason, place in turns:
            self.left_turns[reason] += 1
            self._name(reason, place)

    def _name(self, reason: str, place: str) -> None:
        add_place(self._places.setdefault(reason, []), place)

    def left_out(self, rows: str = "rows left out") -> list[str]:
        """The sentence about rows that were left out, one for each reason.

        Args:
            rows: what is counted, such as "of 8 training rows are left out".
        """
        return list(self._sentences(self.left, rows))

    def _sentences(self, counts: Counter[str], what: str) -> Iterator[str]:
        for reason, count in counts.items():
            yield f"{counted(count, what)}: {reason}{said_places(self._places[reason], count)}"

    def __str__(self) -> str:
        """One line about the source."""
        several = len(self.forms) > 1
        parts = [
            f"{form} ({counted(count, 'rows')})" if several else form
            for form, count in self.forms.most_common(_FORMS)
        ]
        if len(self.forms) > _FORMS:
            parts.append(f"{len(self.forms) - _FORMS} more forms")
        if self.unread:
            names = (name if name.strip() else "the unnamed column" for name in self.unread)
            parts.append(f"not read: {', '.join(names)}")
        parts += [f"in {count} of {self.rows} rows {note}" for note, count in self.notes.items()]
        parts += [*self._sentences(self.left_turns, "turns left out"), *self.left_out()]
        return f"{self.name}: {'; '.join([*parts, *self._about_files()])}"

    def _about_files(self) -> Iterator[str]:
        """Files of a folder: those that are read, and those that are not, by reason."""
        if self._files:
            yield f"files read: {first_few(self._files, _FILES)}"
        for reason in dict.fromkeys(why for _, why in self._unread_files):
            names = [name for name, why in self._unread_files if why == reason]
            yield f"files not read, {reason}: {first_few(names, _FILES)}"

    def log(self) -> None:
        """Log the line: as a warning where something was not read or is noted, else to inform."""
        lost = self.unread or self.left or self.left_turns or self.notes or self._unread_files
        if self.forms or lost:
            _log.log(logging.WARNING if lost else logging.INFO, "%s", self)
