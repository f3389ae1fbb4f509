"""``alphatoken diagnose``: which diagnostics there are, and running one of them or all.

Nothing heavy is imported here, so that ``--list`` and ``--help`` are quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from alphatoken.cli.diagnose_parser import ALL, overview, read_request
from alphatoken.errors import ConfigError
from alphatoken.fidelity.registry import DIAGNOSTICS, find

__all__ = ["run"]


def run(words: Sequence[str]) -> int:
    """Run what ``words``, the arguments after ``diagnose``, ask for; the exit status.

    Raises:
        AlphaTokenError: wrong arguments or input.
    """
    first = words[0] if words else ""
    if list(words) == ["--list"]:
        print("\n".join(entry.name for entry in DIAGNOSTICS))
        return 0
    if first in ("-h", "--help"):
        print(overview())
        return 0
    if not first or first.startswith("-"):
        raise ConfigError(
            "the name of a diagnostic comes first",
            got=first or "nothing",
            remedy="alphatoken diagnose --list names them; or: all",
        )
    entries = DIAGNOSTICS if first == ALL else (find(first),)
    request = read_request(first, entries, words[1:])
    status: int = import_module("alphatoken.cli.diagnose_run").run(request)
    return status
