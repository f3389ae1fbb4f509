"""Documents of the tokens of a batch, under any batching, padding or packing.

A document is one training sequence from its first real token to its last response token (what
follows trains nothing), with the response tokens marked. Its key is a hash of just that, so the
same sequence has the same key in any batch, padded on either side, packed with others, or as a
row of the data set. A response of a preference pair is worth what it is worth against its
counterpart: there the key covers both responses and the branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.errors import InputError
from alphatoken.model.batch import IGNORE, LabelledBatch

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


@dataclass(frozen=True)
class _Piece:
    """A document before it has a key; arrays over its real tokens."""

    tokens: Ints
    response: Flags
    places: Ints

    def digest(self) -> bytes:
        end = int(self.response.nonzero()[0][-1]) + 1 if self.response.any() else 0
        content = self.tokens[:end].astype("<i8", copy=False).tobytes()
        # Nine bytes a token, so that no other split into tokens and marks has the same bytes.
        found = blake2b(content + self.response[:end].tobytes(), digest_size=KEY_BYTES)
        return found.digest()

    def document(self, key: bytes, branch: int = 0) -> Document:
        (at,) = self.response.nonzero()
        return Document(key, branch, self.tokens[: at[-1] + 1], at, self.places[at])


def _pair_keys(chosen: bytes, rejected: bytes) -> tuple[bytes, bytes]:
    """Keys of both branches of a pair, from the digests of its two sequences."""
    first, second = (
        blake2b(name + chosen + rejected, digest_size=KEY_BYTES).digest()
        for name in (b"chosen", b"rejected")
    )
    return first, second


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
    ids, marked, real, starts = _arrays(batch, mask)
    pieces = _pieces(ids, marked, real, starts)
    if "completion_mask" not in batch:
        return [piece.document(piece.digest()) for piece in pieces if piece.response.any()]
    half = len(ids) // 2
    digests = [piece.digest() for piece in pieces]
    keys = [_pair_keys(*pair) for pair in zip(digests[:half], digests[half:], strict=True)]
    stacked = [(keys[row % half][row // half], 1 + row // half) for row in range(len(ids))]
    return [
        piece.document(key, branch)
        for piece, (key, branch) in zip(pieces, stacked, strict=True)
        if piece.response.any()
    ]


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


def _pieces(ids: Ints, marked: Flags, real: Flags, starts: Flags | None) -> list[_Piece]:
    width = ids.shape[1]
    (places,) = real.reshape(-1).nonzero()
    new = np.ones(len(places), dtype=bool)
    new[1:] = places[1:] // width != places[:-1] // width
    if starts is not None:
        new |= starts.reshape(-1)[places]
    tokens, response = ids.reshape(-1)[places], marked.reshape(-1)[places] & ~new
    bounds = [*new.nonzero()[0].tolist(), len(places)]
    return [_Piece(tokens[a:b], response[a:b], places[a:b]) for a, b in pairwise(bounds)]


def row_documents(
    row: Mapping[str, Any], *, max_length: int | None = None, truncation_mode: str = "keep_start"
) -> Iterator[tuple[bytes, int]]:
    """(key, branch) of the documents that one row of a prepared data set holds.

    Args:
        row: ``input_ids`` with ``labels`` (missing: all tokens) and ``seq_lengths`` where rows
            are packed; or ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``.
        max_length: of a pair's sequences; TRL cuts them when it makes the batch.
        truncation_mode: "keep_start" or "keep_end", TRL's.
    """
    if {"prompt_ids", "chosen_ids", "rejected_ids"} <= row.keys():
        cut = slice(None, max_length)
        if truncation_mode == "keep_end" and max_length is not None:
            cut = slice(-max_length, None)
        prompt = _integers(row["prompt_ids"])
        digests = []
        for side in ("chosen_ids", "rejected_ids"):
            response = _integers(row[side])
            marks = np.arange(len(prompt) + len(response)) >= len(prompt)
            digests.append(_piece(np.concatenate([prompt, response])[cut], marks[cut]).digest())
        for branch, key in enumerate(_pair_keys(*digests), start=1):
            yield key, branch
        return
    ids = _integers(row["input_ids"])
    labels = row.get("labels")
    marks = np.ones(len(ids), dtype=bool) if labels is None else _integers(labels) != IGNORE
    lengths = row.get("seq_lengths")
    bounds = np.cumsum([0, *(lengths if lengths is not None else [len(ids)])]).tolist()
    for a, b in pairwise(bounds):
        piece = _piece(ids[a:b], marks[a:b])
        if piece.response.any():
            yield piece.digest(), 0


def rows_fingerprint(rows: Iterable[Mapping[str, Any]]) -> str:
    """Digest of the documents of all rows, in order; read once, nothing is sampled.

    Args:
        rows: tokenised, as :func:`row_documents` takes them. The same rows packed give the same
            digest if the order of the documents is the same.
    """
    digest = blake2b(digest_size=KEY_BYTES)
    for row in rows:
        for key, branch in row_documents(row):
            digest.update(key + bytes([branch]))
    return digest.hexdigest()


def _piece(tokens: Ints, marks: Flags) -> _Piece:
    response = marks.copy()
    response[:1] = False
    return _Piece(tokens, response, np.arange(len(tokens)))


def _integers(numbers: Any) -> Ints:
    return np.asarray(numbers, np.int64)
