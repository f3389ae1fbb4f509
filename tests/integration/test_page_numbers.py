"""Numbers in prose are those of their data: see ``tests.page_numbers``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import page_numbers
from tests.page_numbers import MARK, PAGES, ROOT, differences, filled, value_of, written


@pytest.mark.parametrize("page", PAGES)
def test_every_marked_number_is_that_of_its_data(page: str) -> None:
    assert differences(page) == []


def test_pages_that_readers_meet_first_have_marked_numbers() -> None:
    for name in ("should-i", "fidelity", "paper-gaps", "selection"):
        assert MARK.search((ROOT / f"docs/{name}.md").read_text()), name


def test_a_number_that_was_edited_is_found_and_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "-selection/grids/smollm2/tasks/clean/method=rho-1/against/target/standard/mean"
    right = f"\nit loses {written(value_of(source), '-0.014')}<!-- = {source} --> there"
    wrong = right.replace("loses -0.0", "loses -0.9")
    assert wrong != right
    (tmp_path / "page.md").write_text(wrong)
    monkeypatch.setattr(page_numbers, "ROOT", tmp_path)
    assert [line.split(":")[0] for line in differences("page.md")] == ["page.md, line 2"]
    assert filled(wrong) == right
