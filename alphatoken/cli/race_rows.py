"""Rows of ``alphatoken race``: choosing rows and retention rows, apart from all others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from alphatoken.cli.held_apart import Item, apart_from, take_apart
from alphatoken.cli.training_options import RaceArguments
from alphatoken.errors import DataError, counted
from alphatoken.race.arms import read_arms
from alphatoken.race.rows import choosing_numbers, take

Read = Callable[[str, str], list[Item]]
"""(file, what its rows are) -> the rows."""


def left_out_columns(race: RaceArguments) -> tuple[str, ...]:
    """Columns by which arms leave training rows out."""
    arms = read_arms(race.arms)
    return tuple(dict.fromkeys(arm.without[0] for arm in arms if arm.without is not None))


def arms_by_number(race: RaceArguments | None) -> dict[str, str]:
    """Arms that leave training rows out by their numbers, as messages call them -> the numbers."""
    arms = () if race is None else read_arms(race.arms)
    return {f"the arm '{arm.name}'": arm.without_rows for arm in arms if arm.without_rows}


def read_race_rows(
    arguments: Any, read: Read, others: Mapping[str, list[Item]]
) -> tuple[dict[str, list[Item]], list[str]]:
    """Choosing and retention rows of their own files; what repeats them leaves the ``others``.

    Returns:
        The rows as "choosing" and "watched", those that have a file; and what was taken out of the
        others, in sentences.

    Raises:
        DataError: nothing is left of one of the others.
    """
    race = arguments.race
    files = {} if race is None else {"choosing": race.choosing_file, "watched": race.retention_file}
    rows, notes = dict[str, list[Item]](), list[str]()
    for pool, file in files.items():
        if file is not None:
            kind, what = _KINDS[pool]
            rows[pool] = read(file, kind)
            notes += take_apart(rows[pool], what, others, arguments.data.leak_key)
    return rows, notes


_KINDS = {
    "choosing": ("choosing", "a choosing row"),
    "watched": ("retention", "a retention row of the race"),
}
"""Rows of a race -> the name they are read by, and what one of them is called."""


def rows_of_race(
    arguments: Any,
    pools: dict[str, list[Item]],
    own: Mapping[str, list[Item]],
    notes: list[str],
) -> dict[str, list[Item]]:
    """Choosing rows, and retention rows as "watched"; those set aside leave the validation rows.

    Args:
        arguments: of the command.
        pools: rows of the run by name; validation rows are changed in place.
        own: rows that the race has files of.
        notes: gets sentences on what was done.
    """
    if "choosing" in own:
        return dict(own)
    trusted, seed = pools["validation"], arguments.training.value_seed
    chosen, others = choosing_numbers(len(trusted), arguments.race.choosing_rows, seed)
    choosing, rest = take(trusted, chosen), take(trusted, others)
    pools["validation"], left = apart_from(choosing, rest, arguments.data.leak_key)
    notes.append(
        f"{len(choosing)} of {len(trusted)} validation rows are set aside to choose by, and "
        f"{len(pools['validation'])} are left for the arms"
        + (f" ({counted(left, 'rows repeat a choosing row or prompt')})." if left else ".")
    )
    if not pools["validation"]:
        raise DataError(
            "no validation row is left",
            got=f"all {left} repeat a choosing row",
            remedy="--choosing_file FILE, or other validation rows",
        )
    return {"choosing": choosing, **own}
