"""README is short: what a stranger reads before he decides."""

from __future__ import annotations

import re
from pathlib import Path

from tests.integration.test_page_numbers import ENTRIES, FORMAT

README = Path(__file__).parents[2] / "README.md"
WORDS, WIDTH, NUMBERS = 900, 120, 12
"""Words read raw; characters of a line; measured numbers."""


def test_readme_is_short() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.split()) <= WORDS
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "<!--" not in text
    measured = [one["words"] for one in ENTRIES if one["page"] == README.name]
    assert 0 < sum(len(FORMAT.findall(words)) for words in measured) <= NUMBERS


def test_a_decimal_of_readme_is_a_measured_number() -> None:
    """Versions and identifiers aside."""
    text = README.read_text(encoding="utf-8")
    text = re.sub(
        r"arXiv \d+\.\d+|Apache-2\.0|arxiv\.org\S+|Python 3\.\d+|\]\([^)]*\)|1e-6", "", text
    )
    words = " ".join(one["words"] for one in ENTRIES if one["page"] == README.name)
    decimals = re.findall(r"\d+\.\d+", text)
    assert len(decimals) == len(FORMAT.findall(words))
