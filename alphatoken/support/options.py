"""Options as fields of dataclasses: default, help, choices and range are stated there, once.

Constructors, parsers of the command line and the page of all options read them from the field.
Nothing here imports torch: the help of a command is made of its fields in a moment.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from inspect import cleandoc
from typing import Any, TypeVar

from alphatoken.errors import ConfigError, require_choice


@dataclass(frozen=True)
class Limits:
    """Values that an option may have.

    Attributes:
        choices: the only ones; empty for all.
        at_least, above, below: ends of the range of a number, or of each number of a
            tuple; None for no end. NaN lies in no range, and a bool is no number.
        optional: None is allowed beside them.
        within: the values in words, where choices and range do not say them.
        why: what goes wrong outside of the range.
    """

    choices: tuple[str | None, ...] = ()
    at_least: int | float | None = None
    above: int | float | None = None
    below: int | float | None = None
    optional: bool = False
    within: str = ""
    why: str = ""

    @property
    def ranged(self) -> bool:
        """True if a number must lie in a range."""
        return any(end is not None for end in (self.at_least, self.above, self.below))

    def holds(self, number: Any) -> bool:
        """True if a number lies in the range."""
        return (
            # True is an int: window=True would mean 1. A trailing comma makes a tuple.
            not isinstance(number, bool | str | tuple | list)
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    def range_in_words(self) -> str:
        """The range as errors say it, whether or not None is allowed beside it.

        >>> Limits(at_least=0, below=1).range_in_words()
        'at least 0 and below 1'
        >>> Limits(above=0, below=float("inf")).range_in_words()
        'above 0 and finite'
        """
        ends = {
            "at least": self.at_least,
            "above": self.above,
            "below": self.below,
        }
        words = [f"{name} {end:g}" for name, end in ends.items() if end not in _UNBOUNDED]
        words += ["finite"] if math.inf in ends.values() else []
        return " and ".join(words)


FLAG_WORDS = ("append", "either", "group", "metavar", "required")
"""Beside ``help``, all that a command line reads of a field, see ``alphatoken.cli.program``."""

_UNBOUNDED = (None, math.inf, -math.inf)

# Not in the fields' metadata, which TrlParser and HfArgumentParser hand to argparse as they are.
_LIMITS: dict[Field[Any], Limits] = {}


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    choices: tuple[str | None, ...] = (),
    at_least: int | float | None = None,
    above: int | float | None = None,
    below: int | float | None = None,
    optional: bool | None = None,
    within: str = "",
    why: str = "",
    **flag: Any,
) -> Any:
    """A field of a dataclass that holds an option.

    Args:
        default: without one the field must be given.
        help: what it is; the command line adds the default, errors and the page of options the
            range.
        choices: see :class:`Limits` for these and the next.
        at_least: its lower end, which it may have.
        above: its lower end, which it may not have.
        below: its upper end, which it may not have; infinity for any finite number.
        optional: None is allowed; left out, where it is the default.
        within: the values in words.
        why: what goes wrong outside.
        **flag: of ``FLAG_WORDS``, how its flag is written on a command line.

    Raises:
        TypeError: another word, which nothing would read.
    """
    if unread := sorted(flag.keys() - {*FLAG_WORDS}):
        limits = "choices, at_least, above, below, optional, within, why"
        raise TypeError(
            f"option() does not take {', '.join(unread)}; beside default and help it takes "
            f"{limits}, and of a flag {', '.join(FLAG_WORDS)}"
        )
    metadata = {"help": help, **flag}
    made: Any
    if isinstance(default, list):
        made = field(default_factory=lambda: list(default), metadata=metadata)
    else:
        made = field(default=default, metadata=metadata)
    allows_none = default is None if optional is None else optional
    _LIMITS[made] = Limits(choices, at_least, above, below, allows_none, within, why)
    return made


def same_option(owner: type, name: str, *, default: Any = MISSING, **limits: Any) -> Any:
    """The option of another dataclass: its default, help and limits.

    Args:
        owner: the dataclass that has it.
        name: of its field.
        default: where this one is written in another way, such as a number as text.
        **limits: of :class:`Limits`, where this one takes fewer values.
    """
    (source,) = (one for one in fields(owner) if one.name == name)
    written = source.default if default is MISSING else default
    made: Any = field(default=written, metadata=source.metadata)
    _LIMITS[made] = replace(limits_of(source), **limits)
    return made


T = TypeVar("T")


def with_options_in_docstring(kind: type[T]) -> type[T]:
    """The dataclass, with the help of each of its options among its docstring's attributes."""
    lines = [
        f"    {one.name}: {one.metadata['help'].removesuffix('.')}."
        for one in fields(kind)  # type: ignore[arg-type]
    ]
    kind.__doc__ = "\n\n".join([cleandoc(kind.__doc__ or ""), "\n".join(["Attributes:", *lines])])
    return kind


def limits_of(one: Field[Any]) -> Limits:
    """The values that a field may have: any, if :func:`option` did not make it."""
    return _LIMITS.get(one, Limits())


def check_options(options: Any, kind: type | None = None) -> None:
    """Check that each option has one of its choices and lies in its range.

    Args:
        options: a dataclass.
        kind: the dataclass whose fields are checked, if not all are: one of its bases.

    Raises:
        ConfigError: names the first that does not, and what it may be.
    """
    for one in fields(kind or options):
        limits, value = limits_of(one), getattr(options, one.name)
        # Of an option that is a tuple each entry is checked; elsewhere a tuple is no value.
        entries = value if isinstance(one.default, tuple) and isinstance(value, tuple) else (value,)
        if limits.choices:
            for entry in entries:
                require_choice(one.name, entry, limits.choices)
        if not limits.ranged or (value is None and limits.optional):
            continue
        if not all(map(limits.holds, entries)):
            words = limits.range_in_words()
            raise ConfigError(
                f"{one.name} must be {words}",
                got=repr(value),
                why=limits.why,
                remedy=f"None, or a number {words}" if limits.optional else "",
            )
