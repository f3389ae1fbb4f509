"""Weights of the rows on their way to the loss: through the preparation of TRL, and into batches.

A weight travels with its row as a column of the data set. It is not looked up by the content of a
row, as numbers of a static pass are: two rows of one text may have two weights. In the preparation
of ``SFTTrainer`` a label and its weight are one integer, so that TRL's own code cuts, leaves out,
packs and shuffles both alike. The collator of the training batches lays the weights beside the
labels. No other batch has any.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from alphatoken.data import Fields, WeightedCollator, pair_of, row_of
from alphatoken.data.messages import (
    ROW_WEIGHTS,
    SIDE_WEIGHTS,
    are_messages,
    side_weight,
    weighs,
)
from alphatoken.data.survey import Columns
from alphatoken.data.weights import (
    LOSS_WEIGHTS,
    PAIR_WEIGHTS,
    joined,
    listed_weights,
    parted,
    turn_weights,
)
from alphatoken.errors import DataError, InputError
from alphatoken.model.batch import IGNORE
from alphatoken.train.python_rows import form_of, plain_rows
from alphatoken.train.trainer_loss import ROW_WEIGHTS_KEY

_SIDES = ("chosen", "rejected")


# --- rows of SFTTrainer ---------------------------------------------------------------------------


def prepared_with_weights(
    prepare: Callable[..., Any], dataset: Any, args: Any, packing: bool, **how: Any
) -> Any:
    """TRL's preparation of training rows, with a column ``loss_weights`` beside the labels.

    Args:
        prepare: the preparation: (dataset, args, packing) -> dataset.
        dataset: rows in one of TRL's forms, with their weights.
        args: configuration of the trainer.
        packing: whether rows are packed.
        **how: further arguments of ``weighed_row``.

    Returns:
        The rows that ``prepare`` makes without weights, with one column more.
    """
    whole = copy.copy(args)
    whole.max_length, whole.shuffle_dataset = None, False
    tokens = prepare(dataset=dataset, args=whole, packing=False)
    own = ["input_ids", "labels"]
    # A stream may not know its columns; what is left over is not read.
    codes = tokens.map(partial(weighed_row, **how), with_indices=True).select_columns(own)
    return prepare(dataset=codes, args=args, packing=packing).map(_with_parted)


def weighed_row(
    row: Mapping[str, Any], number: int, *, tokenizer: Any, weights: str, text_field: str
) -> dict[str, list[int]]:
    """Labels of a row that TRL tokenised, joined with the weights that the row brings.

    Args:
        row: with ``input_ids``, ``labels`` and the columns that it came with.
        number: of the row, from 0.
        tokenizer: that made the tokens, with its chat template.
        weights: "read" or "signed".
        text_field: TRL's ``dataset_text_field``.

    Raises:
        DataError: weights that cannot be laid on the tokens.
    """
    place, ids = f"row {number}", row["input_ids"]
    names = form_of(row.keys() - {"input_ids"}, text_field)
    if any(_has_weights(row[name]) for name in names):
        _require_no_list(row, LOSS_WEIGHTS, place)
        texts = {name: row[name] for name in (*names, *ROW_WEIGHTS) if name in row}
        fields = Fields(text=text_field, weights=weights)
        of_turns = row_of(texts, number, place, fields)
        listed = turn_weights(of_turns, ids, row["labels"], tokenizer)
    else:
        own = listed_weights(row, LOSS_WEIGHTS, len(ids), place, weights)
        listed = [1.0] * len(ids) if own is None else own
    return {"labels": joined(row["labels"], listed)}


def _require_no_list(row: Mapping[str, Any], name: str, place: str) -> None:
    if row.get(name) is not None:
        raise DataError(
            f"a row has both {name!r} and weights of its messages",
            got=place,
            why="which of them is meant is not certain",
            remedy="leave one of them out",
        )


def _has_weights(messages: Any) -> bool:
    chat = messages if are_messages(messages) else ()
    return any(weighs(*field) for message in chat for field in message.items())


def _with_parted(row: Mapping[str, Any]) -> dict[str, Any]:
    labels, weights = parted(row["labels"])
    return {"labels": labels, LOSS_WEIGHTS: weights}


# --- pairs ----------------------------------------------------------------------------------------


def weighed_pair(
    row: Mapping[str, Any], number: int, *, tokenizer: Any, weights: str
) -> dict[str, list[float]]:
    """Weights of the tokens of both responses of a pair that TRL tokenised, as columns.

    Args:
        row: with ``prompt_ids``, ``chosen_ids``, ``rejected_ids`` and the columns it came with.
        number: of the pair, from 0.
        tokenizer: that made the tokens.
        weights: "read" or "signed".

    Raises:
        DataError: weights that cannot be laid on the tokens.
    """
    place, result = f"row {number}", dict[str, list[float]]()
    for side, name in zip(_SIDES, PAIR_WEIGHTS, strict=True):
        ids = row[f"{side}_ids"]
        if _has_weights(row.get(side)):
            _require_no_list(row, name, place)
            result[name] = _of_messages(row, side, number, tokenizer, weights)
            continue
        listed = listed_weights(row, name, len(ids), place, weights)
        whole = side_weight(Columns(row, place, weights=weights), side)
        factor = 1.0 if whole is None else whole
        result[name] = [factor * w for w in ([1.0] * len(ids) if listed is None else listed)]
    return result


def _of_messages(
    row: Mapping[str, Any], side: str, number: int, tokenizer: Any, weights: str
) -> list[float]:
    read = ("prompt", *_SIDES, *ROW_WEIGHTS, *SIDE_WEIGHTS)
    texts = {name: row[name] for name in read if name in row}
    pair = pair_of(texts, number, f"row {number}", Fields(weights=weights))
    own, (prompt, ids) = getattr(pair, side), (row["prompt_ids"], row[f"{side}_ids"])
    whole = pair.side(own)
    if len(own) == 1:  # all that is learned
        factors = (1.0 if w is None else w for w in (whole.weight, own[0].weight))
        return [next(factors) * next(factors)] * len(ids)
    labels = [-100] * len(prompt) + list(ids)
    return turn_weights(whole, [*prompt, *ids], labels, tokenizer)[len(prompt) :]


class PairWeightsCollator:
    """Brings ``chosen_weights`` and ``rejected_weights`` into TRL's batches of pairs.

    Args:
        inner: TRL's collator, which cuts both sequences of a pair at the same end.
        keep_end: whether it cuts their beginnings.

    Called with rows that have both columns, it returns the inner collator's batch with one more
    entry, float32 in the shape of ``input_ids``, 0 off the responses.

    Raises:
        DataError: other tokens in the batch than in the rows.
    """

    def __init__(self, inner: Callable[[list[dict[str, Any]]], Any], *, keep_end: bool) -> None:
        self.inner, self.keep_end = inner, keep_end

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Inner collator's batch with the weights of its tokens."""
        batch: dict[str, Any] = self.inner([dict(row) for row in rows])
        ids, marks = batch["input_ids"], batch["completion_mask"] != 0
        laid = torch.zeros(ids.shape, dtype=torch.float32)
        sides = [(f"{side}_ids", name) for side, name in zip(_SIDES, PAIR_WEIGHTS, strict=True)]
        lines = [(row[own], row[name]) for own, name in sides for row in rows]
        for line, (own, weights) in enumerate(lines):
            count = int(marks[line].sum())
            cut = slice(len(own) - count, None) if self.keep_end else slice(None, count)
            tokens = torch.as_tensor(own)[cut].to(ids)
            if len(weights) != len(own) or not torch.equal(ids[line][marks[line]], tokens):
                raise DataError(
                    "a response of the batch is not that of its pair",
                    got=f"{count} tokens in line {line} of the batch, {len(own)} in the pair with "
                    f"{len(weights)} weights",
                    why="a weight would fall onto another token",
                    remedy="TRL's own collator of pairs",
                )
            laid[line, marks[line]] = torch.as_tensor(weights, dtype=torch.float32)[cut]
        batch[ROW_WEIGHTS_KEY] = laid
        return batch


class RowWeightsCollator:
    """``WeightedCollator``, with the weights under a key that only the weigher reads."""

    def __init__(self, inner: Callable[[list[dict[str, Any]]], Any]) -> None:
        self._weighted = WeightedCollator(inner)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Inner collator's batch with the weights of its tokens."""
        batch = self._weighted(rows)
        batch[ROW_WEIGHTS_KEY] = batch.pop(LOSS_WEIGHTS)
        return batch


# --- all rows -------------------------------------------------------------------------------------


def require_a_weight(rows: Any) -> None:
    """Refuse prepared training rows of which no learned token has a weight.

    Args:
        rows: with their weights; of a stream nothing is known yet.

    Raises:
        InputError: every one is 0.
    """
    if not hasattr(rows, "__len__") or any(map(_learns, plain_rows(rows))):
        return
    raise InputError(
        "every weight of the training rows is 0",
        got=f"{len(rows)} rows, and none has a token that is learned",
        why="the run would leave the model as it is",
        remedy="weights above 0 on what is to be learned; policy='all' trains on every token",
    )


def _learns(row: Mapping[str, Any]) -> bool:
    """Whether a learned token of a row has a weight; nothing predicts the first one."""
    if any(name in row for name in PAIR_WEIGHTS):
        return any(any(row[name]) for name in PAIR_WEIGHTS)
    weights = row.get(LOSS_WEIGHTS)
    labels = row.get("labels", row.get("input_ids"))
    if weights is None or labels is None:
        return True
    return any(
        w != 0 and label != IGNORE for w, label in zip(weights[1:], labels[1:], strict=False)
    )


# --- batches --------------------------------------------------------------------------------------


@contextmanager
def weights_in_batches(trainer: Any, collator: Any, columns: Sequence[str]) -> Iterator[None]:
    """Inside, a data loader of the trainer keeps these columns and has this collator.

    Outside the trainer is as it was, so that no batch of evaluation has weights.
    """
    before = trainer.data_collator, trainer._signature_columns
    trainer._set_signature_columns_if_needed()
    trainer._signature_columns = [*trainer._signature_columns, *columns]
    trainer.data_collator = collator
    try:
        yield
    finally:
        trainer.data_collator, trainer._signature_columns = before
