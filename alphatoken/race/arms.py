"""Arms of a race: what each changes of the run, how it is written, and when there is a look."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from alphatoken.data.named_rows import as_typed, read_numbers
from alphatoken.errors import ConfigError, InputError, refuse_unknown
from alphatoken.presets import PRESETS, written_options
from alphatoken.train.fields import AlphaFields
from alphatoken.train.steps import LEAST_STEPS

ALL = "all"
"""The arm that all others are compared with: every response token with weight 1."""

_TOP_80: Mapping[str, Any] = {"policy": "top", "keep_ratio": 0.8}
_WITHOUT_RETENTION: Mapping[str, Any] = {"objective": "adaptation", "retention": "none"}

PACKAGED: Mapping[str, Mapping[str, Any]] = {
    ALL: {"policy": "standard"},
    # The walk's steps and rate are the run's, which are the preset's where none are named.
    "walk-80": {**_TOP_80, "estimator": PRESETS["walk"].options["estimator"], **_WITHOUT_RETENTION},
    **{f"{name}-80": {**_TOP_80, **written_options(name, {})} for name in ("exact", "paper")},
}
"""Arms by name: the 80 % of highest value by each preset; ``all`` is in every race."""

SHARES = (25, 50, 100)
EARLIEST = LEAST_STEPS
"""Thousandths of the run's steps at which there are looks, and the first step for one: at five
steps selection led on rows of each of four kinds, and at forty on one of them alone."""

_NAME = re.compile(r"[\w.+-]+(:[\w.+-]+=[^/\\,]+)?")
CACHES = {"policy_cache": "policies", "fisher_cache": "fisher"}
"""Options for folders of caches, which no arm changes; the folder of each in ``output_dir``."""
_OPTIONS = [one.name for one in fields(AlphaFields) if one.name not in CACHES]
WITHOUT, WITHOUT_ROWS = "without", "without_rows"


@dataclass(frozen=True)
class Arm:
    """One arm.

    Attributes:
        name: of the arm.
        options: of the trainer, in place of the run's own. Only those of token values: steps,
            rates, batches and seeds are the same in all arms.
        without: (column, value) of the training rows that it leaves out, or None.
        without_rows: numbers of training rows that it leaves out, as they are typed, or None: those
            that messages name, in Python places from 0.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, str] | None = None
    without_rows: str | None = None

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return re.sub(r"[^\w.+-]+", "-", self.name)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        rows = {} if self.without is None else {WITHOUT: list(self.without)}
        named = {} if self.without_rows is None else {WITHOUT_ROWS: self.without_rows}
        return {**self.options, **rows, **named}

    @property
    def leaves_rows_out(self) -> bool:
        """Whether it trains on a part of the training rows."""
        return self.without is not None or self.without_rows is not None


def read_arms(arms: Sequence[str] | Mapping[str, Any] | None) -> tuple[Arm, ...]:
    """The arms of a race, ``all`` first.

    Args:
        arms: words as on the command line, or name -> options; None for ``walk-80`` alone.

    Raises:
        ConfigError: a name or an option that there is not, a name twice, or no arm beside ``all``.
    """
    if isinstance(arms, str):
        arms = [arms]
    if arms is None:
        arms = ["walk-80"]
    if isinstance(arms, Mapping):
        made = [_of_mapping(name, options) for name, options in arms.items()]
    else:
        made = [_of_word(word) for word in arms]
    if ALL not in [arm.name for arm in made]:
        made.insert(0, _of_word(ALL))
    made.sort(key=lambda arm: arm.name != ALL)
    folders = [arm.folder for arm in made]
    twice = {one.name for one in made if folders.count(one.folder) > 1}
    if twice or len(made) < 2:
        raise ConfigError(
            "two arms have one name" if twice else "a race needs an arm beside 'all'",
            got=", ".join(sorted(twice)) or ALL,
            remedy="NAME:OPTION=VALUE,... gives an arm a name of its own"
            if twice
            else "--arms walk-80, or leave the option out",
        )
    return tuple(made)


def _of_word(word: Any) -> Arm:
    if not isinstance(word, str):
        raise ConfigError("an arm is written as a word", got=repr(word), remedy="--arms walk-80")
    name, colon, rest = word.partition(":")
    if name == WITHOUT and not rest.startswith(f"{WITHOUT_ROWS}="):
        return _named(word, {WITHOUT: rest})
    if "=" not in rest:  # module:Class is a policy, too
        own = PACKAGED.get(word, {"policy": word})
        return _named(word if word in PACKAGED or not colon else rest, own)
    options: dict[str, Any] = {}
    for part in re.split(r",(?=\w+=)", rest):
        key, _, text = part.partition("=")
        options[key] = _value(text)
    return _named(name, options)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None if text == "none" else text


def _of_mapping(name: str, options: Any) -> Arm:
    if options is None and name in PACKAGED:
        options = PACKAGED[name]
    if not isinstance(options, Mapping):
        raise ConfigError(
            "an arm is a mapping of options",
            got=f"{name}: {options!r}",
            remedy="such as {'policy': 'top', 'estimator': 'walk', 'keep_ratio': 0.8}",
        )
    return _named(name, options)


def _named(name: str, options: Mapping[str, Any]) -> Arm:
    """The arm, its name and options checked."""
    options = dict(options)
    without = _without(options.pop(WITHOUT, None))
    without_rows = as_typed(options.pop(WITHOUT_ROWS, None))
    arm = f"the arm '{name}'"
    if without_rows is not None:
        read_numbers(without_rows, arm)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError("an arm's name has letters, digits and . _ + - in it", got=repr(name))
    of_policy = f"of a policy of your own: {name}:policy=...,policy_options={{...}}"
    refuse_unknown(arm, "option", options, [*_OPTIONS, WITHOUT_ROWS], {}, of_policy)
    made = Arm(name, options, without, without_rows)
    if made.leaves_rows_out:
        options.setdefault("policy", "standard")
    if name == ALL and (options != PACKAGED[ALL] or made.leaves_rows_out):
        raise ConfigError(
            "the arm 'all' is training on every token, with which others are compared",
            got=repr(options),
            remedy="another name for this one",
        )
    return made


def _without(value: Any) -> tuple[str, str] | None:
    if value is None:
        return None
    pair = value.split("=", 1) if isinstance(value, str) else value
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not all(map(str, pair)):
        raise ConfigError(
            "rows are left out by a column and a value",
            got=repr(value),
            remedy="without:COLUMN=VALUE, such as without:source=web",
        )
    return str(pair[0]), str(pair[1])


def looks_of(
    steps: int, looks: Sequence[int] | None, longer: Callable[[int], str] | None = None
) -> tuple[int, ...]:
    """Steps of a run at which there are looks, ascending.

    Args:
        steps: of the whole run.
        looks: the user's own; None for 2.5, 5 and 10 % of the steps, rounded up, none before
            step 20.
        longer: steps -> what makes the run so long, for the message.

    >>> looks_of(400, None), looks_of(4000, None), looks_of(60, None)
    ((20, 40), (100, 200, 400), (20,))

    Raises:
        InputError: the run is over before.
    """
    if looks is None:
        chosen = sorted({max(EARLIEST, -(-share * steps // 1000)) for share in SHARES})
    else:
        chosen = list(looks)
    if chosen[-1] > steps:
        raise InputError(
            "the run is over before the last look",
            got=f"a look at step {chosen[-1]}, {steps} steps",
            why=f"before step {EARLIEST} whatever selects is ahead, also where it loses",
            remedy=(longer(chosen[-1]) if longer is not None else "more steps")
            + f"; or looks at earlier steps all the same: --looks {steps}",
        )
    return tuple(chosen)
