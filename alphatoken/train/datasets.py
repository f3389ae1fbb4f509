"""Data sets for training: checked before any work, and made of rows that were read from files.

TRL trains on whatever its preparation leaves over: an empty response, a pair with two equal
responses or a prompt that fills the whole length cost a place in a batch and teach nothing, or are
dropped without a word. Here they are found first, by row number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from alphatoken.data import Pair
from alphatoken.data.markers import is_filled
from alphatoken.data.plain import text_pieces
from alphatoken.data.template import messages_of
from alphatoken.errors import AlphaTokenWarning, InputError, warn_caller

__all__ = [
    "check_left",
    "columns_of",
    "cut_pair",
    "is_longer",
    "pair_problem",
    "plain_rows",
    "preference_record",
    "response_text",
    "usable_rows",
]

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


# --- checks ------------------------------------------------------------------------------------


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


def pair_problem(row: Mapping[str, Any]) -> str | None:
    """Reason for which DPO cannot train on a pair.

    The gradients of two equal responses cancel, and a mask would make noise of them.
    """
    if not (response_text(row["chosen"]) and response_text(row["rejected"])):
        return "a response is empty"
    return "chosen and rejected are equal" if row["chosen"] == row["rejected"] else None


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


def usable_rows(problems: Mapping[str, list[int]], dataset: Any, name: str, on_empty: str) -> Any:
    """The data set without rows that cannot be trained on, or an error that names them.

    Args:
        problems: problem -> numbers of the rows that have it, from 0.
        dataset: the rows.
        name: of the data set, for messages.
        on_empty: "error", or "skip" to leave them out with a warning.

    Raises:
        InputError: holds count and row numbers.
    """
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


def response_text(value: Any) -> str:
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


def is_longer(prompt: Any, tokenizer: Any, limit: int) -> bool:
    """True if a prompt, a text or messages, has more tokens than ``limit``."""
    if isinstance(prompt, str):
        return len(tokenizer(prompt, verbose=False)["input_ids"]) > limit
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) > limit


# --- records in TRL's forms --------------------------------------------------------------------


def preference_record(pair: Pair, tokenizer: Any, *, chat: bool) -> dict[str, Any]:
    """A pair as a record ``prompt``, ``chosen``, ``rejected`` for TRL's ``DPOTrainer``.

    Messages go through the chat template, and texts are taken as they are, with an end token and
    the start token that the tokenizer puts before a text. A pair of texts that hold the template's
    own markers is one of texts, whatever ``chat`` says.

    Args:
        pair: of which both responses are texts, or both messages.
        tokenizer: of the model.
        chat: write pairs with the chat template.
    """
    sides = (pair.chosen, pair.rejected)
    verbatim = is_filled(pair.row, tokenizer)
    if chat and not verbatim:
        parts = [messages_of(turns, tokenizer) for turns in (pair.prompt, *sides)]
        return dict(zip(_PARTS, parts, strict=True))
    start, end = (getattr(tokenizer, name, None) or "" for name in ("bos_token", "eos_token"))
    first = getattr(tokenizer, "bos_token_id", None)
    if list(tokenizer("")["input_ids"])[:1] != [first]:
        start = ""
    prompt, *said = (
        "".join(text_pieces(turns, tokenizer, verbatim=verbatim)) for turns in (pair.prompt, *sides)
    )
    # TRL puts an end token behind each response that has none.
    texts = [prompt.removeprefix(start), *(text.removesuffix(end) for text in said)]
    return dict(zip(_PARTS, texts, strict=True))


_PARTS = ("prompt", "chosen", "rejected")
