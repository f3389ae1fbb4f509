"""The command line: ``alphatoken score`` and ``alphatoken fisher``.

Exit status: 0 done, 1 a file could not be written or read (disk full, no permission), 2 wrong
arguments or input, 130 interrupted. An error is one line on stderr; ``--debug`` shows where it
came from.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from alphatoken.cli.parser import build_parser
from alphatoken.errors import AlphaTokenError

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; torch is imported only when work starts."""
    options = build_parser().parse_args(arguments)
    try:
        command = import_module(f"alphatoken.cli.{options.command}")
        command.run(options)
    except KeyboardInterrupt as interrupt:
        _say(f"interrupted: {interrupt}" if str(interrupt) else "interrupted")
        return 130
    except AlphaTokenError as error:
        if options.debug:
            raise
        _say(str(error))
        return 1 if isinstance(error.__cause__, OSError) else 2
    except OSError as error:
        if options.debug:
            raise
        _say(str(error))
        return 1
    return 0


def _say(message: str) -> None:
    print(f"alphatoken: {' '.join(message.split())}", file=sys.stderr)
