"""The ledger of a run: what every training token was worth, summed over its visits.

In-run Shapley values (Appendix A of the paper): the value of token u at step s is
``phi_(u,s) = eta_s <grad J(theta_s), grad l_u>``; over a run they add up. Over all tokens the sum
is ``eta <grad J, g>``: to first order the decrease of J where the step is ``-eta g``, in SGD
without momentum or weight decay. An adaptive optimizer steps elsewhere, with momentum a gradient
acts on later steps too, and decay moves the weights along themselves; no value holds these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.train.documents import KEY_BYTES, Document, split_batch
from alphatoken.values import TokenValues

__all__ = ["COMPONENTS", "UNIT", "DocumentValues", "ValueLedger"]

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

    A document is known by its content (:mod:`alphatoken.train.documents`), so the same sequence
    adds up in whatever batch, padding or packing it comes. Sums are in float64 on the CPU, about
    40 bytes a response token.

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
    """(b t, 4): total, adaptation and lambda times stability, as they enter it, and the weight."""
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
