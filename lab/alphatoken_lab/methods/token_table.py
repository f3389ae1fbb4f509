"""Token tables: numbers of every response token of a data set, found again in any batch.

A static pass leaves one: columns over the response tokens, document by document. Documents are
known by their content (:mod:`alphatoken.train.ledger`), so a token is found whatever batch,
padding or packing it comes in, and rows that hold the same sequence share one entry. The header
says what the numbers were computed from; a file that was made for other rows or another model is
refused, and the message names what differs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken.errors import DataError, InputError
from alphatoken.support.precision import wide
from alphatoken.support.resume import changed_settings
from alphatoken.support.storage import read_tensors, write_tensors
from alphatoken.train.ledger import KEY_BYTES, Document, split_batch

_COLUMN = "column/"

Array = NDArray[Any]


@dataclass(frozen=True)
class TableHeader:
    """Facts on which the numbers of a table depend.

    Attributes:
        kind: what was computed, in a word.
        model: digest of the weights (``alphatoken.support.resume.weights_digest``), or "".
        data: ``alphatoken.train.ledger.rows_fingerprint`` of the rows, or "".
        settings: everything else, as plain JSON values.
    """

    kind: str
    model: str = ""
    data: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """16 hexadecimal digits that stand for all of it; for names of files."""
        return blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def to_json(self) -> str:
        """One line, the same for equal headers."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TableHeader:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError, TypeError: it is something else.
        """
        return cls(**json.loads(text))

    def require(self, expected: TableHeader, where: str) -> None:
        """Refuse a table that was made from something else.

        Raises:
            DataError: naming every part that differs, with both values.
        """
        now = json.loads(expected.to_json())  # tuples are lists in a file
        differences = changed_settings(json.loads(self.to_json()), now)
        if differences:
            parts = [f"{name}: {_short(a)} in the file, {_short(b)} here" for name, (a, b) in
                     differences.items()]  # fmt: skip
            raise DataError(
                f"the token table {where} was made for another {' and another '.join(differences)}",
                got="; ".join(parts),
                why="its numbers belong to other tokens, or to another model's view of them",
                remedy="give the rows and the model that it was made for, or remove the file and "
                "let the pass run again",
            )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else f"{text[:12]}..."


@dataclass(frozen=True, eq=False)
class TokenTable:
    """Columns over response tokens; D documents, N tokens, those of a document side by side.

    Attributes:
        header: what it was made from.
        keys: (D, 16) bytes, each document once, in the order of the rows.
        sizes: (D,) response tokens of each.
        positions: (N,) index of the token in its document.
        columns: (N,) numbers by name; floats, integers or booleans.

    Raises:
        InputError: lengths that do not fit each other, or a document twice.
    """

    header: TableHeader
    keys: Array
    sizes: Array
    positions: Array
    columns: Mapping[str, Array]

    def __post_init__(self) -> None:
        """Check lengths once."""
        lengths = {name: len(column) for name, column in self.columns.items()}
        total = int(self.sizes.sum())
        ok = self.keys.shape == (len(self.sizes), KEY_BYTES) and len(self.positions) == total
        if not ok or any(length != total for length in lengths.values()):
            raise InputError(
                "the parts of a token table do not fit each other",
                got=f"keys {self.keys.shape}, sizes that sum to {total}, "
                f"{len(self.positions)} positions, columns {lengths}",
            )
        if len(self._numbers) != len(self.keys):
            raise InputError("a token table holds a document twice")

    # --- making -----------------------------------------------------------------------------------

    @classmethod
    def of_documents(
        cls,
        documents: Sequence[Document],
        columns: Mapping[str, Sequence[Array]],
        header: TableHeader,
    ) -> TokenTable:
        """Make a table of documents and named numbers of each; repeated documents are left out."""
        first: dict[bytes, int] = {}
        for i, document in enumerate(documents):
            first.setdefault(document.key, i)
        kept = list(first.values())
        keys = np.frombuffer(b"".join(first), np.uint8).reshape(-1, KEY_BYTES)
        sizes = np.asarray([len(documents[i].positions) for i in kept], np.int64)
        positions = _joined([documents[i].positions for i in kept]).astype(np.int32)
        joined = {name: _joined([parts[i] for i in kept]) for name, parts in columns.items()}
        return cls(header, keys, sizes, positions, joined)

    @classmethod
    def merge(cls, tables: Sequence[TokenTable]) -> TokenTable:
        """The documents of several tables with the same columns, under the header of the first.

        A document that an earlier table holds is left out.

        Raises:
            InputError: no table, or columns that differ.
        """
        if not tables or any(set(t.columns) != set(tables[0].columns) for t in tables):
            raise InputError(
                "merging needs at least one token table, and the same columns in each",
                got="; ".join(str(sorted(t.columns)) for t in tables) or "none",
            )
        keys: dict[bytes, None] = {}
        keep: list[Array] = []
        for table in tables:
            new = np.asarray([key not in keys for key in table._numbers], bool)
            keys |= dict.fromkeys(table._numbers)
            keep.append(new)
        spread = [np.repeat(new, t.sizes) for new, t in zip(keep, tables, strict=True)]

        def tokens(parts: Sequence[Array]) -> Array:
            return _joined([part[new] for part, new in zip(parts, spread, strict=True)])

        return cls(
            tables[0].header,
            np.concatenate([t.keys[new] for t, new in zip(tables, keep, strict=True)]),
            np.concatenate([t.sizes[new] for t, new in zip(tables, keep, strict=True)]),
            tokens([t.positions for t in tables]),
            {name: tokens([t.columns[name] for t in tables]) for name in tables[0].columns},
        )

    def with_columns(self, **columns: Array) -> TokenTable:
        """The same tokens with columns more, or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def join(self, other: TokenTable, header: TableHeader | None = None) -> TokenTable:
        """Columns of both, which hold the same documents in the same order.

        Raises:
            DataError: another document, or one that is cut elsewhere.
        """
        pairs = zip((self.keys, self.sizes), (other.keys, other.sizes), strict=True)
        if not all(np.array_equal(mine, theirs) for mine, theirs in pairs):
            raise DataError(
                "two token tables do not hold the same documents",
                got=f"{len(self)} documents and {len(other)}",
                why="tokens would have no number in some column",
                remedy="make both from the same rows",
            )
        columns = {**self.columns, **other.columns}
        return replace(self, header=header or self.header, columns=columns)

    # --- documents --------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.sizes)

    @property
    def tokens(self) -> int:
        """Number of response tokens."""
        return len(self.positions)

    @cached_property
    def _numbers(self) -> dict[bytes, int]:
        return {key.tobytes(): i for i, key in enumerate(self.keys)}

    @cached_property
    def starts(self) -> Array:
        """(D + 1,) first token of each document, and the number of tokens."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    def spread(self, by_document: Array) -> Array:
        """(N,) the number of its document for every token."""
        return np.repeat(by_document, self.sizes)

    def sums(self, column: Array) -> Array:
        """(D,) float64 sum over the tokens of each document."""
        if not len(self):
            return np.zeros(0)
        return np.asarray(np.add.reduceat(column.astype(np.float64), self.starts[:-1]))

    def means(self, column: Array) -> Array:
        """(D,) float64 mean over the tokens of each document."""
        return self.sums(column) / self.sizes

    # --- batches ----------------------------------------------------------------------------------

    def columns_of(
        self, inputs: Mapping[str, Any], mask: Tensor, names: Iterable[str] | None = None
    ) -> dict[str, Tensor]:
        """Columns of a batch's response tokens: name -> (b, t), 0 off the response.

        Args:
            inputs: of a forward, as :func:`~alphatoken.train.ledger.split_batch` takes them.
            mask: (b, t) boolean, True at response tokens.
            names: of columns; None for all.

        Returns:
            Tensors on the mask's device, in float32, or float64 where the column is.

        Raises:
            DataError: a document that the table does not hold.
            InputError: a column that it does not have; a mask that does not fit.
        """
        chosen = list(self.columns if names is None else names)
        missing = [name for name in chosen if name not in self.columns]
        if missing:
            raise InputError(
                f"the token table has no column {', '.join(missing)}",
                got=", ".join(self.columns),
                remedy="run the static pass of the policy that asks for it",
            )
        places, sources = self._matches(inputs, mask)
        batch_columns = {}
        for name in chosen:
            numbers = torch.from_numpy(np.ascontiguousarray(self.columns[name][sources]))
            flat = torch.zeros(mask.numel(), dtype=wide(numbers.dtype))
            flat[places] = numbers.to(flat.dtype)
            batch_columns[name] = flat.view(mask.shape).to(mask.device)
        return batch_columns

    def _matches(self, inputs: Mapping[str, Any], mask: Tensor) -> tuple[Tensor, Array]:
        """Flat places in the batch, and the tokens of the table that belong there."""
        places, sources = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for document in split_batch(inputs, mask):
            number = self._numbers.get(document.key)
            if number is None or self.sizes[number] != len(document.positions):
                row = int(document.places[0]) // mask.shape[1]
                raise DataError(
                    "a document of the batch is not in the token table",
                    got=f"row {row} of the batch, {len(document.positions)} response tokens; the "
                    f"table ({self.header.kind}) holds {len(self)} documents",
                    why="nothing is known of its tokens: the static pass saw other rows, or cut or "
                    "masked them in another way",
                    remedy="run the pass over the rows that are trained on, cut and masked alike",
                )
            places.append(document.places)
            sources.append(np.arange(self.starts[number], self.starts[number + 1]))
        return torch.from_numpy(np.concatenate(places)), np.concatenate(sources)

    # --- files ------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all.

        Raises:
            DataError: it could not be written; an old file is intact.
        """
        arrays = {"keys": self.keys, "sizes": self.sizes, "positions": self.positions}
        arrays |= {_COLUMN + name: column for name, column in self.columns.items()}
        tensors = {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        write_tensors(path, tensors, {"token_table": self.header.to_json()})

    @classmethod
    def load(cls, path: str | os.PathLike[str], expected: TableHeader | None = None) -> TokenTable:
        """Read what ``save`` wrote.

        Args:
            path: of the file.
            expected: what it must have been made from; None takes it as it is.

        Raises:
            DataError: no such file, truncated or altered, no token table, or one that was made for
                other rows, another model or other settings (named).
        """
        tensors, metadata = read_tensors(path)
        try:
            header = TableHeader.from_json(metadata["token_table"])
            arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
            keys, sizes, positions = map(arrays.pop, ("keys", "sizes", "positions"))
            columns = {name.removeprefix(_COLUMN): array for name, array in arrays.items()}
            table = cls(header, keys, sizes, positions, columns)
        except (KeyError, ValueError, TypeError) as problem:
            raise DataError(
                f"the file '{os.fspath(path)}' holds no token table",
                got=str(problem),
                remedy="give a file that a static pass wrote",
            ) from problem
        if expected is not None:
            header.require(expected, f"'{os.fspath(path)}'")
        return table


def _joined(parts: Sequence[Array]) -> Array:
    """One array; an empty one of float64 where there is nothing."""
    return np.concatenate(parts) if parts else np.zeros(0)
