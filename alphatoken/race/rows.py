"""Rows of a race: choosing rows set aside of the trusted ones, and rows that an arm leaves out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken.race.decision import FEW


def choosing_numbers(rows: int, wanted: int | None, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the trusted rows to choose by, drawn by the seed alone, and of the others.

    Args:
        rows: how many trusted rows there are.
        wanted: how many are set aside; None for half of them, at least eight.
        seed: of the draw.

    Raises:
        ConfigError: none would be left for the arms.
    """
    count = max(FEW, rows // 2) if wanted is None else wanted
    if count >= rows:
        raise ConfigError(
            "there are too few trusted rows to set choosing rows aside",
            got=f"{rows} validation rows, {count} of them to choose by",
            why="rows that a walk was taken on look better than any other",
            remedy="more validation rows, a smaller choosing_rows, or choosing rows of their own "
            "(choosing_dataset=..., --choosing_file FILE)",
        )
    chosen = set(random.Random(f"choosing rows {seed}").sample(range(rows), count))
    return sorted(chosen), [number for number in range(rows) if number not in chosen]


def take(dataset: Any, numbers: Sequence[int]) -> Any:
    """These rows of a data set, in its own form."""
    if hasattr(dataset, "select"):
        return dataset.select(numbers)
    return [dataset[number] for number in numbers]


def rows_without(entries: Sequence[str], without: tuple[str, str], arm: str) -> list[int]:
    """Numbers of the training rows that an arm does not leave out.

    Args:
        entries: of the column, row by row, as text.
        without: the column, and the entry of the rows that are left out.
        arm: name of the arm.

    Raises:
        ConfigError: it would leave out no row, or every row.
    """
    column, entry = without
    kept = [number for number, own in enumerate(entries) if own != entry]
    if len(kept) in (0, len(entries)):
        some = sorted({*entries})
        raise ConfigError(
            f"the arm '{arm}' leaves out {'no row' if kept else 'every row'}",
            got=f"{column}={entry}; the rows have {', '.join(some[:8])}",
            remedy="a column and an entry that some rows have and others do not",
        )
    return kept
