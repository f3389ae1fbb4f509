"""The ledger of a run: what every training token was worth, summed over its visits.

In-run Shapley values (Appendix A of the paper): the value of token u at step s is
``phi_(u,s) = eta_s <grad J(theta_s), grad l_u>``; over a run they add up. Over all tokens the sum
is ``eta <grad J, g>``: to first order the decrease of J where the step is ``-eta g``, in SGD
without momentum or weight decay. An adaptive optimizer steps elsewhere, with momentum a gradient
acts on later steps too, and decay moves the weights along themselves; no value holds these.

Tokens add up by *document*: one training sequence from its first real token to its last response
token (what follows trains nothing), with the response tokens marked. Its key is a hash of just
that, so the same sequence has the same key in any batch, padded on either side, packed with others,
or as a row of the data set. A response of a preference pair is worth what it is worth against its
counterpart: there the key covers both responses and the branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from alphatoken.values import TokenValues

KEY_BYTES = 16
BRANCHES = (None, "chosen", "rejected")
"""Names of the branch numbers; None outside preference pairs."""

_OWN = ("attention_mask", "position_ids")
"""Columns of a row that say, as in a batch, what is padding and where documents start."""

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
    # The first token is no response token: nothing predicts it.
    at = response[1:].nonzero()[0] + 1
    end = int(at[-1]) + 1 if len(at) else 0
    marks = np.zeros(end, dtype=bool)
    marks[at] = True
    # Nine bytes a token, so that no other split into tokens and marks has the same bytes.
    content = tokens[:end].astype("<i8", copy=False).tobytes() + marks.tobytes()
    key = blake2b(content, digest_size=KEY_BYTES).digest()
    return Document(key, 0, tokens[:end], at, places[at])


def _pair(chosen: Document, rejected: Document) -> list[Document]:
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
    documents = _documents(batch, mask)
    if "completion_mask" in batch:
        half = len(documents) // 2
        pairs = [_pair(*pair) for pair in zip(documents[:half], documents[half:], strict=True)]
        documents = [pair[branch] for branch in (0, 1) for pair in pairs]
    return [document for document in documents if len(document.positions)]


def _documents(batch: Mapping[str, Any], mask: Tensor) -> list[Document]:
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
    inputs = {k: batch[k] for k in _OWN if k in batch}
    starts = LabelledBatch(inputs, ids, mask).document_starts
    numbers = ids.detach().cpu().to(torch.int64).numpy()
    width = ids.shape[1]
    (places,) = real.reshape(-1).nonzero()
    new = np.ones(len(places), dtype=bool)
    new[1:] = places[1:] // width != places[:-1] // width
    if starts is not None:
        new |= starts.cpu().numpy().reshape(-1)[places]
    tokens, response = numbers.reshape(-1)[places], marked.reshape(-1)[places]
    bounds = [*new.nonzero()[0].tolist(), len(places)]
    return [_document(tokens[a:b], response[a:b], places[a:b]) for a, b in pairwise(bounds)]


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


UNIT = "step size times value, summed over visits"
"""Meaning of accumulated values in any run."""

COMPONENTS = ("total", "adaptation", "stability")
"""Components that are summed; a fourth column of ``sums`` holds the weights."""


@dataclass
class DocumentValues:
    """Values so far of the n response tokens of one document.

    Attributes:
        branch: 0 none, 1 chosen, 2 rejected.
        ids: its token ids, up to the last response token.
        positions: (n,) places of its response tokens in ``ids``.
        sums: (n, 4) accumulated total, adaptation and stability, and the summed weights.
        visits: how often it was trained on.
        last_step: the optimizer step of its last visit, from 0.
    """

    branch: int
    ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    sums: NDArray[np.float64]
    visits: int = 0
    last_step: int = 0

    @classmethod
    def of(cls, document: Document) -> DocumentValues:
        """The entry of a document that was not visited yet."""
        positions = document.positions.astype(np.int32)
        sums = np.zeros((len(positions), len(COMPONENTS) + 1))
        return cls(document.branch, document.tokens.astype(np.int32), positions, sums)


class ValueLedger:
    """Values of the response tokens of every document seen, accumulated over visits.

    For each response token of a document::

        accumulated = sum over visits of  scale * value       (total, adaptation, lambda stability)
        kept        = sum over visits of  weight

    Sums are in float64 on the CPU, about 40 bytes a response token.

    Exact: additive over visits and over ledgers (:meth:`merge`), up to rounding of the sums.

    Attributes:
        documents: entries by the key of the document, in the order of first visits.
    """

    def __init__(self) -> None:
        self.documents: dict[bytes, DocumentValues] = {}

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.documents)

    def sums(self) -> NDArray[np.float64]:
        """(tokens, 4) the sums of all documents, one after the other."""
        none = np.zeros((0, len(COMPONENTS) + 1))
        return np.concatenate([none, *(entry.sums for entry in self.documents.values())])

    def add(
        self, batch: Mapping[str, Any], mask: Tensor, values: TokenValues, weights: Tensor,
        *, scale: float, step: int,
    ) -> None:  # fmt: skip
        """Add one visit of every document in the batch.

        Args:
            batch: the forward's inputs: ``input_ids``, ``attention_mask``, ``position_ids``.
            mask: (b, t) boolean, True at response tokens.
            values: what the scorer returned for this batch, with components.
            weights: (b, t), what each token's gradient was weighted with; 0 for dropped ones.
            scale: step size times the coefficient that the values lack; its sign is taken as is.
            step: optimizer step, from 0.

        Raises:
            InputError: a response token that is padding.
        """
        documents = split_batch(batch, mask)
        block = _components(values, weights)
        for document in documents:
            entry = self.documents.get(document.key)
            if entry is None:
                entry = self.documents[document.key] = DocumentValues.of(document)
            entry.visits += 1
            entry.last_step = step
            entry.sums[:, :-1] += scale * block[document.places, :-1]
            entry.sums[:, -1] += block[document.places, -1]

    # --- several processes --------------------------------------------------------------------

    def merge(self, other: ValueLedger) -> None:
        """Add what another ledger holds, as if its visits had been made here."""
        for key, theirs in other.documents.items():
            mine = self.documents.get(key)
            if mine is None:
                self.documents[key] = replace(theirs, sums=theirs.sums.copy())
            else:
                mine.visits += theirs.visits
                mine.last_step = max(mine.last_step, theirs.last_step)
                mine.sums += theirs.sums

    # --- the checkpoint's part ----------------------------------------------------------------

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything: one tensor a column, documents in the order of first visits."""
        entries = list(self.documents.values())
        keys = np.frombuffer(b"".join(self.documents), np.uint8).reshape(-1, KEY_BYTES)
        columns = {
            "keys": keys.copy(),
            "branches": np.array([entry.branch for entry in entries], np.uint8),
            "visits": np.array([entry.visits for entry in entries], np.int64),
            "steps": np.array([entry.last_step for entry in entries], np.int64),
            "lengths": np.array([len(entry.ids) for entry in entries], np.int64),
            "sizes": np.array([len(entry.positions) for entry in entries], np.int64),
            "ids": _joined([entry.ids for entry in entries]),
            "positions": _joined([entry.positions for entry in entries]),
            "sums": self.sums(),
        }
        return {name: torch.from_numpy(column) for name, column in columns.items()}

    def load_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Restore bitwise the ledger that wrote these :meth:`state_tensors`."""
        arrays = {name: tensor.numpy() for name, tensor in state.items()}
        keys = [key.tobytes() for key in arrays["keys"]]
        ends = np.cumsum(arrays["sizes"])[:-1]
        ids = np.split(arrays["ids"], np.cumsum(arrays["lengths"])[:-1]) if keys else []
        positions = np.split(arrays["positions"], ends) if keys else []
        sums = np.split(arrays["sums"], ends) if keys else []
        numbers = [arrays[name].tolist() for name in ("branches", "visits", "steps")]
        parts = zip(keys, ids, positions, sums, *numbers, strict=True)
        self.documents = {
            key: DocumentValues(branch, own, places, table.copy(), visits, step)
            for key, own, places, table, branch, visits, step in parts
        }


def _joined(parts: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate([np.zeros(0, np.int32), *parts])


def _components(values: TokenValues, weights: Tensor) -> NDArray[np.float64]:
    parts, zero = values.components(), torch.zeros_like(values.total)
    columns = [
        values.total,
        sum((v for k, v in parts.items() if k.startswith("adaptation")), zero),
        sum((v for k, v in parts.items() if k.startswith("stability")), zero),
        weights,
    ]
    stacked = torch.stack([column.detach().cpu().double() for column in columns], dim=-1)
    components: NDArray[np.float64] = stacked.numpy().reshape(-1, len(columns))
    return components
