"""``alphatoken diagnose``: list the diagnostics, and run one of them or all.

Nothing heavy is imported here, so that ``--list`` and ``--help`` are quick.
"""

from __future__ import annotations

from collections.abc import Sequence

from alphatoken.diagnose.registry import DIAGNOSTICS, Entry, find
from alphatoken.errors import ConfigError

__all__ = ["ALL", "entries_of", "overview", "read"]

ALL = "all"


def overview() -> str:
    """Text of ``alphatoken diagnose --help``; no diagnostic is loaded for it."""
    width = max(len(entry.name) for entry in DIAGNOSTICS) + 2
    lines = [
        "How far can I trust the values on my own model? Each diagnostic answers one question:",
        "",
        *(f"  {entry.name:{width}}{entry.question}" for entry in DIAGNOSTICS),
        f"  {ALL:{width}}all of these, in one report",
        "",
        "usage: alphatoken diagnose NAME --model_name_or_path PATH --train_file FILE",
        "           --validation_file FILE --output_dir DIR",
        "           [--retention_set FILE] ...      drift and fisher need rows to retain",
        "       alphatoken diagnose NAME --help    what one of them writes, and its options",
    ]
    return "\n".join(lines)


def entries_of(name: str) -> tuple[Entry, ...]:
    """The diagnostic of this name, or all.

    Raises:
        ConfigError: there is none.
    """
    return DIAGNOSTICS if name == ALL else (find(name),)


def read(words: Sequence[str]) -> Sequence[str] | None:
    """The arguments after ``diagnose``, of which the first is a name; None where it is answered.

    Raises:
        ConfigError: no name, or that of no diagnostic.
    """
    first = words[0] if words else ""
    if first in ("-h", "--help"):
        print(overview())
        return None
    if not first or first.startswith("-"):
        raise ConfigError(
            "the name of a diagnostic comes first",
            got=first or "nothing",
            remedy="alphatoken diagnose --help names them; or: all",
        )
    entries_of(first)
    return words
