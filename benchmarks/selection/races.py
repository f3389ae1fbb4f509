"""Races on rows of several kinds, each arm run to the end, so that the verdict can be judged.

``python -m benchmarks.selection races rivals --seeds 0`` (docs/measured.md); ``long_lora`` and
``long_gemma3`` in place of ``rivals`` race by LoRA, on SmolLM2-135M and on Gemma 3 270M. A race
looks at steps 20, 40 and 120 of 120 at a level at which no arm leaves. Its rows are the
16 choosing rows and, behind them, 40 target rows: ``decide`` is then asked again, with the choosing
rows, the first two looks and the usual level, and the target rows say where each arm ended.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from alphatoken.race.arms import ALL
from alphatoken.race.decision import Column, decide
from alphatoken.support.storage import write_json
from benchmarks.pages import number, span, table

KINDS = {
    "words": "30 % wrong words",
    "words-10": "10 % wrong words",
    "responses": "30 % exchanged responses",
    "mixed": "half of another kind",
    "clean": "clean",
    "library": "functions, 30 % wrong words",
    "cut": "half of the responses cut",
}
"""Kinds of rows, and what is in them."""
FILES = {"library": "library-words.jsonl"}
"""Files of training rows that are not ``long-`` and the kind."""
HELD_OUT = 1
"""The draw of rows that nothing on the page was chosen by."""
STEPS, LOOKS = 120, (20, 40)
RESULTS = Path(__file__).with_name("results") / "races.json"
_WALK, _MIX = "walk-80", "mix"
_WITH_ROWS = ("mixed",)
"""Kinds of rows on which whole rows are raced too, in full: that arm values all rows first."""


class Setting(NamedTuple):
    """What a grid's races train: its name on the page, and the rate of the runs and the walk."""

    about: str
    rate: float


SETTINGS = {
    "rivals": Setting("SmolLM2, full", 3.0e-5),
    "long_lora": Setting("SmolLM2, LoRA", 3.0e-4),
    "long_gemma3": Setting("Gemma, LoRA", 3.0e-4),
}
"""By grid; the first of the two rates that the grid tries."""


class Race(NamedTuple):
    """One race: its grid, its kind of rows, the draw of these, and the seed."""

    grid: str
    task: str
    draw: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.grid}-{self.task}-draw{self.draw}-{self.seed}"


def recipe(race: Race, model: str, rows: Path, judge: Path) -> dict[str, Any]:
    """Options of ``alphatoken race``: those of the grid, and arms of the grid of rivals."""
    grid, rivals = (_read(name) for name in (race.grid, "rivals"))
    rate = SETTINGS[race.grid].rate
    top = {k: v for k, v in rivals["methods"]["walk-80"].items() if k != "family"}
    by_rows = dict(rivals["methods"]["walk-rows"]["policy_options"])
    for walk in (top, by_rows):
        walk["walk_learning_rate"] = rate
    file, trusted = FILES.get(race.task, f"long-{race.task}.jsonl"), _trusted(race.task)
    mix = {k: v for k, v in rivals["methods"][_MIX].items() if k != "family"}
    arms = {_WALK: top, _MIX: mix, "walk-rows": {"policy": "walk-rows", "policy_options": by_rows}}
    if race.grid != "rivals" or race.task not in _WITH_ROWS:
        del arms["walk-rows"]
    return grid["options"] | {
        "use_cpu": True,
        "model_name_or_path": model,
        "train_file": str(rows / file),
        "validation_file": str(rows / f"{trusted}validation.jsonl"),
        "choosing_file": str(judge),
        "learning_rate": rate,
        "max_steps": STEPS,
        "warmup_steps": STEPS // 20,
        "seed": race.seed,
        "value_seed": race.seed,
        "report_to": "none",
        "disable_tqdm": True,
        "export_values": False,
        "arms": arms,
        "looks": [*LOOKS, STEPS],
        "level": 1e-14,  # about 12 standard errors
        "stop_after_looks": True,
    }


def _read(grid: str) -> Any:
    return yaml.safe_load(Path(__file__).with_name(f"{grid}.yaml").read_text(encoding="utf-8"))


def _trusted(task: str) -> str:
    """What the files of trusted rows of a kind begin with."""
    return "library-" if task == "library" else ""


def run(work: Path, model: str, rows: Path, races: Sequence[Race]) -> None:
    """Hold each race, or go on with it, and keep the losses by row."""
    for race in races:
        place = work / "races" / race.name
        place.mkdir(parents=True, exist_ok=True)
        judge = place.with_suffix(".jsonl")
        names = (f"{_trusted(race.task)}{part}.jsonl" for part in ("choosing", "target"))
        parts = [(rows / name).read_text("utf-8") for name in names]
        judge.write_text("".join(parts), encoding="utf-8")
        config = place.with_suffix(".yaml")
        options = recipe(race, model, rows, judge) | {"output_dir": str(place)}
        config.write_text(yaml.safe_dump(options, sort_keys=False), encoding="utf-8")
        words = [sys.executable, "-m", "alphatoken.cli", "race", "--config", str(config)]
        words += ["--resume"] if (place / "race.json").exists() else []
        subprocess.run(words, check=True)
        keep(place / "race.json", race, len(parts[0].splitlines()))


def keep(path: Path, race: Race, choosing: int, results: Path = RESULTS) -> None:
    """Add a race's losses by row to the file of results."""
    state = json.loads(path.read_text(encoding="utf-8"))
    lines = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    losses = {
        step: {arm: [round(x, 5) for x in columns["choosing"]] for arm, columns in arms.items()}
        for step, arms in state["losses"].items()
    }
    tokens = [int(count) for count in state["tokens"]["choosing"]]
    kept = {"choosing": choosing, "tokens": tokens, "losses": losses}
    lines[race.name] = race._asdict() | kept
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
    """Write the figures that docs/race.md shows: of the draw that was looked at, and the other."""
    lines = json.loads(RESULTS.read_text(encoding="utf-8"))
    kept = {name: _asked(line) | judged(line) for name, line in lines.items()}
    order = sorted(kept, key=lambda name: _place(kept[name]))
    races = {name: kept[name] for name in order}
    means = {
        group: _means([race for race in races.values() if (race["draw"] == HELD_OUT) == held])
        for group, held in (("seen", False), ("held_out", True))
    }
    write_json(path, {"races": races, "means": means})


def _asked(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in Race._fields}


def _place(race: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """By draw, grid and kind, in the order of the tables above."""
    grids, kinds = [*SETTINGS], [*KINDS]
    return race["draw"], grids.index(race["grid"]), kinds.index(race["task"]), race["seed"]


def _means(races: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How many races, their mean distance to the best arm, and the worst to ``all``."""
    if not races:
        return {"races": 0}
    return {
        "races": len(races),
        "to_best": sum(race["to_best"] for race in races) / len(races),
        "to_all": sum(race["to_all"] for race in races) / len(races),
        "worst_to_all": max(race["to_all"] for race in races),
    }


def rows_of_page(figures: Mapping[str, Any]) -> str:
    """A line for each kind of rows, a column for each grid; the arm that won is bold."""
    lines: dict[tuple[int, int, str], dict[str, str]] = {}
    for race in figures["races"].values():
        line = lines.setdefault((race["draw"], race["seed"], race["task"]), {})
        line[race["grid"]] = "; ".join(
            _of_arm(race, arm) for arm in (_WALK, _MIX) if arm in race["ends"]
        )
    rows = [
        (_rows_of(*key), *(line.get(grid, number(None)) for grid in SETTINGS))
        for key, line in lines.items()
    ]
    return table(("rows", *(setting.about for setting in SETTINGS.values())), rows)


def _rows_of(draw: int, seed: int, task: str) -> str:
    """The kind, with what sets these races apart from the others."""
    return KINDS[task] + f", seed {seed}" * (seed > 0) + ", other rows" * (draw == HELD_OUT)


def _of_arm(race: Mapping[str, Any], arm: str) -> str:
    """The difference at the last look, unless the arm had left before, and where it ended."""
    interval = [*race["looks"].values()][-1].get(arm)
    before = "left" if interval is None else span(interval, 3, "+")
    text = f"{before}; {number(race['ends'][arm], 3, '+')}"
    text = text if arm == _WALK else f"{arm} {text}"
    return f"**{text}**" if race["winner"] == arm else text
