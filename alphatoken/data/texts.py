"""Turns to text and tokens, with the chat template or without one; and what of a text is learned.

Templates cut, split and strip the texts that they write. So what is learned of a row is decoded,
and each response must be in it, but for white space and for what the tokenizer itself does to a
text (:func:`lost_text`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alphatoken.data.markers import bare, find_markers, in_tags
from alphatoken.data.messages import THOUGHTS, common_length
from alphatoken.data.rows import Row, Turn
from alphatoken.errors import DataError
from alphatoken.model.batch import IGNORE
from alphatoken.support.resume import content_digest
from alphatoken.support.token_texts import decoded

PLAIN_FORMAT = (
    "the tokenizer's start token (if it uses one); then, turn by turn, the text of a turn that is "
    "not the assistant's followed by a line break, and the text of an assistant turn followed by "
    "the end token (if there is one, and the text does not end with it). All of it is tokenised as "
    "one text; labels are the assistant turns with their end tokens, from the first token that "
    "the text before them would not have"
)
"""Format of rows if the tokenizer has no chat template."""

LEFT_OUT = "text of turns that are not learned is left out"
_OTHERWISE = (
    "the template opens an answer otherwise than it writes one: learned from where the two part"
)
_WHITE_SPACE = "the template changes white space of a response"

# Tokens before what is learned in which a response may begin, where the template opens it.
_LEAD = 64

Encoded = tuple[list[int], list[int], list[str]]
"""Ids and labels of a row, and notes on how it was written."""


# --- without a template, as TRL makes tokens of prompt and completion -----------------------------


def text_pieces(turns: Sequence[Turn], tokenizer: Any, *, verbatim: bool = False) -> list[str]:
    """Text that each turn adds without a template; ``verbatim`` texts stay as they are.

    An end token follows each answer that does not end with one.
    """
    end = getattr(tokenizer, "eos_token", None) or ""
    pieces = []
    for turn in turns:
        has_end = bool(end) and turn.text.rstrip().endswith(end)
        if turn.role == "assistant":
            pieces.append(turn.text.rstrip() if has_end else turn.text + end)
        else:
            pieces.append(turn.text if verbatim or not turn.text else turn.text + "\n")
    return pieces


def whole_text(
    pieces: Sequence[str], labelled: Sequence[int], tokenizer: Any
) -> tuple[list[int], list[int]]:
    """Ids of the text as one, and labels of the pieces ``labelled``.

    A piece begins where the tokens of the whole leave those of the text before it, as in TRL: a
    token over the border belongs to the later piece.
    """
    ids = _tokens("".join(pieces), tokenizer)

    def border(count: int) -> int:
        return common_length(ids, _tokens("".join(pieces[:count]), tokenizer))

    labels = [IGNORE] * len(ids)
    for index in labelled:
        last = index + 1 == len(pieces)
        start, stop = border(index), len(ids) if last else border(index + 1)
        labels[start:stop] = ids[start:stop]
    return ids, labels


def _tokens(text: str, tokenizer: Any) -> list[int]:
    ids = [int(i) for i in tokenizer(text, verbose=False)["input_ids"]]
    start, end = (
        (getattr(tokenizer, f"{name}_id", None), getattr(tokenizer, name, None) or "")
        for name in ("bos_token", "eos_token")
    )
    # A start or end token that the tokenizer adds to a text which has one is left out.
    if start[1] and text.startswith(start[1]) and ids[:2] == [start[0]] * 2:
        ids = ids[1:]
    if end[1] and text.endswith(end[1]) and ids[-2:] == [end[0]] * 2:
        ids = ids if text.endswith(end[1] * 2) else ids[:-1]
    return ids


def open_text(text: str, tokenizer: Any) -> list[int]:
    """Ids of a text that is to be continued: nothing that the tokenizer puts after a text."""
    ids, inner = _tokens(text, tokenizer), bare_ids(tokenizer, text)
    if not inner:
        return ids[:1] if added_start(tokenizer) else []
    while len(ids) > len(inner) and ids[-len(inner) :] != inner:
        ids = ids[:-1]
    return ids


def added_start(tokenizer: Any) -> str:
    """The start token, if the tokenizer puts it before each text of its own accord; or ""."""
    start = getattr(tokenizer, "bos_token", None) or ""
    if not start:
        return ""
    first = list(tokenizer("", verbose=False)["input_ids"])[:1]
    return start if first == [tokenizer.bos_token_id] else ""


def bare_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, and nothing around it."""
    return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


TOKENS_DIGEST = "tokens_digest"
"""Column of a tokenised row with :func:`tokens_digest` by the tokenizer that made the row."""


def tokens_digest(ids: Sequence[int], tokenizer: Any) -> str:
    """Digest of the texts of a row's tokens.

    Two tokenizers have it in common if the row's ids are the same tokens to both, also where one
    of them has more tokens than the other.
    """
    texts = tokenizer.convert_ids_to_tokens(list(ids))
    return content_digest(texts)[:16]


# --- with the chat template -----------------------------------------------------------------------


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
    ids, runs = list(encoded["input_ids"]), marked_runs(encoded["assistant_masks"])
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
    """Labels from the spans by which each assistant turn lengthens the rendered text."""
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
    # A token that crosses a border has characters of the answer, so it is learned with it.
    labels = [
        token if any(start < end and begin < stop for start, stop, _ in spans) else IGNORE
        for token, (begin, end) in zip(ids, encoded["offset_mapping"], strict=True)
    ]
    return ids, labels, [_OTHERWISE] * any(otherwise for *_, otherwise in spans)


def _span(row: Row, index: int, text: str, tokenizer: Any) -> tuple[int, int, bool]:
    """Characters [start, end) of an assistant turn in the text; True if it is opened otherwise."""
    question, answer = (replace(row, turns=row.turns[:count]) for count in (index, index + 1))
    through = render(answer, tokenizer)
    before = render(question, tokenizer, generation=True) if index else _first(through, tokenizer)
    start = len(before)
    # Where the template opens an answer otherwise than it writes one (with a thought, say), the
    # turn begins where the two part, as in TRL.
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
                else "the conversation starts with the assistant, and is not opened as answers are"
            ),
            why="labels would fall on tokens that are not the response",
        )
    content, answer_text = row.turns[index].text, through[start:].rstrip()
    # White space after the template's end marker is no part of the answer. Without an end marker
    # it may be the content's own, and stays.
    if content.strip() and answer_text.endswith(content.rstrip()):
        return start, len(through), otherwise
    return start, start + len(answer_text), otherwise


def _first(text: str, tokenizer: Any) -> str:
    """A conversation that starts with an answer, up to there; "" where that cannot be told."""
    question = Row(0, "a question", (Turn("user", "a"),))
    whole, before = render(question, tokenizer, generation=True), render(question, tokenizer)
    opening = whole[len(before) :] if whole.startswith(before) else ""
    return text[: text.index(opening) + len(opening)] if opening and opening in text else ""


# --- tokens back to text --------------------------------------------------------------------------


def lost_text(
    parts: Sequence[tuple[int, str]], ids: Sequence[int], labels: Sequence[int], tokenizer: Any
) -> tuple[int, str, str] | None:
    """The first part that is not in what is learned: its turn, its text, and what is learned.

    A part is looked for in the labels of its turn, but for white space: as it is, and as the
    tokenizer writes it by itself. It may begin before them, where the prompt opens a thought.

    Args:
        parts: texts to look for, each with the number of its turn, in their order.
        ids: of the row.
        labels: of the row, unshifted.
        tokenizer: of both.
    """
    spans = marked_runs([label != IGNORE for label in labels])
    turns = list(dict.fromkeys(turn for turn, _ in parts))
    runs = [decoded(tokenizer, ids[start:stop]) for start, stop in spans]
    apart = len(runs) == len(turns)  # otherwise turns touch, and are looked through together
    for turn, part in parts:
        number = turns.index(turn)
        own = slice(number, number + 1) if apart else slice(None)
        text = "".join(runs[own])
        forms = [bare(part)]
        if forms[0] in bare(text):
            continue
        forms.append(bare(decoded(tokenizer, bare_ids(tokenizer, part))))
        leads = [decoded(tokenizer, ids[max(0, at - _LEAD) : at]) for at, _ in spans[own]]
        within = zip(leads, runs[own], strict=True)
        if not any(_ends_in(bare(run), bare(lead), form) for lead, run in within for form in forms):
            return turn, part, text
    return None


def _ends_in(run: str, lead: str, text: str) -> bool:
    place = (lead + run).rfind(text)
    # In the lead alone it is not learned: it must at least end in the run.
    return place >= 0 and place + len(text) > len(lead)


def marked_runs(marks: Any) -> list[tuple[int, int]]:
    """First and last place (exclusive) of each run of true marks, of a sequence or an array."""
    edges = np.flatnonzero(np.diff(np.asarray(marks, np.int8), prepend=0, append=0))
    return [(start, stop) for start, stop in edges.reshape(-1, 2).tolist()]
