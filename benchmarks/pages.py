"""Tables inside pages that are written by hand, filled from the JSON files beside the pages.

A table stands between two comments; the first names who writes it, and of what:

    <!-- table: frontier worth smollm2 -->
    <!-- end of table -->
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from alphatoken.errors import AlphaTokenError, ConfigError

DOCS = Path(__file__).resolve().parents[1] / "docs"
RESULTS = Path(__file__).with_name("results.json")
Writer = Callable[..., str]

_PLACE = re.compile(r"(<!-- table: ([^>]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def filled(text: str, writers: Mapping[str, Writer]) -> str:
    """The page with its tables written anew.

    Raises:
        ConfigError: it names a table that there is not.
    """

    def anew(match: re.Match[str]) -> str:
        name, *words = match[2].split()
        if name not in writers:
            raise ConfigError("the page names no table", got=name, remedy=", ".join(writers))
        return match[1] + writers[name](*words) + match[3]

    return _PLACE.sub(anew, text)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown: names at the left, numbers at the right."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def number(value: float | None, digits: int = 2, sign: str = "") -> str:
    """As tables have it; a dash where there is none."""
    return "–" if value is None else f"{value:{sign}.{digits}f}"


def span(interval: Sequence[float], digits: int = 2, sign: str = "") -> str:
    """A value and the ends of its interval."""
    value, low, high = (number(x, digits, sign) for x in interval)
    return f"{value} [{low}, {high}]"


def measured(path: Path = RESULTS) -> list[dict[str, Any]]:
    """The rows that ``benchmarks.run`` has written to a file; none if there is no file."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        rows = json.loads(path.read_text(encoding="utf-8"))
    return rows


def exit_status(work: Callable[[], None]) -> int:
    """0, or 1 after an error of ours, which is printed."""
    try:
        work()
    except AlphaTokenError as problem:
        print(problem, file=sys.stderr)
        return 1
    return 0


def load(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where there is no file."""
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
