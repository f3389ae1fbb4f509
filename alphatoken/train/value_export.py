"""Accumulated values as files: one record a training token, and a summary.

Columns: ``document`` (its key), ``branch`` (chosen, rejected or null), ``rows`` (rows of the data
set that hold it; null where none was given), ``position`` (token index in the document),
``token_id``, ``token`` (its text; null without a tokenizer), ``total``, ``adaptation``,
``stability`` (accumulated, lambda applied), ``visits``, ``kept_share`` (mean weight over the
visits), ``last`` (unscaled total when last scored), ``last_step``. Prompt tokens have no record.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.data.pieces import token_texts
from alphatoken.errors import ConfigError, DataError
from alphatoken.support.storage import replacing, write_json
from alphatoken.train.documents import BRANCHES, row_documents
from alphatoken.train.ledger_unit import PLAIN

__all__ = ["COMPONENTS", "FORMATS", "Accumulated", "export_values"]

COMPONENTS = ("total", "adaptation", "stability")
FORMATS = ("parquet", "jsonl")
_CHUNK = 1 << 16  # tokens in memory at a time
_EXTREMES = 20  # documents listed at either end of the summary

Array = NDArray[Any]


@dataclass(frozen=True)
class Accumulated:
    """Columns of a ledger; D documents, N response tokens, those of a document side by side.

    Attributes:
        keys: (D, 16) bytes.
        branches: (D,) 0 none, 1 chosen, 2 rejected.
        starts: (D,) first token of each document.
        sizes: (D,) its number of tokens.
        visits: (D,).
        steps: (D,) step at which it was last scored.
        positions: (N,) token index in the document.
        tokens: (N,) token ids.
        sums: (N, 3) accumulated total, adaptation, stability.
        kept: (N,) summed weights.
        last: (N,) unscaled total when last scored.
    """

    keys: Array
    branches: Array
    starts: Array
    sizes: Array
    visits: Array
    steps: Array
    positions: Array
    tokens: Array
    sums: Array
    kept: Array
    last: Array

    def name(self, document: int) -> str:
        """Key of a document in hexadecimal digits."""
        return str(self.keys[document].tobytes().hex())

    def span(self, document: int) -> slice:
        """Its tokens."""
        start = int(self.starts[document])
        return slice(start, start + int(self.sizes[document]))

    def totals(self) -> NDArray[np.float64]:
        """(D,) accumulated total of each document."""
        if not len(self.starts):
            return np.zeros(0)
        return np.asarray(np.add.reduceat(self.sums[:, 0], self.starts))


Holders = dict[int, list[int]]
"""Document number -> rows of the data set that hold it."""


def export_values(
    found: Accumulated,
    path: str | os.PathLike[str],
    rows: Iterable[Mapping[str, Any]] | None = None,
    *,
    tokenizer: Any = None,
    fmt: str | None = None,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
    unit: str = PLAIN,
) -> Path:
    """Write the values file and a JSON summary beside it, each whole or not at all.

    Args:
        found: the ledger's columns.
        path: a file ending in .parquet or .jsonl (summary: ``<stem>.summary.json``), or a folder
            (``values.<fmt>`` and ``summary.json``), made if it is not there.
        rows: rows of the training set as the trainer prepared it (see
            :func:`~alphatoken.train.documents.row_documents`); read once. With it documents are
            ordered by row, and each names the rows that hold it.
        tokenizer: for the text of the tokens.
        fmt: "parquet" (a folder's default) or "jsonl".
        max_length: of preference pairs, as the trainer cut them.
        truncation_mode: TRL's.
        unit: what the sums mean, by the run's optimizer; see
            :func:`~alphatoken.train.ledger_unit.ledger_unit`.

    Returns:
        Path of the values file.

    Raises:
        ConfigError: an unknown format, or Parquet without pyarrow.
        DataError: a file could not be written; an old one is intact.
        InputError: rows without token ids.
    """
    target, summary = _targets(Path(path), fmt)
    if target.suffix == ".parquet":
        _pyarrow()  # before any work
    holders, seen, unseen = _holders(found, rows, max_length, truncation_mode)
    chunks = _chunks(found, holders, tokenizer)
    if target.suffix == ".parquet":
        _write_parquet(target, chunks)
    else:
        with replacing(target) as temporary, temporary.open("w", encoding="utf-8") as file:
            for chunk in chunks:
                names = list(chunk)
                for record in zip(*chunk.values(), strict=True):
                    line = dict(zip(names, record, strict=True))
                    file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
    write_json(summary, {"unit": unit, **_summary(found, holders, seen, unseen)})
    return target


def _targets(path: Path, fmt: str | None) -> tuple[Path, Path]:
    """The values file and its summary."""
    suffix = path.suffix.lstrip(".")
    if suffix not in FORMATS and path.is_file():
        raise ConfigError(
            "unknown format of a value file", got=path.name, remedy=".parquet, .jsonl"
        )
    if fmt not in (None, *FORMATS) or (suffix in FORMATS and fmt not in (None, suffix)):
        raise ConfigError(
            "unknown format of a value file",
            got=f"{path.name}, fmt={fmt!r}",
            remedy="fmt='parquet' or 'jsonl', and a suffix that says the same or none",
        )
    folder = path.parent if suffix in FORMATS else path
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise DataError("the folder cannot be made", got=str(problem)) from problem
    if suffix in FORMATS:
        return path, path.with_suffix(".summary.json")
    return path / f"values.{fmt or 'parquet'}", path / "summary.json"


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError("Parquet needs pyarrow", remedy="pip install pyarrow, or jsonl") from None
    return pa, pq


def _holders(
    found: Accumulated,
    rows: Iterable[Mapping[str, Any]] | None,
    max_length: int | None,
    truncation_mode: str,
) -> tuple[Holders | None, int, int]:
    """Rows of every document, and how many rows hold one that was seen, and none."""
    if rows is None:
        return None, 0, 0
    numbers = {key.tobytes(): number for number, key in enumerate(found.keys)}
    holders: Holders = defaultdict(list)
    count = unseen = 0
    for index, row in enumerate(rows):
        keys = row_documents(row, max_length=max_length, truncation_mode=truncation_mode)
        seen = {numbers[key] for key, _ in keys if key in numbers}
        for number in seen:
            holders[number].append(index)
        count += bool(seen)
        unseen += not seen
    return dict(holders), count, unseen


def _order(found: Accumulated, holders: Holders | None) -> list[int]:
    """Documents by their first row and branch, those in no row last; else as first visited."""
    numbers = range(len(found.keys))
    if holders is None:
        return list(numbers)
    last = (1, 0)
    first = {n: (0, rows[0]) for n, rows in holders.items()}
    return sorted(numbers, key=lambda n: (first.get(n, last), int(found.branches[n]), n))


def _chunks(
    found: Accumulated, holders: Holders | None, tokenizer: Any
) -> Iterator[dict[str, list[Any]]]:
    """Columns of at most about ``_CHUNK`` tokens, whole documents at a time."""
    waiting: list[int] = []
    size = 0
    for number in _order(found, holders):
        waiting.append(number)
        size += int(found.sizes[number])
        if size >= _CHUNK:
            yield _columns(found, waiting, holders, tokenizer)
            waiting, size = [], 0
    yield _columns(found, waiting, holders, tokenizer)


def _columns(
    found: Accumulated, documents: list[int], holders: Holders | None, tokenizer: Any
) -> dict[str, list[Any]]:
    spans = [found.span(n) for n in documents]
    sizes = found.sizes[documents]
    tokens = np.concatenate([np.arange(s.start, s.stop) for s in spans]) if spans else _NO_TOKENS

    def each(of_documents: list[Any]) -> list[Any]:
        return [x for x, n in zip(of_documents, sizes.tolist(), strict=True) for _ in range(n)]

    texts: list[Any] = [None] * len(tokens)
    if tokenizer is not None:
        texts = [t.text for s in spans for t in token_texts(tokenizer, found.tokens[s].tolist())]
    rows = [None if holders is None else holders.get(n, []) for n in documents]
    visits = np.repeat(found.visits[documents], sizes)
    sums = found.sums[tokens]
    return {
        "document": each([found.name(n) for n in documents]),
        "branch": each([BRANCHES[found.branches[n]] for n in documents]),
        "rows": each(rows),
        "position": found.positions[tokens].tolist(),
        "token_id": found.tokens[tokens].tolist(),
        "token": texts,
        **{name: sums[:, k].tolist() for k, name in enumerate(COMPONENTS)},
        "visits": visits.tolist(),
        "kept_share": (found.kept[tokens] / visits).tolist(),
        "last": found.last[tokens].astype(np.float64).tolist(),
        "last_step": np.repeat(found.steps[documents], sizes).tolist(),
    }


_NO_TOKENS: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


def _write_parquet(path: Path, chunks: Iterable[Mapping[str, list[Any]]]) -> None:
    pa, pq = _pyarrow()
    text = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema(
        {
            "document": text,
            "branch": text,
            "rows": pa.list_(pa.int64()),
            "position": pa.int32(),
            "token_id": pa.int32(),
            "token": pa.string(),
            **{name: pa.float64() for name in COMPONENTS},
            "visits": pa.int64(),
            "kept_share": pa.float64(),
            "last": pa.float64(),
            "last_step": pa.int64(),
        }
    )
    with replacing(path) as temporary, pq.ParquetWriter(temporary, schema) as writer:
        for chunk in chunks:
            writer.write_table(pa.table(chunk, schema=schema))


def _summary(found: Accumulated, holders: Holders | None, seen: int, unseen: int) -> dict[str, Any]:
    """What the run says about its data, in one page."""
    totals, visits = found.totals(), np.repeat(found.visits, found.sizes)
    order = np.argsort(totals, kind="stable")
    quantiles = np.quantile(totals, (0, 0.25, 0.5, 0.75, 1)).tolist() if len(totals) else None

    def entry(number: int) -> dict[str, Any]:
        return {
            "document": found.name(number),
            "branch": BRANCHES[found.branches[number]],
            "rows": None if holders is None else holders.get(number, []),
            "tokens": int(found.sizes[number]),
            "visits": int(found.visits[number]),
            "total": float(totals[number]),
        }

    return {
        "documents": len(totals),
        "tokens": len(found.tokens),
        "visits_of_documents": int(found.visits.sum()),
        "visits_of_tokens": int(visits.sum()),
        "last_step": int(found.steps.max()) if len(totals) else None,
        "sums": {name: float(found.sums[:, k].sum()) for k, name in enumerate(COMPONENTS)},
        "negative_share": _share(found.sums[:, 0] < 0),
        "kept_share": float(found.kept.sum() / visits.sum()) if len(visits) else None,
        "document_totals": {
            "min_q25_median_q75_max": quantiles,
            "negative_share": _share(totals < 0),
        },
        "documents_in_no_row": None if holders is None else len(totals) - len(holders),
        "rows_seen": None if holders is None else seen,
        "rows_not_seen": None if holders is None else unseen,
        "best_documents": [entry(int(n)) for n in order[::-1][:_EXTREMES]],
        "worst_documents": [entry(int(n)) for n in order[:_EXTREMES]],
    }


def _share(flags: Array) -> float | None:
    return float(flags.mean()) if len(flags) else None
