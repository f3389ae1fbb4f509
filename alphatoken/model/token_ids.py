"""Token ids, and the embedding that has a row for each.

A token that was added to a tokenizer and not to the model has no row there: on a CPU the look-up
raises a bare IndexError, on a GPU it stops the device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from alphatoken.errors import InputError

__all__ = ["embedding_rows", "require_rows"]


def embedding_rows(model: Any) -> int | None:
    """Number of tokens with a row in the input embedding; None if unknown."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    embedding = getattr(embedding, "base_layer", embedding)  # under a LoRA adapter
    rows = getattr(embedding, "num_embeddings", None)
    return rows if isinstance(rows, int) else None


def require_rows(ids: Tensor, model: Any, what: str) -> None:
    """Check that the embedding has a row for each of these ids.

    Args:
        ids: (batch, length), or (length,).
        model: what they are for.
        what: they are, for the message.

    Raises:
        InputError: one has none; names its place.
    """
    rows = embedding_rows(model)
    if rows is None or ids.dtype.is_floating_point or not ids.numel():
        return
    bad = (ids < 0) | (ids >= rows)
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        names = ("row", "token")[-len(place) :]
        where = ", ".join(f"{name} {i}" for name, i in zip(names, place, strict=True))
        raise InputError(
            f"a token of {what} has no row in the embedding",
            got=f"id {int(ids[tuple(place)])} at {where}; {rows} rows",
            why="the model has never seen it: it was added to the tokenizer, and not to the model",
            remedy="the tokenizer that the model was trained with, or "
            "model.resize_token_embeddings(len(tokenizer)) before training",
        )
