"""Options of a command as a dataclass: one field is one flag, with its type, default and help.

A field's type says how its value is written: a number or a text; ``tuple[...]``: several with
commas between them; ``list[...]``: several words; ``... | None``: "none" too; ``bool``: a flag
without a value, which ``no_`` before its name takes back where it is the default. The ``metadata``
hold what transformers' ``HfArgumentParser`` reads there as well (``help``, ``choices``), and what
:func:`option` lists. The bases of a dataclass are the groups of its help, in their order. Nothing
here imports torch or transformers: ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from typing import Any, NoReturn, TypeVar

from alphatoken.errors import ConfigError

__all__ = [
    "CommandParser",
    "Kind",
    "add_options",
    "default_of",
    "kinds_of",
    "option",
    "present_names",
    "read_options",
    "shown",
]

_BOOLEANS = dict.fromkeys(("true", "yes", "1"), True) | dict.fromkeys(("false", "no", "0"), False)
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
_METAVARS = {int: "N", float: "X", str: "TEXT", bool: "BOOL"}

T = TypeVar("T")


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A field of a dataclass of options; without default it must be given.

    Args:
        default: of the field.
        help: what the option does; its default is added.
        **more: ``choices`` that a value must be one of; ``metavar`` that stands for it in the help;
            ``least`` number; ``append``, where the flag may be repeated; ``either``, a name that
            options share of which one at most may be given; ``required`` with it, where one must
            be.
    """
    metadata = {"help": help, **more}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Kind:
    """The type of an option, and how its values are written.

    Attributes:
        base: int, float, str or bool.
        several: a tuple of them, with commas between them.
        optional: or None, written "none".
        listed: a list of them, one word each.
    """

    base: type
    several: bool = False
    optional: bool = False
    listed: bool = False

    @classmethod
    def of(cls, hint: Any) -> Kind:
        """Of a type.

        Raises:
            TypeError: of a type whose values have no text. A programmer's mistake.
        """
        origin, inside = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType):
            some = [one for one in inside if one is not types.NoneType]
            if len(some) == 1:
                return replace(cls.of(some[0]), optional=True)
        if origin is tuple and inside[1:] == (...,):
            return replace(cls.of(inside[0]), several=True)
        if origin is list:
            return replace(cls.of(inside[0]), listed=True)
        if hint not in _WORDS:
            raise TypeError(f"an option of type {hint!r} has no text")
        return cls(hint)

    def read(self, text: str) -> Any:
        """The value that ``text`` writes; of a list, one of its words.

        >>> Kind.of(tuple[float, ...]).read("0.1,1e-3")
        (0.1, 0.001)

        Raises:
            argparse.ArgumentTypeError: it writes none of this kind.
        """
        if self.optional and not self.listed and text.lower() == "none":
            return None
        try:
            if self.several:
                parts = [] if text.lower() in ("", "none") else text.split(",")
                return tuple(self._one(part.strip()) for part in parts)
            return self._one(text)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{text!r} is not {self}") from None

    def _one(self, text: str) -> Any:
        return _BOOLEANS[text.lower()] if self.base is bool else self.base(text)

    def __str__(self) -> str:
        """What a value looks like."""
        several = "; several with commas between them" if self.several else ""
        return _WORDS[self.base] + several + (", or none" if self.optional else "")

    @property
    def metavar(self) -> str:
        """What stands for a value in the help.

        >>> Kind.of(tuple[int, ...]).metavar
        'N,N,...'
        """
        letter = _METAVARS[self.base]
        return f"{letter},{letter},..." if self.several else letter


def kinds_of(options: type) -> dict[str, Kind]:
    """The kind of each field, by name; see :class:`Kind` for what is refused."""
    hints = typing.get_type_hints(options)
    return {one.name: Kind.of(hints[one.name]) for one in fields(options)}


def default_of(one: Field[Any]) -> Any:
    """The default of a field; ``MISSING`` where it must be given."""
    return one.default if one.default_factory is MISSING else one.default_factory()


def shown(value: Any) -> str:
    """A value as it would be written.

    >>> shown((0.1, 1.0)), shown(None)
    ('0.1,1.0', 'none')
    """
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


# --- argparse -------------------------------------------------------------------------------------


class CommandParser(argparse.ArgumentParser):
    """The description stands first in the help; an error is one line, raised as ConfigError."""

    def __init__(self, command: str, **more: Any) -> None:
        super().__init__(
            prog=f"alphatoken {command}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **more,
        )

    def format_help(self) -> str:
        """Description, usage, groups, epilog."""
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage of dozens of options."""
        raise ConfigError(message, remedy=f"{self.prog} --help")


class _Switch(argparse.BooleanOptionalAction):
    """``--NAME`` and ``--no_NAME``, with an underscore as all flags."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        both = [*option_strings, *(f"--no_{flag[2:]}" for flag in option_strings)]
        argparse.Action.__init__(self, both, dest, nargs=0, **more)

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        setattr(namespace, self.dest, not str(option_string).startswith("--no_"))


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Give a parser the fields of a dataclass, those of each of its bases as a group.

    The first line of a base's docstring is the title of its group.
    """
    kinds = kinds_of(options)
    for base in options.__mro__[:-1]:
        own = [one for one in fields(options) if one.name in vars(base).get("__annotations__", {})]
        if not own:
            continue
        title = inspect.cleandoc(base.__doc__ or "").partition("\n")[0].rstrip(".")
        group = parser.add_argument_group(title[:1].lower() + title[1:])
        either: dict[str, Any] = {}
        for one in own:
            shared = one.metadata.get("either")
            if shared is not None and shared not in either:
                required = one.metadata.get("required", False)
                either[shared] = group.add_mutually_exclusive_group(required=required)
            add_option(either.get(str(shared), group), one, kinds[one.name], f"--{one.name}")


def add_option(
    group: Any, one: Field[Any], kind: Kind, flag: str, default: Any = MISSING, dest: str = ""
) -> None:
    """Give a group the flag of one field.

    Args:
        group: of a parser.
        one: the field.
        kind: its type.
        flag: by which it is given.
        default: of the parser, where it is not the field's.
        dest: name of the value, where it is not the field's.
    """
    own = default_of(one)
    default = own if default is MISSING else default
    dest = dest or one.name
    if kind.base is bool:
        action: Any = "store_true" if default is False else _Switch
        text = _help(one, own)
        group.add_argument(flag, dest=dest, action=action, default=default, help=text)
        return
    more: dict[str, Any] = {"dest": dest, "type": _reader(one, kind), "help": _help(one, own)}
    more["metavar"] = one.metadata.get("metavar", kind.metavar)
    if "choices" in one.metadata:
        more |= {"choices": one.metadata["choices"]}
        del more["metavar"]
    if one.metadata.get("append"):
        more["action"] = "append"
    elif kind.listed:
        more["nargs"] = "+"
    given = {"required": "either" not in one.metadata} if default is MISSING else {}
    group.add_argument(flag, **more, **(given or {"default": default}))


def _help(one: Field[Any], default: Any) -> str:
    text = str(one.metadata.get("help", "")).replace("%", "%%")
    said = default in (MISSING, None, "", [], ()) or isinstance(default, bool) or "default" in text
    return text if said else f"{text} (default {shown(default)})".strip().replace("%", "%")


def _reader(one: Field[Any], kind: Kind) -> Any:
    least = one.metadata.get("least")
    if least is None:
        return kind.read

    def read(text: str) -> Any:
        value = kind.read(text)
        if value is not None and value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}: {text}")
        return value

    return read


def read_options(
    command: str,
    options: type[T],
    words: Sequence[str],
    **more: Any,
) -> T:
    """The options of a command, read from its words.

    Args:
        command: its name.
        options: the dataclass.
        words: what follows the name.
        **more: of the parser: ``description``, ``epilog`` and others.

    Raises:
        ConfigError: words that cannot be read.
    """
    parser = CommandParser(command, **more)
    add_options(parser, options)
    return options(**vars(parser.parse_args(list(words))))


# --- spellings ------------------------------------------------------------------------------------


def present_names(words: Sequence[str], former: Mapping[str, str]) -> list[str]:
    """Words with flags in their present spelling: underscores, and no former name.

    Former names are said on stderr, once each, unless ``--quiet`` is among the words.

    >>> present_names(["--batch-size", "8", "--set", "a.b-c=1"], {})
    ['--batch_size', '8', '--set', 'a.b-c=1']
    """
    found, renamed = [], {}
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            name = flag[2:].replace("-", "_")
            now = former.get(name, name)
            if now != name:
                renamed[name] = now
            word = f"--{now}{equals}{value}"
        found.append(word)
    if renamed and "--quiet" not in found:
        said = ", ".join(f"--{name} is --{now}" for name, now in renamed.items())
        print(f"note: options that have another name now: {said}", file=sys.stderr)
    return found
