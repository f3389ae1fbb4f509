"""Conversations to token ids and labels.

Where the tokenizer has a chat template, it writes the text and the assistant's part is found in
it: from the template's own ``{% generation %}`` marks, or else by rendering growing prefixes of
the conversation, which must agree with each other. Where it has none, one plain format holds:
see :data:`PLAIN_FORMAT`. A prompt and response that hold the template's own markers are taken as
they are.

Whatever wrote the text, the text of each response must be found in what is learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from alphatoken.data.markers import (
    bare,
    control_notes,
    find_markers,
    in_tags,
    is_filled,
    verbatim_note,
)
from alphatoken.data.messages import THOUGHTS
from alphatoken.data.rows import KEEP_MARKS, UNLEARNED, Row, Turn
from alphatoken.data.survey import Survey
from alphatoken.data.texts import (
    LEFT_OUT,
    PLAIN_FORMAT,
    Encoded,
    bare_ids,
    encode_chat,
    lost_text,
    open_text,
    render,
    text_pieces,
    whole_text,
)
from alphatoken.errors import DataError, counted, short
from alphatoken.model.batch import IGNORE
from alphatoken.support.options import check_options, option, with_options_in_docstring

NO_RESPONSE = "no response within the length"
"""Reason for which a row is left out whose response begins beyond the length."""

EMPTY = "the response is empty"
"""Reason for which a row is left out that has no response at any length."""

_NAMED = 3
"""Rows that are named of those that are left out."""

_SKIP = "have such rows passed over (--on_bad_rows skip; not in evaluate and merge)"
_WITHOUT = (
    "leave the template out (--no_chat_template; --no_chat in evaluate; chat_template=False of "
    "EncodeOptions)"
)


@with_options_in_docstring
@dataclass(frozen=True)
class EncodeOptions:
    """Options for turning rows into tokens.

    Raises:
        ConfigError: an option outside of its choices or its range.
    """

    max_length: int | None = option(
        None,
        "longest sequence in tokens; a longer row is cut at its end and counted",
        at_least=2,
        why="a token is valued only where another one precedes it",
    )
    on_empty: str = option(
        "error",
        "rows without any response token (also when truncation took all of them): stop and name "
        "the row, or drop and count it",
        choices=("error", "skip"),
    )
    turns: str = option("all", "assistant turns to label", choices=("all", "last"))
    chat_template: bool = option(True, "use the tokenizer's chat template where it has one")
    vocabulary: int | None = option(
        None, "rows of the model's embedding, of which every token must have one; None: unchecked"
    )
    on_bad_rows: str = option(
        "error",
        "rows that cannot be written as tokens (a template refuses one, the embedding lacks a "
        "token): stop and name the row, or drop and count it",
        choices=("error", "skip"),
    )

    def __post_init__(self) -> None:
        """Check choices and range."""
        check_options(self)


@dataclass(frozen=True)
class Example:
    """One encoded row: ids and unshifted labels of one length, -100 where nothing is learned."""

    row: Row
    input_ids: list[int]
    labels: list[int]
    tokens_cut: int = 0
    notes: tuple[str, ...] = ()
    """Notes on how the row was written, for the survey of its source."""
    weights: list[float] | None = None
    """Weight of each token by the row, where weights are read."""
    left_turns: tuple[tuple[str, str], ...] = ()
    """Turns of which nothing is learned though they may be meant to be: reason and place."""
    decoded: bool = False
    """The row came as tokens, of which its texts are made."""

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
    """Rows without a response token, those of ``skipped_cut`` among them."""
    skipped_cut: int = 0
    """Rows whose response begins beyond the length."""
    skipped_bad: int = 0
    format: str = ""
    first_skipped: list[str] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    """Notes on how rows were written, and of how many rows: texts that stay as they are, control
    tokens in texts, text that the template leaves out."""

    def add(self, other: EncodeReport) -> None:
        """Count what happened to further rows as well."""
        for name, value in vars(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        self.format = self.format or other.format
        self.first_skipped = [*self.first_skipped, *other.first_skipped][:10]
        for note, count in other.notes.items():
            self.notes[note] = self.notes.get(note, 0) + count


def prompt_tokens(ids: Sequence[int], labels: Sequence[int]) -> tuple[int, ...]:
    """The tokens before the first label; of a row without a prompt all of it.

    >>> prompt_tokens([1, 5, 6, 7], [-100, -100, 6, 7]), prompt_tokens([1, 6], [-100, 6])
    ((1, 5), (1, 6))
    """
    first = next((place for place, label in enumerate(labels) if label != IGNORE), 0)
    return tuple(ids[:first] if first > 1 else ids)  # a start token alone is no prompt


def encode_rows(
    rows: Sequence[Row],
    tokenizer: Any,
    options: EncodeOptions | None = None,
    survey: Survey | None = None,
) -> tuple[list[Example], EncodeReport]:
    """Encode rows in their order; see :class:`EncodeOptions` for what is dropped, and when.

    Notes on the rows stand in the report, and are logged (``alphatoken.data``).

    Args:
        rows: of any source.
        tokenizer: of the model.
        options: how rows become tokens.
        survey: counts the notes and the rows that are dropped; its caller then logs them.

    Raises:
        DataError: an empty response, a template that gives no consistent assistant span, or a
            response whose text is not in what would be learned; the message names the row.
    """
    options = options or EncodeOptions()
    template = _uses_template(tokenizer, options)
    how = "the tokenizer's chat template" if template else f"plain: {PLAIN_FORMAT}"
    report = EncodeReport(rows=len(rows), format=how)
    counts = survey_of(rows) if survey is None else survey
    examples = []
    for row in rows:
        try:
            whole = encode_example(row, tokenizer, options)
        except DataError as error:
            if options.on_bad_rows == "error":
                raise
            report.add(EncodeReport(skipped_bad=1, first_skipped=[f"{row.place}: {error}"]))
            counts.leave_out(error.what, row.place)
            continue
        notes = dict.fromkeys(whole.notes, 1)
        report.add(EncodeReport(notes=notes))
        counts.notes.update(notes)
        example = _cut(whole, options.max_length)
        if example.response_tokens:
            examples.append(example)
            counts.leave_out_turns(whole.left_turns)
            report.truncated_rows += example.tokens_cut > 0
            report.truncated_tokens += example.tokens_cut
            report.tokens += len(example.input_ids)
            report.response_tokens += example.response_tokens
            continue
        if options.on_empty == "error":
            raise _no_response(example, options.max_length)
        cut = whole.response_tokens > 0
        reason = NO_RESPONSE if cut else EMPTY if row.is_learned else UNLEARNED
        first = [f"{row.place}: {reason}"]
        report.add(EncodeReport(skipped_empty=1, skipped_cut=int(cut), first_skipped=first))
        counts.leave_out(reason, row.place)
    report.examples = len(examples)
    if survey is None and (report.notes or counts.left_turns):
        counts.log()
    return examples, report


def about_encoding(name: str, report: EncodeReport) -> list[str]:
    """Sentences about rows called ``name`` that were cut or left out."""
    rows = f"{'training' if name == 'train' else name} rows"
    notes, survey = [], Survey(rows)
    if report.truncated_rows:
        notes.append(
            f"{counted(report.truncated_rows, rows)} longer than --max_length allows: "
            f"{counted(report.truncated_tokens, 'tokens')} cut off at the end."
        )
    survey.leave_out(NO_RESPONSE, count=report.skipped_cut)
    survey.leave_out("no token to learn", count=report.skipped_empty - report.skipped_cut)
    survey.leave_out("not to be written as tokens", count=report.skipped_bad)
    notes += [f"{sentence}." for sentence in survey.left_out(f"{rows} left out")]
    if first := "; ".join(short(one, 100) for one in report.first_skipped[:_NAMED]):
        count = report.skipped_empty + report.skipped_bad
        named = counted(count, rows).split(" ", 1)[1]
        several = "The first" if count > _NAMED else "The"
        notes.append(f"{several} {named} left out: {first}.")
    return notes


def survey_of(rows: Sequence[Row]) -> Survey:
    """An empty survey of rows that were read before."""
    survey = Survey(f"rows from {rows[0].place}" if rows else "no rows")
    survey.rows = len(rows)
    return survey


def _cut(example: Example, limit: int | None) -> Example:
    ids, labels = example.input_ids, example.labels
    limit = limit or len(ids)
    beyond = max(0, len(ids) - limit)
    return replace(example, input_ids=ids[:limit], labels=labels[:limit], tokens_cut=beyond)


def _no_response(example: Example, limit: int | None) -> DataError:
    if not example.row.is_learned:
        return DataError(
            UNLEARNED,
            got=example.row.place,
            why="there is no token to value",
            remedy=f"drop such rows with --on_empty skip (on_empty='skip'); or {KEEP_MARKS}",
        )
    if example.tokens_cut:
        length = len(example.input_ids) + example.tokens_cut
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


def _uses_template(tokenizer: Any, options: EncodeOptions) -> bool:
    return options.chat_template and getattr(tokenizer, "chat_template", None) is not None


def encode_row(
    row: Row, tokenizer: Any, options: EncodeOptions | None = None
) -> tuple[list[int], list[int]]:
    """Ids and labels of one row, before any truncation.

    Turns after the last assistant turn are left out: no label can see them. Turns that the data
    mark as not to be trained on have no labels.

    Raises:
        DataError: the template refuses the conversation, or its prefixes do not agree; the text
            of a response is not in what is learned; a token is beyond the model's embedding.
    """
    example = encode_example(row, tokenizer, options)
    return example.input_ids, example.labels


def encode_example(row: Row, tokenizer: Any, options: EncodeOptions | None = None) -> Example:
    """Encode a row as :func:`encode_row` does, with notes on how it was written."""
    options, answered = options or EncodeOptions(), _cut_after_answers(row)
    verbatim = is_filled(answered, tokenizer)
    try:
        ids, labels, notes = _encode(answered, tokenizer, options)
    except DataError as error:
        further = _ways(answered, tokenizer, options, verbatim=verbatim)
        ways = [*filter(None, [error.remedy]), *further, _SKIP]
        raise DataError(error.what, got=error.got, why=error.why, remedy=_either(ways)) from None
    _require_embedded(ids, row, tokenizer, options)
    left = tuple(_left_turns(row, tokenizer, options))
    return Example(row, ids, labels, notes=tuple(notes), left_turns=left)


def _left_turns(row: Row, tokenizer: Any, options: EncodeOptions) -> Iterator[tuple[str, str]]:
    """Answers without a label, and turns behind the last answer, which no label can see."""
    answers = [i for i, turn in enumerate(row.turns) if turn.role == "assistant"]
    last = answers[-1]
    for index in answers if options.turns == "all" else [last]:
        if not row.turns[index].learned:
            yield "marked as not to be learned", f"{row.place}, turn {index + 1}"
        elif not _says(row.turns[index], tokenizer):
            yield "the answer is empty", f"{row.place}, turn {index + 1}"
    for index in range(last + 1, len(row.turns)):
        yield "no answer follows", f"{row.place}, turn {index + 1}"


def _encode(row: Row, tokenizer: Any, options: EncodeOptions) -> Encoded:
    labelled = [i for i, turn in enumerate(row.turns) if turn.role == "assistant"]
    if options.turns == "last":
        labelled = labelled[-1:]
    # A template would dress an empty response in markers; with no text there is nothing to learn.
    answers = [i for i in labelled if row.turns[i].learned and _says(row.turns[i], tokenizer)]
    verbatim, notes = is_filled(row, tokenizer), list[str]()
    # A text without a prompt stays as it is; an answer that came as a message is written as one.
    document = len(row.turns) == 1 and not row.turns[0].message
    if as_text := verbatim or not _uses_template(tokenizer, options) or document:
        text = "".join(pieces := text_pieces(row.turns, tokenizer, verbatim=verbatim))
        ids, labels = whole_text(pieces, answers, tokenizer)
    else:
        text = render(row, tokenizer)
        ids, labels, notes = encode_chat(row, answers, text, tokenizer)
    parts = [(i, part) for i in answers for part in (row.turns[i].thought, row.turns[i].text)]
    if lost := lost_text(parts, ids, labels, tokenizer):
        raise _lost(row, *lost, as_text=as_text)
    return ids, labels, [*notes, *_notes(row, answers, text, tokenizer, verbatim=verbatim)]


def _cut_after_answers(row: Row) -> Row:
    last = max(index for index, turn in enumerate(row.turns) if turn.role == "assistant")
    return replace(row, turns=row.turns[: last + 1])


def _says(turn: Turn, tokenizer: Any) -> bool:
    """True if a turn says more than white space and an end token."""
    text = (turn.thought + turn.text).strip()
    for end in find_markers(tokenizer).ends:
        text = text.removesuffix(end).rstrip()
    return bool(text)


def _notes(
    row: Row, answers: Sequence[int], text: str, tokenizer: Any, *, verbatim: bool
) -> Iterator[str]:
    texts = [(i, part) for i, turn in enumerate(row.turns) for part in (turn.thought, turn.text)]
    if verbatim:
        yield verbatim_note(tokenizer)
    else:
        yield from control_notes([part for _, part in texts], tokenizer)
    packed = bare(text)
    if any(bare(part) not in packed for i, part in texts if i not in answers):
        yield LEFT_OUT


def _lost(row: Row, index: int, part: str, labels: str, *, as_text: bool) -> DataError:
    thought = part is row.turns[index].thought or bare(part.split("</think>")[-1]) in bare(labels)
    what = "the thoughts of a row" if thought else "the text of a response"
    why = "the chat template does not write" if not as_text else "no chat template is used to write"
    return DataError(
        f"{what} would be lost",
        got=f"{row.place}, turn {index + 1}: {short(part, 60)!r} is not in what would be learned, "
        f"{short(labels, 60)!r}",
        why=f"{why} {'them' if thought else 'it'}",
    )


def _ways(row: Row, tokenizer: Any, options: EncodeOptions, *, verbatim: bool) -> Iterator[str]:
    """Remedies that were tried on the row, and work."""

    def works(row: Row, **changes: Any) -> bool:
        try:
            _encode(row, tokenizer, replace(options, **changes))
        except DataError:
            return False
        return True

    answers = [i for i, turn in enumerate(row.turns) if turn.role == "assistant"]
    if options.turns == "all" and len(answers) > 1 and works(row, turns="last"):
        parts = [replace(row, turns=row.turns[: i + 1]) for i in answers]
        each = all(works(part, turns="last") for part in parts)
        split = ", of one row a response where all are to be learned" if each else ""
        yield f"label the last turn only{split} (--turns last; turns='last')"
    template = not verbatim and _uses_template(tokenizer, options)
    if template and works(row, chat_template=False):
        yield _WITHOUT
    inside = tuple(
        replace(turn, text=in_tags(turn.thought, turn.text), thought="") if turn.thought else turn
        for turn in row.turns
    )
    if inside != row.turns:
        write = "write the thoughts into the content, in <think> and </think>"
        if works(replace(row, turns=inside)):
            yield write
        elif works(replace(row, turns=inside), chat_template=False):
            yield f"{write}, and {_WITHOUT}"
        bare_turns = tuple(replace(turn, thought="") for turn in row.turns)
        if works(replace(row, turns=bare_turns)):
            yield f"leave the thoughts aside (--unread_columns {','.join(THOUGHTS)})"
    spaced = tuple(
        replace(turn, text=turn.text + " ") if turn.role == "user" else turn for turn in row.turns
    )
    if verbatim and works(replace(row, turns=spaced)):
        yield "end the prompt with white space"
    elif template and find_markers(tokenizer).heads:
        yield (
            "give prompt and response as texts that hold the template's markers, which are taken "
            "as they are"
        )


def _either(ways: Sequence[str]) -> str:
    *first, last = ways
    return f"{', '.join(first)}, or {last}" if first else last


def _require_embedded(ids: Sequence[int], row: Row, tokenizer: Any, options: EncodeOptions) -> None:
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
    return prompt_example(row, tokenizer, options).input_ids


def prompt_example(row: Row, tokenizer: Any, options: EncodeOptions | None = None) -> Example:
    """Encode a prompt as :func:`encode_prompt` does, with notes on how it was written."""
    options = options or EncodeOptions()
    verbatim = is_filled(_cut_after_answers(row), tokenizer)
    turns = tuple(takewhile(lambda turn: turn.role != "assistant", row.turns))
    prompt = replace(row, turns=turns)
    if _uses_template(tokenizer, options) and turns and not verbatim:
        try:
            text = render(prompt, tokenizer, generation=True)
        except DataError as error:
            ways = _either([error.remedy, _WITHOUT, _SKIP])
            raise DataError(error.what, got=error.got, why=error.why, remedy=ways) from None
        ids = bare_ids(tokenizer, text)
    else:
        text = "".join(text_pieces(turns, tokenizer, verbatim=verbatim))
        ids = open_text(text, tokenizer)
    if not ids:
        raise DataError(
            "a row has an empty prompt",
            got=row.place,
            why="there is nothing for the model to continue",
            remedy=f"drop the row, or {_SKIP}",
        )
    _require_embedded(ids, row, tokenizer, options)
    notes = tuple(_notes(prompt, [], text, tokenizer, verbatim=verbatim))
    return Example(row, ids, [IGNORE] * len(ids), notes=notes)
