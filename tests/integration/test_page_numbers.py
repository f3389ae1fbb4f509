"""Numbers in prose are those of their data: see ``tests.page_numbers``."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import page_numbers
from tests.page_numbers import MARK, PAGES, ROOT, differences, filled, value_of, written


@pytest.mark.parametrize("page", PAGES)
def test_every_marked_number_is_that_of_its_data(page: str) -> None:
    assert differences(page) == []


@pytest.mark.parametrize("room", ["selection", "training"])
def test_a_page_holds_its_conclusions_as_they_are(room: str) -> None:
    page = {"selection": "selection", "training": "results"}[room]
    conclusions = (ROOT / f"benchmarks/{room}/conclusions.md").read_text().strip()
    assert len(MARK.findall(conclusions)) > 20
    assert conclusions in (ROOT / f"docs/{page}.md").read_text()


def test_pages_that_readers_meet_first_have_marked_numbers() -> None:
    for name in ("should-i", "fidelity", "paper-gaps", "trainers"):
        assert MARK.search((ROOT / f"docs/{name}.md").read_text()), name


GAIN = "-selection/grids/{}/against/target/standard"
FIRST = GAIN.format("smollm2/tasks/{}/method=after-validation")
GEMMA = GAIN.format("gemma3/tasks/{}/method=validation-first")
KEPT = "selection/grids/smollm2/tasks/{}/method=after-validation/against/retention/standard/mean"
WORDS = "smollm2/tasks/noisy-words/method={}"
LABEL = "results/task=sft_math,noise={},policy=top,estimator=label,variant={},seed=0/target_loss"
RUN = "results/task=sft_math,noise={},policy=top,estimator=alphatoken,variant={},seed=0/target_loss"
AS_LONG = WORDS.format("standard-longer")
AS_LONG = f"selection/grids/{AS_LONG}/against/target/after-validation/mean"
IN_RECIPES = (
    (
        r"alone, and no other row: (\S+); beside plain training for as long: (\S+)\)",
        (GAIN.format(WORDS.format("on-validation")) + "/mean", AS_LONG),
    ),
    (
        r"target loss (\S+) and not (\S+) on clean rows, (\S+) and not (\S+) on noisy",
        [LABEL.format(n, v) for n in ("0.0", "0.3") for v in ("ratio 0.7", "main")],
    ),
    (
        r"at 0.9 it cost (\S+) to (\S+) of the target loss",
        [
            f"{RUN.format(noise, 'running mean 0.9')} - {RUN.format(noise, 'main')}"
            for noise in ("0.0", "0.3")
        ],
    ),
    (
        r"Off the target loss: (\S+) \[(\S+), (\S+)\] .*; (\S+) \[(\S+), (\S+)\] .*"
        r"; (\S+) \[(\S+), (\S+)\] .*; (\S+) \[(\S+), (\S+)\] on clean rows",
        [
            f"{FIRST.format(task)}/{end}"
            for task in ("noisy-words", "mixed", "noisy-responses", "clean")
            for end in ("mean", "high", "low")
        ],
    ),
    (
        r"Retention: (\S+) better on wrong words, (\S+) to (\S+) worse elsewhere",
        ("-" + KEPT.format("noisy-words"), KEPT.format("mixed"), KEPT.format("noisy-responses")),
    ),
    (
        r"with LoRA: (\S+) \[(\S+), (\S+)\] on wrong words, (\S+) \[(\S+), (\S+)\] where",
        [
            f"{GEMMA.format(t)}/{e}"
            for t in ("noisy-words", "mixed")
            for e in ("mean", "high", "low")
        ],
    ),
    (
        r"3.0e-5\}', (\S+) on wrong words .* all, (\S+) on wrong words",
        [GAIN.format(WORDS.format(m)) + "/mean" for m in ("rho-1", "full-step-all")],
    ),
)
"""What the recipes' comments say, and where each of its numbers stands."""


def test_numbers_in_the_recipes_comments_are_those_of_their_data() -> None:
    found = dict.fromkeys(said for said, _ in IN_RECIPES) | {}
    for path in sorted((ROOT / "alphatoken/recipes").glob("*.yaml")):
        lines = [x[2:] for x in path.read_text().splitlines() if x.startswith("# ")]
        for said, sources in IN_RECIPES:
            if not (match := re.search(said, " ".join(lines))):
                continue
            numbers = [number.rstrip(",;") for number in match.groups()]
            assert numbers == [
                written(value_of(source), number)
                for source, number in zip(sources, numbers, strict=True)
            ], path.name
            found[said] = path.name
    assert None not in found.values(), found


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
