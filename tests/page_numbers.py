"""Numbers in prose, filled in from the measurements that they come from.

    python -m tests.page_numbers          writes every number anew
    python -m tests.page_numbers --check  names those that differ from their data

A number is followed by a comment that says where it stands in a JSON file of ``docs``:

    takes 0.124<!-- = -selection/grids/smollm2/tasks/noisy-words/standard/... --> nats off

Keys are separated by ``/``. In a list of records a key is ``name=value,name=value``, or the value
of any field of theirs; several records that fit give their mean. Paths may be negated, added and
subtracted (with spaces around the sign), and multiplied by 100 (``100*``). How the number is
written, its decimals and an explicit plus, is kept as it is found.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md",
    "docs/log.yaml",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")),
)
MARK = re.compile(r"(?P<shown>[+\-]?\d+(?:\.\d+)?)<!-- = (?P<source>[^>]+?) -->")


@cache
def _document(name: str) -> Any:
    return json.loads((ROOT / "docs" / f"{name}.json").read_text(encoding="utf-8"))


def value_of(source: str) -> float:
    """The number that a source names.

    Raises:
        KeyError: nothing, or no number, stands there.
    """
    total = 0.0
    first, *others = re.split(r" ([+-]) ", source)
    terms = [("-", first[1:]) if first.startswith("-") else ("+", first)]
    for sign, term in [*terms, *zip(others[::2], others[1::2], strict=True)]:
        path = term.removeprefix("100*")
        name, *keys = path.split("/")
        found = [_document(name)]
        for key in keys:
            found = [item for one in found for item in _step(one, key)]
        if not found or not all(isinstance(one, int | float) for one in found):
            raise KeyError(f"{path} names no number")
        total += (-1 if sign == "-" else 1) * (1 if path == term else 100) * fmean(found)
    return total


def _step(place: Any, key: str) -> Iterator[Any]:
    """What stands under a key: of a mapping, of a list by number, or of a list of records."""
    if isinstance(place, dict):
        yield from [place[key]] if key in place else []
    elif isinstance(place, list) and key.isdigit():
        yield from place[int(key) : int(key) + 1]
    elif isinstance(place, list):
        yield from (record for record in place if _fits(record, key))


def _fits(record: dict[str, Any], key: str) -> bool:
    if "=" not in key:
        return key in [value for value in record.values() if isinstance(value, str)]
    wanted = (part.split("=") for part in key.split(","))
    return all(str(record.get(name)) == value for name, value in wanted)


def written(value: float, like: str) -> str:
    """The number with the decimals, and the explicit plus, of the one that it replaces."""
    decimals = len(like.partition(".")[2])
    text = f"{value:{'+' if like[0] == '+' else ''}.{decimals}f}"
    return text.replace("-", "") if not float(text) else text


def filled(text: str) -> str:
    """A page with every marked number as its data have it."""
    return MARK.sub(
        lambda m: f"{written(value_of(m['source']), m['shown'])}<!-- = {m['source']} -->", text
    )


def differences(name: str) -> list[str]:
    """What is wrong with a page: one line a number."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return [
        f"{name}, line {text.count(chr(10), 0, m.start()) + 1}: {m['shown']} should be {right}"
        for m in MARK.finditer(text)
        if (right := written(value_of(m["source"]), m["shown"])) != m["shown"]
    ]


def main() -> int:
    wrong = [line for name in PAGES for line in differences(name)]
    print(*wrong, sep="\n")
    if "--check" in sys.argv[1:]:
        return bool(wrong)
    for name in PAGES:
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
