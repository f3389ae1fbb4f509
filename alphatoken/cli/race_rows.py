"""Rows of ``alphatoken race``: choosing rows and retention rows, apart from all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from alphatoken.cli.training_options import RaceArguments
from alphatoken.data import Example, Pair, leak_keys
from alphatoken.data.split import repeated_in
from alphatoken.errors import DataError
from alphatoken.race.arms import read_arms
from alphatoken.race.rows import choosing_numbers, take

Item = Example | Pair
Read = Callable[[str, str], list[Item]]
"""(file, what its rows are) -> the rows."""


def left_out_columns(race: RaceArguments) -> tuple[str, ...]:
    """Columns by which arms leave training rows out."""
    arms = read_arms(race.arms)
    return tuple(dict.fromkeys(arm.without[0] for arm in arms if arm.without is not None))


def read_choosing(
    arguments: Any, read: Read, others: Mapping[str, list[Item]]
) -> tuple[list[Item], list[str]]:
    """Choosing rows of their own file; what repeats them is taken out of the ``others``.

    Returns:
        The rows, none where they have no file; and what was taken out, in sentences.

    Raises:
        DataError: nothing is left of one of the others.
    """
    race = arguments.race
    if race is None or race.choosing_file is None:
        return [], []
    choosing, notes = read(race.choosing_file, "choosing"), list[str]()
    for name, items in others.items():
        items[:], left = _apart_from(choosing, items, arguments.data.leak_key)
        if left:
            notes.append(f"{left} {name} rows repeat a choosing row or prompt and were removed.")
        if not items:
            raise DataError(
                f"no {name} row is left",
                got=f"all {left} repeat a choosing row",
                why="an arm would be judged on rows that it has seen",
                remedy="other rows for one of the two",
            )
    return choosing, notes


def _apart_from(choosing: Sequence[Item], items: Sequence[Item], by: str) -> tuple[list[Item], int]:
    """Items that repeat no choosing row, and how many do."""
    keys = {"choosing": {key for item in choosing for key in leak_keys(item.row)}}
    kept = [item for item in items if repeated_in(item.row, keys, by) is None]
    return kept, len(items) - len(kept)


def rows_of_race(
    arguments: Any,
    read: Read,
    pools: dict[str, list[Item]],
    choosing: list[Item],
    notes: list[str],
) -> dict[str, list[Item]]:
    """Choosing rows, and retention rows as "watched"; those set aside leave the validation rows.

    Args:
        arguments: of the command.
        read: reads the rows of a file.
        pools: rows of the run by name; validation rows are changed in place.
        choosing: rows of their own file, or none.
        notes: gets sentences on what was done.
    """
    race = arguments.race
    if not choosing:
        trusted, seed = pools["validation"], arguments.training.value_seed
        chosen, others = choosing_numbers(len(trusted), race.choosing_rows, seed)
        choosing, rest = take(trusted, chosen), take(trusted, others)
        pools["validation"], left = _apart_from(choosing, rest, arguments.data.leak_key)
        notes.append(
            f"{len(choosing)} of {len(trusted)} validation rows are set aside to choose by, and "
            f"{len(pools['validation'])} are left for the arms"
            + (f" ({left} repeat a choosing row or prompt)." if left else ".")
        )
        if not pools["validation"]:
            raise DataError(
                "no validation row is left",
                got=f"all {left} repeat a choosing row",
                remedy="--choosing_file FILE, or other validation rows",
            )
    rows = {"choosing": choosing}
    if race.retention_file is not None:
        rows["watched"] = read(race.retention_file, "retention")
    return rows
