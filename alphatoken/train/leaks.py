"""Training rows that are held-out rows too: found when a trainer is made, before any work.

What is measured on a row that is trained on rewards learning it by heart. The command line takes
such rows out of the training rows; a trainer in Python is handed both sets by its user, and warns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from alphatoken.data import Row, leak_keys, pair_of
from alphatoken.data.encode import prompt_tokens
from alphatoken.data.rows import Fields, row_of
from alphatoken.errors import AlphaTokenWarning, DataError, warn_caller
from alphatoken.train.python_rows import form_of


def leaking_rows(train: Any, other: Any, *, text_field: str = "text") -> list[int]:
    """Numbers of the training rows that have a prompt or a whole row in common with ``other``.

    "In common" is as on the command line: equal after NFKC, case folding and white-space folding
    (``alphatoken.data.leak_keys``); an empty prompt is in common with none.

    Args:
        train: rows in one of TRL's forms; of a stream nothing is found.
        other: validation, retention or evaluation rows, likewise.
        text_field: TRL's ``dataset_text_field``.
    """
    if not (hasattr(train, "__len__") and hasattr(other, "__len__")):
        return []
    keys = {key for record in other for key in _keys(record, text_field)}
    numbered = enumerate(train) if keys else ()
    return [number for number, row in numbered if not keys.isdisjoint(_keys(row, text_field))]


def warn_of_leaks(train: Any, others: Mapping[str, Any], *, text_field: str = "text") -> None:
    """Warn, once for each set, where training rows repeat its rows.

    Args:
        train: training rows.
        others: what one of the rows is called, such as "a validation row" -> the rows.
        text_field: TRL's ``dataset_text_field``.
    """
    for one, rows in others.items():
        leaks = leaking_rows(train, rows, text_field=text_field)
        if leaks:
            numbers = ", ".join(map(str, leaks[:5])) + (", ..." if len(leaks) > 5 else "")
            warn_caller(
                f"{len(leaks)} of {len(train)} training rows repeat {one} or its prompt (row "
                f"{numbers}). What is measured on it then rewards learning by heart. "
                "alphatoken.train.leaks.leaking_rows names all.",
                AlphaTokenWarning,
            )


def _keys(record: Mapping[str, Any], text_field: str) -> set[str]:
    """Keys of one record; none of a record that is no text (images, tool calls)."""
    if "input_ids" in record:  # what comes before the first label is the prompt
        ids = list(record["input_ids"])
        prompt = prompt_tokens(ids, record.get("labels") or ())
        return {str(ids), f"prompt {prompt}"} if len(prompt) < len(ids) else {str(ids)}
    try:
        return leak_keys(_row(record, text_field))
    except (DataError, TypeError):
        return set()


def _row(record: Mapping[str, Any], text_field: str) -> Row:
    if "chosen" in record and "rejected" in record:
        return pair_of(record, 0, "", Fields(weights="signed")).row
    read = {name: record[name] for name in form_of(record, text_field)}
    return row_of(read, 0, "", Fields(text=text_field, weights="signed"))
