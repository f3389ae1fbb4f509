"""Measured cells that the repository keeps, and the page made from them; nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alphatoken.support.storage import write_json
from alphatoken_lab.commands.compare import parse
from alphatoken_lab.runner.grid import Cell, all_cells
from alphatoken_lab.runner.grid_file import read_grid
from alphatoken_lab.runner.running import GridFolder
from benchmarks.selection import report, store

GRID = """
about: two methods of a small grid
command: compare
model_name_or_path: $ALPHATOKEN_MODELS/small
seeds: [0, 1, 2]
modes: [native, budget]
tune: {learning_rate: [1.0e-5, 1.0e-4]}
options: {train_file: $SELECTION_ROWS/train.jsonl, max_steps: 2}
measures:
  target_file: $SELECTION_ROWS/target.jsonl
  choosing_file: $SELECTION_ROWS/choosing.jsonl
  retention_file: $SELECTION_ROWS/retention.jsonl
tasks:
  noisy-words: {command: sft, policies: [start, standard, random]}
policies: [start, standard, random]
"""

GAIN = {"start": 0.0, "standard": -0.2, "random": -0.1}
"""What each method changes of the target loss, at every seed and row."""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the grid and its results; rows and models lie in folders of the name given."""
    (tmp_path / "small.yaml").write_text(GRID)
    monkeypatch.setattr(store, "__file__", str(tmp_path / "store.py"))
    for module in (store, report):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(report, "MODELS", {"small": "A small model"})
    move(tmp_path, monkeypatch, "here")
    return tmp_path


def move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str) -> Path:
    """Go to another machine: other folders for everything; its work folder."""
    for name in store.PLACES:
        place = tmp_path / machine / name.lower()
        place.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv(name, str(place))
    rows = tmp_path / machine / "selection_rows"
    for name in ("train", "target", "choosing", "retention"):
        (rows / f"{name}.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 3)
    return tmp_path / machine / "work" / "small"


def cells_in(folder: Path) -> tuple[dict[str, Cell], GridFolder]:
    config = str(folder.parents[2] / "small.yaml")
    grid = read_grid(*parse(["--config", config, "--output_dir", str(folder)]))
    return {cell.name: cell for cell in all_cells(grid)}, GridFolder(folder)


def measured(cell: Cell, choosing: float) -> dict[str, Any]:
    """What a cell's process writes, with losses made by hand."""
    level = round(2.0 + GAIN[cell.policy] + 0.01 * cell.seed, 5)
    target = round(level + 0.25, 5)
    each = {"loss": [level, round(level + 1.0, 5)], "tokens": [30, 10]}
    return {
        **{name: getattr(cell, name) for name in ("task", "policy", "mode", "seed", "kind")},
        "command": cell.command, "status": "done", "spec": cell.spec(), "secret": "a row's text",
        "steps": 2, "kept_tokens": 40, "response_tokens": 80, "time": 4.0, "seconds": 5.0,
        "scoring_time": 0.75, "direction_time": 0.25,
        "target": target, "retention": 2.5,
        "details": {"choosing_loss": choosing, "target_loss": target, "retention_loss": 2.5},
        "rows": {"target": each, "retention": {"loss": [2.5], "tokens": [9]}},
    }  # fmt: skip


def run(folder: Path) -> None:
    """Finish every cell; the higher learning rate is the better one."""
    cells, place = cells_in(folder)
    for name, cell in cells.items():
        place.place(name).mkdir(parents=True)
        choosing = 1.0 if cell.tried.get("learning_rate") == 1e-4 else 1.5
        write_json(place.place(name) / "result.json", measured(cell, choosing))


def test_a_result_of_other_settings_is_not_taken(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = places / "here" / "work" / "small"
    run(first)
    store.synchronised(first)
    before = len((places / "results" / "small.jsonl").read_text().splitlines())
    (places / "small.yaml").write_text(GRID.replace("max_steps: 2", "max_steps: 3"))
    second = move(places, monkeypatch, "there")
    store.synchronised(second)
    cells, place = cells_in(second)
    trained = [name for name, cell in cells.items() if cell.kind == "train"]
    assert all(place.result(name) is None for name in trained)
    assert place.result("noisy-words/start-native-seed0") is not None  # takes no step
    # What was measured of the other settings stays: they may come back.
    assert len((places / "results" / "small.jsonl").read_text().splitlines()) == before
    (places / "small.yaml").write_text(GRID)
    monkeypatch.setattr(store, "SIZES", {**store.SIZES, "validation": 1})
    third = move(places, monkeypatch, "elsewhere")
    store.synchronised(third)
    cells, place = cells_in(third)
    assert all(place.result(name) is None for name in cells)


def test_the_figures_are_of_what_was_measured(places: Path) -> None:
    folder = places / "here" / "work" / "small"
    run(folder)
    docs = places / "docs"
    docs.mkdir()

    def entry(method: str) -> dict[str, Any]:
        data = json.loads(report.write_report(folder.parent, docs).read_text())["grids"]["small"]
        (found,) = [e for e in data["tasks"]["noisy-words"] if e["method"] == method]
        return found

    # Three seeds, the better of the two rates; 0.1 worse at every seed and row.
    found = entry("random")
    assert found["target"] == pytest.approx(2.16)
    assert [found[key] for key in ("rate", "tokens", "valuing", "share")] == [1e-4, 40, 0.25, 0.5]
    gap = found["against"]["target"]["standard"]
    assert [gap[end] for end in ("mean", "low", "high")] == pytest.approx([0.1] * 3)
    assert gap["seeds"] == 3
    assert (docs / "selection.svg").exists()
    for seed in (1, 2):
        (folder / f"noisy-words/random-budget-seed{seed}/result.json").unlink()
    (places / "results" / "small.jsonl").unlink()
    assert entry("random")["against"]["target"]["standard"]["seeds"] == 1
    # A task without its plain training is not shown, and what is missing is counted.
    for cell in folder.glob("noisy-words/standard-*"):
        (cell / "result.json").unlink()
    (places / "results" / "small.jsonl").unlink()
    data = json.loads(report.write_report(folder.parent, docs).read_text())["grids"]["small"]
    assert data["tasks"] == {}
    assert (len(data["missing"]), data["cells"]) == (6, 11)


def test_the_picture_over_steps_is_of_runs_on_wrong_words(tmp_path: Path) -> None:
    def entry(method: str, gap: float) -> dict[str, Any]:
        gap_of = {"mean": gap, "low": gap - 0.1, "high": gap + 0.1, "seeds": 3}
        return {"method": method, "against": {"target": {"standard": gap_of}}}

    long = [entry("walk", -0.2), entry("random", 0.1)]
    tasks = {"words-16": [entry("walk", -0.1)], "words-400": long, "clean-400": long}
    found = report.over_steps(tasks)
    assert {m: {n: g["mean"] for n, g in line.items()} for m, line in found.items()} == {
        "walk": {16: -0.1, 400: -0.2}
    }
    report.draw_over_steps(found, tmp_path / "steps.svg")
    assert (tmp_path / "steps.svg").exists()
