"""The grid behind docs/selection.md: its rows, intervals and files; no model is trained here."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from alphatoken_lab.commands.compare import parse
from alphatoken_lab.runner.grid import all_cells
from alphatoken_lab.runner.grid_file import read_grid
from benchmarks.selection.report import HYPOTHESES, apart, difference
from benchmarks.selection.rows import (
    DIRT,
    FLIPPED,
    LETTERS,
    LITTLE,
    LITTLE_DIRT,
    SIZES,
    write_later,
    write_rows,
)
from benchmarks.selection.store import PLACES

GRIDS = sorted((Path(__file__).parents[2] / "benchmarks" / "selection").glob("*.yaml"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def rows(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder)
    return folder


def test_no_two_parts_share_a_row(rows: Path) -> None:
    held = ["validation", "choosing", "target", "retention"]
    for name in ("clean", "mixed", "noisy-words", "noisy-responses"):
        parts = [name, *held]
        seen: dict[str, str] = {}
        for part in parts:
            for row in lines(rows / f"{part}.jsonl"):
                key = row.get("prompt", row.get("text"))
                assert seen.setdefault(key, part) == part, f"{part} and {seen[key]}: {key[:60]}"
    for kind in ("code", "pairs"):
        names = [f"{kind}-{part}" for part in ("train", "validation", "choosing", "target")]
        prompts = [{row["prompt"] for row in lines(rows / f"{name}.jsonl")} for name in names]
        assert sum(map(len, prompts)) == len(set.union(*prompts))


def test_the_dirt_is_what_it_is_said_to_be(rows: Path) -> None:
    clean = lines(rows / "clean.jsonl")
    words, marks = lines(rows / "noisy-words.jsonl"), lines(rows / "noisy-words-marks.jsonl")
    count = total = 0
    for before, after, mark in zip(clean, words, marks, strict=True):
        assert before["prompt"] == after["prompt"]
        pairs = zip(before["response"].split(), after["response"].split(), mark["replaced"],
                    strict=True)  # fmt: skip
        assert all(a == b for a, b, bad in pairs if not bad)
        count, total = count + sum(mark["replaced"]), total + len(mark["replaced"])
    assert count / total == pytest.approx(DIRT, abs=0.02)
    clean, little = lines(rows / "long-clean.jsonl"), lines(rows / LITTLE)
    words_of = [[row["response"].split() for row in part] for part in (clean, little)]
    assert [row["prompt"] for row in clean] == [row["prompt"] for row in little]
    pairs_of_words = [
        (a, b) for one, two in zip(*words_of, strict=True) for a, b in zip(one, two, strict=True)
    ]
    other = sum(a != b for a, b in pairs_of_words) / len(pairs_of_words)
    assert other == pytest.approx(LITTLE_DIRT, abs=0.01)  # some words are replaced by themselves
    clean = lines(rows / "clean.jsonl")
    swapped = lines(rows / "noisy-responses.jsonl")
    dirty = [mark["exchanged"] for mark in lines(rows / "noisy-responses-marks.jsonl")]
    assert sum(dirty) == round(DIRT * len(clean))
    assert sorted(r["response"] for r in swapped) == sorted(r["response"] for r in clean)
    for before, after, bad in zip(clean, swapped, dirty, strict=True):
        assert (before["response"] != after["response"]) == bool(bad)
    oracle = lines(rows / "oracle-noisy-responses.jsonl")
    assert oracle == [row for row, bad in zip(clean, dirty, strict=True) if not bad]
    pairs_, flipped = lines(rows / "pairs-train.jsonl"), lines(rows / "pairs-flipped.jsonl")
    turned = sum(a["chosen"] != b["chosen"] for a, b in zip(pairs_, flipped, strict=True))
    assert turned == round(FLIPPED * len(pairs_))
    assert all(len(r["prompt"]) + len(r["response"]) <= LETTERS for r in clean)


@pytest.mark.parametrize("name", [LITTLE, "long-cut.jsonl", "library-choosing.jsonl"])
def test_a_later_file_is_drawn_by_itself(rows: Path, tmp_path: Path, name: str) -> None:
    """Beside the files of an earlier version, which stay."""
    for part in rows.glob("*.jsonl"):
        if part.name != name:
            (tmp_path / part.name).write_bytes(part.read_bytes())
    write_later(tmp_path)
    assert (tmp_path / name).read_bytes() == (rows / name).read_bytes()


def test_half_of_the_responses_end_in_their_middle(rows: Path) -> None:
    clean, short = lines(rows / "long-clean.jsonl"), lines(rows / "long-cut.jsonl")
    other = [(a, b) for a, b in zip(clean, short, strict=True) if a != b]
    assert len(other) == len(clean) // 2
    for before, after in other:
        assert before["prompt"] == after["prompt"]
        words, kept = before["response"].split(), after["response"].split()
        assert kept == words[: (len(words) + 1) // 2]
        assert before["response"].startswith(after["response"])


def test_functions_that_choose_stand_in_no_other_part(rows: Path) -> None:
    parts = ("validation", "target", "words")
    used = {row["prompt"] for part in parts for row in lines(rows / f"library-{part}.jsonl")}
    choosing = lines(rows / "library-choosing.jsonl")
    assert len(choosing) == SIZES["choosing"]
    assert not used & {row["prompt"] for row in choosing}


# --- intervals ------------------------------------------------------------------------------------


def each(losses: Any, tokens: Any) -> dict[str, list[float]]:
    return {"loss": list(map(float, losses)), "tokens": list(map(float, tokens))}


def test_a_difference_is_weighted_by_tokens_and_paired() -> None:
    tokens = [1, 3]
    one = {0: each([1, 2], tokens), 1: each([2, 2], tokens), 7: each([9, 9], tokens)}
    other = {0: each([1, 1], tokens), 1: each([1, 1], tokens)}
    found = difference(one, other)
    assert found["mean"] == pytest.approx((0.75 + 1.0) / 2)
    assert found["seeds"] == 2
    assert not apart(found)  # two seeds say nothing
    assert difference(one, {5: other[0]}) is None


# --- the grids ------------------------------------------------------------------------------------


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that the grids name, and no test of theirs looks into."""
    for name in ("SELECTION_ROWS", "ALPHATOKEN_MODELS"):
        monkeypatch.setenv(name, "anywhere")


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("grid", GRIDS, ids=lambda path: path.stem)
def test_a_grid_can_be_read_and_every_try_is_counted(grid: Path) -> None:
    found = read_grid(*parse(["--config", str(grid)]))
    tried = Counter((cell.task, cell.policy) for cell in all_cells(found) if cell.tried)
    assert set(tried.values()) == {len(values) for values in found.tune.values()}


def test_rivals_are_trained_as_long_runs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of one name have the same options, but a processor alone and one rate."""
    for name in PLACES:
        monkeypatch.setenv(name, f"/{name.lower()}")
    grids = (
        read_grid(*parse(["--config", str(GRIDS[0].parent / f"{name}.yaml")]))
        for name in ("rivals", "long")
    )
    rivals, long = ({c.name: dict(c.options) for c in all_cells(grid)} for grid in grids)
    common = rivals.keys() & long.keys()
    assert {name.partition("/")[0] for name in common} == {
        "words-120", "words-400", "clean-400", "responses-400", "mixed-400"
    }  # fmt: skip
    for name in common:
        assert rivals[name] == {**long[name], "use_cpu": True, "learning_rate": 3e-5}, name


@pytest.mark.usefixtures("anywhere")
def test_a_hypothesis_changes_no_more_than_its_option() -> None:
    """Both are of its task; beside a base that takes values, estimator and rows are the base's."""
    (path,) = (one for one in GRIDS if one.stem == "smollm2")
    cells = all_cells(read_grid(*parse(["--config", str(path)])))
    of = {(cell.task, cell.policy): dict(cell.options) for cell in cells}
    meant = {"label": "label", "label-responses": "label"}  # bases by the name of their method
    for one in HYPOTHESES:
        method, base = of[one["task"], one["method"]], of[one["task"], one["base"]]
        if base.get("policy") in ("top", "label"):
            estimators = [o.get("estimator", meant.get(o["policy"])) for o in (method, base)]
            assert estimators[0] == estimators[1], one
        for name in ("train_file", "model_name_or_path", "validation_file"):
            assert method.get(name) == base.get(name), one


def test_an_interval_weighs_rows_by_tokens_and_draws_seeds_too() -> None:
    """A long row that is drawn decides; of three seeds of which one differs, some draws are all of
    it, and some have none."""
    zeros, seeds = [0.0] * 10, range(3)
    long = {"loss": [1.0, *zeros[1:]], "tokens": [1000.0, *[1.0] * 9]}
    found = difference(dict.fromkeys(seeds, long), {key: {**long, "loss": zeros} for key in seeds})
    assert found["low"] == 0
    assert found["high"] > 0.99
    even = {"loss": zeros, "tokens": [1.0] * 10}
    other = {**even, "loss": [3.0] * 10}
    found = difference({0: even, 1: even, 2: other}, dict.fromkeys(seeds, even))
    assert [found[end] for end in ("low", "mean", "high")] == pytest.approx([0, 1, 3])
    assert not apart(found)
