"""Data sets for training, of whatever library: checked, and rows that teach nothing left out.

TRL trains on whatever its preparation leaves over: an empty response, a pair with two equal
responses or a prompt that fills the whole length cost a place in a batch and teach nothing, or are
dropped without a word. Here they are named first, by row number.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from alphatoken.data.survey import Survey
from alphatoken.data.trl_rows import in_trls_form, lost_of_messages, other_meaning
from alphatoken.errors import AlphaTokenWarning, InputError, warn_caller

__all__ = [
    "as_dataset",
    "check_left",
    "columns_of",
    "cut_pair",
    "plain_rows",
    "require_rows",
    "require_trls_dataset",
    "without_rows",
]

# --- sets of rows ---------------------------------------------------------------------------------


class _PlainRows:
    """Rows read one by one by their number, tensors and arrays in them as lists."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)  # a data set of one's own may have another end
        row = self._dataset[index]
        try:
            columns = dict(row)
        except (TypeError, ValueError):
            raise InputError(
                "a row of a data set has no columns",
                got=f"row {index} of a {type(self._dataset).__name__}: {type(row).__name__}",
                why="rows are read by the names of their columns",
                remedy="rows as dictionaries, such as {'input_ids': ..., 'labels': ...}",
            ) from None
        return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


def plain_rows(dataset: Any) -> Any:
    """A data set whose rows are mappings of lists, numbers and texts, for whoever reads them.

    A ``datasets.Dataset`` in a format of tensors or with a transform, and a torch ``Dataset``, give
    tensors, or columns that are not those that are stored. Streams and all others stay.
    """
    kind = (getattr(dataset, "format", None) or {}).get("type")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return dataset
    if isinstance(dataset, (list, tuple, _PlainRows)):
        return dataset
    if hasattr(dataset, "column_names") and kind is None:
        return dataset
    return _PlainRows(dataset)


def columns_of(dataset: Any, name: str) -> set[str]:
    """Names of the columns; of a stream that does not know them, those of its first row.

    Raises:
        InputError: no rows.
    """
    columns = getattr(dataset, "column_names", None)
    first = next(iter(dataset), None)
    if first is None:
        raise InputError(f"the {name} data set has no rows", got="0 rows", remedy="give some")
    return set(columns if columns is not None else first)


def as_dataset(rows: Any, name: str) -> Any:
    """A list of records or of texts as a ``datasets.Dataset``; a data set as it is.

    Args:
        rows: as the caller handed them over.
        name: of the data set, for messages.

    Raises:
        InputError: no rows, a path, or a mapping; records that are not of one form; the message
            says what to give.
    """
    if not isinstance(rows, (str, Mapping, list, tuple)):
        return rows
    if isinstance(rows, (list, tuple)) and rows:
        from datasets import Dataset

        if all(isinstance(row, str) for row in rows):
            return Dataset.from_dict({"text": list(rows)})
        if all(isinstance(row, Mapping) for row in rows):
            records = [{**row, **in_trls_form(row, n, name)} for n, row in enumerate(rows)]
            # ``Dataset.from_list`` would take the first record's columns for all.
            columns = dict.fromkeys(column for row in records for column in row)
            return _of_columns({c: [row.get(c) for row in records] for c in columns}, name, records)
    raise InputError(
        f"the {name} data set is no set of rows",
        got=f"{type(rows).__name__}: {str(rows)[:60]!r}",
        remedy="give a datasets.Dataset (one split of it), a list of records or a list of texts; "
        "load_dataset('json', data_files=FILE, split='train') reads a file",
    )


def _of_columns(columns: Mapping[str, list[Any]], name: str, rows: Sequence[Any]) -> Any:
    """A data set of these columns, each of which holds values of one kind.

    Raises:
        InputError: one holds several; the message names what is lost of ``rows`` first.
    """
    import pyarrow as pa
    from datasets import Dataset

    try:
        return Dataset.from_dict(columns)
    except pa.ArrowException as error:
        for number, row in enumerate(rows):
            if lost := lost_of_messages(row):
                raise other_meaning(lost, row, name, number) from None
        kinds = {c: {type(v).__name__ for v in own if v is not None} for c, own in columns.items()}
        several = {c: " and ".join(sorted(k)) for c, k in kinds.items() if len(k) > 1}
        raise InputError(
            f"the {name} rows are of several forms",
            got="; ".join(f"{c!r} holds {own}" for c, own in several.items()) or str(error),
            why="a column of a data set holds values of one kind",
            remedy="write a column in one kind for all rows: texts, or messages of which each "
            "field is of one kind",
        ) from None


def require_rows(rows: Any, name: str) -> None:
    """Refuse tables and iterators of other libraries, which TRL reads in none of its forms.

    Raises:
        InputError: names what makes a data set of them.
    """
    library = type(rows).__module__.partition(".")[0]
    remedy = {
        "pandas": "datasets.Dataset.from_pandas(rows, preserve_index=False)",
        "polars": "datasets.Dataset.from_polars(rows)",
        "pyarrow": "datasets.Dataset(rows)",
        "numpy": "datasets.Dataset.from_list(rows.tolist())",
    }.get(library)
    if remedy is None and (isinstance(rows, Iterator) or inspect.isfunction(rows)):
        remedy = (
            "datasets.Dataset.from_list(list(rows)), or datasets.IterableDataset.from_generator"
        )
    if remedy is not None:
        raise InputError(
            f"the {name} data set is no set of rows",
            got=f"{type(rows).__module__}.{type(rows).__qualname__}",
            why="rows are looked at by their number before training, and again in it",
            remedy=remedy,
        )


def require_trls_dataset(rows: Any) -> None:
    """Refuse training rows that TRL does not take.

    Raises:
        InputError: they are no data set of ``datasets``.
    """
    from datasets import Dataset, IterableDataset

    if not isinstance(rows, (Dataset, IterableDataset)):
        raise InputError(
            "the training data set is none that TRL reads",
            got=f"{type(rows).__module__}.{type(rows).__qualname__}",
            remedy="datasets.Dataset.from_list([dict(row) for row in rows])",
        )


# --- rows that are left out -----------------------------------------------------------------------


def without_rows(problems: Mapping[int, str], dataset: Any, name: str, on_empty: str) -> Any:
    """The data set without rows that cannot be trained on, or an error that names them.

    Args:
        problems: number of a row, from 0 -> reason for which it cannot be trained on.
        dataset: the rows.
        name: of the data set, for messages.
        on_empty: "error", or "skip" to leave them out with a warning.

    Raises:
        InputError: holds count and row numbers.
    """
    if not problems:
        return dataset
    survey, total = Survey(f"{name} rows"), len(dataset)
    for number, reason in problems.items():
        survey.leave_out(reason, f"row {number}")
    can_skip = hasattr(dataset, "select") and len(problems) < total
    if on_empty == "error" or not can_skip:
        raise InputError(
            f"{len(problems)} of {total} {name} rows cannot be trained on",
            got="; ".join(survey.left_out("rows")),
            why="they would take a place in a batch and teach nothing, or noise",
            remedy=f"mend them{', or on_empty=skip leaves them out' if can_skip else ''}",
        )
    sentences = survey.left_out(f"of {total} {name} rows left out")
    warn_caller(f"{'; '.join(sentences)}. on_empty='error' stops instead.", AlphaTokenWarning)
    return dataset.select([number for number in range(total) if number not in problems])


def check_left(rows: Any, prepared: Any, args: Any) -> None:
    """Count the training rows that the trainer below left out, of which no response token is left.

    Packed rows are other rows, and are not counted.

    Args:
        rows: as they were handed to the trainer below.
        prepared: as it will train on them; of a stream nothing is known yet.
        args: of the trainer.

    Raises:
        InputError: no row is left.
    """
    if not (hasattr(prepared, "__len__") and hasattr(rows, "__len__")):
        return
    before, after, limit = len(rows), len(prepared), getattr(args, "max_length", None)
    if before and not after:
        raise InputError(
            "no training row has a response token left",
            got=f"{before} rows, max_length {limit}",
            why="there would be nothing to train on",
            remedy="a larger max_length, or shorter prompts",
        )
    if after < before and not getattr(args, "packing", False):
        survey = Survey("training rows")
        survey.leave_out(f"no response token within max_length={limit}", count=before - after)
        (sentence,) = survey.left_out(f"of {before} training rows left out")
        warn_caller(f"{sentence}.", AlphaTokenWarning)


def cut_pair(
    row: Mapping[str, Any], *, max_prompt: int | None, max_response: int | None
) -> dict[str, Any]:
    """A tokenised pair whose prompt and responses are each cut to a length of their own.

    A prompt keeps its end, which the response answers; a response keeps its start, which no later
    token has changed. So did TRL while it had two limits.

    Args:
        row: with ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``.
        max_prompt: tokens of the prompt; None cuts nothing.
        max_response: tokens of either response; None cuts nothing.
    """
    prompt = row["prompt_ids"] if max_prompt is None else row["prompt_ids"][-max_prompt:]
    responses = {name: row[name][:max_response] for name in ("chosen_ids", "rejected_ids")}
    return {**row, "prompt_ids": prompt, **responses}
