"""Figures of docs/selection.md and its pictures, from the folders of the grids; its tables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken.score.page import COLOURS, DASHES, MARKERS, canvas, save
from alphatoken.support.storage import write_json
from alphatoken_lab.runner.grid import Cell, Grid, all_cells
from alphatoken_lab.runner.methods import PLAIN
from alphatoken_lab.runner.records import Row, collect, rows_of
from alphatoken_lab.runner.running import GridFolder
from benchmarks.pages import DOCS, load, number, table
from benchmarks.selection import races
from benchmarks.selection.store import RESULTS, synchronised, to_read

Each = Mapping[str, Sequence[float]]
"""Of each held-out row: ``loss``, its mean over the response, and its ``tokens``."""

Losses = dict[str, dict[str, dict[int, Each]]]
"""Method -> "target" or "retention" -> seed -> losses of the rows."""

Gap = dict[str, float]
"""Mean loss of one method minus that of another: ``mean``, in nats a token, ``low`` and ``high``,
the ends of its 95 % interval, and ``seeds``, how many both have."""

Entry = dict[str, Any]
"""One method of one task, over its seeds, as docs/selection.json holds it."""

MODELS = {
    "smollm2": "SmolLM2-135M-Instruct",
    "long": "SmolLM2-135M-Instruct, hundreds of steps",
    "rivals": "SmolLM2-135M-Instruct, rivals of a walk",
    "long_lora": "SmolLM2-135M-Instruct, LoRA, hundreds of steps",
    "long_gemma3": "Gemma 3 270M, hundreds of steps",
    "lora": "SmolLM2-135M-Instruct, LoRA",
    "code": "SmolLM2-135M-Instruct, Python",
    "pairs": "SmolLM2-135M-Instruct, preferences",
    "gemma3": "Gemma 3 270M",
    "merged": "SmolLM2-135M-Instruct, merged with its start",
}
"""Grid -> its title on the page: the model, and what it learns if not mathematics."""

BASELINES = (
    tuple(PLAIN.values()),
    ("random",),
    ("after-validation", "validation-first"),
    ("standard-longer",),
)
"""What every method is compared with; of several names the first that a task has."""

HYPOTHESES = tuple(
    dict(zip(("what", "task", "method", "base"), one, strict=True))
    for one in (
        ("the best 4 of 8 rows, equal tokens", "mixed", "rows-of-two", "standard"),
        ("Adam's own step in the value", "noisy-words", "full-step", "label"),
        ("the same over all parameters", "noisy-words", "full-step-all", "label"),
        ("retention by the paper's lambda, Fisher", "noisy-words", "alphatoken", "adaptation"),
        ("clean rows first, then Adam's own step", "noisy-words", "after-validation-full-step",
         "after-validation"),
    )
)  # fmt: skip
"""Options that may help, in the order of the page: ``method`` has one more than ``base``."""

DRAWN = (
    "oracle", "random", "alphatoken", "label", "full-step-all", "label-responses", "rho-1",
    "rho-1-responses", "on-validation", "after-validation", "validation-first",
)  # fmt: skip
"""Methods of the picture, where three seeds have run."""

NAMES = dict.fromkeys(("after-validation", "validation-first"), "clean rows first")
NAMES["on-validation"] = "clean rows alone"
"""What the picture says in place of a method's name: two ways of one method are one."""

LASTING = {
    "oracle": "the right words",
    "walk": "values along one walk",
    "validation-first": "clean rows first",
    "rho-1": "loss that clean rows take away",
    "alphatoken": "the paper's values",
}
"""Methods of the picture over steps, and what it calls them."""

_KINDS = ("target", "retention")
_DRAWS = 4000


# --- figures --------------------------------------------------------------------------------------


def write_report(work: Path, docs: Path = DOCS) -> Path:
    """The figures of whatever is finished; ``python -m benchmarks`` writes the page's tables.

    Args:
        work: with a folder of cells for each grid; what is kept in results/ is added.
        docs: where data and pictures go.
    """
    report: dict[str, Any] = {"grids": {}, "finding": {}}
    drawn: dict[str, list[Entry]] = {}
    for name, model in _folders(work).items():
        grid, tasks, losses, missing = _grid(work / name)
        report["grids"][name] = {
            "model": model,
            "cells": len(all_cells(grid)),
            "missing": missing,
            "tasks": tasks,
            "options": effects(losses),
        }
        if name == "long":
            draw_over_steps(over_steps(tasks), docs / "selection-steps.svg")
        elif "-draw" not in name and "long" not in name and name != "rivals":
            drawn |= {f"{model}: {task}": entries for task, entries in tasks.items()}
        if finding := load(RESULTS / f"finding-{name}.json"):
            report["finding"][name] = finding
    draw(drawn, docs / "selection.svg")
    write_json(docs / "selection.json", report)
    return docs / "selection.json"


def _folders(work: Path) -> dict[str, str]:
    """Name of each grid that has run, other draws of rows after the first, and its title."""
    titles = {}
    for name, model in MODELS.items():
        places = [p for p in work.glob(f"{name}*") if p.is_dir()]
        names = {p.name for p in places} | {p.stem for p in RESULTS.glob(f"{name}*.jsonl")}
        for one in sorted(names):
            draw = one.removeprefix(name)
            if re.fullmatch(r"(-draw\d+)?", draw):
                titles[one] = model + (f", other rows ({draw[1:]})" if draw else "")
    return titles


def _grid(folder: Path) -> tuple[Grid, dict[str, list[Entry]], dict[str, Losses], list[str]]:
    """The grid, its figures and losses by task, and the cells that have not run."""
    grid = synchronised(folder, to_read)
    cells, place = to_read(grid), GridFolder(folder)
    records = collect(cells, place)
    tasks, losses = {}, {}
    for task in grid.tasks:
        lines = [line for line in rows_of(records, task.name) if line.values("target")]
        losses[task.name] = _losses(cells, place, task.name)
        tasks[task.name] = [_entry(line, losses[task.name]) for line in lines]
    missing = [
        f"{r['task']}/{r['policy']}-seed{r['seed']}" for r in records if r["status"] != "done"
    ]
    # Nothing can be said of a task before its plain training.
    begun = {k: v for k, v in tasks.items() if any(e["method"] in PLAIN.values() for e in v)}
    return grid, begun, losses, missing


def _losses(cells: Sequence[Cell], folder: GridFolder, task: str) -> Losses:
    """Losses of the chosen cells, row by row."""
    losses: Losses = {}
    tried: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.task == task:
            tried.setdefault(f"{cell.policy} {cell.seed}", []).append(cell)
    for group in tried.values():
        done = [cell.name for cell in group if folder.result(cell) is not None]
        failed = [cell.name for cell in group if folder.error(cell) is not None]
        if not done or len(done) + len(failed) < len(group):
            continue
        best = done[0] if len(group) == 1 else folder.best(done)
        cell = next(one for one in group if one.name == best)
        rows = (folder.result(cell) or {})["rows"]
        for kind in rows.keys() & set(_KINDS):
            own = losses.setdefault(cell.policy, {}).setdefault(kind, {})
            own[cell.seed] = _in_nats(rows[kind])
    return losses


def _in_nats(rows: Each) -> Each:
    """Of pairs, which are kept with their margins: DPO's loss ``log(1 + exp(-margin))``."""
    if "margin" not in rows:
        return rows
    return {
        "loss": np.logaddexp(0, -np.asarray(rows["margin"])),
        "tokens": [1.0] * len(rows["margin"]),
    }


def _entry(line: Row, losses: Losses) -> Entry:
    own = losses.get(line.policy, {})
    against = {
        kind: {
            other: difference(own.get(kind, {}), losses[other].get(kind, {}))
            for names in BASELINES
            for other in [one for one in names if one in losses][:1]
            if other != line.policy
        }
        for kind in _KINDS
    }
    tried = [r["tried"] for r in line.records if r.get("tried")]
    rates = [float(one["learning_rate"]) for one in tried if "learning_rate" in one]
    kept, tokens, time = (line.mean(name) for name in ("kept_tokens", "response_tokens", "time"))
    valuing = (line.mean("scoring_time") or 0.0) + (line.mean("direction_time") or 0.0)
    return {
        "method": line.policy,
        "share": None if not tokens or kept is None else kept / tokens,
        "tokens": kept,
        "seconds": time,
        "valuing": valuing / time if time else None,
        "rate": rates[0] if rates else None,
        "target": line.mean("target_loss"),
        "retention": line.mean("retention_loss"),
        "against": against,
    }


def difference(one: Mapping[int, Each], other: Mapping[int, Each]) -> Gap | None:
    """Paired by seed and by row; None without a seed that both have.

        d_s = sum_r n_r (l_rs - l'_rs) / sum_r n_r,     d = mean_s d_s

    with n_r the tokens of row r. Rows are drawn for all seeds together, since a hard row is hard
    under each.
    """
    seeds = sorted(set(one) & set(other))
    if not seeds:
        return None
    tokens = np.asarray(one[seeds[0]]["tokens"], float)
    gaps = np.asarray([np.subtract(one[s]["loss"], other[s]["loss"]) for s in seeds])
    generator = np.random.default_rng(0)
    drawn = []
    for _ in range(_DRAWS):
        rows = generator.integers(len(tokens), size=len(tokens))
        of_seeds = generator.integers(len(seeds), size=len(seeds))
        weights = tokens[rows] / tokens[rows].sum()
        drawn.append(float((gaps[of_seeds][:, rows] @ weights).mean()))
    low, high = np.quantile(drawn, [0.025, 0.975])
    mean = float((gaps @ (tokens / tokens.sum())).mean())
    return {"mean": mean, "low": float(low), "high": float(high), "seeds": len(seeds)}


def apart(gap: Mapping[str, float]) -> bool:
    """Whether the interval leaves 0 out, over at least three seeds."""
    return gap["seeds"] >= 3 and not gap["low"] <= 0 <= gap["high"]


def to_plain(entry: Entry | None, kind: str = "target") -> Gap | None:
    """A method's difference to training on all tokens."""
    against: Mapping[str, Gap | None] = {} if entry is None else entry["against"][kind]
    return next((against[name] for name in PLAIN.values() if against.get(name)), None)


def effects(losses: Mapping[str, Losses]) -> list[dict[str, Any]]:
    """What came of the hypotheses whose two methods have run with a seed in common, by task."""
    results = []
    for one in HYPOTHESES:
        own, base = (losses.get(one["task"], {}).get(one[name], {}) for name in ("method", "base"))
        gaps = {kind: difference(own.get(kind, {}), base.get(kind, {})) for kind in _KINDS}
        if gaps["target"] is not None:
            results.append({"hypothesis": one, **gaps})
    return results


# --- pictures -------------------------------------------------------------------------------------


def draw(tasks: Mapping[str, Sequence[Entry]], path: Path) -> None:
    """Target loss minus that of training on all tokens, by method, one panel a task."""
    shown = {
        title: [e for e in entries if e["method"] in DRAWN and _seeds(e) >= 3]
        for title, entries in tasks.items()
    }
    shown = {title: entries for title, entries in shown.items() if entries}
    if not shown:
        return
    wide = min(2, len(shown))
    counts = [len(entries) for entries in shown.values()]
    most = [max(counts[at : at + wide]) for at in range(0, len(counts), wide)]  # of each line
    ratios = [count + 3.5 for count in most]  # with room for title and axis
    with canvas(4.3 * wide, 0.25 * sum(ratios)) as figure:
        grid = {"height_ratios": ratios}
        panels = figure.subplots(
            len(most), wide, squeeze=False, sharex=True, gridspec_kw=grid
        ).ravel()
        for axes in panels[len(shown) :]:
            axes.axis("off")
        for at, (axes, (title, entries)) in enumerate(zip(panels, shown.items(), strict=False)):
            for place, entry in enumerate(reversed(entries), start=most[at // wide] - len(entries)):
                gap = to_plain(entry)
                assert gap is not None
                colour = COLOURS[0] if apart(gap) else "#888888"
                axes.plot([gap["low"], gap["high"]], [place, place], color=colour, lw=2)
                axes.plot([gap["mean"]], [place], "o", color=colour, ms=5)
            axes.axvline(0, color="black", lw=0.8, ls="--")
            top = most[at // wide]
            names = [NAMES.get(e["method"], e["method"]) for e in reversed(entries)]
            axes.set_yticks(range(top - len(entries), top), names)
            axes.set_ylim(-0.6, top - 0.4)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("target loss minus that of all tokens, nats")
            axes.tick_params(labelbottom=True)
        save(figure, path)


def _seeds(entry: Entry) -> float:
    gap = to_plain(entry)
    return 0 if gap is None else gap["seeds"]


def over_steps(tasks: Mapping[str, Sequence[Entry]]) -> dict[str, dict[int, Gap]]:
    """Method -> steps of the run -> target loss minus that of all tokens; of tasks words-STEPS."""
    gaps: dict[str, dict[int, Gap]] = {}
    for task, entries in tasks.items():
        kind, _, steps = task.rpartition("-")
        for entry in entries if kind == "words" else ():
            gap = to_plain(entry)
            if gap is not None and entry["method"] in LASTING:
                gaps.setdefault(entry["method"], {})[int(steps)] = gap
    return gaps


def draw_over_steps(gaps: Mapping[str, Mapping[int, Gap]], path: Path) -> None:
    """What each method gains in runs of each length, a line a method."""
    lengths = sorted({steps for line in gaps.values() for steps in line})
    if len(lengths) < 2:
        return
    with canvas(6.4, 3.8) as figure:
        axes = figure.subplots()
        axes.axhline(0, color="black", lw=0.8, ls="--")
        for at, (method, name) in enumerate(LASTING.items()):
            if not (line := sorted(gaps.get(method, {}).items())):
                continue
            away = 1 + 0.02 * (at - 2)  # so that intervals stand beside each other
            axes.errorbar(
                [steps * away for steps, _ in line],
                [-gap["mean"] for _, gap in line],
                yerr=[
                    [gap["high"] - gap["mean"] for _, gap in line],
                    [gap["mean"] - gap["low"] for _, gap in line],
                ],
                color=COLOURS[at],
                marker=MARKERS[at],
                ls=DASHES[at],
                ms=5,
                label=name,
            )
        axes.set_xscale("log")
        axes.set_xticks(lengths, [str(steps) for steps in lengths])
        axes.minorticks_off()
        axes.set_xlabel("steps of the run")
        axes.set_ylabel("nats below training on all tokens")
        axes.legend(fontsize=8, frameon=False)
        save(figure, path)


# --- tables ---------------------------------------------------------------------------------------


def tables(kind: str, *words: str) -> str:
    """``methods GRID [TASK...]``, ``others GRID...``, ``options|finding GRID`` or ``races``."""
    if kind == "races":
        return races.rows_of_page(load(DOCS / "races.json"))
    report = load(DOCS / "selection.json")
    if kind == "methods":
        tasks = report["grids"][words[0]]["tasks"]
        return _methods({name: tasks[name] for name in words[1:] or tasks})
    if kind == "others":
        return _others([report["grids"][name] for name in words])
    if kind == "options":
        return _options(report["grids"][words[0]]["options"])
    return _finding(report["finding"][words[0]])


def _methods(tasks: Mapping[str, Sequence[Entry]]) -> str:
    """Methods one below the other, tasks beside each other: differences to all tokens."""
    by = {task: {e["method"]: e for e in entries} for task, entries in tasks.items()}
    names = dict.fromkeys(name for entries in by.values() for name in entries)
    rows = [
        (f"`{name}`", *(_gap(to_plain(by[task].get(name), k), k) for task in tasks for k in _KINDS))
        for name in names
        if name not in PLAIN.values()
    ]
    head = [f"{task}: {kind}" for task in tasks for kind in _KINDS]
    return table(("minus `standard`", *head), rows)


def _others(grids: Sequence[Mapping[str, Any]]) -> str:
    """A line a grid, task and method, where a task has more than one; its name stands once."""
    rows = [
        (
            f"{grid['model']}, {task}" if not at else "",
            f"`{entry['method']}`",
            number(entry["target"], 3),
            *(_gap(to_plain(entry, kind), kind) for kind in _KINDS),
        )
        for grid in grids
        for task, entries in grid["tasks"].items()
        for at, entry in enumerate(entries)
        if len(entries) > 1
    ]
    return table(("model, task", "method", "target loss", "target", "retention"), rows)


def _options(tried: Sequence[Mapping[str, Any]]) -> str:
    """Each method beside the one that it adds an option to."""
    rows = [
        (
            "{what} ({task})".format(**one["hypothesis"]),
            f"`{one['hypothesis']['base']}`",
            *(_gap(one[kind], kind) for kind in _KINDS),
        )
        for one in tried
    ]
    return table(("option (task)", "beside", "target", "retention"), rows)


def _finding(tasks: Mapping[str, Mapping[str, Any]]) -> str:
    """Areas under the curve by number, tasks beside each other."""
    first = next(iter(tasks.values()))
    rows = []
    for name in [name for name in first if isinstance(first[name], dict)]:
        areas = [areas_of[name] for areas_of in tasks.values()]
        rows.append((name, *(f"{a['auc']:.2f} [{a['low']:.2f}, {a['high']:.2f}]" for a in areas)))
    heads = [f"{task} ({areas_of['planted']:.0%} planted)" for task, areas_of in tasks.items()]
    return table(("number", *heads), rows)


def _gap(gap: Mapping[str, float] | None, kind: str = "target") -> str:
    """Bold where three seeds leave 0 outside; the interval stands beside target losses alone."""
    if gap is None:
        return "–"
    text = f"{gap['mean']:+.3f}"
    text += f" [{gap['low']:+.3f}, {gap['high']:+.3f}]" * (kind == "target")
    return f"**{text}**" if apart(gap) else text
