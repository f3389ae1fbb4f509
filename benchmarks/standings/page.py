"""What the cells of a model and a task say; tables of docs/standings.md and its picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alphatoken.diagnose.statistics import spearman
from alphatoken.score.page import COLOURS, canvas, save
from alphatoken.support.storage import write_json
from benchmarks.data import MODELS
from benchmarks.pages import DOCS, load, number, span, table
from benchmarks.standings.runs import TASKS, UNITS, Numbers, Setting
from benchmarks.standings.values import ONE_STEP

DROPS = (0.01, 0.05, 0.2)
"""Shares of the tokens that are left out."""

ENDS = ("best", "worst")
"""Whether those of highest value or of lowest."""


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
    spread = {share: statistics.stdev(losses_after) for share, losses_after in random.items()}
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
        "says": TASKS[cells.folder.name][0],
        "scale": {**asdict(scale), "without": sorted(scale.without)},
        "tokens": cells.setting.tokens,
        "good": None if good is None or not good.any() else float(good.mean()),
        "plain": [loss(f"all, seed {seed}") for seed in (0, 1)],
        "ceiling": {
            unit: rivals(losses[unit, 0][: count[1]], losses[unit, 1]) if count[1] else None
            for unit in scale.units
        },
        "spread": {str(share): losses_after for share, losses_after in spread.items()},
        "values": values,
    }


def write_report(work: Path, docs: Path = DOCS) -> None:
    """Put what is measured in ``work`` into docs/standings.json, and draw the picture."""
    report = {"runs": {}, "facts": {}, **load(docs / "standings.json")}
    for path in sorted(work.glob("*/*/summary.json")):
        report["runs"].setdefault(path.parts[-3], {})[path.parts[-2]] = load(path)
    for path in sorted(work.glob("*/facts.json")):
        report["facts"][path.parts[-2]] = recalled(load(path))
    write_json(docs / "standings.json", report)
    if report["runs"]:
        _draw(report["runs"], docs / "standings.svg")


def recalled(places: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Of each value: how often the right row is the first, and among five; its mean 1 / place."""
    recall = dict[str, dict[str, list[float]]]()
    for name in next(iter(places.values())):
        own = np.array([one[name] for one in places.values()])
        draws = np.random.default_rng(0).integers(0, len(own), (1000, len(own)))
        recall[name] = {}
        for kind, hits in {"first": own == 1, "in 5": own <= 5, "1 / place": 1 / own}.items():
            low, high = np.quantile(hits[draws].mean(1), [0.025, 0.975])
            recall[name][kind] = [float(hits.mean()), float(low), float(high)]
    return {"questions": len(places), "values": recall}


def tables(kind: str, model: str, *tasks: str) -> str:
    """``lds MODEL [TASK...]``, ``rows MODEL``, ``drops MODEL TASK`` or ``facts MODEL``."""
    if kind == "facts":
        return _facts(load(DOCS / "standings.json")["facts"][model]["values"])
    tasks_of_model = load(DOCS / "standings.json")["runs"][model]
    if kind == "drops":
        return _drops(tasks_of_model[tasks[0]])
    if kind == "rows":
        return _rows(tasks_of_model)
    return _lds({task: tasks_of_model[task] for task in tasks or tasks_of_model})


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


# --- yardsticks -----------------------------------------------------------------------------------


def subset(setting: Setting, unit: str, number: int) -> Numbers:
    """Weights 0 and 1: half of the tokens, or all tokens of half of the rows."""
    draw = np.random.default_rng([UNITS.index(unit), number, 2])
    count = setting.tokens if unit == "tokens" else len(setting.rows)
    kept = np.zeros(count)
    kept[draw.permutation(count)[: count // 2]] = 1.0
    return kept if unit == "tokens" else kept[setting.row_of]


def drop(setting: Setting, values: Numbers, share: float, *, best: bool) -> Numbers:
    """Weights without the share of the tokens of highest (else lowest) value."""
    order = np.argsort(-values if best else values, kind="stable")
    kept = np.ones(setting.tokens)
    kept[order[: round(share * setting.tokens)]] = 0.0
    return kept


def lds(values: Numbers, subsets: Sequence[Numbers], losses: Sequence[float]) -> list[float]:
    """Spearman of the summed values of each subset with -J after training on it.

    Returns:
        The correlation, and a 95 % interval that draws subsets anew.
    """
    return _interval(_sums(values, subsets), -np.asarray(losses))


def above(
    values: Numbers, others: Sequence[Numbers], subsets: Sequence[Numbers], losses: Sequence[float]
) -> bool:
    """Whether the LDS is above that of each of the others: paired 95 % intervals leave 0 out."""
    wanted = -np.asarray(losses)
    own = _redrawn(_sums(values, subsets), wanted)
    gaps = [own - _redrawn(_sums(other, subsets), wanted) for other in others]
    return all(float(np.nanquantile(gap, 0.025)) > 0 for gap in gaps)


def _sums(values: Numbers, subsets: Sequence[Numbers]) -> Numbers:
    return np.array([float(values @ kept) for kept in subsets])


def precision(setting: Setting, values: Numbers) -> float | None:
    """Average precision with which rows by their mean value bring up the good ones (AUPRC).

    Chance is the share of good rows; None where all rows are alike.
    """
    good = setting.good
    if good is None or good.all() or not good.any():
        return None
    sums = np.bincount(setting.row_of, values) / np.bincount(setting.row_of)
    hits = good[np.argsort(-sums, kind="stable")]
    return float((np.cumsum(hits) / np.arange(1, len(hits) + 1))[hits].mean())


def rivals(losses: Sequence[float], others: Sequence[float]) -> list[float]:
    """Spearman of J after the same subsets in runs of two seeds: nothing is expected to pass it."""
    return _interval(np.asarray(losses), np.asarray(others))


def _interval(first: NDArray[Any], second: NDArray[Any]) -> list[float]:
    low, high = np.nanquantile(_redrawn(first, second), [0.025, 0.975])
    return [spearman(first, second), float(low), float(high)]


def _redrawn(first: NDArray[Any], second: NDArray[Any]) -> Numbers:
    """Spearman of 1,000 draws with repetition, the same ones whatever is asked."""
    draw, count = np.random.default_rng(0), len(first)
    drawn = (draw.integers(0, count, count) for _ in range(1000))
    return np.array([spearman(first[places], second[places]) for places in drawn])
