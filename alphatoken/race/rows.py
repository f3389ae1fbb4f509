"""Rows of a race: choosing rows set aside of the trusted ones, and rows that an arm leaves out."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from alphatoken.data.encode import prompt_tokens
from alphatoken.data.named_rows import read_numbers
from alphatoken.errors import ConfigError, short
from alphatoken.race.arms import Arm
from alphatoken.race.decision import FEW


def set_aside(rows: int, wanted: int | None) -> int:
    """How many of so many trusted rows choose among arms; arguments of :func:`choosing_numbers`."""
    return max(FEW, rows // 2) if wanted is None else wanted


def choosing_numbers(rows: int, wanted: int | None, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the trusted rows to choose by, drawn by the seed alone, and of the others.

    Args:
        rows: how many trusted rows there are.
        wanted: how many are set aside; None for half of them, at least eight.
        seed: of the draw.

    Raises:
        ConfigError: none would be left for the arms.
    """
    count = set_aside(rows, wanted)
    if count >= rows:
        fewer = max(2, rows // 2)
        smaller = f"choosing_rows={fewer} (--choosing_rows {fewer}), or " if fewer < rows else ""
        raise ConfigError(
            "there are too few trusted rows to set choosing rows aside",
            got=f"{rows} validation rows, {count} of them to choose by",
            why="rows that a walk was taken on look better than any other",
            remedy=f"more validation rows, {smaller or 'or '}choosing rows of their own "
            "(choosing_dataset=..., --choosing_file FILE)",
        )
    chosen = set(random.Random(f"choosing rows {seed}").sample(range(rows), count))
    return sorted(chosen), [number for number in range(rows) if number not in chosen]


def prompt_numbers(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """A number for each row of tokens, the same for rows that share their prompt.

    The prompt is what comes before the first label, of a pair its own. A row without one has its
    number in common with its copies alone.

    >>> row = {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}
    >>> prompt_numbers([row, {**row, "input_ids": [5, 6, 8]}, {"input_ids": [5], "labels": [5]}])
    [0, 0, 1]
    """
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault(_prompt(row), len(numbers)) for row in rows]


def _prompt(row: Mapping[str, Any]) -> tuple[int, ...]:
    if "prompt_ids" in row:
        return tuple(row["prompt_ids"])
    return prompt_tokens(row["input_ids"], row["labels"])


def counted_rows(name: str, facts: Mapping[str, Any]) -> str:
    """How many rows there are, and of how many prompts where some share theirs.

    >>> counted_rows("choosing", {"rows": 16, "prompts": 16})
    '16 choosing rows'
    """
    counted = f"{facts['rows']} {name} rows"
    if facts["prompts"] == facts["rows"]:
        return counted
    return f"{counted} of {facts['prompts']} prompts (rows of one prompt count as one)"


def take(dataset: Any, numbers: Sequence[int]) -> Any:
    """These rows of a data set, in its own form."""
    if hasattr(dataset, "select"):
        return dataset.select(numbers)
    return [dataset[number] for number in numbers]


def rows_of_arm(arm: Arm, entries: Sequence[str], numbers: Sequence[int]) -> list[int]:
    """Places of the training rows that an arm does not leave out, by a column or by their numbers.

    Args:
        arm: which says both.
        entries: of the arm's column, row by row, as text; read where it names one.
        numbers: of the rows, as messages and pages name them.

    Raises:
        ConfigError: it would leave out no row, or every row.
    """
    kept = list(range(len(numbers)))
    if arm.without is not None:
        column, entry = arm.without
        kept = [place for place in kept if entries[place] != entry]
        some = ", ".join(sorted({*entries})[:8])
        said = f"{column}={entry}; the rows have {some}"
        remedy = "a column and an entry that some rows have and others do not"
    if arm.without_rows is not None:
        parts = read_numbers(arm.without_rows)
        kept = [place for place in kept if not any(numbers[place] in part for part in parts)]
        said = f"without_rows={short(arm.without_rows)}, of {len(numbers)} rows"
        remedy = "numbers of some rows that the other arms train on"
    if len(kept) in (0, len(numbers)):
        raise ConfigError(
            f"the arm '{arm.name}' leaves out {'no row' if kept else 'every row'}",
            got=said,
            remedy=remedy,
        )
    return kept
