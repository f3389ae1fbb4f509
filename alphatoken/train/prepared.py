"""What the trainer below makes of the training rows, looked at before the first step.

TRL cuts rows at ``max_length``, drops those of which no response token is left without a word,
and hands ids to the model as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from alphatoken.data.rows import THOUGHTS
from alphatoken.errors import AlphaTokenWarning, InputError, warn_caller
from alphatoken.model.batch import IGNORE
from alphatoken.model.token_ids import embedding_rows
from alphatoken.train.datasets import plain_rows

__all__ = ["check_prepared", "check_tokens", "require_thoughts"]

_IDS = ("input_ids", "prompt_ids", "chosen_ids", "rejected_ids")


def require_thoughts(rows: Iterable[Any], tokenizer: Callable[[], Any], name: str) -> None:
    """See that the chat template writes the thoughts of messages, where rows have some.

    Args:
        rows: in TRL's forms.
        tokenizer: gives what they will be written with; asked where there is a thought.
        name: of the data set.

    Raises:
        InputError: they would be lost; names the row.
    """
    own = None
    for number, row in enumerate(rows):
        for messages in _conversations(row):
            if not any(one.get(field) for one in messages for field in THOUGHTS):
                continue
            own = own or tokenizer()
            bare = [{k: v for k, v in one.items() if k not in THOUGHTS} for one in messages]
            try:
                texts = [own.apply_chat_template(some, tokenize=False) for some in (messages, bare)]
            except Exception:  # raised where the trainer below writes the row
                continue
            if texts[0] == texts[1]:
                raise InputError(
                    f"the thoughts of a {name} row would be lost",
                    got=f"row {number}",
                    why="the chat template does not write them",
                    remedy="a tokenizer whose template writes them, or write them into the content",
                )


def _conversations(row: Any) -> Iterator[Any]:
    """The chats of one record in TRL's forms."""
    if not isinstance(row, Mapping):
        return
    prompt = row.get("prompt")
    before = prompt if isinstance(prompt, list) else []
    for name in ("messages", "completion", "chosen", "rejected"):
        if isinstance(row.get(name), list):
            yield [*before, *row[name]]


def check_prepared(
    given: Any, prepared: Any, model: Any, tokenizer: Any, args: Any, name: str = "training"
) -> None:
    """Refuse rows that nothing is left of, or with tokens that the model lacks; count what was cut.

    Args:
        given: rows as they were handed to the trainer below.
        prepared: as it will train on them; of a stream nothing is known yet.
        model: that looks the ids up.
        tokenizer: that made them, for the message.
        args: of the trainer.
        name: of the data set.

    Raises:
        InputError: no row is left; a token without a row in the embedding: names both, and where.
    """
    if not (hasattr(prepared, "__len__") and hasattr(given, "__len__")):
        return
    before, limit = len(given), getattr(args, "max_length", None)
    after = _with_responses(given, prepared, args)
    if before and not after:
        raise InputError(
            f"no {name} row has a response token left",
            got=f"{before} rows, max_length {limit}",
            why="there would be nothing to train on",
            remedy="a larger max_length, or shorter prompts",
        )
    if after < before:
        warn_caller(
            f"{before - after} of {before} {name} rows have no response token within "
            f"max_length={limit}, and are left out.",
            AlphaTokenWarning,
        )
    check_tokens(prepared, model, tokenizer, name)


def _with_responses(given: Any, prepared: Any, args: Any) -> int:
    """Rows with a response that the trainer will train on; where packing mixes them, all or none.

    Packing drops no row, but cuts what is longer ("bfd"), splits it, or writes rows on end.
    """
    before, columns = (getattr(rows, "column_names", None) or () for rows in (given, prepared))
    packed = getattr(args, "packing", False) and "seq_lengths" not in before  # and not by the user
    if not packed or "labels" not in columns:
        return len(prepared)
    whole = args.packing_strategy == "bfd" and "seq_lengths" in columns
    found = 0
    for table in prepared.with_format("arrow").iter(batch_size=1000):
        labelled = _flat(table, "labels") != IGNORE
        if not whole:
            found += int(labelled.any())
            continue
        lengths = _flat(table, "seq_lengths")
        found += int(np.logical_or.reduceat(labelled, lengths.cumsum() - lengths).sum())
    return found if whole or not found else len(given)


def _flat(table: Any, column: str) -> Any:
    return table.column(column).combine_chunks().flatten().to_numpy(zero_copy_only=False)


def check_tokens(rows: Any, model: Any, tokenizer: Any, name: str) -> None:
    """Refuse tokenised rows with tokens that the model's embedding has no row for.

    Raises:
        InputError: names token, tokenizer and row.
    """
    rows = plain_rows(rows)  # a torch data set may have a length and no end of its own
    size = embedding_rows(model)
    first = rows[0] if len(rows) else None
    if size is None or not isinstance(first, Mapping):
        return
    for column in set(_IDS) & set(first):
        if _largest(rows, column) < size:
            continue
        for number, row in enumerate(rows):
            if (token := _last(row[column])) >= size:
                raise InputError(
                    f"a token of a {name} row has no row in the embedding",
                    got=f"row {number}: {_said(tokenizer, token)}; {size} rows",
                    why="it was added to the tokenizer, and not to the model",
                    remedy="the tokenizer that the model was trained with, or first "
                    "model.resize_token_embeddings(len(tokenizer))",
                )


def _largest(rows: Any, column: str) -> int:
    """The largest id, by columns where the rows lie in Arrow."""
    import pyarrow.compute as pc

    table: Any = getattr(rows, "data", None)
    known = column in getattr(table, "column_names", ())  # not where a transform makes it
    if not known or getattr(rows, "_indices", None) is not None:
        return max((_last(row[column]) for row in rows), default=0)
    chunks = table.column(column).chunks
    found = (pc.max(pc.list_flatten(chunk)).as_py() for chunk in chunks)
    return max((largest for largest in found if largest is not None), default=0)


def _last(ids: Any) -> int:
    found = torch.as_tensor(ids)
    return int(found.max()) if found.numel() else 0


def _said(tokenizer: Any, token: int) -> str:
    own = getattr(tokenizer, "tokenizer", tokenizer)
    text = own.convert_ids_to_tokens(token) if own is not None else None
    of = getattr(own, "name_or_path", "")
    return f"token {text!r} (id {token}) of the tokenizer {of}".rstrip()
