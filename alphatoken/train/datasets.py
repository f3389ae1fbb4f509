"""Data sets for training: checked before any work, and made of rows that were read from files.

TRL trains on whatever its preparation leaves over: an empty response, a pair with two equal
responses or a prompt that fills the whole length cost a place in a batch and teach nothing, or are
dropped without a word. Here they are found first, by row number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from alphatoken.data import Pair, Turn
from alphatoken.data.encode import messages_of
from alphatoken.errors import AlphaTokenWarning, InputError, warn_caller

__all__ = [
    "check_left",
    "check_preference_rows",
    "check_sft_rows",
    "columns_of",
    "cut_pair",
    "is_longer",
    "plain_rows",
    "preference_problems",
    "preference_records",
]

Problems = dict[str, list[int]]
"""Problem -> numbers of the rows that have it, from 0."""

_EMPTY = "the response is empty"


# --- rows in whatever they are held --------------------------------------------------------------


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
        return {k: v.tolist() if hasattr(v, "tolist") else v for k, v in dict(row).items()}

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


# --- checks ------------------------------------------------------------------------------------


def check_sft_rows(
    dataset: Any, *, name: str = "training", text_field: str = "text", on_empty: str = "error"
) -> Any:
    """The data set without rows that SFT cannot train on; or an error that names them.

    Args:
        dataset: a ``datasets.Dataset`` in any form that TRL's ``SFTTrainer`` takes (of a stream
            only the columns of its first row are looked at).
        name: of the data set, for messages.
        text_field: TRL's ``dataset_text_field``.
        on_empty: "error", or "skip" to leave them out with a warning.

    Raises:
        InputError: no rows; a needed column is missing; rows with an empty response (a call of a
            tool is one). The message holds count and row numbers.
    """
    rows = plain_rows(dataset)
    columns = columns_of(rows, name)
    chat = next((name for name in ("messages", "conversations") if name in columns), None)
    if {"prompt", "completion"} <= columns:
        tests = {_EMPTY: lambda row: not _text(row["completion"])}
    elif chat is not None:
        tests = {_EMPTY: lambda row: not _text(row[chat])}
    elif "input_ids" in columns:
        tests = {_EMPTY: _no_label}
    elif text_field in columns:
        tests = {"the text is empty": lambda row: not _text(row[text_field])}
    else:
        raise InputError(
            f"the {name} data set has none of the columns that SFT needs",
            got=", ".join(sorted(columns)),
            remedy="input_ids, messages, conversations, prompt and completion, or "
            f"{text_field} (dataset_text_field)",
        )
    return _usable(_find(rows, tests), dataset, name, on_empty)


def check_preference_rows(dataset: Any, *, name: str = "training", on_empty: str = "error") -> Any:
    """The data set without pairs that DPO cannot train on; or an error that names them.

    Args:
        dataset: a ``datasets.Dataset`` in any form that TRL's ``DPOTrainer`` takes.
        name: of the data set, for messages.
        on_empty: "error", or "skip" to leave them out with a warning.

    Raises:
        InputError: no rows; a needed column is missing; pairs with an empty response on either
            side, or with two equal responses (their gradients cancel, and a mask would make noise
            of them). The message holds count and row numbers.
    """
    return _usable(preference_problems(plain_rows(dataset), name), dataset, name, on_empty)


def check_left(given: Any, prepared: Any, args: Any) -> None:
    """Count the training rows that the trainer below left out, of which no response token is left.

    Packed rows are other rows, and are not counted.

    Args:
        given: rows as they were handed to the trainer below.
        prepared: as it will train on them; of a stream nothing is known yet.
        args: of the trainer.

    Raises:
        InputError: no row is left.
    """
    if not (hasattr(prepared, "__len__") and hasattr(given, "__len__")):
        return
    before, after, limit = len(given), len(prepared), getattr(args, "max_length", None)
    if before and not after:
        raise InputError(
            "no training row has a response token left",
            got=f"{before} rows, max_length {limit}",
            why="there would be nothing to train on",
            remedy="a larger max_length, or shorter prompts",
        )
    if after < before and not getattr(args, "packing", False):
        warn_caller(
            f"{before - after} of {before} training rows have no response token within "
            f"max_length={limit}, and are left out.",
            AlphaTokenWarning,
        )


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


def preference_problems(dataset: Any, name: str = "training") -> Problems:
    """Problems of preference pairs by row; see :func:`check_preference_rows`.

    Raises:
        InputError: no rows, or a needed column is missing.
    """
    columns = columns_of(dataset, name)
    missing = [column for column in ("chosen", "rejected") if column not in columns]
    if missing:
        raise InputError(
            f"the {name} data set has no column {' and no column '.join(map(repr, missing))}",
            got=", ".join(sorted(columns)),
            why="DPO compares two responses to one prompt",
            remedy="give prompt, chosen and rejected",
        )
    tests = {
        "a response is empty": lambda row: not (_text(row["chosen"]) and _text(row["rejected"])),
        "chosen and rejected are equal": lambda row: row["chosen"] == row["rejected"],
    }
    return _find(dataset, tests)


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


Test = Callable[[Mapping[str, Any]], bool]


def _find(dataset: Any, tests: Mapping[str, Test]) -> Problems:
    """Rows by the first thing that is wrong with them; a stream is not read."""
    found: Problems = {}
    if not hasattr(dataset, "__len__"):
        return found
    for number, row in enumerate(dataset):
        problem = next((what for what, test in tests.items() if test(row)), None)
        if problem is not None:
            found.setdefault(problem, []).append(number)
    return found


def _usable(problems: Problems, dataset: Any, name: str, on_empty: str) -> Any:
    """The data set without the rows of ``problems``, or an error that names them."""
    if not problems:
        return dataset
    bad = {row for rows in problems.values() for row in rows}
    parts = []
    for what, rows in problems.items():
        numbers = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
        parts.append(f"{what}: {len(rows)} (row {numbers})")
    can_skip = hasattr(dataset, "select") and len(bad) < len(dataset)
    if on_empty == "error" or not can_skip:
        raise InputError(
            f"{len(bad)} of {len(dataset)} {name} rows cannot be trained on",
            got="; ".join(parts),
            why="they would take a place in a batch and teach nothing, or noise",
            remedy=f"mend them{', or on_empty=skip leaves them out' if can_skip else ''}",
        )
    warn_caller(
        f"{len(bad)} of {len(dataset)} {name} rows cannot be trained on and are left out "
        f"({'; '.join(parts)}). on_empty='error' stops instead.",
        AlphaTokenWarning,
    )
    return dataset.select([row for row in range(len(dataset)) if row not in bad])


def _text(value: Any) -> str:
    """The text of a response, stripped: of a string, or of the assistant's messages and calls."""
    if isinstance(value, str):
        return value.strip()
    texts = []
    for message in value or []:
        if message.get("role", message.get("from")) in ("assistant", "gpt", "model", "bot"):
            content = message.get("content", message.get("value"))
            texts.append(content if isinstance(content, str) else _parts_text(content))
            texts += [str(call) for call in message.get("tool_calls") or ()]
    return "".join(texts).strip()


def _parts_text(content: Any) -> str:
    return "".join(str(part.get("text", "")) for part in content or [])


def _no_label(row: Mapping[str, Any]) -> bool:
    labels = row.get("labels", row["input_ids"])
    return all(label == -100 for label in labels[1:])


def is_longer(prompt: Any, tokenizer: Any, limit: int) -> bool:
    """True if a prompt, a text or messages, has more tokens than ``limit``."""
    if isinstance(prompt, str):
        return len(tokenizer(prompt, verbose=False)["input_ids"]) > limit
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) > limit


# --- records in TRL's forms --------------------------------------------------------------------


def preference_records(
    pairs: Iterable[Pair], *, chat: bool, separator: str = "\n", end: str = ""
) -> list[dict[str, Any]]:
    """Pairs as records ``prompt``, ``chosen``, ``rejected`` for TRL's ``DPOTrainer``."""
    write = messages_of if chat else (lambda turns: _plain(turns, separator, end))
    answer = messages_of if chat else (lambda turns: "\n".join(turn.text for turn in turns))
    return [
        {
            "prompt": write(pair.prompt),
            "chosen": answer(pair.chosen),
            "rejected": answer(pair.rejected),
        }
        for pair in pairs
    ]


def _plain(turns: Sequence[Turn], separator: str, end: str) -> str:
    return "".join(turn.text + (end if turn.role == "assistant" else separator) for turn in turns)
