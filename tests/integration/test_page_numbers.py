"""Numbers of measurements in README and docs, as ``docs/numbers.toml`` lists them."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENTRIES = tomllib.loads((ROOT / "docs/numbers.toml").read_text(encoding="utf-8"))["number"]
FORMAT = re.compile(r"\{:[^}]+\}")
NUMBER = r"[+-]?\d+(?:\.\d+)?"


@cache
def page_words(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


@cache
def measured(file: str) -> Any:
    return json.loads((ROOT / "docs" / file).read_text(encoding="utf-8"))


def numbers_at(source: str) -> list[float]:
    """The numbers that a source names: one, or those of a list."""
    sign, percent, path = re.fullmatch(r"(-?)(100\*)?(.+)", source).groups()
    file, *keys = path.split("/")
    place = measured(file)
    for key in keys:
        if isinstance(place, dict):
            place = place[key]
        elif key.isdigit():
            place = place[int(key)]
        else:
            (place,) = (r for r in place if key in (r.get("name"), r.get("method")))
    factor = (-1 if sign else 1) * (100 if percent else 1)
    return [factor * number for number in (place if isinstance(place, list) else [place])]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry['page']}: {entry['words']}")
def test_numbers_of_a_page_are_those_of_their_sources(entry: dict[str, Any]) -> None:
    page, words = entry["page"], entry["words"]
    numbers = [number for source in entry["sources"] for number in numbers_at(source)]
    assert len(numbers) == len(FORMAT.findall(words)), "one source or item for each format"
    expected = words.format(*numbers)
    literals = (re.escape(text.format()) for text in FORMAT.split(words))
    standing = re.findall(NUMBER.join(literals), page_words(page))
    assert standing == [expected], f"{page} has {standing}; it should have, once: {expected}"
