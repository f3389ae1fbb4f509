"""Weights that rows bring, laid on their tokens.

    w_t = (weight of the row) (weight of the turn that token t is in),  or  (weight of the row) w_t

where a tokenised row has a list ``loss_weights`` of its own. What has no weight counts as 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from alphatoken.data.encode import EncodeOptions, encode_row
from alphatoken.data.messages import (
    MESSAGE_WEIGHTS,
    ROW_WEIGHTS,
    SIDE_WEIGHTS,
    TRL_CHATS,
    are_messages,
    checked_weight,
    message_weight,
    row_weight,
    side_weight,
    weighs,
)
from alphatoken.data.rows import Row, Turn
from alphatoken.data.survey import Columns
from alphatoken.errors import DataError, InputError
from alphatoken.model.batch import IGNORE

LOSS_WEIGHTS = "loss_weights"
"""Column of a tokenised row with a weight for each token, beside ``input_ids`` and ``labels``."""
PAIR_WEIGHTS = ("chosen_weights", "rejected_weights")
"""Columns of a pair with a weight for each token of its responses."""
WEIGHT_COLUMNS = frozenset({*ROW_WEIGHTS, *SIDE_WEIGHTS, LOSS_WEIGHTS, *PAIR_WEIGHTS})
"""Columns in which a run that reads weights looks for them."""


def turn_weights(
    row: Row,
    ids: Sequence[int],
    labels: Sequence[int],
    tokenizer: Any,
    options: EncodeOptions | None = None,
) -> list[float]:
    """(t,) weight of each token of a conversation, also where no label is.

    A weight of an assistant's turn is that of its tokens with its end token, as
    :func:`~alphatoken.data.encode_row` labels them, and of what the template writes after the last
    one; a turn that is not to be learned has 0. Tokens outside of the answers have the weight that
    all other turns state alike, which is 0 where they are marked as not to be learned.

    Args:
        row: the conversation, with its weights.
        ids: its tokens, by ``encode_row`` or by TRL.
        labels: of what is learned, unshifted.
        tokenizer: of both.
        options: how the row becomes tokens.

    Raises:
        DataError: other tokens than ``encode_row`` makes; tokens outside of the answers that are
            learned, and whose turns state several weights.

    Oracle: weights written by hand, in ``tests/property/test_own_weights.py``.
    """
    own = _factor(row.weight)
    if all(turn.weight is None and turn.learned for turn in row.turns):
        return [own] * len(ids)
    laid = _of_answers(row, ids, tokenizer, options)
    other = _of_others(row, [label for label, w in zip(labels, laid, strict=True) if w is None])
    return [own * (other if weight is None else weight) for weight in laid]


def whole_labels(
    row: Row, ids: Sequence[int], tokenizer: Any, options: EncodeOptions | None = None
) -> list[int]:
    """Labels of all tokens of a conversation, but of turns that are not to be learned.

    Arguments and errors are those of :func:`turn_weights`.
    """
    turns = tuple(replace(turn, weight=None) for turn in row.turns)
    marks = turn_weights(replace(row, turns=turns, weight=None), ids, ids, tokenizer, options)
    return [token if mark else IGNORE for token, mark in zip(ids, marks, strict=True)]


def _factor(weight: float | None) -> float:
    return 1.0 if weight is None else weight


def _of_turn(turn: Turn) -> float:
    return _factor(turn.weight) if turn.learned else 0.0


def _of_answers(
    row: Row, ids: Sequence[int], tokenizer: Any, options: EncodeOptions | None
) -> list[float | None]:
    """Weight of the answer that each token is in; None outside of them."""
    laid: list[float | None] = [None] * len(ids)
    answers = [turn for turn in row.turns if turn.role == "assistant"]
    # One encoding for each weight: its answers alone have labels.
    for weight in dict.fromkeys(map(_of_turn, answers)):
        turns = tuple(replace(turn, learned=_of_turn(turn) == weight) for turn in row.turns)
        own, labels = encode_row(replace(row, turns=turns), tokenizer, options)
        if list(ids[: len(own)]) != own:
            raise DataError(
                "weights of turns cannot be laid on the tokens of a row",
                got=f"{row.place}: {len(ids)} tokens, which differ from those that the turns have",
                why="a weight would fall onto another token",
                remedy="a weight for the whole row; or input_ids, labels and loss_weights in place "
                "of the messages",
            )
        for place, label in enumerate(labels):
            if label != IGNORE:
                laid[place] = weight
    if row.turns[-1].role == "assistant":  # the template may write white space after it
        end = max((i for i, weight in enumerate(laid) if weight is not None), default=len(ids))
        laid[end + 1 :] = [_of_turn(row.turns[-1])] * len(laid[end + 1 :])
    return laid


def _of_others(row: Row, labels: Sequence[int]) -> float:
    """Weight of the tokens outside of the answers, which have these labels."""
    others = [turn for turn in row.turns if turn.role != "assistant"]
    stated = set(map(_of_turn, others))
    if len(stated) <= 1:
        return stated.pop() if stated else 1.0
    if any(label != IGNORE for label in labels):
        raise DataError(
            "turns of the user or the system have several weights, and are learned",
            got=f"{row.place}: {', '.join(f'{weight:g}' for weight in sorted(stated))}",
            why="only the assistant's turns can be told from each other",
            remedy="one weight for all of them; or train on the answers alone "
            "(assistant_only_loss=True, or prompt and completion)",
        )
    return 1.0


# --- lists by token -------------------------------------------------------------------------------


def listed_weights(
    record: Mapping[str, Any], name: str, tokens: int, place: str, weights: str
) -> list[float] | None:
    """Weights of a row's column by token, times the weight of the row; None where it has neither.

    Args:
        record: the row's columns.
        name: of the column with a weight for each token.
        tokens: that there are.
        place: of the row, for messages.
        weights: "read" or "signed", as for ``Columns``.

    Raises:
        DataError: another number of weights than of tokens, or what is no weight.
    """
    own = row_weight(Columns(record, place, weights=weights))
    listed = record.get(name)
    if listed is None:
        return None if own is None else [own] * tokens
    if not isinstance(listed, (list, tuple)) or len(listed) != tokens:
        count = len(listed) if isinstance(listed, (list, tuple)) else type(listed).__name__
        raise DataError(
            f"{name!r} has no weight for each token",
            got=f"{place}: {count}, and {tokens} tokens",
            why="a weight would fall onto another token",
            remedy="one number a token, unshifted, also where no label is (0)",
        )
    signed = weights == "signed"
    return [_factor(own) * checked_weight(w, name, place, signed=signed) for w in listed]


# --- labels and weights in one column -------------------------------------------------------------


def joined(labels: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Label and weight of each token as one integer; -100 where there is no label.

    What cuts, packs and shuffles labels then does so to the weights. The upper half of an integer
    is the weight in float32, the lower half the label. No finite weight makes -100 of them.

    Raises:
        DataError: the product of two weights that is beyond float32.
    """
    own = np.asarray(labels, np.int64)
    with np.errstate(over="ignore"):
        factors = np.asarray(weights, np.float64).astype(np.float32)
    if not np.isfinite(factors).all():
        token = int(np.argmin(np.isfinite(factors)))
        raise DataError(
            "the weight of a token is beyond float32",
            got=f"{weights[token]:g} at token {token}: the weight of the row times its own",
            why="each weight is a factor in float32 on the losses of tokens",
            remedy="smaller weights",
        )
    bits = factors.view(np.int32).astype(np.int64) << 32
    return np.where(own >= 0, bits | own, own).tolist()  # type: ignore[no-any-return]


def parted(codes: Sequence[int]) -> tuple[list[int], list[float]]:
    """Labels and weights that :func:`joined` made one; bitwise, with weights 0 without a label."""
    own = np.asarray(codes, np.int64)
    # Codes without a label have the bits of a NaN above.
    weights = (own >> 32).astype(np.int32).view(np.float32)
    labelled = np.isfinite(weights)
    labels = np.where(labelled, own & 0xFFFFFFFF, own)
    return labels.tolist(), np.where(labelled, weights, np.float32(0)).tolist()


# --- what a row states ----------------------------------------------------------------------------

WEIGHTLESS = "there is no weight, which counts as 1"
"""Note on a row that brings no weight beside others that do."""


def no_weights(rows: str) -> InputError:
    """The error about rows of which none brings a weight; ``rows`` says how they were read."""
    return InputError(
        "no training row has a weight",
        got=rows,
        why="policy 'weights' trains by the weights that rows bring",
        remedy="write a number 'weight' into messages or rows, or loss_weights beside input_ids "
        "and labels; or policy='all', under which all tokens count alike",
    )


def has_weights(record: Mapping[str, Any], place: str, weights: str) -> bool:
    """True if a row in one of TRL's forms brings weights, each of which is looked at.

    Arguments and errors are those of :func:`listed_weights`; how long a list must be is not known.
    """
    columns = Columns(record, place, weights=weights)
    stated = row_weight(columns) is not None
    for side in ("chosen", "rejected"):
        stated |= side_weight(columns, side) is not None
    for name in TRL_CHATS:
        messages = record.get(name)
        for message in messages if are_messages(messages) else ():
            own = message_weight(Columns(message, place, weights=weights))
            stated |= own is not None or any(weighs(*field) for field in message.items())
    for name in (LOSS_WEIGHTS, *PAIR_WEIGHTS):
        if (listed := record.get(name)) is not None:
            tokens = len(listed) if isinstance(listed, (list, tuple)) else 0
            listed_weights({name: listed}, name, tokens, place, weights)
            stated = True
    return stated


def unweighted_messages(record: Mapping[str, Any]) -> dict[str, Any]:
    """Conversations of a row without the weights of their messages; yes and no stay as marks."""
    chats = {name: record.get(name) for name in TRL_CHATS}
    return {
        name: [
            {k: v for k, v in one.items() if k not in MESSAGE_WEIGHTS or isinstance(v, bool)}
            for one in chat
        ]
        for name, chat in chats.items()
        if are_messages(chat)
    }
