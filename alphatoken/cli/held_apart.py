"""Rows that are measured, and all others without those that repeat one of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard, TypeVar

from alphatoken.data import Example, Pair, leak_keys
from alphatoken.data.split import token_keys
from alphatoken.data.survey import said_places
from alphatoken.errors import DataError, counted
from alphatoken.model.batch import IGNORE

Item = Example | Pair
"""An example to train on; other rows are compared with its ``row``."""
T = TypeVar("T", bound=Item)


def take_apart(
    held_out: Sequence[Item], what: str, others: Mapping[str, list[T]], by: str
) -> list[str]:
    """Take what repeats the rows ``held_out`` out of the others, in place; say how much, by name.

    Args:
        held_out: rows that are measured.
        what: one of them is called.
        others: name -> rows.
        by: option ``leak_key``.

    Raises:
        DataError: nothing is left of one of the others.
    """
    notes = []
    for name, items in others.items():
        kept, left = apart_from(held_out, items, by)
        if left:
            staying = {id(item) for item in kept}
            places = [item.row.place for item in items if id(item) not in staying]
            told = counted(left, f"{name} rows repeat {what} or its prompt and were removed")
            notes.append(f"{told}{said_places(places, left)}.")
        items[:] = kept
        if not items:
            raise DataError(
                f"no {name} row is left",
                got=f"all {left} repeat {what}",
                why="what is measured on rows that were seen rewards learning by heart",
                remedy="other rows for one of the two",
            )
    return notes


def apart_from(held_out: Sequence[Item], items: Sequence[T], by: str) -> tuple[list[T], int]:
    """Items that repeat none of the rows ``held_out``, and how many do."""
    keys = {key for item in held_out for key in item_keys(item)}
    repeats = _same_tokens(held_out, by) if any(map(came_as_tokens, items)) else None
    kept = [
        item
        for item in items
        if keys.isdisjoint(item_keys(item, by))
        and not (repeats and came_as_tokens(item) and repeats(item))
    ]
    return kept, len(items) - len(kept)


def item_keys(item: Item, by: str = "prompt") -> set[str]:
    """``leak_keys`` of a row and, where it is encoded here, those of its tokens."""
    tokens = item if isinstance(item, Example) else item.written
    return leak_keys(item.row, by) | (set() if tokens is None else token_keys(tokens, by))


def came_as_tokens(item: Item) -> TypeGuard[Example]:
    """True of a row that came as tokens."""
    return isinstance(item, Example) and item.decoded


def _same_tokens(held_out: Sequence[Item], by: str) -> Callable[[Example], bool]:
    """Tells whether a row of tokens is one of these rows, or begins with the prompt of one.

    The texts of such a row are decoded, with what the chat template writes around them. Its first
    label may be behind the first response token: `alphatoken score --rows tokens` drops some.
    """
    examples = [item for item in held_out if isinstance(item, Example)]
    wholes = {_bytes(one.input_ids) for one in examples}
    prompts = [one.input_ids[: _first_label(one)] for one in examples if by == "prompt"]
    # A start token alone is no prompt.
    starts = {_bytes(prompt) for prompt in prompts if len(prompt) > 1}
    lengths = sorted({len(start) for start in starts})

    def repeats(row: Example) -> bool:
        whole, end = _bytes(row.input_ids), len(_bytes(row.input_ids[: _first_label(row)]))
        return whole in wholes or any(whole[:n] in starts for n in lengths if n <= end)

    return repeats


def _first_label(item: Example) -> int:
    """Number of the first token with a label; the length of a row without one."""
    labels = item.labels
    return next((i for i, label in enumerate(labels) if label != IGNORE), len(labels))


def _bytes(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()
