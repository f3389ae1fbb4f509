"""Races on rows of five kinds, each arm run to the end, so that the verdict can be judged.

``python -m benchmarks.selection races --seeds 0`` (docs/measured.md). A race of three arms looks
at steps 20, 40 and 120 of 120 at a level at which no arm leaves. Its rows are the 16 choosing rows
and, behind them, 40 target rows: ``decide`` is then asked again, with the choosing rows, the first
two looks and the usual level, and the target rows say where each arm ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from alphatoken.race.arms import ALL
from alphatoken.race.decision import Column, decide
from alphatoken.support.storage import write_json
from benchmarks.pages import number, table

KINDS = {
    "words": "30 % of the words are wrong",
    "words-10": "10 % of the words are wrong",
    "responses": "30 % of the responses answer another row",
    "mixed": "half of the rows are of another kind",
    "clean": "clean",
}
"""File of rows, after ``long-``, and what is in it."""
STEPS, LOOKS = 120, (20, 40)
RATE = 3.0e-5
RESULTS = Path(__file__).with_name("results") / "races.json"
_SHOWN = ("walk-80", "walk-rows")


def recipe(grid: Path, model: str, rows: Path, judge: Path, task: str, seed: int) -> dict[str, Any]:
    """Options of ``alphatoken race``: those of the grid of rivals, on one kind of rows."""
    spec = yaml.safe_load(grid.read_text(encoding="utf-8"))
    methods = spec["methods"]
    top = {k: v for k, v in methods["walk-80"].items() if k != "family"}
    by_rows = {"policy": "walk-rows", "policy_options": methods["walk-rows"]["policy_options"]}
    return spec["options"] | {
        "model_name_or_path": model,
        "train_file": str(rows / f"long-{task}.jsonl"),
        "validation_file": str(rows / "validation.jsonl"),
        "choosing_file": str(judge),
        "learning_rate": RATE,
        "max_steps": STEPS,
        "warmup_steps": STEPS // 20,
        "seed": seed,
        "value_seed": seed,
        "report_to": "none",
        "disable_tqdm": True,
        "export_values": False,
        "arms": {"walk-80": top, "walk-rows": by_rows},
        "looks": [*LOOKS, STEPS],
        "level": 1e-9,
        "stop_after_looks": True,
    }


def run(work: Path, model: str, rows: Path, seeds: Sequence[int], tasks: Sequence[str]) -> None:
    """Race on each kind of rows under each seed, and keep the losses by row."""
    judge = work / "races" / "judge.jsonl"
    judge.parent.mkdir(parents=True, exist_ok=True)
    parts = [(rows / f"{name}.jsonl").read_text("utf-8") for name in ("choosing", "target")]
    judge.write_text("".join(parts), encoding="utf-8")
    choosing = len(parts[0].splitlines())
    grid = Path(__file__).with_name("rivals.yaml")
    for seed in seeds:
        for task in tasks:
            place = judge.parent / f"{task}-{seed}"
            options = recipe(grid, model, rows, judge, task, seed) | {"output_dir": str(place)}
            config = place.with_suffix(".yaml")
            config.write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")
            words = [sys.executable, "-m", "alphatoken.cli", "race", "--config", str(config)]
            words += ["--resume"] if (place / "race.json").exists() else []
            subprocess.run(words, check=True)
            keep(place / "race.json", task, seed, choosing)


def keep(path: Path, task: str, seed: int, choosing: int, results: Path = RESULTS) -> None:
    """Add a race's losses by row to the file of results."""
    race = json.loads(path.read_text(encoding="utf-8"))
    lines = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    losses = {
        step: {arm: [round(x, 5) for x in columns["choosing"]] for arm, columns in arms.items()}
        for step, arms in race["losses"].items()
    }
    tokens = [int(count) for count in race["tokens"]["choosing"]]
    lines[f"{task}-{seed}"] = {"choosing": choosing, "tokens": tokens, "losses": losses}
    write_json(results, dict(sorted(lines.items())))


def judged(line: Mapping[str, Any], level: float = 0.05) -> dict[str, Any]:
    """The race's decision by its choosing rows, and where each arm ended on the target rows.

    Returns:
        ``winner``; ``looks``, by step and arm the difference to ``all`` on the choosing rows with
        its interval; ``ends``, by arm the target loss minus that of ``all``, nats a token;
        ``to_best`` and ``to_all``, the winner's minus that of the best arm and of ``all``.
    """
    count, tokens = line["choosing"], line["tokens"]
    looks = [line["losses"][str(step)] for step in LOOKS]
    column = Column(
        [float(one) for one in tokens[:count]],
        [{arm: losses[:count] for arm, losses in look.items()} for look in looks],
    )
    arms = [arm for arm in looks[0] if arm != ALL]
    outcome = decide(column, arms=arms, looks=len(LOOKS), level=level)
    last, weights = line["losses"][str(STEPS)], tokens[count:]
    ends = {arm: _mean(losses[count:], weights) for arm, losses in last.items()}
    ends = {arm: end - ends[ALL] for arm, end in ends.items()}
    end = ends[outcome.winner]
    shown = [
        {arm: [one.value, one.low, one.high] for arm, one in look.items()}
        for look in outcome.differences
    ]
    return {
        "winner": outcome.winner,
        "looks": dict(zip(map(str, LOOKS), shown, strict=False)),
        "ends": ends,
        "to_best": end - min(ends.values()),
        "to_all": end,
    }


def _mean(losses: Sequence[float], tokens: Sequence[float]) -> float:
    return sum(x * n for x, n in zip(losses, tokens, strict=True)) / sum(tokens)


def report(path: Path) -> None:
    """Write the figures that docs/measured.md shows."""
    lines = json.loads(RESULTS.read_text(encoding="utf-8"))
    races = {name: judged(line) for name, line in lines.items()}
    means = {
        what: sum(race[what] for race in races.values()) / len(races)
        for what in ("to_best", "to_all")
    }
    write_json(path, {"races": races, "means": means})


def rows_of_page(figures: Mapping[str, Any]) -> str:
    """A line a race: what was seen at the last look, who won, and where each arm ended."""
    rows = []
    for name, race in figures["races"].items():
        task, _, seed = name.rpartition("-")
        last = list(race["looks"].values())[-1]
        rows.append(
            (
                f"{KINDS[task]}, seed {seed}",
                *(_with_ends(last.get(arm)) for arm in _SHOWN),
                f"`{race['winner']}`",
                *(number(race["ends"].get(arm), 3, "+") for arm in _SHOWN),
                number(race["to_best"], 3, "+"),
            )
        )
    looks = [f"`{arm}` at step {LOOKS[-1]}" for arm in _SHOWN]
    ends = [f"`{arm}` at the end" for arm in _SHOWN]
    return table(("rows", *looks, "winner", *ends, "winner minus best"), rows)


def _with_ends(interval: Sequence[float] | None) -> str:
    """A dash where the arm had left before."""
    if interval is None:
        return "left"
    value, low, high = (number(x, 3, "+") for x in interval)
    return f"{value} [{low}, {high}]"
