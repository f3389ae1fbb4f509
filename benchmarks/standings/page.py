"""What the cells of a model and a task say; tables of docs/standings.md and its picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken.score.drawing import COLOURS, canvas, save
from alphatoken.support.storage import write_json
from benchmarks.frontier.draws import MODELS
from benchmarks.pages import DOCS, load, number, span, table
from benchmarks.standings.tasks import TASKS
from benchmarks.standings.values import ONE_STEP
from benchmarks.standings.yardsticks import DROPS, ENDS, above, lds, precision, rivals, subset


def summary(cells: Any) -> dict[str, Any]:
    """LDS of every value, J after dropping its best and worst tokens, and the ceilings."""
    scale = cells.scale

    def loss(name: str) -> float:
        return float(load(cells.folder / f"{name}.json")["validation"])

    count = {0: scale.subsets, 1: scale.again}
    losses = {
        (unit, seed): [loss(f"{unit} {i}{', seed 1' * seed}") for i in range(count[seed])]
        for unit in scale.units
        for seed in count
    }
    kept = {
        unit: [subset(cells.setting, unit, i) for i in range(scale.subsets)] for unit in scale.units
    }
    shares = DROPS if scale.drops else ()
    random = {share: [loss(f"random {i} {share}") for i in range(scale.drops)] for share in shares}
    spread = {share: statistics.stdev(found) for share, found in random.items()}
    values = {}
    rivalled = [cells.values(name) for name in cells.names if name in ONE_STEP]
    for name in cells.names:
        numbers = cells.values(name)
        values[name] = {
            "lds": {unit: lds(numbers, kept[unit], losses[unit, 0]) for unit in scale.units},
            "drops": {
                f"{end} {share}": (loss(f"{end} {share} {name}") - statistics.fmean(random[share]))
                / spread[share]
                for share in shares
                for end in ENDS
            },
            "above": {
                unit: above(numbers, rivalled, kept[unit], losses[unit, 0]) for unit in scale.units
            },
            "precision": precision(cells.setting, numbers),
        }
    good = cells.setting.good
    return {
        "says": TASKS[cells.folder.name].says,
        "scale": {**asdict(scale), "without": sorted(scale.without)},
        "tokens": cells.setting.tokens,
        "good": None if good is None or not good.any() else float(good.mean()),
        "plain": [loss(f"all, seed {seed}") for seed in (0, 1)],
        "ceiling": {
            unit: rivals(losses[unit, 0][: count[1]], losses[unit, 1]) if count[1] else None
            for unit in scale.units
        },
        "spread": {str(share): found for share, found in spread.items()},
        "values": values,
    }


def write_report(work: Path, docs: Path = DOCS) -> None:
    """Put what is measured in ``work`` into docs/standings.json, and draw the picture."""
    found = {"runs": {}, "facts": {}, **load(docs / "standings.json")}
    for path in sorted(work.glob("*/*/summary.json")):
        found["runs"].setdefault(path.parts[-3], {})[path.parts[-2]] = load(path)
    for path in sorted(work.glob("*/facts.json")):
        found["facts"][path.parts[-2]] = recalled(load(path))
    write_json(docs / "standings.json", found)
    if found["runs"]:
        _draw(found["runs"], docs / "standings.svg")


def recalled(places: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Of each value: how often the right row is the first, and among five; its mean 1 / place."""
    found = dict[str, dict[str, list[float]]]()
    for name in next(iter(places.values())):
        own = np.array([one[name] for one in places.values()])
        draws = np.random.default_rng(0).integers(0, len(own), (1000, len(own)))
        found[name] = {}
        for kind, hits in {"first": own == 1, "in 5": own <= 5, "1 / place": 1 / own}.items():
            low, high = np.quantile(hits[draws].mean(1), [0.025, 0.975])
            found[name][kind] = [float(hits.mean()), float(low), float(high)]
    return {"questions": len(places), "values": found}


def tables(kind: str, model: str, *tasks: str) -> str:
    """``lds MODEL``, ``rows MODEL``, ``drops MODEL TASK`` or ``facts MODEL``."""
    if kind == "facts":
        return _facts(load(DOCS / "standings.json")["facts"][model]["values"])
    found = load(DOCS / "standings.json")["runs"][model]
    if kind == "drops":
        return _drops(found[tasks[0]])
    return _lds(found) if kind == "lds" else _rows(found)


def _lds(tasks: Mapping[str, Any]) -> str:
    columns = [(t, unit) for t, one in tasks.items() for unit in one["scale"]["units"]]
    repeated = [tasks[t]["ceiling"][unit] for t, unit in columns]
    ceiling = ["–" if one is None else span(one) for one in repeated]
    rows = [
        (name, *(_marked(tasks[t]["values"][name], unit) for t, unit in columns))
        for name in _named(tasks)
    ]
    head = ("value", *(f"{t}: {unit}" for t, unit in columns))
    return table(head, [*rows, ("*the same run under another seed*", *ceiling)])


def _marked(one: Mapping[str, Any], unit: str) -> str:
    """Bold where it is above every one-step value."""
    return f"**{span(one['lds'][unit])}**" if one["above"][unit] else span(one["lds"][unit])


def _rows(tasks: Mapping[str, Any]) -> str:
    shown = [t for t, one in tasks.items() if one["good"] not in (None, 1.0)]
    rows = [
        (name, *(number(tasks[t]["values"][name]["precision"]) for t in shown))
        for name in _named(tasks)
    ]
    return table(("value", *(f"{t} (chance {tasks[t]['good']:.2f})" for t in shown)), rows)


def _facts(values: Mapping[str, Any]) -> str:
    kinds = next(iter(values.values()))
    rows = [(name, *(span(one[kind]) for kind in kinds)) for name, one in values.items()]
    return table(("value", *kinds), rows)


def _drops(task: Mapping[str, Any]) -> str:
    columns = [f"{end} {share}" for end in ENDS for share in DROPS]
    rows = [
        (name, *(number(one["drops"][column], 1, "+") for column in columns))
        for name, one in task["values"].items()
    ]
    spread = [f"{task['spread'][str(share)]:.4f}" for _ in ENDS for share in DROPS]
    head = (f"{end} {share:.0%}" for end in ENDS for share in DROPS)
    return table(("without the", *head), [*rows, ("*unit, nats*", *spread)])


def _draw(models: Mapping[str, Any], path: Path) -> None:
    """LDS over tokens of each value, one panel a model, one colour a task."""
    with canvas(8.6, 0.34 * max(len(_named(one)) for one in models.values()) + 1) as figure:
        panels = figure.subplots(1, len(models), squeeze=False)[0]
        for axes, (key, tasks) in zip(panels, models.items(), strict=True):
            names = _named(tasks)
            for at, (task, one) in enumerate(tasks.items()):
                for place, name in enumerate(reversed(names)):
                    value, low, high = one["values"][name]["lds"]["tokens"]
                    y = place + 0.2 * (len(tasks) - 1 - 2 * at) / 2
                    axes.plot([low, high], [y, y], color=COLOURS[at], lw=1.5)
                    axes.plot([value], [y], "os^"[at], color=COLOURS[at], ms=4, label=task)
                if one["ceiling"]["tokens"] is not None:
                    axes.axvline(one["ceiling"]["tokens"][0], color=COLOURS[at], lw=0.8, ls=":")
            axes.axvline(0, color="black", lw=0.8, ls="--")
            axes.set_yticks(range(len(names)), list(reversed(names)))
            axes.set_title(MODELS[key].name, fontsize=9)
            axes.set_xlabel("LDS over tokens")
        by_task = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
        figure.legend(by_task.values(), by_task.keys(), loc="outside lower center")
        save(figure, path)


def _named(tasks: Mapping[str, Any]) -> list[str]:
    return list(next(iter(tasks.values()))["values"])
