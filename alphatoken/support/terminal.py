"""Text for a terminal: whether it is coloured, ANSI colours, and characters that it would obey."""

from __future__ import annotations

import os
import re
import unicodedata
from typing import TextIO

OPEN, CLOSE = "\u27e6", "\u27e7"
"""Around text that stands out, where there are no colours."""

# Marks that turn the direction of the text around them.
_TURNING = "\u202a-\u202e\u2066-\u2069"
_HIDDEN = re.compile(rf"[\x00-\x1f\x7f-\x9f\u2028\u2029{_TURNING}]")


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


def visible(text: str) -> str:
    """Line breaks with a mark; characters that a terminal would obey by their names."""
    return _HIDDEN.sub(lambda match: _name(match.group()), text)


def _name(character: str) -> str:
    if character == "\n":
        return "\u21b5\n"
    width = 2 if unicodedata.category(character) == "Cc" else 4
    short = {"\t": "\\t", "\r": "\\r"}
    return short.get(character, f"\\{'xu'[width == 4]}{ord(character):0{width}x}")
