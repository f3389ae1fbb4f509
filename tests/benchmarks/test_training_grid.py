"""The grid of training runs: data parts, noise, resuming, statistics, the report, one real cell."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import report, starts, tasks
from benchmarks.training.folder import WorkFolder
from benchmarks.training.grid import Cell, every_cell, main_grid
from benchmarks.training.statistics import Mean


def test_main_grid_is_every_task_noise_policy_and_seed() -> None:
    cells = list(main_grid())
    assert len(cells) == 3 * 2 * 5 * 3
    assert len({cell.name for cell in every_cell()}) == len(every_cell())
    assert {cell.variant for cell in cells} == {"main"}


def test_noise_replaces_the_stated_share_of_response_tokens_only() -> None:
    row = {"input_ids": list(range(3, 43)), "labels": [-100] * 10 + list(range(13, 43))}
    (noisy,) = tasks.with_noise([row], 0.3, 512, seed=1)
    changed = [i for i, (a, b) in enumerate(zip(*_ids(row, noisy), strict=True)) if a != b]
    assert min(changed) >= 10
    assert len(changed) in (8, 9)  # one of nine may be replaced by itself
    assert noisy["labels"][10:] == noisy["input_ids"][10:]
    assert noisy["labels"][:10] == [-100] * 10
    assert min(noisy["input_ids"]) >= 3
    assert tasks.with_noise([row], 0.3, 512, seed=1) == [noisy]
    assert tasks.with_noise([row], 0.3, 512, seed=2) != [noisy]


def _ids(*rows: tasks.Row) -> list[list[int]]:
    return [row["input_ids"] for row in rows]


def test_noise_treats_both_sides_of_a_pair_and_leaves_the_prompt() -> None:
    pair = {"prompt_ids": [5] * 9, "chosen_ids": [6] * 20, "rejected_ids": [7] * 10}
    (noisy,) = tasks.with_noise([pair], 0.3, 512, seed=0)
    assert noisy["prompt_ids"] == pair["prompt_ids"]
    assert sum(a != 6 for a in noisy["chosen_ids"]) in (5, 6)
    assert sum(a != 7 for a in noisy["rejected_ids"]) in (2, 3)


def test_interval_is_student_s() -> None:
    found = Mean.of([1.0, 2.0, 4.0])
    assert found.mean == pytest.approx(7 / 3)
    assert found.half == pytest.approx(4.302653 * 1.5275252 / 3**0.5, rel=1e-6)
    assert not Mean.of([-1.0, 1.0, 0.5]).clear
    assert Mean.of([1.0, 1.01, 0.99]).clear
    assert Mean.of([0.5]).text() == "0.500"


SETTINGS = {"start": "base", "accuracy": 0.5, "margin": 0.1, "steps": 60, "learning_rate": 1e-3}


def _result(cell: Cell, loss: float) -> dict[str, Any]:
    losses = {"target_loss": loss, "retention_loss": 2 * loss, "validation_gap": 0.1}
    counts = {"kept_tokens": 50, "response_tokens": 100, "wrong_share_of_kept": 0.2}
    return {**cell.record(), **losses, **counts, **SETTINGS}


def test_a_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    cells = list(main_grid())[:5]
    folder, seen = WorkFolder(tmp_path), []

    def measure(cell: Cell) -> dict[str, Any]:
        seen.append(cell.name)
        if cell == cells[2] and len(seen) == 3:
            raise RuntimeError("on purpose")
        return {"name": cell.name}

    folder.work(cells, measure)
    assert [cell.name for cell in folder.missing(cells)] == [cells[2].name]
    assert "on purpose" in (tmp_path / "cells" / f"{cells[2].name}.failed").read_text()
    WorkFolder(tmp_path).work(cells, measure)
    assert seen[5:] == [cells[2].name]
    assert not list(folder.missing(cells))
    assert {path.suffix for path in folder.cells.iterdir()} == {".json"}


def test_a_claimed_cell_is_left_to_its_process_unless_that_is_gone(tmp_path: Path) -> None:
    cell = next(main_grid())
    folder = WorkFolder(tmp_path)
    claim = folder.cells / f"{cell.name}.claim"
    claim.write_text(str(os.getpid()))
    folder.drop_dead_claims()
    folder.work([cell], lambda c: {"name": c.name})
    assert not folder.measured()
    claim.write_text(str(2**22 + 1))  # above Linux's largest process number
    folder.drop_dead_claims()
    folder.work([cell], lambda c: {"name": c.name})
    assert folder.measured() == [{"name": cell.name}]


@pytest.mark.pictures
def test_report_holds_every_cell_and_only_measured_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "DOCS", tmp_path)
    measured = [
        {"name": cell.name, **_result(cell, 2.0 + 0.1 * cell.seed + (cell.policy == "top"))}
        for cell in main_grid()
        if cell.task != "sft_code"
    ]
    report.write_report(measured)
    cells = json.loads((tmp_path / "results.json").read_text())
    assert len(cells) == 60
    needed = {"task", "noise", "policy", "estimator", "seed", "kept_tokens", "retention_loss"}
    assert needed <= set(cells[0])
    text = (tmp_path / "results.md").read_text()
    assert "**+1.000 ± 0.000**" in text  # paired: the seeds' own spread drops out
    assert "2.100 ± 0.248" in text
    assert (tmp_path / "results-policies.svg").read_text().startswith("<?xml")
    measured[0]["steps"] = 100
    with pytest.raises(SystemExit, match="drop the old"):
        report.write_report(measured)


@pytest.mark.slow
def test_parts_of_a_task_share_no_row(data_dir: Path) -> None:
    for name, sizes in tasks.SIZES.items():
        task = tasks.load_task(name, starts.tokenizer())
        parts = [task.train, task.pool, task.held_out]
        assert [len(part) for part in parts] == [sizes.train, sizes.pool, sizes.held_out]
        rows = [json.dumps(row) for part in parts for row in part]
        assert len(set(rows)) == len(rows)
        assert all(tasks.size(row) <= sizes.length for part in parts for row in part)
        prompts = {json.dumps(tasks.prompt_ids(row)) for part in parts for row in part}
        assert not prompts & {json.dumps(prompt) for prompt in task.prompts}


@pytest.mark.slow
def test_one_real_cell(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.training import cell as cells

    whole = tasks.load_task("sft_code", starts.tokenizer())
    stories = tasks.load_stories(starts.tokenizer())
    few = replace(whole, pool=whole.pool[:16], held_out=whole.held_out[:4], train=whole.train[:16])
    monkeypatch.setattr(cells, "task_of", lambda name: few)
    monkeypatch.setattr(cells, "stories", lambda: replace(stories, held_out=stories.held_out[:2]))
    monkeypatch.setattr(cells, "STEPS", {"sft_code": 2})
    monkeypatch.setattr(cells, "FISHER_SAMPLES", 4)
    monkeypatch.setattr(cells, "FISHER_LENGTH", 8)
    random, top = (
        cells.measure(Cell("sft_code", 0.3, policy, estimator, 0), tmp_path)
        for policy, estimator in (("random", "none"), ("top", "alphatoken"))
    )
    assert random["kept_tokens"] == top["kept_tokens"]
    assert random["response_tokens"] == top["response_tokens"]
    assert top["kept_share"] == pytest.approx(0.5, abs=0.01)
    assert random["target_loss"] != top["target_loss"]
    assert 0.2 < random["wrong_share_of_kept"] < 0.4
