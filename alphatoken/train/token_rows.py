"""Tokenised rows of one's own: given labels are taken as they are, and nothing else is lost.

What a trainer does not read of such a row must say no more than its tokens and labels do: a mask
that agrees with the labels, positions that count from 0, padding after the last label. Any other
mask, weight or position would change what is learned, and the row is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from alphatoken.model.batch import IGNORE

__all__ = ["labels_of_tokens", "lost_of_tokens", "says_of_tokens"]

_MASKS = ("completion_mask", "assistant_masks")
"""Columns that TRL makes labels of where a row has none; beside labels they say nothing."""
_BY_TOKEN = ("labels", "attention_mask", "position_ids", "token_type_ids", *_MASKS)
_WEIGHS = re.compile("(^|_)(loss|masks?|weights?)(_|$)")
"""Names of columns with a weight for each token."""
_WEIGHS_NOTHING = {"attention_mask", "special_tokens_mask", *_MASKS}


def labels_of_tokens(row: Mapping[str, Any], read: Collection[str]) -> list[int]:
    """Labels of a tokenised row by TRL's rule: given ones as they are, else by the masks, else all.

    Args:
        row: with ``input_ids``.
        read: columns that the trainer reads.
    """
    if row.get("labels") is not None:
        return list(row["labels"])
    masks = [row[name] for name in _MASKS if name in read and row.get(name) is not None]
    marked = zip(row["input_ids"], *masks, strict=False)
    return [token if all(marks) else IGNORE for token, *marks in marked]


def lost_of_tokens(row: Mapping[str, Any], read: Collection[str]) -> str:
    """What a tokenised row says that the trainer would not read, or what is wrong, or ""."""
    length = len(row["input_ids"])
    for name, own in _by_token(row):
        if (name in _BY_TOKEN or _WEIGHS.search(name)) and len(own) != length:
            return f"{name!r} has {len(own)} entries, 'input_ids' {length}"
    labels = labels_of_tokens(row, read)
    weighs = [i > 0 and label != IGNORE for i, label in enumerate(labels)]
    documents = row.get("seq_lengths") or () if "seq_lengths" in read else ()
    for name, own in _by_token(row):
        if name in read:
            continue
        if name == "attention_mask" and not _is_padding(own, weighs):
            return "'attention_mask' is 0 before the last label"
        if name == "position_ids" and list(own) != _usual(documents or [length]):
            return "'position_ids' do not count from 0"
        if name == "seq_lengths" and len(own) > 1:
            return f"'seq_lengths' packs {len(own)} documents, which would see each other"
        if _WEIGHS.search(name) and name not in _WEIGHS_NOTHING and list(own)[1:] != weighs[1:]:
            return f"{name!r} says something else than the labels"
    return ""


def _usual(documents: Sequence[int]) -> list[int]:
    """Positions of documents of these lengths, which each count from 0."""
    return [position for length in documents for position in range(length)]


def says_of_tokens(row: Mapping[str, Any], read: Collection[str]) -> str:
    """What is noted of a tokenised row: labels that are other tokens than those they stand at."""
    pairs = zip(labels_of_tokens(row, read), row["input_ids"], strict=True)
    if all(label in (IGNORE, token) for label, token in pairs):
        return ""
    return "a label is another token than the one at its place (the loss itself shifts labels)"


def _by_token(row: Mapping[str, Any]) -> list[tuple[str, Sequence[Any]]]:
    """Columns of numbers, which are of the tokens of the row."""
    lists = ((name, own) for name, own in row.items() if isinstance(own, (list, tuple)))
    return [(name, own) for name, own in lists if all(isinstance(n, (int, float)) for n in own[:1])]


def _is_padding(mask: Sequence[int], weighs: Sequence[bool]) -> bool:
    """True if what the mask hides stands behind everything that is learned."""
    hidden = next((i for i, own in enumerate(mask) if not own), len(mask))
    return not any(weighs[hidden:]) and not any(mask[hidden:])
