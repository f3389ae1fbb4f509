"""``alphatoken diagnose``: which diagnostics there are, and running one of them or all.

Nothing heavy is imported here, so that ``--list`` and ``--help`` are quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alphatoken.errors import ConfigError
from alphatoken.fidelity.registry import DIAGNOSTICS, Entry, find

__all__ = ["ALL", "Asked", "overview", "read"]

ALL = "all"


def overview() -> str:
    """What ``alphatoken diagnose --help`` says; no diagnostic is loaded for it."""
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
        "       alphatoken diagnose --list         the names, one a line",
    ]
    return "\n".join(lines)


@dataclass(frozen=True)
class Asked:
    """Which diagnostics are asked for, and the words after their name."""

    name: str
    entries: tuple[Entry, ...]
    words: tuple[str, ...]


def read(words: Sequence[str]) -> Asked | None:
    """What ``words``, the arguments after ``diagnose``, ask for; None where it is answered here.

    Raises:
        ConfigError: no name, or that of no diagnostic.
    """
    first = words[0] if words else ""
    if list(words) == ["--list"]:
        print("\n".join(entry.name for entry in DIAGNOSTICS))
        return None
    if first in ("-h", "--help"):
        print(overview())
        return None
    if not first or first.startswith("-"):
        raise ConfigError(
            "the name of a diagnostic comes first",
            got=first or "nothing",
            remedy="alphatoken diagnose --list names them; or: all",
        )
    entries = DIAGNOSTICS if first == ALL else (find(first),)
    return Asked(first, entries, tuple(words[1:]))
