"""Conversations to tokens through the chat template, and the assistant's part found in them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alphatoken.data.markers import find_markers, in_tags
from alphatoken.data.messages import THOUGHTS, common_length
from alphatoken.data.plain import IGNORE
from alphatoken.data.rows import Row, Turn
from alphatoken.errors import DataError

__all__ = ["Encoded", "encode_chat", "messages_of", "render"]

_OTHERWISE = (
    "the template opens an answer otherwise than it writes one: learned from where the two part"
)
_WHITE_SPACE = "the template changes white space of a response"

Encoded = tuple[list[int], list[int], list[str]]
"""Ids and labels of a row, and notes on how it was written."""


def messages_of(turns: Sequence[Turn], tokenizer: Any = None) -> list[dict[str, str]]:
    """Turns as a chat template takes them.

    A thought stands under each name that templates know, or in the content, where the template of
    this tokenizer looks for it there alone.
    """
    inside = tokenizer is not None and find_markers(tokenizer).tags_only
    return [
        {"role": turn.role, "content": in_tags(turn.thought, turn.text)}
        if turn.thought and inside
        else {"role": turn.role, "content": turn.text}
        | (dict.fromkeys(THOUGHTS, turn.thought) if turn.thought else {})
        for turn in turns
    ]


def render(row: Row, tokenizer: Any, generation: bool = False) -> str:
    """The conversation as the chat template writes it, or its error, named by row."""
    try:
        text = tokenizer.apply_chat_template(
            messages_of(row.turns, tokenizer), tokenize=False, add_generation_prompt=generation
        )
    except Exception as error:  # templates raise whatever their author wrote
        raise DataError(
            "the chat template refuses the conversation",
            got=f"{row.place}: {type(error).__name__}: {error}",
            remedy="mend the row (order of roles?)",
        ) from None
    return str(text)


def encode_chat(row: Row, labelled: Sequence[int], text: str, tokenizer: Any) -> Encoded:
    """Ids of a conversation, labels of its turns ``labelled``, and notes on how it was written.

    Args:
        row: the conversation.
        labelled: numbers of assistant turns.
        text: the conversation as the chat template writes it.
        tokenizer: with the template.

    Raises:
        DataError: the assistant's part cannot be told from the rest.
    """
    tags = set(re.findall(r"{%-?\s*(\w+)", str(tokenizer.chat_template)))
    if "generation" in tags:
        ids, labels, notes = *_marked(row, labelled, tokenizer), list[str]()
    else:
        ids, labels, notes = _spanned(row, labelled, text, tokenizer)
    parts = (part for i in labelled for part in (row.turns[i].thought, row.turns[i].text))
    if any(part.strip("\n") not in text for part in parts):
        notes.append(_WHITE_SPACE)
    return ids, labels, notes


def _marked(row: Row, labelled: Sequence[int], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Labels from the template's own generation marks, one marked run an assistant turn."""
    turns = row.turns
    encoded = tokenizer.apply_chat_template(
        messages_of(turns, tokenizer),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    ids, marks = list(encoded["input_ids"]), np.asarray(encoded["assistant_masks"], np.int8)
    runs = np.flatnonzero(np.diff(marks, prepend=0, append=0)).reshape(-1, 2).tolist()
    wanted = [index for index, turn in enumerate(turns) if turn.role == "assistant"]
    if labelled and len(runs) != len(wanted):
        raise DataError(
            "the chat template marks other spans than the assistant turns",
            got=f"{row.place}: {len(runs)} marked spans, {len(wanted)} assistant turns",
            remedy="check the template's generation marks",
        )
    labels = [IGNORE] * len(ids)
    for turn, (start, end) in zip(wanted, runs, strict=False):
        if turn in labelled:
            labels[start:end] = ids[start:end]
    return ids, labels


def _spanned(row: Row, labelled: Sequence[int], text: str, tokenizer: Any) -> Encoded:
    """Labels from the spans by which each assistant turn lengthens the rendered text.

    A token belongs to each span that it has a character of.
    """
    spans = [_span(row, index, text, tokenizer) for index in labelled]
    try:
        encoded = tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
    except NotImplementedError:
        raise DataError(
            "the tokenizer does not say which characters a token covers",
            got=f"{type(tokenizer).__name__}, {row.place}",
            why="tokens of an assistant turn cannot be told from others",
            remedy="use the fast tokenizer",
        ) from None
    ids = [int(i) for i in encoded["input_ids"]]
    labels = [
        token if any(start < end and begin < stop for start, stop, _ in spans) else IGNORE
        for token, (begin, end) in zip(ids, encoded["offset_mapping"], strict=True)
    ]
    return ids, labels, [_OTHERWISE] * any(otherwise for *_, otherwise in spans)


def _span(row: Row, index: int, text: str, tokenizer: Any) -> tuple[int, int, bool]:
    """Characters [start, end) of assistant turn ``index`` in the whole rendered ``text``.

    Where the template opens an answer otherwise than it writes one (with a thought, say), the turn
    begins where the two part, as in TRL; the third is then True.
    """
    question, answer = (replace(row, turns=row.turns[:count]) for count in (index, index + 1))
    before = render(question, tokenizer, generation=True) if index else ""
    through = render(answer, tokenizer)
    start = len(before)
    if otherwise := bool(index) and not through.startswith(before):
        same = through.startswith(render(question, tokenizer))
        start = common_length(before, through) if same else 0
    if not (start and text.startswith(through)):
        raise DataError(
            "the chat template gives no consistent assistant span",
            got=f"{row.place}, turn {index + 1}: "
            + (
                "the text rendered up to this turn is not a prefix of the whole"
                if index
                else "the conversation starts with the assistant"
            ),
            why="labels would fall on tokens that are not the response",
        )
    return start, _trim(through, start, row.turns[index].text), otherwise


def _trim(text: str, start: int, content: str) -> int:
    """End of the span without white space that the template writes after its end marker."""
    stripped = text[start:].rstrip()
    if content.strip() and stripped.endswith(
        content.rstrip()
    ):  # no end marker: the white space may be the content's
        return len(text)
    return start + len(stripped)
