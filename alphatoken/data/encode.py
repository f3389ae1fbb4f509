"""Conversations to token ids and labels.

Where the tokenizer has a chat template, it writes the text and the assistant's part is found in
it: from the template's own ``{% generation %}`` marks, or else by rendering growing prefixes of
the conversation, which must agree with each other. Where it has none, one plain format holds:
see :data:`PLAIN_FORMAT`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from alphatoken.data.rows import Row, Turn
from alphatoken.errors import ConfigError, DataError, require_choice

__all__ = [
    "PLAIN_FORMAT",
    "EncodeOptions",
    "EncodeReport",
    "Example",
    "encode_prompt",
    "encode_row",
    "encode_rows",
    "messages_of",
]

IGNORE = -100

_SKIP = "have such rows passed over (--on_bad_rows skip; not in evaluate and merge)"
_WITHOUT = "leave the template out (--no_chat_template; --no_chat in evaluate)"

PLAIN_FORMAT = (
    "the tokenizer's start token (if it uses one); then, turn by turn, the text of a turn that is "
    "not the assistant's followed by a line break, and the text of an assistant turn followed by "
    "the end token (if there is one). Each turn is tokenised by itself; labels are the assistant "
    "turns with their end tokens"
)
"""Format of rows if the tokenizer has no chat template."""


@dataclass(frozen=True)
class EncodeOptions:
    """Options for turning rows into tokens.

    Attributes:
        max_length: longest sequence in tokens, None for no limit; a longer row is cut at its end
            and counted.
        on_empty: what happens to a row without any response token (also when truncation took
            all of them): "error" stops and names the row, "skip" drops and counts it.
        turns: label "all" assistant turns, or the "last" one only.
        chat_template: use the tokenizer's chat template where it has one.
        vocabulary: rows of the model's embedding, which every token must have one of; None is not
            looked at.
        on_bad_rows: what happens to a row that cannot be written as tokens (a template refuses it,
            the embedding lacks a token): "error" stops and names it, "skip" drops and counts it.
    """

    max_length: int | None = None
    on_empty: str = "error"
    turns: str = "all"
    chat_template: bool = True
    vocabulary: int | None = None
    on_bad_rows: str = "error"

    def __post_init__(self) -> None:
        """Check the choices once."""
        for name, allowed in (
            ("on_empty", ("error", "skip")),
            ("turns", ("all", "last")),
            ("on_bad_rows", ("error", "skip")),
        ):
            require_choice(name, getattr(self, name), allowed)
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(
                "max_length must be at least 2",
                got=str(self.max_length),
                why="a token is valued only where another one precedes it",
            )


@dataclass(frozen=True)
class Example:
    """One encoded row: ids and unshifted labels of one length, -100 where nothing is learned."""

    row: Row
    input_ids: list[int]
    labels: list[int]
    tokens_cut: int = 0

    @property
    def response_tokens(self) -> int:
        """Labels that some position predicts (index 0 never is one)."""
        return sum(label != IGNORE for label in self.labels[1:])


@dataclass
class EncodeReport:
    """Counts of encoded, cut and dropped rows."""

    rows: int = 0
    examples: int = 0
    tokens: int = 0
    response_tokens: int = 0
    truncated_rows: int = 0
    truncated_tokens: int = 0
    skipped_empty: int = 0
    skipped_bad: int = 0
    format: str = ""
    first_skipped: list[str] = field(default_factory=list)

    def add(self, other: EncodeReport) -> None:
        """Count what happened to further rows as well."""
        for name, value in vars(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        self.format = self.format or other.format
        self.first_skipped = [*self.first_skipped, *other.first_skipped][:10]


def encode_rows(
    rows: Sequence[Row], tokenizer: Any, options: EncodeOptions | None = None
) -> tuple[list[Example], EncodeReport]:
    """Encode rows in their order; see :class:`EncodeOptions` for what is dropped, and when.

    Raises:
        DataError: an empty response, or a template that gives no consistent
            assistant span; the message names the row.
    """
    options = options or EncodeOptions()
    report = EncodeReport(rows=len(rows), format=format_name(tokenizer, options))
    examples = []
    for row in rows:
        try:
            ids, labels = encode_row(row, tokenizer, options)
        except DataError as error:
            if options.on_bad_rows == "error":
                raise
            report.add(EncodeReport(skipped_bad=1, first_skipped=[f"{row.place}: {error}"]))
            continue
        limit = options.max_length or len(ids)
        example = Example(row, ids[:limit], labels[:limit], max(0, len(ids) - limit))
        if example.response_tokens:
            examples.append(example)
            report.truncated_rows += example.tokens_cut > 0
            report.truncated_tokens += example.tokens_cut
            report.tokens += len(example.input_ids)
            report.response_tokens += example.response_tokens
            continue
        if options.on_empty == "error":
            raise _no_response(example, len(ids), options.max_length)
        report.add(EncodeReport(skipped_empty=1, first_skipped=[f"{row.place}: empty"]))
    report.examples = len(examples)
    return examples, report


def _no_response(example: Example, length: int, limit: int | None) -> DataError:
    """There was no response, or the prompt has left no room for it."""
    if example.tokens_cut:
        return DataError(
            "the prompt of a row leaves no room for its response",
            got=f"{example.row.place}: {length} tokens, all of the response beyond the limit of "
            f"{limit}",
            why="there is no token to value",
            remedy="a larger --max_length (max_length of EncodeOptions), or drop such rows with "
            "--on_empty skip (on_empty='skip')",
        )
    return DataError(
        "a row has an empty response",
        got=f"{example.row.place}: {len(example.row.response)} characters of response",
        why="there is no token to value",
        remedy="mend the row, or drop such rows with --on_empty skip (on_empty='skip')",
    )


def format_name(tokenizer: Any, options: EncodeOptions) -> str:
    """Name of the format of the rows: "chat template" or the plain format, spelled out."""
    if _uses_template(tokenizer, options):
        return "the tokenizer's chat template"
    return f"plain: {PLAIN_FORMAT}"


def _uses_template(tokenizer: Any, options: EncodeOptions) -> bool:
    return options.chat_template and getattr(tokenizer, "chat_template", None) is not None


def encode_row(
    row: Row, tokenizer: Any, options: EncodeOptions | None = None
) -> tuple[list[int], list[int]]:
    """Ids and labels of one row, before any truncation.

    Turns after the last assistant turn are left out: no label can see them. Turns that the data
    mark as not to be trained on have no labels.

    Raises:
        DataError: the template refuses the conversation, or does not show all of it, or its
            prefixes do not agree; a token is beyond the model's embedding.
    """
    options = options or EncodeOptions()
    last = max(index for index, turn in enumerate(row.turns) if turn.role == "assistant")
    turns = row.turns[: last + 1]
    labelled = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    if options.turns == "last":
        labelled = labelled[-1:]
    # A template would dress an empty response in markers; with no text there is nothing to learn.
    said = [i for i in labelled if turns[i].learned and (turns[i].text + turns[i].thought).strip()]
    row = replace(row, turns=turns)
    require_shown(row, tokenizer, options)
    if not _uses_template(tokenizer, options) or len(turns) == 1:  # plain text is no conversation
        ids, labels = _plain(turns, said, tokenizer)
    elif "generation" in _block_tags(tokenizer):
        ids, labels = _marked(row, said, tokenizer)
    else:
        ids, labels = _templated(row, said, tokenizer)
    _require_known(ids, row, tokenizer, options)
    return ids, labels


def _require_known(ids: Sequence[int], row: Row, tokenizer: Any, options: EncodeOptions) -> None:
    """Check that the model's embedding has a row for each token."""
    if options.vocabulary is None or max(ids, default=0) < options.vocabulary:
        return
    token = max(ids)
    text = getattr(tokenizer, "convert_ids_to_tokens", str)(token)
    raise DataError(
        "a token has no row in the model's embedding",
        got=f"{row.place}: {text!r} (id {token}) of the tokenizer "
        f"{getattr(tokenizer, 'name_or_path', '')}; {options.vocabulary} rows",
        why="it was added to the tokenizer, and not to the model",
        remedy="the tokenizer that the model was trained with; or save the model after "
        f"resize_token_embeddings(len(tokenizer)); or {_SKIP}",
    )


def encode_prompt(row: Row, tokenizer: Any, options: EncodeOptions | None = None) -> list[int]:
    """Ids of everything before the first assistant turn, ready for the model to continue.

    Raises:
        DataError: the prompt is empty and the tokenizer has no start token to begin from; as of
            :func:`encode_row`.
    """
    options = options or EncodeOptions()
    first = next(i for i, turn in enumerate(row.turns) if turn.role == "assistant")
    row = replace(row, turns=row.turns[:first])
    require_shown(row, tokenizer, options)
    if _uses_template(tokenizer, options) and row.turns:
        ids = _ids(tokenizer, _rendered(row, tokenizer, generation=True))
    else:
        ids, _ = _plain(row.turns, [], tokenizer)
    if not ids:
        raise DataError(
            "a row has an empty prompt",
            got=row.place,
            why="there is nothing for the model to continue",
            remedy=f"drop the row, or {_SKIP}",
        )
    _require_known(ids, row, tokenizer, options)
    return ids


def _plain(
    turns: Sequence[Turn], labelled: Sequence[int], tokenizer: Any
) -> tuple[list[int], list[int]]:
    ids = _start(tokenizer)
    labels = [IGNORE] * len(ids)
    for index, turn in enumerate(turns):
        if turn.role == "assistant":
            piece = _ids(tokenizer, turn.text) if turn.text else []
            end = getattr(tokenizer, "eos_token_id", None)
            if end is not None:
                piece.append(int(end))
        else:
            piece = _ids(tokenizer, turn.text + "\n") if turn.text else []
        ids += piece
        labels += piece if index in labelled else [IGNORE] * len(piece)
    return ids, labels


def _start(tokenizer: Any) -> list[int]:
    """The start token, if the tokenizer puts one before a text of its own accord."""
    start = getattr(tokenizer, "bos_token_id", None)
    first = list(tokenizer("")["input_ids"])[:1]
    return [int(start)] if start is not None and first == [start] else []


def _ids(tokenizer: Any, text: str) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def messages_of(turns: Sequence[Turn]) -> list[dict[str, str]]:
    """Turns as a chat template takes them; a thought under both names that templates know."""
    return [
        {"role": turn.role, "content": turn.text}
        | ({"reasoning_content": turn.thought, "thinking": turn.thought} if turn.thought else {})
        for turn in turns
    ]


def require_shown(row: Row, tokenizer: Any, options: EncodeOptions) -> None:
    """Refuse a row whose thoughts are not in the text that is made of it."""
    if not any(turn.thought for turn in row.turns):
        return
    bare = replace(row, turns=tuple(replace(turn, thought="") for turn in row.turns))
    asked = any(turn.role != "assistant" for turn in row.turns)
    shown = asked and _uses_template(tokenizer, options)
    if shown and _rendered(row, tokenizer) != _rendered(bare, tokenizer):
        return
    raise DataError(
        "the thoughts of a row would be lost",
        got=row.place,
        why="the chat template does not write them" if shown else "no chat template is used",
        remedy="a tokenizer whose template writes them, or write them into the content",
    )


def _rendered(row: Row, tokenizer: Any, generation: bool = False) -> str:
    """The conversation as the chat template writes it, or its error, named by row."""
    try:
        text = tokenizer.apply_chat_template(
            messages_of(row.turns), tokenize=False, add_generation_prompt=generation
        )
    except Exception as error:  # templates raise whatever their author wrote
        raise DataError(
            "the chat template refuses the conversation",
            got=f"{row.place}: {type(error).__name__}: {error}",
            remedy=f"mend the row (order of roles?), {_SKIP}, or {_WITHOUT}",
        ) from None
    return str(text)


def _block_tags(tokenizer: Any) -> set[str]:
    return set(re.findall(r"{%-?\s*(\w+)", str(tokenizer.chat_template)))


def _marked(row: Row, labelled: Sequence[int], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Labels from the template's own generation marks, one marked run an assistant turn."""
    turns = row.turns
    _rendered(row, tokenizer)  # its errors, named by row
    encoded = tokenizer.apply_chat_template(
        messages_of(turns),
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
            remedy=f"check the template's generation marks, or {_WITHOUT}",
        )
    labels = [IGNORE] * len(ids)
    for turn, (start, end) in zip(wanted, runs, strict=False):
        if turn in labelled:
            labels[start:end] = ids[start:end]
    return ids, labels


def _templated(row: Row, labelled: Sequence[int], tokenizer: Any) -> tuple[list[int], list[int]]:
    """Labels from the spans by which each assistant turn lengthens the rendered text.

    A token belongs to the span that its last character lies in.
    """
    text = _rendered(row, tokenizer)
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
            remedy=f"use the fast tokenizer, or {_WITHOUT}",
        ) from None
    ids = [int(i) for i in encoded["input_ids"]]
    labels = [
        token if any(start < end <= stop for start, stop in spans) else IGNORE
        for token, (_, end) in zip(ids, encoded["offset_mapping"], strict=True)
    ]
    return ids, labels


def _span(row: Row, index: int, text: str, tokenizer: Any) -> tuple[int, int]:
    """Characters [start, end) of assistant turn ``index`` in the whole rendered ``text``."""
    asked, said = (replace(row, turns=row.turns[:count]) for count in (index, index + 1))
    before = _rendered(asked, tokenizer, generation=True) if index else ""
    through = _rendered(said, tokenizer)
    if not (index and through.startswith(before) and text.startswith(through)):
        raise DataError(
            "the chat template gives no consistent assistant span",
            got=f"{row.place}, turn {index + 1}: "
            + (
                "the text rendered up to this turn is not a prefix of the whole"
                if index
                else "the conversation starts with the assistant"
            ),
            why="labels would fall on tokens that are not the response",
            remedy="label the last turn only (--turns last), split the conversation into one row "
            f"a response, or {_WITHOUT}",
        )
    return len(before), _trim(through, len(before), row.turns[index].text)


def _trim(text: str, start: int, content: str) -> int:
    """End of the span without white space that the template writes after its end marker."""
    stripped = text[start:].rstrip()
    if content.strip() and stripped.endswith(
        content.rstrip()
    ):  # no end marker: the white space may be the content's
        return len(text)
    return start + len(stripped)
