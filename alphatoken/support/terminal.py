"""Text for a terminal: whether it is coloured, and ANSI colours."""

from __future__ import annotations

import os
from typing import TextIO

OPEN, CLOSE = "\u27e6", "\u27e7"
"""Around text that stands out, where there are no colours."""


def has_colour(stream: TextIO, choice: str = "auto") -> bool:
    """True if text written to the stream is coloured; "auto" follows terminal and NO_COLOR."""
    if choice != "auto":
        return choice == "always"
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not plain


def painted(text: str, code: str) -> str:
    """The text in an ANSI colour, or as it is where the code is ""."""
    if not code:
        return text
    # Line by line, since a pager forgets a colour at the end of a line.
    return "\n".join(f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in text.split("\n"))
