"""Preference pairs: one prompt, a chosen and a rejected response.

A pair is written in many ways: three texts; a prompt with messages; two whole conversations that
begin alike. All become turns here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphatoken.data.marks import require_learned, require_order
from alphatoken.data.reading import Columns, Reading, short
from alphatoken.data.rows import (
    CHATS,
    PROMPTS,
    Fields,
    Row,
    Turn,
    prompt_turns,
    require_read,
    require_text,
    value_turns,
    with_system,
)
from alphatoken.data.source import take_rows
from alphatoken.errors import DataError

__all__ = ["CHOSEN", "REJECTED", "Pair", "pair_of", "read_pairs"]

CHOSEN = ("chosen", "chosen_response")
REJECTED = ("rejected", "rejected_response")
WHOLE = "a response has turns of the user, which are learned with it"
"""Note on a pair of conversations, whose responses are learned from the first turn to the last."""


@dataclass(frozen=True)
class Pair:
    """One pair of a data file; ``index`` and ``place`` as for :class:`Row`.

    ``chosen`` and ``rejected`` are what follows the common ``prompt``: one assistant turn each, as
    a rule.
    """

    index: int
    place: str
    prompt: tuple[Turn, ...]
    chosen: tuple[Turn, ...]
    rejected: tuple[Turn, ...]

    @property
    def row(self) -> Row:
        """The chosen conversation, by which pairs are compared with other rows."""
        return Row(self.index, self.place, (*self.prompt, *self.chosen))


def read_pairs(
    path: str | Path, *, fields: Fields | None = None, limit: int | None = None
) -> list[Pair]:
    """The pairs of a data file or folder; logs what was read as what, as ``read_rows`` does.

    Raises:
        DataError: as for ``read_rows``; a record that is no pair. The message names file and line.
    """
    return take_rows(path, pair_of, fields, limit)


def pair_of(
    record: Mapping[str, Any],
    index: int,
    place: str,
    fields: Fields | None = None,
    reading: Reading | None = None,
) -> Pair:
    """One record, of a file or of any other source, as a pair; see ``row_of``.

    Raises:
        DataError: a missing or wrong field, or one that would be lost; a pair that is marked as a
            bad one, or by a weight; scores that contradict its order; the message names ``place``.
    """
    fields = fields or Fields()
    columns = Columns(record, place, fields.unread)
    fields = columns.present(fields)
    chosen = columns.take(_name(columns, fields.chosen, CHOSEN, "chosen"), "chosen")
    rejected = columns.take(_name(columns, fields.rejected, REJECTED, "rejected"), "rejected")
    name = fields.prompt or columns.first((*PROMPTS, *CHATS))
    prompt = None if name is None else prompt_turns(columns, name)
    if prompt is None and isinstance(chosen, str) and isinstance(rejected, str):
        raise DataError(
            "a pair of texts has no prompt",
            got=f"{place}: {short(chosen, 40)!r} and {short(rejected, 40)!r}",
            remedy="name its column with --prompt_column, or write it into one: what both texts "
            "begin with (trl.extract_prompt)",
        )
    notes = list(columns.notes)
    good = value_turns(chosen, "assistant", "chosen", columns)
    bad = value_turns(rejected, "assistant", "rejected", columns)
    asked, *said = _of_messages(prompt, good, bad, place, name)
    if prompt is None:
        asked = with_system(columns, asked)
    # A pair is learned whole, whoever says it: what is noted of a user's turn is untrue here.
    several = any(turn.role != "assistant" for turns in said for turn in turns)
    columns.notes = [*notes, WHOLE] if several else notes
    require_read(columns)
    require_learned(columns)
    require_order(columns)
    for turns in (asked, *said):
        require_text(turns, place)
    if not all(turn.learned for turns in said for turn in turns):
        raise DataError(
            "a response of a pair is marked as not to be trained on",
            got=place,
            why="a pair is learned as a whole",
            remedy="drop the pair, or the mark",
        )
    if reading is not None:
        reading.add(columns)
    return Pair(index, place, asked, *said)


Turns = tuple[Turn, ...]
Parts = tuple[Turns, Turns, Turns]


def _name(columns: Columns, asked: str | None, known: Sequence[str], kind: str) -> str:
    name = asked or columns.first(known)
    null = next((one for one in ((asked,) if asked else known) if one in columns.null), None)
    if null is not None and (name is None or name == null):
        raise DataError(
            f"the {kind} response of a pair is null",
            got=f"{columns.place} has {columns}",
            why="null counts as absent",
            remedy="mend or drop the row, or have it passed over (--on_bad_rows skip; not in "
            "evaluate)",
        )
    if name is None:
        raise DataError(
            f"the row has no {kind} response",
            got=f"{columns.place} has {columns}",
            remedy=f"name its column with --{kind}_column (known: {', '.join(known)})",
        )
    return name


def _of_messages(
    prompt: Turns | None, chosen: Turns, rejected: Turns, place: str, name: str | None
) -> Parts:
    """Responses, after a prompt of their own (the column ``name``) or with it at their head."""
    if prompt is None:
        return _split(chosen, rejected, place)
    if chosen[0].role == rejected[0].role == "assistant":
        return prompt, chosen, rejected
    system = prompt[:1] if prompt[0].role == "system" else ()
    head, *said = _split(chosen, rejected, place)
    if head[0].role == "system":
        system = ()
    if prompt[-1] not in head:
        raise DataError(
            "the prompt is not that of the two conversations",
            got=f"{place}: {short(prompt[-1].text, 40)!r} and {short(head[-1].text, 40)!r}",
            why="one of them would be lost",
            remedy=f"mend the row, or leave the prompt's column aside: --unread_columns {name} "
            f"(in Python Fields(unread=({name!r},)))",
        )
    return (*system, *head), said[0], said[1]


def _split(chosen: Turns, rejected: Turns, place: str) -> Parts:
    """Two conversations at the last turn before they part."""
    count = 0
    shortest = min(len(chosen), len(rejected)) - 1  # each keeps a response, also where both agree
    while count < shortest and chosen[count] == rejected[count]:
        count += 1
    if not count:
        raise DataError(
            "the two conversations have no common beginning to be the prompt",
            got=f"{place}: {short(chosen[0].text, 40)!r} and {short(rejected[0].text, 40)!r}",
            remedy="mend the row, or name the column of the prompt with --prompt_column",
        )
    return chosen[:count], chosen[count:], rejected[count:]
