"""Documents of the tokens of a batch, under any batching, padding or packing.

A document is one training sequence from its first real token to its last response token (what
follows trains nothing), with the response tokens marked. Its key is a hash of just that, so the
same sequence has the same key in any batch, padded on either side, packed with others, or as a
row of the data set. A response of a preference pair is worth what it is worth against its
counterpart: there the key covers both responses and the branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.errors import InputError
from alphatoken.model.batch import IGNORE, LabelledBatch
from alphatoken.support.resume import content_digest

__all__ = [
    "BRANCHES",
    "KEY_BYTES",
    "Document",
    "row_documents",
    "rows_fingerprint",
    "split_batch",
]

KEY_BYTES = 16
BRANCHES = (None, "chosen", "rejected")
"""Names of the branch numbers; None outside preference pairs."""

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Document:
    """One document of a batch with at least one response token.

    Attributes:
        key: hash of the content (and of the pair), 16 bytes.
        branch: 0, or 1 chosen and 2 rejected.
        tokens: all its token ids, up to the last response token.
        positions: index of each response token in ``tokens``.
        places: its index in the flattened (b, t) batch.
    """

    key: bytes
    branch: int
    tokens: Ints
    positions: Ints
    places: Ints


def _document(tokens: Ints, response: Flags, places: Ints) -> Document:
    """One document, perhaps without a response token; the first token is none."""
    at = response[1:].nonzero()[0] + 1
    end = int(at[-1]) + 1 if len(at) else 0
    marks = np.zeros(end, dtype=bool)
    marks[at] = True
    # Nine bytes a token, so that no other split into tokens and marks has the same bytes.
    content = tokens[:end].astype("<i8", copy=False).tobytes() + marks.tobytes()
    key = blake2b(content, digest_size=KEY_BYTES).digest()
    return Document(key, 0, tokens[:end], at, places[at])


def _pair(chosen: Document, rejected: Document) -> list[Document]:
    """Both branches of a pair, each with a key of the two sequences."""
    both = chosen.key + rejected.key
    keys = [
        blake2b(name + both, digest_size=KEY_BYTES).digest() for name in (b"chosen", b"rejected")
    ]
    return [replace(chosen, key=keys[0], branch=1), replace(rejected, key=keys[1], branch=2)]


def split_batch(batch: Mapping[str, Any], mask: Tensor) -> list[Document]:
    """The documents of a batch that have response tokens, in the order of the batch.

    The first token of a document is never a response token: nothing predicts it.

    Args:
        batch: ``input_ids`` (b, t), and where there are ``attention_mask`` (padding) and
            ``position_ids`` (packing; a document starts where they do not continue). With
            ``completion_mask``, which TRL's preference batches alone have, it is [chosen; rejected]
            stacked.
        mask: (b, t) boolean, True at response tokens.

    Raises:
        InputError: a mask that is True on padding.
    """
    documents = _documents(*_arrays(batch, mask))
    if "completion_mask" in batch:
        half = len(documents) // 2
        pairs = [_pair(*pair) for pair in zip(documents[:half], documents[half:], strict=True)]
        documents = [pair[branch] for branch in (0, 1) for pair in pairs]
    return [document for document in documents if len(document.positions)]


def _arrays(batch: Mapping[str, Any], mask: Tensor) -> tuple[Ints, Flags, Flags, Flags | None]:
    """Token ids, response marks, real tokens and document starts of a batch, on the CPU."""
    ids, attention = batch["input_ids"], batch.get("attention_mask")
    real = np.ones(ids.shape, dtype=bool)
    if isinstance(attention, Tensor) and attention.dim() == 2:
        real = (attention.cpu() != 0).numpy()
    marked = mask.cpu().numpy()
    if (marked & ~real).any():
        row, index = np.argwhere(marked & ~real)[0].tolist()
        raise InputError(
            "a response token is padding",
            got=f"row {row}, token {index}, where attention_mask is 0",
            why="it would be trained on, and belongs to no document",
            remedy="set labels to -100 on padding",
        )
    inputs = {k: batch[k] for k in ("attention_mask", "position_ids") if k in batch}
    starts = LabelledBatch(inputs, ids, mask).document_starts
    numbers: Ints = ids.detach().cpu().to(torch.int64).numpy()
    return numbers, marked, real, None if starts is None else starts.cpu().numpy()


def _documents(ids: Ints, marked: Flags, real: Flags, starts: Flags | None) -> list[Document]:
    width = ids.shape[1]
    (places,) = real.reshape(-1).nonzero()
    new = np.ones(len(places), dtype=bool)
    new[1:] = places[1:] // width != places[:-1] // width
    if starts is not None:
        new |= starts.reshape(-1)[places]
    tokens, response = ids.reshape(-1)[places], marked.reshape(-1)[places]
    bounds = [*new.nonzero()[0].tolist(), len(places)]
    return [_document(tokens[a:b], response[a:b], places[a:b]) for a, b in pairwise(bounds)]


_OWN = ("attention_mask", "position_ids")
"""Columns of a row that say, as in a batch, what is padding and where documents start."""


def row_documents(
    row: Mapping[str, Any], *, max_length: int | None = None, truncation_mode: str = "keep_start"
) -> Iterator[tuple[bytes, int]]:
    """(key, branch) of the documents that one row of a prepared data set holds.

    Args:
        row: ``input_ids`` with ``labels`` (missing: all tokens) and ``seq_lengths`` where rows
            are packed, or its own ``attention_mask`` and ``position_ids``; or ``prompt_ids``,
            ``chosen_ids`` and ``rejected_ids``.
        max_length: of a pair's sequences; TRL cuts them when it makes the batch.
        truncation_mode: "keep_start" or "keep_end", TRL's.
    """
    if {"prompt_ids", "chosen_ids", "rejected_ids"} <= row.keys():
        cut = slice(None, max_length)
        if truncation_mode == "keep_end" and max_length is not None:
            cut = slice(-max_length, None)
        sides = []
        for side in ("chosen_ids", "rejected_ids"):
            tokens = np.asarray([*row["prompt_ids"], *row[side]], np.int64)
            places = np.arange(len(tokens))
            marks = places >= len(row["prompt_ids"])
            sides.append(_document(tokens[cut], marks[cut], places))
        yield from ((one.key, one.branch) for one in _pair(*sides))
        return
    ids = np.asarray(row["input_ids"], np.int64)
    labels, lengths = row.get("labels"), row.get("seq_lengths")
    marks = np.ones(len(ids), dtype=bool) if labels is None else np.asarray(labels) != IGNORE
    own = {name: torch.as_tensor(row[name])[None] for name in _OWN if row.get(name) is not None}
    if own and lengths is None:
        batch = {"input_ids": torch.from_numpy(ids)[None], **own}
        yield from ((one.key, 0) for one in split_batch(batch, torch.from_numpy(marks)[None]))
        return
    bounds = np.cumsum([0, *(lengths if lengths is not None else [len(ids)])]).tolist()
    for a, b in pairwise(bounds):
        one = _document(ids[a:b], marks[a:b], np.arange(b - a))
        if len(one.positions):
            yield one.key, 0


def rows_fingerprint(rows: Iterable[Mapping[str, Any]]) -> str:
    """Digest of the documents of all rows, in order; read once, nothing is sampled.

    Args:
        rows: tokenised, as :func:`row_documents` takes them. The same rows packed give the same
            digest if the order of the documents is the same.
    """
    documents = (document for row in rows for document in row_documents(row))
    return content_digest([key.hex(), branch] for key, branch in documents)
