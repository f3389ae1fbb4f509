"""Results in ``output_dir/_alphatoken``: accumulated values as Parquet, and their page.

The files and the page are those of ``alphatoken score``, with the visits of each document. The
loss, and what else was logged, is where the trainer's own logs are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken.score.statistics import summarise
from alphatoken.score.value_page import write_report
from alphatoken.score.values import IGNORE, ScoredExample, Visits, read_values, write_values
from alphatoken.support.storage import read_json
from alphatoken.train.documents import BRANCHES, row_documents
from alphatoken.train.ledger import COMPONENTS, UNIT, DocumentValues, ValueLedger
from alphatoken.train.manifest import RESULTS, RUN

__all__ = ["REPORT", "VALUES", "export_values", "write_run_report"]

REPORT = f"{RESULTS}/alphatoken-report.html"
VALUES = f"{RESULTS}/values"
"""The page, and the folder of value files, in a run's folder."""

Holders = dict[bytes, list[int]]
"""Key of a document -> rows of the data set that hold it."""


def export_values(
    ledger: ValueLedger,
    folder: str | Path,
    rows: Iterable[Mapping[str, Any]] | None = None,
    *,
    max_length: int | None = None,
    truncation_mode: str = "keep_start",
) -> tuple[int, int]:
    """Write ``part-00000.parquet``, whole or not at all.

    One record a document, as ``alphatoken score`` writes them, with its visits. A token counts as
    kept if its mean weight is at least one half.

    Args:
        ledger: of the run.
        folder: is made if it does not exist.
        rows: rows of the training set as the trainer prepared it (see
            :func:`~alphatoken.train.documents.row_documents`); read once. With it documents are
            ordered by row, and each names the rows that hold it.
        max_length: of preference pairs, as the trainer cut them.
        truncation_mode: TRL's.

    Returns:
        Rows of which a document was visited, and the other rows.

    Raises:
        DataError: the file could not be written; an old one is intact.
        InputError: rows without token ids.
    """
    folder = Path(folder)
    holders: Holders = defaultdict(list)
    visited_rows = other_rows = 0
    for index, row in enumerate(rows or ()):
        keys = row_documents(row, max_length=max_length, truncation_mode=truncation_mode)
        documents = {key for key, _ in keys if key in ledger.documents}
        for key in documents:
            holders[key].append(index)
        visited_rows += bool(documents)
        other_rows += not documents
    folder.mkdir(parents=True, exist_ok=True)
    write_values(folder / "part-00000.parquet", _examples(ledger, holders))
    return visited_rows, other_rows


def _examples(ledger: ValueLedger, holders: Holders) -> Iterator[ScoredExample]:
    """Documents by their first row and branch, those in no row last, else as first visited."""

    def order(key: bytes) -> tuple[bool, int, int]:
        rows = holders.get(key, ())
        return not rows, rows[0] if rows else 0, ledger.documents[key].branch if rows else 0

    for number, key in enumerate(sorted(ledger.documents, key=order)):
        yield _example(number, key, ledger.documents[key], holders.get(key, []))


def _example(number: int, key: bytes, entry: DocumentValues, rows: list[int]) -> ScoredExample:
    def spread(column: Any, kind: Any = np.float64) -> Any:
        whole: Any = np.zeros(len(entry.ids), kind)
        whole[entry.positions] = column
        return whole

    place = f"row {rows[0]}" if rows else f"document {key.hex()[:8]}"
    branch = BRANCHES[entry.branch]
    visits = f"{entry.visits} visit{'s'[: entry.visits != 1]}"
    labels = np.full(len(entry.ids), IGNORE)
    labels[entry.positions] = entry.ids[entry.positions]
    share = entry.sums[:, -1] / entry.visits
    return ScoredExample(
        row=rows[0] if rows else number,
        place=f"{place}{f', {branch}' if branch else ''} ({visits})",
        tokens=[],
        ids=entry.ids.tolist(),
        labels=labels.tolist(),
        kept=spread(share >= 0.5, bool),
        values={name: spread(entry.sums[:, k]) for k, name in enumerate(COMPONENTS)},
        visits=Visits(entry.visits, entry.last_step, branch, rows, spread(share)),
    )


def write_run_report(
    folder: str | Path,
    texts: Callable[[Sequence[int]], list[str]] | None = None,
    rows: tuple[int, int] | None = None,
    facts: Mapping[str, object] | None = None,
    notes: Sequence[str] = (),
) -> Path:
    """Write the page of a run's values, whole or not at all, and return its path.

    It quotes training rows; ``push_to_hub`` does not upload it.

    Args:
        folder: the run's ``output_dir``, with the files of :func:`export_values` in ``VALUES``.
        texts: token ids -> the text of each; without it tokens are shown by their numbers.
        rows: training rows that were seen, and those that were not; None for a stream.
        facts: more of the run, shown before its options.
        notes: sentences about the values.

    Raises:
        DataError: a value file cannot be read, or the page could not be written.
    """
    folder = Path(folder)
    notes = [f"Values are {UNIT}; stability counts with its lambda.", *notes]
    if rows is not None:
        notes.append(
            f"{rows[0]:,} of {sum(rows):,} training rows were seen. A row number counts the "
            "training rows from 0, without those that were left out or held out: it is no line of "
            "the file."
        )
    return write_report(
        folder / REPORT,
        summarise(read_values(folder / VALUES), texts=texts or _numbers),
        title=f"Values of the run {folder.resolve().name}",
        settings={**(facts or {}), **(read_json(folder / RUN) or {}).get("options", {})},
        notes=notes,
    )


def _numbers(ids: Sequence[int]) -> list[str]:
    return [f" #{token}" for token in ids]
