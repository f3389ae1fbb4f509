"""Preference pairs: one prompt, a chosen and a rejected response; and pairs as TRL reads them.

A pair is written in many ways: three texts; a prompt with messages; two whole conversations that
begin alike. All become turns here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from alphatoken.data.encode import Example
from alphatoken.data.markers import is_filled
from alphatoken.data.messages import (
    CHATS,
    PROMPTS,
    answer_text,
    require_learned,
    require_order,
    row_weight,
    side_weight,
)
from alphatoken.data.rows import (
    Fields,
    Row,
    Turn,
    missing,
    prompt_turns,
    require_read,
    require_text,
    value_turns,
    with_system,
)
from alphatoken.data.source import find_source, usable_rows
from alphatoken.data.survey import Columns, Survey
from alphatoken.data.texts import added_start, messages_of, text_pieces
from alphatoken.errors import DataError, short

CHOSEN = ("chosen", "chosen_response", "chosen_messages")
REJECTED = ("rejected", "rejected_response", "rejected_messages")
WHOLE = "a response has turns of the user, which are learned with it"
"""Note on a pair of conversations, whose responses are learned from the first turn to the last."""


@dataclass(frozen=True)
class Pair:
    """One pair of a data file; ``index``, ``place`` and ``weight`` as for :class:`Row`.

    ``chosen`` and ``rejected`` are what follows the common ``prompt``: one assistant turn each, as
    a rule. ``written`` is the chosen conversation as tokens, where it was made.
    """

    index: int
    place: str
    prompt: tuple[Turn, ...]
    chosen: tuple[Turn, ...]
    rejected: tuple[Turn, ...]
    weight: float | None = None
    written: Example | None = field(default=None, compare=False, repr=False)

    @property
    def row(self) -> Row:
        """The chosen conversation, by which pairs are compared with other rows."""
        return self.side(self.chosen)

    def side(self, response: tuple[Turn, ...]) -> Row:
        """The prompt and one of the responses."""
        return Row(self.index, self.place, (*self.prompt, *response), self.weight)


def read_pairs(
    path: str | Path, *, fields: Fields | None = None, limit: int | None = None
) -> list[Pair]:
    """The pairs of a data file or folder; logs what was read as what, as ``read_rows`` does.

    Raises:
        DataError: as for ``read_rows``; a record that is no pair. The message names file and line.
    """
    source = find_source(path)
    survey = source.survey()
    make = partial(pair_of, fields=fields, survey=survey)
    return usable_rows(source.read(0, limit), make, survey)


def pair_of(
    record: Mapping[str, Any],
    index: int,
    place: str,
    fields: Fields | None = None,
    survey: Survey | None = None,
) -> Pair:
    """One record, of a file or of any other source, as a pair; see ``row_of``.

    Raises:
        DataError: a missing or wrong field, or one that would be lost; a pair that is marked as a
            bad one, or by a weight; scores that contradict its order; the message names ``place``.
    """
    fields = fields or Fields()
    columns = Columns(record, place, fields.unread, fields.weights)
    fields = columns.present(fields)
    good = fields.chosen or columns.first(CHOSEN) or missing(columns, "chosen", CHOSEN)
    bad = fields.rejected or columns.first(REJECTED) or missing(columns, "rejected", REJECTED)
    chosen, rejected = columns.take(good, "chosen"), columns.take(bad, "rejected")
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
    sides = (
        value_turns(chosen, "assistant", "chosen", columns),
        value_turns(rejected, "assistant", "rejected", columns),
    )
    question, *responses = _of_messages(prompt, *sides, place, name)
    responses = [
        _weighed(turns, side_weight(columns, side))
        for side, turns in zip(("chosen", "rejected"), responses, strict=True)
    ]
    if prompt is None:
        question = with_system(columns, question)
    # A pair is learned whole, whoever says it: what is noted of a user's turn is untrue here.
    several = any(turn.role != "assistant" for turns in responses for turn in turns)
    weighted = any(turn.weight is not None for turns in sides for turn in turns)
    columns.notes = [*notes, *["turns have weights"] * weighted, *[WHOLE] * several]
    weight = row_weight(columns)
    require_read(columns)
    require_learned(columns)
    require_order(columns)
    for turns in (question, *responses):
        require_text(turns, place)
    if not all(turn.learned for turns in responses for turn in turns):
        raise DataError(
            "a response of a pair is marked as not to be trained on",
            got=place,
            why="a pair is learned as a whole",
            remedy="drop the pair, or the mark",
        )
    if survey is not None:
        survey.add_columns(columns)
    return Pair(index, place, question, responses[0], responses[1], weight)


def _weighed(turns: tuple[Turn, ...], weight: float | None) -> tuple[Turn, ...]:
    """The turns of a response, each by the response's weight as well."""
    if weight is None:
        return turns
    return tuple(
        replace(turn, weight=weight * (1.0 if turn.weight is None else turn.weight))
        for turn in turns
    )


Turns = tuple[Turn, ...]
Parts = tuple[Turns, Turns, Turns]


def _of_messages(
    prompt: Turns | None, chosen: Turns, rejected: Turns, place: str, name: str | None
) -> Parts:
    """Responses, after a prompt of their own (the column ``name``) or with it at their head."""
    if prompt is None:
        return _split(chosen, rejected, place)
    if chosen[0].role == rejected[0].role == "assistant":
        return prompt, chosen, rejected
    system = prompt[:1] if prompt[0].role == "system" else ()
    head, *responses = _split(chosen, rejected, place)
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
    return (*system, *head), responses[0], responses[1]


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


# --- pairs as TRL reads them --------------------------------------------------------------------


def preference_record(pair: Pair, tokenizer: Any, *, chat: bool) -> dict[str, Any]:
    """A pair as a record ``prompt``, ``chosen``, ``rejected`` for TRL's ``DPOTrainer``.

    Messages go through the chat template, and texts are taken as they are, with an end token and
    the start token that the tokenizer puts before a text. A pair of texts that hold the template's
    own markers is one of texts, whatever ``chat`` says.

    Args:
        pair: of which both responses are texts, or both messages.
        tokenizer: of the model.
        chat: write pairs with the chat template.
    """
    sides = (pair.chosen, pair.rejected)
    verbatim = is_filled(pair.row, tokenizer)
    if chat and not verbatim:
        parts = [messages_of(turns, tokenizer) for turns in (pair.prompt, *sides)]
        return dict(zip(("prompt", "chosen", "rejected"), parts, strict=True))
    prompt, *responses = (
        "".join(text_pieces(turns, tokenizer, verbatim=verbatim)) for turns in (pair.prompt, *sides)
    )
    end = getattr(tokenizer, "eos_token", None) or ""
    # TRL puts an end token behind each response that has none.
    texts = [
        prompt.removeprefix(added_start(tokenizer)),
        *(text.removesuffix(end) for text in responses),
    ]
    return dict(zip(("prompt", "chosen", "rejected"), texts, strict=True))


def weights_of_pair(pair: Pair, record: Mapping[str, Any]) -> dict[str, Any]:
    """Columns of weights beside a record of :func:`preference_record`, as the trainers read them.

    Raises:
        DataError: a response that is one text, of turns with several weights.
    """
    columns: dict[str, Any] = {"weight": pair.weight}
    for side in ("prompt", "chosen", "rejected"):
        turns, value = getattr(pair, side), record[side]
        if isinstance(value, list):
            columns[side] = [
                {**message, "weight": turn.weight}
                for message, turn in zip(value, turns, strict=True)
            ]
        elif side != "prompt":
            weights = {1.0 if turn.weight is None else turn.weight for turn in turns}
            if len(weights) > 1:
                raise DataError(
                    "turns of a response have several weights, and are written as one text",
                    got=f"{pair.place}: {', '.join(f'{w:g}' for w in sorted(weights))}",
                    why="their tokens cannot be told from each other",
                    remedy="one weight for all of them, or a tokenizer with a chat template",
                )
            columns[f"{side}_weight"] = weights.pop()
    return columns


def pair_problem(row: Mapping[str, Any]) -> str | None:
    """Reason for which DPO cannot train on a pair."""
    if not (answer_text(row["chosen"]) and answer_text(row["rejected"])):
        return "a response is empty"
    # The gradients of two equal responses cancel, and a mask would make noise of them.
    return "chosen and rejected are equal" if row["chosen"] == row["rejected"] else None


def is_longer(prompt: Any, tokenizer: Any, limit: int) -> bool:
    """True if a prompt, a text or messages, has more tokens than ``limit``."""
    if isinstance(prompt, str):
        return len(tokenizer(prompt, verbose=False)["input_ids"]) > limit
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) > limit
