"""The command line that trains as an arm of a race does, without the race."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from alphatoken.cli.arguments import Arguments, named_options, read_arguments, words_of
from alphatoken.cli.recipes import find_recipe
from alphatoken.cli.training_options import RaceArguments
from alphatoken.cli.training_rows import check_rows
from alphatoken.errors import AlphaTokenError
from alphatoken.race.arms import Arm
from alphatoken.train.fields import AlphaFields
from alphatoken.train.policies import OF_VALUES

_NOT_KEPT = {one.name for kind in (RaceArguments, AlphaFields) for one in fields(kind)}
_NOT_KEPT |= {"value", "resume", "allow_changed", "overwrite_output", "output_dir"}
"""Options of the race, of arms, and of going on; an arm's own are said anew."""


def command_of_arm(own: Arguments, arm: Arm, steps: int) -> str:
    """The command that trains by the options of an arm; "" where none is known to.

    It has the words that were typed, but for those of the race, and the options of the arm. It is
    read here, and must come to the arm's own options.

    Args:
        own: what the race read for this arm, before any trainer was made of it.
        arm: of the race.
        steps: of the race's run, which an arm of fewer rows takes as well.
    """
    args = own.training
    if arm.without is not None or args.world_size > 1:
        return ""  # no option leaves rows out by a column; another launcher was typed before
    rows = dict[str, Any]()
    if arm.without_rows is not None:
        numbers = filter(None, (own.data.without_rows, arm.without_rows))
        rows = {"without_rows": ",".join(numbers), "max_steps": steps}
    kept = (option for option in _options(own.words) if _is_kept(option, rows))
    words = [word for option in kept for word in option]

    def read(options: Mapping[str, Any]) -> Arguments:
        line = [*words, *words_of({**options, "output_dir": args.output_dir})]
        return read_arguments(own.command, line, type(args))

    try:
        options = {**arm.options, **_differences(own, read(arm.options)), **rows}
        alone = read(options)
        check_rows(alone)
    except AlphaTokenError:
        return ""
    if _differences(own, alone).keys() - rows.keys():
        return ""
    folder = {"output_dir": _free_folder(Path(args.output_dir))}
    return shlex.join(["alphatoken", own.command, *words, *words_of(options | folder)])


def _options(words: Sequence[str]) -> Iterator[list[str]]:
    """The words of each option: its flag, and what follows up to the next one."""
    begins = [place for place, word in enumerate(words) if word.startswith("--")]
    for place, end in zip(begins, [*begins[1:], len(words)], strict=True):
        yield list(words[place:end])


def _is_kept(option: Sequence[str], again: Collection[str]) -> bool:
    """Whether the words of an option are those of a run without a race; some are said ``again``."""
    (name,) = named_options(option[:1])
    if name == "config":
        return find_recipe(option[0].partition("=")[2] or option[1]).command != "race"
    return not {name, name.removeprefix("no_")} & _NOT_KEPT.union(again)


def _differences(own: Arguments, other: Arguments) -> dict[str, Any]:
    """Options of the trainer, of rows and of the model that are others in a second reading.

    Those of values are left out where nothing is valued.
    """
    unread = set() if own.training.needs_values else {*OF_VALUES}
    pairs = [
        (own.training, other.training),
        (own.data, other.data),
        (own.model, other.model),
    ]
    return {
        one.name: getattr(first, one.name)
        for first, second in pairs
        for one in fields(first)
        if one.init and one.name not in unread
        if getattr(first, one.name) != getattr(second, one.name)
    }


def _free_folder(folder: Path) -> str:
    """A folder beside this one in which nothing is."""
    place, number = folder.with_name(f"{folder.name}-alone"), 2
    while place.exists():
        place, number = folder.with_name(f"{folder.name}-alone-{number}"), number + 1
    return str(place)
