"""A command line of several commands, each loaded only when it is called."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from alphatoken.cli.options import spelled
from alphatoken.errors import AlphaTokenError

__all__ = ["Command", "Program"]

_WRONG_PATH = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""What the system says of a name that the user got wrong, and not of a disk or of permissions."""


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
        """The exit status."""
        request = words if self.read is None else _at(self.read)(words)
        return 0 if request is None else _at(self.run)(request) or 0


def _at(place: str) -> Any:
    module, _, function = place.partition(":")
    return getattr(import_module(module), function)


@dataclass(frozen=True)
class Program:
    """A program and its commands.

    Attributes:
        name: of the program, which is also that of its distribution.
        about: one line for ``--help``.
        examples: the last lines of ``--help``.
        commands: by name.
    """

    name: str
    about: str
    examples: str
    commands: Mapping[str, Command]

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run one command and return its exit status."""
        words = list(sys.argv[1:] if arguments is None else arguments)
        if not words or words[0] not in self.commands:
            self._parser().parse_args(words)  # --help, --version, or no such command: it ends here
            words = [word for word in words if word != "--"]
        name, *rest = words
        rest = spelled(rest)

        # Most commands take abbreviations of their flags; this one is read before they are.
        traceback = any(len(word) > 3 and "--traceback".startswith(word) for word in rest)
        with _own_modules(), _said_in_notes("--quiet" in rest):
            return self._guarded(partial(self.commands[name], rest), traceback)

    def _parser(self) -> argparse.ArgumentParser:
        """Knows the names of the commands only."""
        parser = argparse.ArgumentParser(
            prog=self.name,
            description=self.about,
            epilog=self.examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--version", action="version", version=f"{self.name} {self._version()}")
        commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        for name, command in self.commands.items():
            commands.add_parser(name, help=command.about)
        return parser

    def _version(self) -> str:
        try:
            return version(self.name)
        except PackageNotFoundError:
            return "(not installed)"

    def _guarded(self, command: Callable[[], int], traceback: bool) -> int:
        """Run it; an error becomes one line and a status."""
        try:
            return command()
        except KeyboardInterrupt as interrupt:
            self._say(f"interrupted: {interrupt}" if str(interrupt) else "interrupted")
            return 130
        except AlphaTokenError as error:
            if traceback:
                raise
            self._say(str(error))
            cause = error.__cause__
            return 1 if isinstance(cause, OSError) and not isinstance(cause, _WRONG_PATH) else 2
        except BrokenPipeError:  # who read the output has read enough, as ``head`` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
            return 1
        except OSError as error:
            if traceback:
                raise
            self._say(str(error))
            return 1

    def _say(self, message: str) -> None:
        rank = os.environ.get("RANK", "0")
        process = "" if rank == "0" else f" (process {rank})"
        print(f"{self.name}{process}: {' '.join(message.split())}", file=sys.stderr)


@contextmanager
def _own_modules() -> Iterator[None]:
    """Inside, modules of the current folder can be imported, behind all others.

    ``python`` looks there; an installed command does not, and ``--policy my_policy:Name`` is meant
    to find the file that lies beside the rows.
    """
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


@contextmanager
def _said_in_notes(quiet: bool) -> Iterator[None]:
    """Inside, the first process says in lines what was read of each file, and our own warnings."""
    log, shown = logging.getLogger("alphatoken.data"), warnings.showwarning
    before = log.handlers, log.propagate, log.level
    notes = logging.StreamHandler()
    notes.setFormatter(logging.Formatter("note: %(message)s"))
    log.handlers, log.propagate = [notes], False
    first = os.environ.get("RANK", "0") == "0"
    log.setLevel(logging.INFO if first and not quiet else logging.ERROR)

    def show(message: Any, category: Any, *more: Any, **named: Any) -> None:
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
