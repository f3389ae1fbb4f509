"""A grid whose methods try values of one option: who tries, what decides, what is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alphatoken import ConfigError
from alphatoken.support.storage import write_json
from alphatoken_lab.commands.compare import parse
from alphatoken_lab.runner.grid import Cell, all_cells
from alphatoken_lab.runner.grid_file import read_grid
from alphatoken_lab.runner.records import Row, collect, rows_of
from alphatoken_lab.runner.running import GridFolder
from tests.both_programs import main
from tests.lab.forked_cells import forked_cells
from tests.lab.small import write
from tests.lab.test_compare import grid_file

RATES = [1e-3, 1e-2]


def tuned_grid(folder: Path, model: Path, **changes: Any) -> Path:
    rows = [{"prompt": f"ask {i}", "response": f"say {i} {i}"} for i in range(40, 44)]
    more = [{"prompt": f"ask {i}", "response": f"say {i} {i}"} for i in range(50, 53)]
    measures = {
        "target_file": write(folder / "goal.jsonl", rows),
        "choosing_file": write(folder / "choosing.jsonl", more),
    }
    settings: dict[str, Any] = {
        "seeds": [3, 4],
        "policies": ["start", "standard", "fixed", "wise-ft"],
        "methods": {"fixed": {"policy": "all", "learning_rate": 1e-4, "max_steps": 1}},
        "tasks": {
            "one": {"command": "sft", "measures": measures},
            "two": {"command": "sft", "measures": measures, "tuned_on": "one",
                    "policies": ["standard"]},
        },
        "tune": {"learning_rate": RATES},
    }  # fmt: skip
    return grid_file(folder, model, **(settings | changes))


def cells_of(path: Path) -> dict[str, Cell]:
    return {cell.name: cell for cell in all_cells(read_grid(*parse(["--config", str(path)])))}


@pytest.fixture
def model(world: Any) -> Path:
    folder: Path = world / "reference"
    return folder


def test_who_tries_and_who_waits(model: Path, tmp_path: Path) -> None:
    cells = cells_of(tuned_grid(tmp_path, model))
    tries = {f"one/standard-native-seed3-{rate}": {"learning_rate": rate} for rate in RATES}
    assert {n: c.tried for n, c in cells.items() if c.tried} == tries
    assert [cells[n].options["learning_rate"] for n in tries] == RATES
    assert "one/standard-native-seed3" not in cells
    for name in ("one/standard-native-seed4", "two/standard-native-seed3"):
        assert cells[name].tries == tries
        assert set(tries) <= set(cells[name].needs)
    assert cells["one/fixed-native-seed3"].options["learning_rate"] == 1e-4
    assert not cells["one/fixed-native-seed4"].tries
    assert [n for n in cells if n.startswith("two/")] == [
        "two/standard-native-seed3", "two/standard-native-seed4",
    ]  # fmt: skip
    # Only a merge loads models: of the first seed all tries, later the one that was trained.
    kept = {n for n, c in cells.items() if c.keep_model and c.kind == "train"}
    assert kept == {*tries, "one/standard-native-seed4"}


def test_the_best_of_the_choosing_rows_is_taken(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["standard", "wise-ft"]
    grid, out = tuned_grid(tmp_path, model, policies=names), tmp_path / "out"
    with forked_cells():
        assert main(["compare", "--config", str(grid), "--output_dir", str(out), "--quiet"]) == 0
    cells, folder = cells_of(grid), GridFolder(out)
    results = {name: folder.result(name) or {} for name in cells}
    tries = cells["one/standard-native-seed4"].tries
    losses = {name: results[name]["details"]["choosing_loss"] for name in tries}
    best = min(losses, key=lambda name: losses[name])
    assert len(set(losses.values())) == 2
    for name in ("one/standard-native-seed4", "two/standard-native-seed3"):
        asked = json.loads((out / name / "cell.json").read_text())["resolved"]
        assert asked["learning_rate"] == tries[best]["learning_rate"]
    merged = json.loads((out / "one/wise-ft-native-seed3/cell.json").read_text())["resolved"]
    assert merged["merged"] == str((out / best / "model").resolve())
    records = collect(list(cells.values()), folder)
    (line,) = [one for one in rows_of(records, "one") if one.policy == "standard"]
    assert [r["seed"] for r in line.records] == [3, 4]
    assert line.records[0]["tried"] == dict(tries[best])
    assert line.values("target")[0] == results[best]["target"]
    # Losses row by row, of which the summed one is made.
    rows = results[best]["rows"]["target"]
    total = sum(x * n for x, n in zip(rows["loss"], rows["tokens"], strict=True))
    assert total / sum(rows["tokens"]) == pytest.approx(results[best]["details"]["target_loss"])
    assert len(rows["loss"]) == 4
    assert "7 of 7 cells" in capsys.readouterr().out


def test_tries_that_are_unfinished_or_failed(model: Path, tmp_path: Path) -> None:
    """Other seeds wait for all tries, take the best of those that did not fail, or are given up."""
    cells, folder = cells_of(tuned_grid(tmp_path, model)), GridFolder(tmp_path / "out")
    later, merge = cells["one/standard-native-seed4"], cells["one/wise-ft-native-seed3"]
    first, second = later.tries

    def fail(name: str) -> None:
        folder.place(name).mkdir(parents=True, exist_ok=True)
        write_json(folder.place(name) / "failed.json", {"error": "not finite", "exit_code": 2})

    def line() -> Row:
        records = collect(list(cells.values()), folder)
        return next(row for row in rows_of(records, "one") if row.policy == "standard")

    result = {"spec": cells[second].spec(), "details": {"choosing_loss": 9.0}, "target": 5.0}
    (folder.place(second) / "model").mkdir(parents=True)
    write_json(folder.place(second) / "result.json", result)
    assert not later.ready({second}, set())
    assert [r["status"] for r in line().records] == ["missing", "missing"]
    assert line().records[0]["tried"] == cells[first].tried
    fail(first)
    assert later.ready({second}, {first})
    assert not later.hopeless({first})
    assert folder.best(later.tries) == second
    assert folder.resolved_options(later)["learning_rate"] == RATES[1]
    status = folder.status(cells.values())
    assert (status[first].state, status[later.name].state) == ("failed", "missing")
    assert line().values("target") == [5.0]
    (folder.place(second) / "result.json").unlink()
    fail(second)
    assert set(later.hopeless({first, second})) == {first, second}
    assert folder.status(cells.values())[later.name].state == "blocked"
    assert merge.ready({second}, {first})
    assert merge.hopeless({first, second})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tune": {"learning_rate": [1e-3]}}, "at least two"),
        ({"tune": {"learning_rate": [1e-3, 1e-3]}}, "at least two"),
        ({"tune": {"learning_rate": RATES, "max_steps": [1, 2]}}, "one option"),
        ({"tasks": {"a": {"tuned_on": "b"}, "b": {"command": "dpo"}}}, "the same command"),
        ({"tasks": {"a": {"measures": {"target_file": "t"}}}}, "choosing_file"),
        ({"tasks": {"a": {"policies": ["standart"]}}}, "standart"),
    ],
)
def test_a_tuning_without_meaning_is_refused(
    model: Path, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    measures = {"measures": {"target_file": "t", "choosing_file": "c"}}
    changes = {
        k: {n: measures | one for n, one in v.items()} if k == "tasks" else v
        for k, v in changes.items()
    }
    grid = tuned_grid(tmp_path, model, **changes)
    with pytest.raises(ConfigError, match=says):
        cells_of(grid)
