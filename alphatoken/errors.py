"""One tree of errors; each message says what is wrong, what was found, why it matters, what to do.

All errors derive from :class:`AlphaTokenError`, so ``except AlphaTokenError`` catches whatever the
library raises on purpose. Where a built-in class says the same thing (``ValueError``), the error
derives from that too.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

__all__ = [
    "AlphaTokenError",
    "AlphaTokenWarning",
    "ColumnsError",
    "ConfigError",
    "CoverageError",
    "DataError",
    "FisherError",
    "InputError",
    "ModelError",
    "NumericalError",
    "UnsupportedError",
    "collected_warnings",
    "counted",
    "first_few",
    "quoted",
    "refuse_unknown",
    "require_choice",
    "short",
    "warn_caller",
]


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line outside the library that led here, however deep the call is.

    A fixed ``stacklevel`` points into the library as soon as there is another way to the warning.
    (From Python 3.12 on ``skip_file_prefixes`` does the same.)
    """
    # torch is skipped too, because its decorators stand between two frames of the library.
    modules = (sys.modules.get(name) for name in ("alphatoken", "torch"))
    files = [module.__file__ for module in modules if module is not None and module.__file__]
    within = tuple(os.path.join(os.path.dirname(file), "") for file in files)
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(within):
        frame = frame.f_back
    # The caller's own registry, so that "once per place" means the caller's line.
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


class AlphaTokenWarning(UserWarning):
    """Something is legal but probably not meant; the message says what to look at."""


class AlphaTokenError(Exception):
    """Base of all errors: four short parts, joined into one message.

    Args:
        what: what is wrong, one clause.
        got: the offending value or its place, as found.
        why: why it matters (what would go wrong silently).
        remedy: what the user can do.
    """

    def __init__(self, what: str, *, got: str = "", why: str = "", remedy: str = "") -> None:
        self.what, self.got, self.why, self.remedy = what, got, why, remedy
        named = {"": what, "Got: ": got, "Why it matters: ": why, "Remedy: ": remedy}
        super().__init__(" ".join(f"{name}{_ended(said)}" for name, said in named.items() if said))
        # Below a traceback, and no part of the message itself.
        self.add_note(f"Documentation: Troubleshooting, {type(self).__name__}.")


def _ended(sentence: str) -> str:
    """Text with a full stop, unless it ends with one."""
    return sentence if sentence.endswith(("?", "!", "...", ".")) else f"{sentence}."


class InputError(AlphaTokenError, ValueError):
    """A batch, tensor or argument is not what the call needs."""


class ConfigError(AlphaTokenError, ValueError):
    """An option, or a combination of options, has no meaning for this model."""


class CoverageError(AlphaTokenError):
    """A parameter in scope is used in a way that the captured inputs and errors do not cover."""


class UnsupportedError(AlphaTokenError):
    """There is no rule for a layer or an optimizer; the message names what does work."""


class FisherError(AlphaTokenError, ValueError):
    """A Fisher file or object is unreadable, incomplete or belongs to another model."""


class NumericalError(AlphaTokenError, ArithmeticError):
    """A NaN or Inf where a finite number is needed; the message names the module or token."""


class ModelError(AlphaTokenError):
    """The model is in a state, or of a kind, that cannot be valued."""


class DataError(AlphaTokenError, ValueError):
    """A data file cannot be read; the message names file and line."""


class ColumnsError(DataError):
    """A row can be read in two ways. A choice about the file: no row is passed over for it."""


def short(text: str, length: int = 80) -> str:
    """One line of at most ``length`` characters, for a message."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."


def quoted(error: BaseException) -> str:
    """Class and message of another library's error, on one line."""
    return short(f"{type(error).__name__}: {error}", 300)


_OF_ONE = {
    " are ": " is ", " were ": " was ", " have ": " has ", " repeat ": " repeats ",
    " share ": " shares ",
}  # fmt: skip
"""Verbs of several -> of one."""


def counted(count: int, what: str) -> str:
    """A count and its noun, with the verbs behind it.

    >>> counted(1, "rows left out"), counted(2, "rows left out"), counted(1, "of 3 rows left out")
    ('1 row left out', '2 rows left out', '1 of 3 rows left out')
    >>> counted(1, "rows repeat another one and are left out")
    '1 row repeats another one and is left out'
    """
    if count != 1 or what.startswith("of "):
        return f"{count} {what}"
    noun = re.sub("s(?= |$)", "", what, count=1)
    return f"{count} {re.sub('|'.join(_OF_ONE), lambda verb: _OF_ONE[verb[0]], noun)}"


def first_few(names: Sequence[str], count: int) -> str:
    """The first ``count`` names, and how many more there are; for a message."""
    more = len(names) - count
    return ", ".join(names[:count]) + (f" and {more} more" if more > 0 else "")


def require_choice(
    name: str,
    value: object,
    allowed: Iterable[object],
    error: type[AlphaTokenError] = ConfigError,
) -> None:
    """Raise ``error`` if the option's value is none of its choices; the same words everywhere."""
    choices = list(allowed)
    if value not in choices:
        raise error(f"{name} must be one of {', '.join(map(str, choices))}", got=repr(value))


def refuse_unknown(
    owner: str,
    kind: str,
    names: Iterable[str],
    allowed: Iterable[str],
    renamed: Mapping[str, str] | None = None,
    listing: str = "",
) -> None:
    """Raise for the first of the names that is not allowed.

    Args:
        owner: what takes them, such as a class.
        kind: of name: "option" or "argument".
        names: as they were written.
        allowed: all that there are.
        renamed: names of earlier versions, by what they are called today, if this owner has that.
        listing: where those that there are stand, or another remedy; by default help(owner).

    Raises:
        ConfigError: names it, and those that it may stand for.
    """
    there = list(allowed)
    for name in names:
        if name in there:
            continue
        renamed = renamed or {}
        today = renamed.get(name)
        close = [] if today else get_close_matches(name, there, n=3)
        raise ConfigError(
            f"{owner} has no such {kind}",
            got=name,
            why="nothing would read it",
            remedy=f"{today}, as it is called today"
            if today in there
            else f"did you mean {' or '.join(close)}?"
            if close
            else f"leave it out; {listing or f'help({owner}) lists those that there are'}",
        )


@contextmanager
def unsaid(logger: str, pattern: str) -> Iterator[None]:
    """Context in which a library's logger leaves out what has this pattern: we say it ourselves."""
    log, left_out = logging.getLogger(logger), re.compile(pattern)

    def other(record: logging.LogRecord) -> bool:
        return left_out.search(record.getMessage()) is None

    log.addFilter(other)
    try:
        yield
    finally:
        log.removeFilter(other)


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """The library's own warnings as sentences, each once and as it comes; others pass on."""
    messages: list[str] = []
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Any, category: Any, *more: Any, **named: Any) -> None:
            if not issubclass(category, AlphaTokenWarning):
                shown(message, category, *more, **named)
            elif str(message) not in messages:
                messages.append(str(message))

        warnings.simplefilter("always", AlphaTokenWarning)
        warnings.showwarning = show
        yield messages
