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
    for name in ("should-i", "fidelity", "paper-gaps", "selection", "results"):
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


def test_a_source_that_names_nothing_is_refused() -> None:
    with pytest.raises(KeyError, match="names no number"):
        value_of("selection/grids/smollm2/tasks/clean/method=rho-2/against/target/standard/mean")


def test_sources_are_means_differences_and_shares() -> None:
    of = "results/task=sft_math,noise=0.3,policy=top,estimator=label,variant=main"
    losses = [value_of(f"{of},seed={seed}/target_loss") for seed in (0, 1, 2)]
    assert len(set(losses)) == 3
    assert value_of(f"{of}/target_loss") == pytest.approx(sum(losses) / 3)
    assert value_of(f"-{of}/target_loss + {of},seed=0/target_loss") == pytest.approx(
        losses[0] - sum(losses) / 3
    )
    share = value_of(f"{of}/wrong_share_of_kept")
    assert value_of(f"100*{of}/wrong_share_of_kept") == pytest.approx(100 * share)


@pytest.mark.parametrize(
    ("value", "like", "shown"),
    [
        (0.1249, "0.1", "0.1"),
        (0.1249, "+0.10", "+0.12"),
        (-0.0004, "-0.01", "0.00"),
        (18.6, "2", "19"),
    ],
)
def test_a_number_keeps_the_form_that_it_had(value: float, like: str, shown: str) -> None:
    assert written(value, like) == shown
