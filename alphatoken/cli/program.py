"""A command line of several commands, each loaded only when it is called; options as dataclasses.

One field is one flag, with its type, default and help. A field's type says how its value is
written: a number or a text; ``tuple[...]``: several with commas between them; ``list[...]``:
several words; ``Literal[...]``: one of these; ``... | None``: "none" too; ``bool``: a flag without
a value, which ``--no_NAME`` takes back where it is the default. Choices and range are those of the
field (``alphatoken.support.options``). The ``metadata`` hold ``help``, as transformers'
``HfArgumentParser`` has it, and:

* ``metavar`` stands for a value in the help (the last word of the name, if left out);
* ``append``: the flag may be repeated;
* ``either``: a name that options share of which one at most may be given; with ``required`` in the
  first of them one must be;
* ``group``: the title of the help's group that begins with this field.

Nothing here imports torch or transformers: ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import logging
import os
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NoReturn, TypeVar

from alphatoken.cli.recipes import close_to
from alphatoken.errors import AlphaTokenError, ConfigError, unsaid
from alphatoken.support.options import Limits, limits_of

# What the system says of a name that the user got wrong, and not of a disk or of permissions.
_WRONG_PATH = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


@dataclass(frozen=True)
class Command:
    """One command, by the places of its code: nothing is imported before it is called.

    Attributes:
        about: its line in the help.
        run: "module:function": takes what ``read`` returned; its exit status, or None for 0.
        read: "module:function": takes the words after the command's name and makes a request of
            them; None from it is the end, as after ``--list``. It needs no torch, so that help is
            quick. Left out, ``run`` takes the words.
    """

    about: str
    run: str
    read: str | None = None

    def __call__(self, words: Sequence[str]) -> int:
        """Run the command; its exit status."""
        request = words if self.read is None else _at(self.read)(words)
        return 0 if request is None else _at(self.run)(request) or 0


def _at(place: str) -> Any:
    module, _, function = place.partition(":")
    return getattr(import_module(module), function)


def run_program(
    name: str,
    about: str,
    examples: str,
    commands: Mapping[str, Command],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run one command of a program and return its exit status.

    Args:
        name: of the program, which is also that of its distribution.
        about: one line for ``--help``.
        examples: the last lines of ``--help``.
        commands: by name.
        arguments: the command line without the program's name; None for this process's own.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    words[:1] = words[0].split() if words else []  # two words are listed, and the first is called
    if not words or words[0] not in commands:
        parser = _parser(name, about, examples, commands)
        if not words:
            parser.print_help(sys.stderr)
            return 2
        if not words[0].startswith("-"):
            close = difflib.get_close_matches(words[0], commands, n=1)
            meant = f"; did you mean '{close[0]}'?" if close else "."
            _say(name, f"there is no command '{words[0]}'{meant} Commands: {', '.join(commands)}")
            return 2
        parser.parse_args(words)  # --help, --version, or no such option: it ends here
        words = [word for word in words if word != "--"]
    command, *rest = words
    rest = spelled(rest)

    # Most commands take abbreviations of their flags; this one is read before they are.
    traceback = any(len(word) > 3 and "--traceback".startswith(word) for word in rest)
    with _own_modules(), _without_noise(), _said_in_notes("--quiet" in rest):
        return guarded(name, partial(commands[command], rest), traceback=traceback)


def _parser(
    name: str, about: str, examples: str, commands: Mapping[str, Command]
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=name,
        description=about,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    try:
        number = version(name)
    except PackageNotFoundError:
        number = "(not installed)"
    parser.add_argument("--version", action="version", version=f"{name} {number}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for own, command in commands.items():
        subparsers.add_parser(own, help=command.about)
    return parser


def guarded(program: str, command: Callable[[], int], *, traceback: bool) -> int:
    """The exit status of a command; an error is one line on stderr, unless with ``traceback``."""
    try:
        return command()
    except KeyboardInterrupt as interrupt:
        _say(program, f"interrupted: {interrupt}" if str(interrupt) else "interrupted")
        return 130
    except AlphaTokenError as error:
        if traceback:
            raise
        _say(program, str(error))
        cause = error.__cause__
        return 1 if isinstance(cause, OSError) and not isinstance(cause, _WRONG_PATH) else 2
    except BrokenPipeError:  # who read the output has read enough, as ``head`` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
        return 1
    except OSError as error:
        if traceback:
            raise
        _say(program, str(error))
        return 1


def _say(program: str, message: str) -> None:
    rank = os.environ.get("RANK", "0")
    process = "" if rank == "0" else f" (process {rank})"
    print(f"{program}{process}: {' '.join(message.split())}", file=sys.stderr)


@contextmanager
def _own_modules() -> Iterator[None]:
    # `python` looks in the current folder; an installed command does not, and `--policy
    # my_policy:Name` is meant to find the file that lies beside the rows. Behind all others, so
    # that it hides no module.
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        yield
        return
    sys.path.append(here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


_NOISE = {
    "bitsandbytes.backends.cpu.ops": (
        r"^Failed to load CPU gemm_4bit_forward from kernels-community"
    ),
    "DeepSpeed": r"^Setting accelerator to CPU\.",
}
"""Logger of another library -> the beginning of a line of it that says nothing of a run."""
_UNPINNED = "'pin_memory' argument is set as true but no"
"""The beginning of torch's warning of each loader on a machine without an accelerator."""


@contextmanager
def _without_noise() -> Iterator[None]:
    """Leaves these lines of other libraries out, and no others of theirs."""
    with ExitStack() as stack:
        for logger, beginning in _NOISE.items():
            stack.enter_context(unsaid(logger, beginning))
        yield


@contextmanager
def _said_in_notes(quiet: bool) -> Iterator[None]:
    """Prints, in the first process, what was read of each file and our own warnings."""
    log, shown = logging.getLogger("alphatoken.data"), warnings.showwarning
    before = log.handlers, log.propagate, log.level
    notes = logging.StreamHandler()
    notes.setFormatter(logging.Formatter("note: %(message)s"))
    log.handlers, log.propagate = [notes], False
    first = os.environ.get("RANK", "0") == "0"
    log.setLevel(logging.INFO if first and not quiet else logging.ERROR)

    def show(message: Any, category: Any, *more: Any, **named: Any) -> None:
        if str(message).startswith(_UNPINNED):
            return
        if category.__name__ != "AlphaTokenWarning":  # whose module imports torch
            shown(message, category, *more, **named)
        elif first:
            print(f"note: {message}", file=sys.stderr)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = shown
        log.handlers, log.propagate = before[:2]
        log.setLevel(before[2])


_WORDS = {int: "a whole number", float: "a number", str: "a text"}

T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """The type of an option, and how its values are written.

    Attributes:
        base: int, float, str or bool.
        several: a tuple of them, with commas between them.
        optional: or None, written "none".
        listed: a list of them, one word each.
        choices: which alone are allowed; empty for all.
    """

    base: type
    several: bool = False
    optional: bool = False
    listed: bool = False
    choices: tuple[Any, ...] = ()

    @classmethod
    def of(cls, hint: Any) -> Kind:
        """Kind of option for a type."""
        origin, inside = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, types.UnionType) and inside[1:] == (types.NoneType,):
            return replace(cls.of(inside[0]), optional=True)
        if origin is tuple and inside[1:] == (...,):
            return replace(cls.of(inside[0]), several=True)
        if origin is list:
            return replace(cls.of(inside[0]), listed=True)
        if origin is Literal:
            return cls(type(inside[0]), choices=inside)
        return cls(hint if isinstance(hint, type) else str)  # a mapping: JSON text

    def read(self, text: str, limits: Limits | None = None) -> Any:
        """The value that ``text`` writes; of a list, one of its words.

        >>> Kind.of(tuple[float, ...]).read("0.1,1e-3")
        (0.1, 0.001)

        Raises:
            argparse.ArgumentTypeError: it writes none of this kind, or a number out of range.
        """
        if text.lower() == "none" and (self.optional or self.several) and not self.listed:
            return None if self.optional else ()
        parts = [text]
        if self.several:
            parts = [part.strip() for part in text.split(",") if text]
        try:
            values = tuple(map(self.base, parts))
        except ValueError:
            several = "; several with commas between them" if self.several else ""
            words = _WORDS[self.base] + several + (", or none" if self.optional else "")
            raise argparse.ArgumentTypeError(f"{text!r} is not {words}") from None
        if limits is not None and not all(map(limits.holds, values)):
            raise argparse.ArgumentTypeError(f"must be {limits.range_in_words()}: {text}")
        return values if self.several else values[0]


def kinds_of(options: type) -> dict[str, Kind]:
    """The kind of each field, by name."""
    hints = typing.get_type_hints(options)
    return {one.name: Kind.of(hints[one.name]) for one in fields(options)}


def default_of(one: Field[Any]) -> Any:
    """The default of a field; ``MISSING`` where it must be given."""
    return one.default if one.default_factory is MISSING else one.default_factory()


def shown(value: Any) -> str:
    """A default as it would be written."""
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def _written(choice: str | None) -> str:
    return "none" if choice is None else choice


# --- argparse -------------------------------------------------------------------------------------


class CommandParser(argparse.ArgumentParser):
    """A description, which says the usage too, then the options; an error is one line."""

    def __init__(self, command: str, program: str = "alphatoken", **more: Any) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(
            prog=f"{program} {command}", usage=argparse.SUPPRESS, formatter_class=form, **more
        )

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does; an option that there is not is said before one that is missing.

        Raises:
            ConfigError: words that cannot be read.
        """
        flags = list(self._option_string_actions)
        for word in args or ():
            if word == "--":
                break
            flag = word.partition("=")[0]
            if not flag.startswith("--") or " " in word:  # argparse takes a blank for a value's
                continue
            if not (
                any(own.startswith(flag) for own in flags) if self.allow_abbrev else flag in flags
            ):
                raise ConfigError(
                    "there is no such option",
                    got=flag,
                    remedy=close_to(flag, flags) or f"{self.prog} {HELP_ALL} lists them",
                )
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError instead of printing dozens of options."""
        raise ConfigError(message, remedy=f"{self.prog} --help")


def add_options(parser: argparse.ArgumentParser, options: type) -> None:
    """Give a parser the fields of a dataclass, in groups with titles.

    Those of each base are a group, whose title is the first line of its docstring, until a field
    with a ``group`` of its own begins another one.
    """
    kinds = kinds_of(options)
    for base in options.__mro__[:-1]:
        own = [one for one in fields(options) if one.name in vars(base).get("__annotations__", {})]
        title = inspect.cleandoc(base.__doc__ or "").partition("\n")[0].rstrip(".")
        title, group = title[:1].lower() + title[1:], None
        pairs: dict[str, Any] = {}
        for one in own:
            if group is None or "group" in one.metadata:
                group = parser.add_argument_group(one.metadata.get("group", title))
            shared = one.metadata.get("either", "")
            if shared and shared not in pairs:
                required = one.metadata.get("required", False)
                pairs[shared] = group.add_mutually_exclusive_group(required=required)
            add_option(pairs.get(shared, group), one, kinds[one.name], f"--{one.name}")


def add_option(
    group: Any, one: Field[Any], kind: Kind, flag: str, dest: str = "", **more: Any
) -> None:
    """Give a group the flag of one field.

    Args:
        group: of a parser.
        one: the field.
        kind: its type.
        flag: by which it is given.
        dest: name of the value, where it is not the field's.
        **more: of ``add_argument``, before what the field says.
    """
    default, text = default_of(one), str(one.metadata.get("help", "")).replace("%", "%%")
    more = {"dest": dest or one.name, "default": default, "help": text} | more
    if kind.base is bool:
        said = f"{text} (default)" if default else text
        group.add_argument(flag, action="store_true", **(more | {"help": said}))
        if more["default"] is not False:
            more["help"] = f"Switch {flag} off."
            group.add_argument(f"--no_{flag[2:]}", action="store_false", **more)
        return
    if more["default"] is MISSING:
        more |= {"default": None, "required": True}
    elif default not in (None, "", "\n", []) and "default" not in text.lower():
        more["help"] = f"{text} (default {shown(default)})"
    limits = limits_of(one)
    more["type"] = lambda word: kind.read(word, limits if limits.ranged else None)
    if choices := kind.choices or limits.choices:
        more |= {"choices": choices, "metavar": f"{{{','.join(map(_written, choices))}}}"}
    else:
        more["metavar"] = one.metadata.get("metavar", one.name.rpartition("_")[2].upper())
    if one.metadata.get("append"):
        more["action"] = "append"
    elif kind.listed:
        more["nargs"] = "+"
    group.add_argument(flag, **more)


def read_options(command: str, options: type[T], words: Sequence[str], **more: Any) -> T:
    """The options of a command, read from its words.

    Args:
        command: its name.
        options: the dataclass.
        words: what follows the name.
        **more: of the parser: ``program``, ``description``, ``epilog`` and others.

    Raises:
        ConfigError: words that cannot be read.
    """
    parser = option_parser(command, options, words, **more)
    return options(**vars(parser.parse_args(list(words))))


def option_parser(
    command: str, options: type, words: Sequence[str], *, shown: Sequence[str] = (), **more: Any
) -> argparse.ArgumentParser:
    """The parser of a command, by which :func:`read_options` reads its words.

    Args:
        command: its name.
        options: the dataclass.
        words: what follows the name.
        shown: as of :func:`shorten_help`; empty for all.
        **more: as of :func:`read_options`.
    """
    parser = CommandParser(command, **more)
    add_options(parser, options)
    if shown:
        shorten_help(parser, shown, words)
    else:  # the help has every option anyway
        parser.add_argument(HELP_ALL, action="help", help=argparse.SUPPRESS)
    return parser


def replace_default(parser: argparse.ArgumentParser, name: str, text: str) -> None:
    """Have the help of an option say ``text`` at its end, in place of its default."""
    (action,) = (action for action in parser._actions if action.dest == name)
    if action.help != argparse.SUPPRESS:
        former = f" (default {shown(action.default)})"
        action.help = f"{str(action.help).removesuffix(former)} {text}"


HELP_ALL = "--help_all"


def shorten_help(
    parser: argparse.ArgumentParser, shown: Sequence[str], words: Sequence[str]
) -> None:
    """Leave options out of the help, unless the words ask for all by ``--help_all``.

    Args:
        parser: with all of its options.
        shown: names of those that stay; ``own_`` before the name of a diagnostic's own stays too.
        words: of the command.
    """
    for action in () if HELP_ALL in words else parser._actions:
        if action.dest not in ("help", "config", *shown) and not action.dest.startswith("own_"):
            action.help = argparse.SUPPRESS
    parser.add_argument(HELP_ALL, action="help", help="every option, the research options too")


# --- spellings ------------------------------------------------------------------------------------


def spelled(words: Sequence[str]) -> list[str]:
    """Words with underscores in the names of flags, and values as they are.

    >>> spelled(["--batch-size", "8", "--set", "a.b-c=1"])
    ['--batch_size', '8', '--set', 'a.b-c=1']
    """
    result = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            word = f"--{flag[2:].replace('-', '_')}{equals}{value}"
        result.append(word)
    return result
