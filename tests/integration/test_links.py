"""Links of README, CONTRIBUTING and docs lead to files and headings of the repository."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from tests.integration.test_printed_commands import prose

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BUILT = {DOCS / f"{name}.md" for name in ("claims", "files", "log", "options")}
"""Pages that each build of the documentation writes, so the repository does not have them."""

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/log.yaml")),
    *sorted(
        path
        for path in {*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")} - BUILT
        if not path.is_relative_to(DOCS / "_build")
    ),
]


@cache
def anchors(page: Path) -> set[str]:
    """Names by which headings are linked to: in lower case, hyphens for spaces."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    """As a clone, or a web page of the repository, shows them."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{page.name}: {target}"
        assert place not in BUILT, f"{page.name}: {target} is in no clone"
        assert not anchor or place.suffix != ".md" or anchor in anchors(place), target
