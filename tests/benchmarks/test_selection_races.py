"""Races of the selection benchmark: what is kept of a race judges it as the race itself would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from alphatoken.support.storage import write_json
from benchmarks.selection import races

GRID = Path(races.__file__).with_name("rivals.yaml")


def line(gain: float) -> dict[str, Any]:
    """16 choosing rows and 3 target rows; ``walk-80`` gains in the race and loses at the end."""
    base = [1.0 + 0.01 * row for row in range(19)]
    tokens = [10 + row for row in range(16)] + [1, 2, 7]

    def look(shift: float) -> dict[str, list[float]]:
        moved = [x - shift - 1e-3 * (row % 3) for row, x in enumerate(base)]
        return {"all": base, "walk-80": moved, "walk-rows": [x + 0.1 for x in base]}

    end = {"all": base, "walk-80": [*base[:16], 2.0, 1.0, 1.0], "walk-rows": base}
    losses = {"20": look(0.0), "40": look(gain), "120": end}
    return {"choosing": 16, "tokens": tokens, "losses": losses}


def test_the_winner_is_judged_by_the_target_rows_at_the_end() -> None:
    race = races.judged(line(gain=0.2))
    assert race["winner"] == "walk-80"
    assert "walk-rows" not in race["looks"]["40"], "an arm that lost at the first look has left"
    base = (1.16 * 1 + 1.17 * 2 + 1.18 * 7) / 10
    end = (2.0 * 1 + 1.0 * 2 + 1.0 * 7) / 10 - base
    assert race["ends"]["walk-80"] == pytest.approx(end)
    assert (race["to_all"], race["to_best"]) == pytest.approx((end, end - min(end, 0.0)))


def test_without_a_gain_all_tokens_win() -> None:
    race = races.judged(line(gain=-0.1))
    assert (race["winner"], race["to_all"]) == ("all", 0.0)


def test_what_is_kept_is_read_from_a_race(tmp_path: Path) -> None:
    state = {
        "tokens": {"choosing": [3.0, 4.0]},
        "losses": {"20": {"all": {"choosing": [1.1234567, 2.0]}}},
    }
    write_json(tmp_path / "race.json", state)
    results = tmp_path / "races.json"
    for task in ("words", "clean"):
        races.keep(tmp_path / "race.json", races.Race("rivals", task, 0, 2), 1, results)
    lines = json.loads(results.read_text("utf-8"))
    assert [*lines] == ["rivals-clean-draw0-2", "rivals-words-draw0-2"]
    losses = {"20": {"all": [1.12346, 2.0]}}
    kept = {"choosing": 1, "tokens": [3, 4], "losses": losses}
    asked = {"grid": "rivals", "task": "words", "draw": 0, "seed": 2}
    assert lines["rivals-words-draw0-2"] == asked | kept


@pytest.mark.parametrize(("grid", "rate"), [("rivals", 3e-5), ("long_gemma3", 3e-4)])
def test_a_race_is_a_recipe_of_the_command(tmp_path: Path, grid: str, rate: float) -> None:
    """Arms are those of the grid of rivals, and looks end with the run."""
    race = races.Race(grid, "mixed", 0, 3)
    options = races.recipe(race, "model", tmp_path, tmp_path / "judge.jsonl")
    assert options["seed"] == options["value_seed"] == 3
    assert options["looks"] == [20, 40, 120]
    assert options["learning_rate"] == rate
    assert options.get("use_peft", False) == (grid != "rivals")
    methods = yaml.safe_load(GRID.read_text("utf-8"))["methods"]
    walk = {k: v for k, v in methods["walk-80"].items() if k != "family"}
    assert options["arms"]["walk-80"] == walk | {"walk_learning_rate": rate}
    assert options["arms"]["mix"] == {"policy": "validation-mix", "policy_options": {"rows": 1}}
    assert ("walk-rows" in options["arms"]) == (grid == "rivals")
    if grid == "rivals":
        assert options["arms"]["walk-rows"]["policy_options"]["walk_learning_rate"] == rate


def test_a_race_on_functions_takes_its_trusted_rows_from_functions(tmp_path: Path) -> None:
    race = races.Race("rivals", "library", 0, 0)
    options = races.recipe(race, "model", tmp_path, tmp_path / "judge.jsonl")
    assert options["train_file"] == str(tmp_path / "library-words.jsonl")
    assert options["validation_file"] == str(tmp_path / "library-validation.jsonl")


def test_held_out_races_have_means_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By draw first, then by grid and kind; the worst of a group is not hidden in its mean."""
    asked = [
        races.Race("long_lora", "clean", 0, 0),
        races.Race("rivals", "cut", races.HELD_OUT, 1),
        races.Race("rivals", "words", 0, 0),
    ]
    gains = {"clean": -0.1, "cut": 0.2, "words": 0.2}
    stored = {race.name: race._asdict() | line(gains[race.task]) for race in asked}
    write_json(tmp_path / "results.json", stored)
    monkeypatch.setattr(races, "RESULTS", tmp_path / "results.json")
    races.report(tmp_path / "races.json")
    figures = json.loads((tmp_path / "races.json").read_text("utf-8"))
    assert [*figures["races"]] == [asked[2].name, asked[0].name, asked[1].name]
    seen, held_out = figures["means"]["seen"], figures["means"]["held_out"]
    assert (seen["races"], held_out["races"]) == (2, 1)
    end = figures["races"][asked[2].name]["to_all"]
    assert end < 0
    assert (seen["to_all"], seen["worst_to_all"]) == pytest.approx((end / 2, 0.0))
    assert held_out["worst_to_all"] == pytest.approx(end)
    del figures["races"][asked[0].name]["looks"]["40"]["walk-80"]
    page = [line.split(" | ") for line in races.rows_of_page(figures).splitlines()]
    assert page[0][1:] == ["SmolLM2, full", "SmolLM2, LoRA", "Gemma, LoRA |"]
    words, clean, held = page[2:]
    assert words[1].startswith("**-0.2"), "bold where the walk won"
    assert words[2:] == ["–", "– |"], "not raced"
    assert (clean[0], clean[1], clean[2][:6]) == ("| clean", "–", "left; "), "it left before"
    assert held[0] == "| half of the responses cut, seed 1, other rows"
