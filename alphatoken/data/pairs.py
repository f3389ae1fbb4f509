"""Preference pairs: one prompt, a chosen and a rejected response.

A pair is written in many ways: three texts; a prompt with messages; two whole conversations that
begin alike; two transcripts with ``Human:`` and ``Assistant:``. All become turns here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphatoken.data.rows import CHATS, PROMPTS, Row, Turn, read_records, short, turn_of
from alphatoken.errors import DataError

__all__ = ["Pair", "PairFields", "pair_of", "read_pairs"]

_CHOSEN = ("chosen", "chosen_response")
_REJECTED = ("rejected", "rejected_response")
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


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


@dataclass(frozen=True)
class PairFields:
    """Names of the fields to read; None means: the first known name that the row has.

    Known names: prompt, instruction, question, query, messages, conversations (or none, where both
    responses are whole conversations); chosen, chosen_response; rejected, rejected_response.
    """

    prompt: str | None = None
    chosen: str | None = None
    rejected: str | None = None


def read_pairs(
    path: str | Path, *, fields: PairFields | None = None, limit: int | None = None
) -> list[Pair]:
    """The pairs of a ``.jsonl``, ``.json`` or ``.parquet`` file.

    Raises:
        DataError: as for ``read_rows``; a record that is no pair. The message names file and line.
    """
    pairs: list[Pair] = []
    for place, record in read_records(path):
        if limit is not None and len(pairs) >= limit:
            break
        pairs.append(pair_of(record, len(pairs), place, fields))
    if not pairs:
        raise DataError("the data file has no rows", got=str(path), remedy="give a non-empty file")
    return pairs


def pair_of(
    record: Mapping[str, Any], index: int, place: str, fields: PairFields | None = None
) -> Pair:
    """One record, of a file or of any other source, as a pair.

    Raises:
        DataError: a missing or wrong field; the message names ``place``.
    """
    fields = fields or PairFields()
    chosen = record[_name(record, fields.chosen, _CHOSEN, "chosen", place)]
    rejected = record[_name(record, fields.rejected, _REJECTED, "rejected", place)]
    name = fields.prompt or next((n for n in (*PROMPTS, *CHATS) if n in record), None)
    if name is not None and name not in record:
        raise _missing(name, record, place)
    prompt = None if name is None else record[name]
    if isinstance(chosen, str) and isinstance(rejected, str):
        turns = _of_texts(prompt, chosen, rejected, place)
    else:
        turns = _of_messages(prompt, _turns(chosen, place), _turns(rejected, place), place)
    return Pair(index, place, *turns)


Parts = tuple[tuple[Turn, ...], tuple[Turn, ...], tuple[Turn, ...]]


def _name(
    record: Mapping[str, Any], asked: str | None, known: Sequence[str], kind: str, place: str
) -> str:
    name = asked or next((n for n in known if n in record), None)
    if name is None:
        raise DataError(
            f"the row has no {kind} response",
            got=f"{place} has {', '.join(map(repr, record)) or 'no fields'}",
            remedy=f"name its column with --{kind}_column (known: {', '.join(known)})",
        )
    if name not in record:
        raise _missing(name, record, place)
    return name


def _missing(name: str, record: Mapping[str, Any], place: str) -> DataError:
    return DataError(
        f"the row has no field {name!r}",
        got=f"{place} has {', '.join(map(repr, record)) or 'no fields'}",
        remedy="check the name of the column",
    )


def _turns(value: Any, place: str) -> tuple[Turn, ...]:
    """A message, a list of them, or a text, which is an assistant's."""
    if isinstance(value, str):
        return (Turn("assistant", value),)
    if isinstance(value, Mapping):
        return (turn_of(value, place),)
    if isinstance(value, Sequence) and value:
        return tuple(turn_of(message, place) for message in value)
    raise DataError(
        "a response is neither text nor a list of messages",
        got=f"{place}: {short(repr(value))}",
        remedy='write a text, or [{"role": "assistant", "content": ...}]',
    )


def _of_texts(prompt: Any, chosen: str, rejected: str, place: str) -> Parts:
    """Three texts; or two transcripts or texts that begin alike."""
    if prompt is not None:
        asked = (Turn("user", prompt),) if isinstance(prompt, str) else _turns(prompt, place)
        return asked, (Turn("assistant", chosen),), (Turn("assistant", rejected),)
    if all(_SPEAKER.match(text) for text in (chosen, rejected)):
        return _split(_transcript(chosen), _transcript(rejected), place)
    length = next(
        (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b),
        min(len(chosen), len(rejected)),
    )
    common = chosen[:length]
    cut = max(common.rfind(" "), common.rfind("\n")) + 1  # never inside a word
    if not common[:cut].strip():
        raise DataError(
            "the two responses have no common beginning to be the prompt",
            got=f"{place}: {short(chosen, 40)!r} and {short(rejected, 40)!r}",
            remedy="name the column of the prompt with --prompt_column",
        )
    return (
        (Turn("user", common[:cut]),),
        (Turn("assistant", chosen[cut:]),),
        (Turn("assistant", rejected[cut:]),),
    )


def _transcript(text: str) -> tuple[Turn, ...]:
    pieces = _SPEAKER.split(text)[1:]  # what is before the first speaker is empty
    return tuple(
        Turn(_SPEAKERS[speaker], said.strip())
        for speaker, said in zip(pieces[::2], pieces[1::2], strict=True)
    )


def _of_messages(
    prompt: Any, chosen: tuple[Turn, ...], rejected: tuple[Turn, ...], place: str
) -> Parts:
    """Messages, after a prompt of their own or with it at their head."""
    whole = any(turn.role != "assistant" for turn in (*chosen, *rejected))
    if prompt is None or (isinstance(prompt, str) and whole):
        return _split(chosen, rejected, place)
    asked = (Turn("user", prompt),) if isinstance(prompt, str) else _turns(prompt, place)
    if chosen[: len(asked)] == asked == rejected[: len(asked)]:
        chosen, rejected = chosen[len(asked) :], rejected[len(asked) :]
    return asked, chosen, rejected


def _split(chosen: tuple[Turn, ...], rejected: tuple[Turn, ...], place: str) -> Parts:
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
