"""Tokenised rows of one's own: their labels stay as they are, and nothing else is lost.

What a trainer does not read of such a row must say no more than its tokens and labels do: a mask
that agrees with the labels, positions that count from 0, padding after the last label. Any other
mask, weight or position would change what is learned, and the row is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from alphatoken.data.survey import Columns, Survey
from alphatoken.data.trl_rows import require_unmarked
from alphatoken.errors import InputError
from alphatoken.model.batch import IGNORE, weighs_tokens

__all__ = ["check_tokens", "has_labels", "lost_of_tokens"]

_MASKS = ("completion_mask", "assistant_masks")
"""Columns that TRL makes labels of where a row has none; beside labels they say nothing."""
_BY_TOKEN = ("labels", "attention_mask", "position_ids", "token_type_ids", *_MASKS)


def check_tokens(
    row: Mapping[str, Any],
    number: int,
    *,
    name: str,
    read: Collection[str],
    unread: Sequence[str],
    survey: Survey,
) -> dict[str, Any]:
    """Refuse a tokenised row of which something would be lost; nothing of it is to be changed.

    Arguments and errors are those of :func:`alphatoken.data.trl_rows.check_row`.
    """
    if lost := lost_of_tokens(row, read):
        raise InputError(
            f"a {name} row would be learned otherwise than it says",
            got=f"row {number}: {lost}",
            why="given labels are taken as they are, and positions count from 0",
            remedy="write -100 into 'labels' where nothing is to be learned; give one document "
            "a row, without padding; drop columns that say something else",
        )
    of_row = {column: row.get(column) for column in unread}
    of_row = {column: value for column, value in of_row.items() if not isinstance(value, list)}
    rest = Columns(of_row, f"row {number}")
    if name != "Fisher":
        require_unmarked(rest, name)
    survey.add(", ".join(sorted(read)), notes=[*rest.notes, *_notes(row, read)])
    return {}


def lost_of_tokens(row: Mapping[str, Any], read: Collection[str]) -> str:
    """Fault of a tokenised row: what the trainer would not read, or what is wrong; or ""."""
    length = len(row["input_ids"])
    own = _by_token(row)
    for name in _BY_TOKEN:  # an empty list is no list of numbers
        if row.get(name) is not None:
            own.setdefault(name, row[name])
    for name, numbers in own.items():
        if (name in _BY_TOKEN or weighs_tokens(name)) and len(numbers) != length:
            return f"{name!r} has {len(numbers)} entries, 'input_ids' {length}"
    for name, numbers in own.items():
        if name not in read and (lost := _lost_of_column(name, numbers, row, read)):
            return lost
    return ""


def _lost_of_column(
    name: str, numbers: Sequence[Any], row: Mapping[str, Any], read: Collection[str]
) -> str:
    """What an unread column says of the tokens beside their labels, or ""."""
    if name == "position_ids":
        packed = row.get("seq_lengths") if "seq_lengths" in read else None
        usual = list(numbers) == _usual(packed or [len(numbers)])
        return "" if usual else "'position_ids' do not count from 0"
    if name == "seq_lengths" and len(numbers) > 1:
        return f"'seq_lengths' packs {len(numbers)} documents, which would see each other"
    padding = name == "attention_mask" and 0 in numbers
    if not (padding or (weighs_tokens(name) and name not in _MASKS)):
        return ""
    weighs = [label != IGNORE for label in _labels(row, read)]
    weighs[:1] = numbers[:1]  # nothing predicts the first token
    if padding:
        behind = list(numbers).index(0)
        lost = any(weighs[behind:]) or any(numbers[behind:])
        return "'attention_mask' is 0 before the last label" if lost else ""
    return "" if list(numbers) == weighs else f"{name!r} says something else than the labels"


def _usual(documents: Sequence[int]) -> list[int]:
    """Positions of documents of these lengths, which each count from 0."""
    return [position for length in documents for position in range(length)]


def _notes(row: Mapping[str, Any], read: Collection[str]) -> list[str]:
    """Note about a tokenised row: labels that are other tokens than those they stand at."""
    pairs = zip(_labels(row, read), row["input_ids"], strict=True)
    if all(label in (IGNORE, token) for label, token in pairs):
        return []
    return ["a label is another token than the one at its place (the loss itself shifts labels)"]


def has_labels(row: Mapping[str, Any], read: Collection[str]) -> bool:
    """True if a label of the row is predicted by something, or a collator is to make them."""
    if row.get("labels") == []:  # a collator of the caller's own makes them
        return True
    return any(label != IGNORE for label in _labels(row, read)[1:])


def _labels(row: Mapping[str, Any], read: Collection[str]) -> Sequence[int]:
    """Labels of a tokenised row by TRL's rule: its own as they are, else by the masks, else all.

    Args:
        row: with ``input_ids``.
        read: columns that the trainer reads.
    """
    labels: Sequence[int] | None = row.get("labels")
    if labels is not None:
        return labels
    masks = [row[name] for name in _MASKS if name in read and row.get(name) is not None]
    marked = zip(row["input_ids"], *masks, strict=False)
    return [token if all(marks) else IGNORE for token, *marks in marked]


def _by_token(row: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Columns of numbers, which are of the tokens of the row."""
    lists = {name: own for name, own in row.items() if isinstance(own, (list, tuple))}
    return {k: own for k, own in lists.items() if own and isinstance(own[0], (int, float))}
