"""The command line: ``alphatoken score``, ``fisher``, ``sft``, ``dpo``, ``diagnose`` and others.

Exit status: 0 done, 1 a file could not be written or read (disk full, no permission), 2 wrong
arguments or input, 130 interrupted. An error is one line on stderr; ``--debug`` (``--traceback``
for ``sft`` and ``dpo``) shows where it came from.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from alphatoken.cli.parser import ELSEWHERE, build_parser
from alphatoken.errors import AlphaTokenError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in ELSEWHERE:
        name, debug = words[0], ELSEWHERE[words[0]] in words

        def command() -> int | None:
            status: int | None = import_module(f"alphatoken.cli.{name}").run(words[1:])
            return status

    else:
        options = build_parser().parse_args(words)
        debug = options.debug

        def command() -> int | None:
            import_module(f"alphatoken.cli.{options.command}").run(options)
            return 0

    return _guarded(command, debug)


def _guarded(command: Callable[[], int | None], debug: bool) -> int:
    """Run it; an error becomes one line and a status."""
    try:
        return command() or 0
    except KeyboardInterrupt as interrupt:
        _say(f"interrupted: {interrupt}" if str(interrupt) else "interrupted")
        return 130
    except AlphaTokenError as error:
        if debug:
            raise
        _say(str(error))
        return 1 if isinstance(error.__cause__, OSError) else 2
    except OSError as error:
        if debug:
            raise
        _say(str(error))
        return 1


def _say(message: str) -> None:
    rank = os.environ.get("RANK", "0")
    process = "" if rank == "0" else f" (process {rank})"
    print(f"alphatoken{process}: {' '.join(message.split())}", file=sys.stderr)
