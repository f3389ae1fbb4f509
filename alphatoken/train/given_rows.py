"""Rows in whatever form they are given from Python, as a data set in one of TRL's forms.

TRL reads ``prompt`` and ``completion``, ``messages``, ``text``, ``input_ids``, and pairs of
``chosen`` and ``rejected``. Rows in these forms stay as they are, to the bit. The command line
reads more (``question`` and ``answer``, ``instruction`` and ``output``, lists of records); here
those are written as the command line writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from alphatoken.data import pair_of, row_of
from alphatoken.data.rows import CHATS, PROMPTS, RESPONSES
from alphatoken.errors import InputError
from alphatoken.train.datasets import preference_records, sft_records
from alphatoken.train.loading import load_tokenizer

__all__ = ["as_dataset", "pairs_in_trl_form", "rows_in_trl_form", "tokenizer_of", "uses_template"]


def as_dataset(rows: Any, name: str) -> Any:
    """A list of records or of texts as a ``datasets.Dataset``; a data set as it is.

    Args:
        rows: as given.
        name: of the data set, for messages.

    Raises:
        InputError: no rows, a path, or a mapping; the message says what to give.
    """
    from datasets import Dataset

    wanted = (
        "give a datasets.Dataset, a list of records or a list of texts; "
        "load_dataset('json', data_files=FILE, split='train') reads a file"
    )
    if isinstance(rows, (str, Mapping)):
        kind = "one split of it, or " if hasattr(rows, "num_rows") else ""
        raise InputError(
            f"the {name} data set is no set of rows",
            got=f"{type(rows).__name__}: {str(rows)[:60]!r}",
            remedy=kind + wanted,
        )
    if not isinstance(rows, (list, tuple)):
        return rows
    kinds = sorted({type(row).__name__ for row in rows})
    if rows and all(isinstance(row, str) for row in rows):
        return Dataset.from_list([{"text": row} for row in rows])
    if rows and all(isinstance(row, Mapping) for row in rows):
        return Dataset.from_list([dict(row) for row in rows])
    raise InputError(
        f"the {name} data set is no set of rows",
        got=f"{type(rows).__name__} of {' and '.join(kinds) or 'nothing'}",
        remedy=wanted,
    )


def rows_in_trl_form(dataset: Any, name: str, text_field: str, chat: Callable[[], bool]) -> Any:
    """A data set of prompts and responses in other columns than TRL's, for ``SFTTrainer``.

    Args:
        dataset: of :func:`as_dataset`.
        name: of it, for messages.
        text_field: TRL's ``dataset_text_field``.
        chat: whether rows become messages; asked only where it matters.

    Raises:
        DataError: a record cannot be read; the message names it.
    """
    columns = _columns(dataset)
    trl = {"input_ids", text_field, *CHATS} & columns or {"prompt", "completion"} <= columns
    if trl or not (set(PROMPTS) & columns and set(RESPONSES) & columns):
        return dataset
    return _mapped(dataset, _record, columns, name, chat())


def pairs_in_trl_form(dataset: Any, name: str, chat: Callable[[], bool]) -> Any:
    """Pairs whose columns have other names than TRL's, for ``DPOTrainer``.

    A prompt by another name would not be refused by TRL: it would look for a common beginning of
    the two responses instead.

    Raises:
        DataError: a record is no pair; the message names it.
    """
    columns = _columns(dataset)
    trl = "prompt" in columns or not {*PROMPTS, *CHATS} & columns
    named = {"chosen", "rejected"} <= columns
    other = {"chosen_response", "rejected_response"} <= columns
    if not (named or other) or (trl and named) or "prompt_ids" in columns:
        return dataset
    return _mapped(dataset, _pair_record, columns, name, chat())


def uses_template(given: Mapping[str, Any]) -> bool:
    """Whether rows of a trainer with these arguments become chats, as on the command line.

    They do where the tokenizer has a template.
    """
    if getattr(given["args"], "chat_template_path", None) is not None:
        return True
    return getattr(tokenizer_of(given), "chat_template", None) is not None


def tokenizer_of(given: Mapping[str, Any]) -> Any:
    """The tokenizer of a trainer with these arguments; one that was not handed over: the model's.

    Raises:
        ModelError: there is none.
    """
    tokenizer, model = given.get("processing_class"), given.get("model")
    if tokenizer is None and model is not None:
        tokenizer = load_tokenizer(model if isinstance(model, str) else model.config._name_or_path)
    return tokenizer


def _columns(dataset: Any) -> set[str]:
    """Column names; of a stream that does not know them, those of its first row."""
    names: Sequence[str] | None = getattr(dataset, "column_names", None)
    if names is None:
        first: Iterator[Mapping[str, Any]] = iter(dataset)
        names = list(next(first, {}))
    return set(names)


# Of the module, with all they need as arguments: datasets keys its cache by their content.


def _record(row: Mapping[str, Any], index: int, *, name: str, chat: bool) -> dict[str, Any]:
    return sft_records([row_of(row, index, f"{name} row {index}")], chat=chat)[0]


def _pair_record(row: Mapping[str, Any], index: int, *, name: str, chat: bool) -> dict[str, Any]:
    return preference_records([pair_of(row, index, f"{name} row {index}")], chat=chat)[0]


def _mapped(
    dataset: Any, record: Callable[..., dict[str, Any]], columns: set[str], name: str, chat: bool
) -> Any:
    options = {"name": name, "chat": chat}
    return dataset.map(record, with_indices=True, fn_kwargs=options, remove_columns=sorted(columns))
