"""The ledger of a run: what every training token was worth, summed over its visits.

In-run Shapley values (Appendix A of the paper): the value of token u at step s is
``phi_(u,s) = eta_s <grad J(theta_s), grad l_u>``; over a run they add up. What the sum means
depends on the optimizer: see :func:`alphatoken.train.ledger_unit.ledger_unit`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.errors import DataError, InputError, NumericalError
from alphatoken.support.storage import read_tensors, write_tensors
from alphatoken.train.documents import KEY_BYTES, Document, split_batch
from alphatoken.train.ledger_unit import PLAIN
from alphatoken.train.value_export import COMPONENTS, Accumulated, export_values
from alphatoken.values import TokenValues

__all__ = ["ValueLedger"]

_FORMAT = 1
_DOCUMENTS: dict[str, tuple[type, tuple[int, ...]]] = {
    "keys": (np.uint8, (KEY_BYTES,)),
    "branches": (np.uint8, ()),
    "starts": (np.int64, ()),
    "sizes": (np.int64, ()),
    "visits": (np.int64, ()),
    "steps": (np.int64, ()),
}
_TOKENS: dict[str, tuple[type, tuple[int, ...]]] = {
    "positions": (np.int32, ()),
    "tokens": (np.int32, ()),
    "sums": (np.float64, (len(COMPONENTS) + 1,)),
    "last": (np.float32, ()),
}
"""Columns of the two tables: of each entry the type, and its own shape. ``sums`` holds scaled
total, adaptation and stability, then the weights; ``last`` the unscaled total, as last scored."""


class _Table:
    """Columns of one length that grow together, in amortised constant time an entry."""

    def __init__(self, columns: Mapping[str, tuple[type, tuple[int, ...]]]) -> None:
        self.count = 0
        self._arrays: dict[str, NDArray[Any]] = {
            name: np.zeros((0, *shape), dtype=kind) for name, (kind, shape) in columns.items()
        }

    def __getitem__(self, name: str) -> NDArray[Any]:
        """The used part of a column; a view, good until the table grows."""
        return self._arrays[name][: self.count]

    def items(self) -> Iterable[tuple[str, NDArray[Any]]]:
        return ((name, self[name]) for name in self._arrays)

    def grow(self, count: int) -> slice:
        """Add zeros at the end; returns where they are."""
        start, self.count = self.count, self.count + count
        for name, array in self._arrays.items():
            if self.count > len(array):
                larger = np.zeros((max(self.count, 2 * len(array)), *array.shape[1:]), array.dtype)
                larger[:start] = array[:start]
                self._arrays[name] = larger
        return slice(start, self.count)


class ValueLedger:
    """Values of the response tokens of every document seen, accumulated over visits.

    For each response token of a document::

        accumulated = sum over visits of  scale * value       (total, adaptation, lambda stability)
        kept        = sum over visits of  weight

    A document is known by its content (:mod:`alphatoken.train.documents`), so the same sequence
    adds up in whatever batch, padding or packing it comes. Sums are in float64 on the CPU, about
    44 bytes a response token.

    Exact: additive over visits and over ledgers (:meth:`merge`), up to rounding of the sums. For
    small plain gradient steps (SGD without momentum, no gradient cut) the sum over all tokens and
    steps is to first order the decrease of the objective that unmasked training would bring. Under
    AdamW and its like it is not.
    """

    def __init__(self) -> None:
        self._documents, self._tokens = _Table(_DOCUMENTS), _Table(_TOKENS)
        self._numbers: dict[bytes, int] = {}

    def __len__(self) -> int:
        """Number of documents."""
        return self._documents.count

    @property
    def tokens(self) -> int:
        """Number of response tokens."""
        return self._tokens.count

    # --- a visit ------------------------------------------------------------------------------

    def add(
        self,
        batch: Mapping[str, Any],
        mask: Tensor,
        values: TokenValues,
        weights: Tensor,
        *,
        scale: float,
        step: int,
    ) -> None:
        """Add one visit of every document in the batch.

        Args:
            batch: the forward's inputs: ``input_ids``, ``attention_mask``, ``position_ids``.
            mask: (b, t) boolean, True at response tokens.
            values: what the scorer returned for this batch.
            weights: (b, t), what each token's gradient was weighted with; 0 for dropped ones.
            scale: step size times the coefficient that the values lack; its sign is taken as is.
            step: optimizer step, from 0.

        Raises:
            InputError: shapes or types that do not fit; values without components, which the ledger
                adds up as well.
            NumericalError: a NaN or Inf among the values or the scale. Nothing is added then.
        """
        _require_step(step)
        if not math.isfinite(scale):
            raise NumericalError("the scale of a visit is not finite", got=str(scale))
        documents = split_batch(batch, mask)
        kept = _checked_weights(weights, mask)
        block = _components(values, mask)
        spans = [self._span(self._number(document)) for document in documents]
        sums, last = self._tokens["sums"], self._tokens["last"]
        for document, span in zip(documents, spans, strict=True):
            number = self._numbers[document.key]
            self._documents["visits"][number] += 1
            self._documents["steps"][number] = step
            found = block[document.places]
            last[span] = found[:, 0]
            sums[span, :-1] += scale * found
            sums[span, -1] += kept[document.places]

    def _number(self, document: Document) -> int:
        """The document's number; a new one gets its place."""
        number = self._numbers.get(document.key)
        if number is None:
            tokens = self._tokens.grow(len(document.tokens))
            self._tokens["positions"][tokens] = document.positions
            self._tokens["tokens"][tokens] = document.tokens
            number = self._enter(document.key, document.branch, tokens)
        return number

    def _enter(self, key: bytes, branch: int, tokens: slice) -> int:
        number = self._documents.grow(1).start
        self._documents["keys"][number] = np.frombuffer(key, dtype=np.uint8)
        self._documents["branches"][number] = branch
        self._documents["starts"][number] = tokens.start
        self._documents["sizes"][number] = tokens.stop - tokens.start
        self._numbers[key] = int(number)
        return int(number)

    def _span(self, number: int) -> slice:
        start = int(self._documents["starts"][number])
        return slice(start, start + int(self._documents["sizes"][number]))

    # --- several processes --------------------------------------------------------------------

    def merge(self, other: ValueLedger) -> None:
        """Add what another ledger holds, as if its visits had been made here.

        Of a document that both hold, the values scored last are kept (this ledger's, at one step).
        """
        for number in range(len(other)):
            span = other._span(number)
            key = other._documents["keys"][number].tobytes()
            mine = self._numbers.get(key)
            fresh = mine is None
            if mine is None:
                tokens = self._tokens.grow(span.stop - span.start)
                for name in ("positions", "tokens"):
                    self._tokens[name][tokens] = other._tokens[name][span]
                mine = self._enter(key, int(other._documents["branches"][number]), tokens)
            here, step = self._span(mine), other._documents["steps"][number]
            self._tokens["sums"][here] += other._tokens["sums"][span]
            self._documents["visits"][mine] += other._documents["visits"][number]
            if fresh or step > self._documents["steps"][mine]:
                self._tokens["last"][here] = other._tokens["last"][span]
                self._documents["steps"][mine] = step

    # --- state --------------------------------------------------------------------------------

    def state_tensors(self, *, copy: bool = True) -> dict[str, Tensor]:
        """Everything: one tensor a column, documents in the order of first visits.

        Args:
            copy: False gives views, good until the next visit: enough for writing them down.
        """
        columns = (*self._documents.items(), *self._tokens.items())
        state = {n: torch.from_numpy(column.copy() if copy else column) for n, column in columns}
        return {"format": torch.tensor(_FORMAT), **state}

    def load_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Become what :meth:`state_tensors` was taken of, bit for bit.

        Raises:
            DataError: not such a state, or one that contradicts itself. Nothing changes then.
        """
        tables = (_read_table(state, _DOCUMENTS), _read_table(state, _TOKENS))
        if state.keys() != {"format", *_DOCUMENTS, *_TOKENS} or int(state["format"]) != _FORMAT:
            raise _no_ledger(f"tensors {sorted(state)}")
        documents, tokens = tables
        sizes, starts = documents["sizes"], documents["starts"]
        whole = np.array_equal(np.cumsum(sizes) - sizes, starts) and sizes.sum() == tokens.count
        if not whole or (sizes < 1).any():
            raise _no_ledger("documents that do not cover its tokens")
        numbers = {key.tobytes(): number for number, key in enumerate(documents["keys"])}
        if len(numbers) != documents.count:
            raise _no_ledger("a document twice")
        self._documents, self._tokens, self._numbers = documents, tokens, numbers

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`state_tensors` to one safetensors file, whole or not at all.

        Raises:
            DataError: the file could not be written; an old one is intact.
        """
        write_tensors(path, self.state_tensors(copy=False), {"kind": "alphatoken value ledger"})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ValueLedger:
        """Read what :meth:`save` wrote.

        Raises:
            DataError: no such file, truncated, altered, or something else.
        """
        return cls.of(read_tensors(path)[0])

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> ValueLedger:
        """The ledger that :meth:`state_tensors` was taken of.

        Raises:
            DataError: not such a state.
        """
        ledger = cls()
        ledger.load_tensors(state)
        return ledger

    # --- export -------------------------------------------------------------------------------

    def accumulated(self) -> Accumulated:
        """The columns, for reading: views, good until the next visit."""
        documents, tokens = self._documents, self._tokens
        return Accumulated(
            keys=documents["keys"],
            branches=documents["branches"],
            starts=documents["starts"],
            sizes=documents["sizes"],
            visits=documents["visits"],
            steps=documents["steps"],
            positions=tokens["positions"],
            tokens=tokens["tokens"],
            sums=tokens["sums"][:, :-1],
            kept=tokens["sums"][:, -1],
            last=tokens["last"],
        )

    def export(
        self,
        path: str | os.PathLike[str],
        rows: Iterable[Mapping[str, Any]] | None = None,
        *,
        tokenizer: Any = None,
        fmt: str | None = None,
        max_length: int | None = None,
        truncation_mode: str = "keep_start",
        unit: str = PLAIN,
    ) -> Path:
        """Write one record a response token, and a summary; see :func:`export_values`."""
        return export_values(
            self.accumulated(),
            path,
            rows,
            tokenizer=tokenizer,
            fmt=fmt,
            max_length=max_length,
            truncation_mode=truncation_mode,
            unit=unit,
        )


def _require_step(step: int) -> None:
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise InputError("a step is an integer of at least 0", got=repr(step))


def _checked_weights(weights: Tensor, mask: Tensor) -> NDArray[np.float64]:
    """Weights of the flattened batch, finite and not negative where the mask is True."""
    if weights.shape != mask.shape:
        raise InputError(
            "weights and mask differ in shape",
            got=f"{tuple(weights.shape)} and {tuple(mask.shape)}",
        )
    found: NDArray[np.float64] = weights.detach().cpu().double().numpy().reshape(-1)
    used = found[mask.cpu().numpy().reshape(-1)]
    if not (np.isfinite(used) & (used >= 0)).all():
        raise InputError("a token's weight is finite and at least 0", got=str(used.min()))
    return found


def _components(values: TokenValues, mask: Tensor) -> NDArray[np.float64]:
    """(b t, 3): total, adaptation and lambda times stability, as they enter the total."""
    if values.total.shape != mask.shape:
        raise InputError(
            "values and mask differ in shape",
            got=f"{tuple(values.total.shape)} and {tuple(mask.shape)}",
        )
    parts = values.components()
    if not parts:
        raise InputError(
            "the values have no components",
            got="TokenValues of a call with components=False",
            why="the ledger adds up adaptation and stability beside the total",
            remedy="components=True",
        )
    zero = torch.zeros_like(values.total)
    stacked = torch.stack(
        [
            values.total,
            sum((v for k, v in parts.items() if k.startswith("adaptation")), zero),
            sum((v for k, v in parts.items() if k.startswith("stability")), zero),
            values.mask.to(values.total),
        ],
        dim=-1,
    )
    found: NDArray[np.float64] = stacked.detach().cpu().double().numpy().reshape(-1, 4)
    used = mask.cpu().numpy().reshape(-1)
    if not np.array_equal(found[:, 3] != 0, used):
        raise InputError(
            "the values are of other tokens than the mask",
            got=f"{int((found[:, 3] != 0).sum())} valued, {int(used.sum())} response tokens",
        )
    if not np.isfinite(found[used]).all():
        row, index = divmod(
            int((~np.isfinite(found).all(-1) & used).nonzero()[0][0]), mask.shape[1]
        )
        raise NumericalError(
            "a token value is not finite",
            got=f"row {row}, token {index}",
            why="a NaN never leaves a sum",
            remedy="look at the loss of that token and at the weights",
        )
    return found[:, :3]


def _read_table(
    state: Mapping[str, Tensor], columns: Mapping[str, tuple[type, tuple[int, ...]]]
) -> _Table:
    table = _Table(columns)
    missing = [name for name in columns if name not in state]
    if missing:
        raise _no_ledger(f"no tensor {missing[0]}")
    count = {len(state[name]) if state[name].dim() else -1 for name in columns}
    if len(count) != 1:
        raise _no_ledger("columns of different lengths")
    table.grow(count.pop())
    for name, (kind, shape) in columns.items():
        found = state[name].cpu().numpy()
        if found.dtype != kind or found.shape[1:] != shape:
            raise _no_ledger(f"{name}: {found.dtype} {found.shape}")
        table[name][:] = found
    return table


def _no_ledger(got: str) -> DataError:
    return DataError(
        "this is no state of a value ledger",
        got=got,
        remedy="give what ValueLedger.state_tensors or save made, in this release",
    )
