"""Figures of docs/selection.md and its picture, from the folders of the grids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken.score.drawing import COLOURS, DASHES, MARKERS, canvas, save
from alphatoken.support.storage import write_json
from alphatoken_lab.runner.folder import GridFolder
from alphatoken_lab.runner.grid import Cell, Grid, all_cells
from alphatoken_lab.runner.methods import PLAIN
from alphatoken_lab.runner.records import Row, collect, rows_of
from benchmarks.pages import DOCS
from benchmarks.selection.hypotheses import effects
from benchmarks.selection.paired import Difference, Each, difference
from benchmarks.selection.store import RESULTS, synchronised, to_read

MODELS = {
    "smollm2": "SmolLM2-135M-Instruct",
    "long": "SmolLM2-135M-Instruct, hundreds of steps",
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


@dataclass(frozen=True)
class Entry:
    """One method of one task, over its seeds."""

    method: str
    share: float | None
    tokens: float | None
    seconds: float | None
    valuing: float | None
    rate: float | None
    target: float | None
    retention: float | None
    against: dict[str, dict[str, Difference | None]]


def write_report(work: Path, docs: Path = DOCS) -> Path:
    """The figures of whatever is finished; ``python -m benchmarks`` writes the page's tables.

    Args:
        work: with a folder of cells for each grid; what is kept in results/ is added.
        docs: where data and picture go.
    """
    found: dict[str, Any] = {"grids": {}, "finding": {}}
    drawn: dict[str, list[Entry]] = {}
    for name, model in _folders(work).items():
        grid, tasks, losses, missing = _grid(work / name)
        found["grids"][name] = {
            "model": model,
            "cells": len(all_cells(grid)),
            "missing": missing,
            "tasks": {
                task: [asdict(entry) for entry in entries] for task, entries in tasks.items()
            },
            "options": [asdict(one) for one in effects(losses)],
        }
        if name == "long":
            draw_over_steps(over_steps(tasks), docs / "selection-steps.svg")
        elif "-draw" not in name and "long" not in name:
            drawn |= {f"{model}: {task}": entries for task, entries in tasks.items()}
        finding = RESULTS / f"finding-{name}.json"
        if finding.exists():
            found["finding"][name] = json.loads(finding.read_text(encoding="utf-8"))
    draw(drawn, docs / "selection.svg")
    write_json(docs / "selection.json", found)
    return docs / "selection.json"


def _folders(work: Path) -> dict[str, str]:
    """Name of each grid that has run, other draws of rows after the first, and its title."""
    found = {}
    for name, model in MODELS.items():
        places = [p for p in work.glob(f"{name}*") if p.is_dir()]
        names = {p.name for p in places} | {p.stem for p in RESULTS.glob(f"{name}*.jsonl")}
        for one in sorted(names):
            draw = one.removeprefix(name)
            if re.fullmatch(r"(-draw\d+)?", draw):
                found[one] = model + (f", other rows and dirt ({draw[1:]})" if draw else "")
    return found


def _grid(folder: Path) -> tuple[Grid, dict[str, list[Entry]], dict[str, Losses], list[str]]:
    """The grid, its figures and losses by task, and the cells that have not run."""
    grid = synchronised(folder, to_read)
    cells, place = to_read(grid), GridFolder(folder)
    found = collect(cells, place)
    tasks, losses = {}, {}
    for task in grid.tasks:
        lines = [line for line in rows_of(found, task.name) if line.values("target")]
        losses[task.name] = _losses(cells, place, task.name)
        tasks[task.name] = [_entry(line, losses[task.name]) for line in lines]
    missing = [f"{r['task']}/{r['policy']}-seed{r['seed']}" for r in found if r["status"] != "done"]
    # Nothing can be said of a task before its plain training.
    begun = {k: v for k, v in tasks.items() if any(e.method in PLAIN.values() for e in v)}
    return grid, begun, losses, missing


Losses = dict[str, dict[str, dict[int, Each]]]
"""Method -> "target" or "retention" -> seed -> losses of the rows."""


def _losses(cells: Sequence[Cell], folder: GridFolder, task: str) -> Losses:
    """Of chosen cells."""
    found: Losses = {}
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
        for kind in rows.keys() & {"target", "retention"}:
            own = found.setdefault(cell.policy, {}).setdefault(kind, {})
            own[cell.seed] = in_nats(rows[kind])
    return found


def in_nats(rows: Each) -> Each:
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
        for kind in ("target", "retention")
    }
    tried = [r["tried"] for r in line.records if r.get("tried")]
    rates = [float(one["learning_rate"]) for one in tried if "learning_rate" in one]
    kept, seen = line.mean("kept_tokens"), line.mean("response_tokens")
    return Entry(
        method=line.policy,
        share=None if not seen or kept is None else kept / seen,
        tokens=kept,
        seconds=line.mean("time"),
        valuing=_valuing(line),
        rate=rates[0] if rates else None,
        target=line.mean("target_loss"),
        retention=line.mean("retention_loss"),
        against=against,
    )


def _valuing(line: Row) -> float | None:
    """Share of the time of training that goes into values and their directions."""
    time = line.mean("time")
    parts = (line.mean("scoring_time") or 0.0) + (line.mean("direction_time") or 0.0)
    return parts / time if time else None


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

NONE = Difference(0.0, 0.0, 0.0, 0)


# --- picture --------------------------------------------------------------------------------------


def draw(tasks: Mapping[str, Sequence[Entry]], path: Path) -> None:
    """Target loss minus that of training on all tokens, by method, one panel a task."""
    shown = {
        title: [e for e in entries if e.method in DRAWN and (_beside_plain(e) or NONE).seeds >= 3]
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
                gap = _beside_plain(entry)
                assert gap is not None
                colour = COLOURS[0] if gap.apart else "#888888"
                axes.plot([gap.low, gap.high], [place, place], color=colour, lw=2)
                axes.plot([gap.mean], [place], "o", color=colour, ms=5)
            axes.axvline(0, color="black", lw=0.8, ls="--")
            top = most[at // wide]
            places = range(top - len(entries), top)
            axes.set_yticks(places, [NAMES.get(e.method, e.method) for e in reversed(entries)])
            axes.set_ylim(-0.6, top - 0.4)
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("target loss minus that of all tokens, nats")
            axes.tick_params(labelbottom=True)
        save(figure, path)


def over_steps(tasks: Mapping[str, Sequence[Entry]]) -> dict[str, dict[int, Difference]]:
    """Method -> steps of the run -> target loss minus that of all tokens; of tasks words-STEPS."""
    found: dict[str, dict[int, Difference]] = {}
    for task, entries in tasks.items():
        kind, _, steps = task.rpartition("-")
        for entry in entries if kind == "words" else ():
            gap = _beside_plain(entry)
            if gap is not None and entry.method in LASTING:
                found.setdefault(entry.method, {})[int(steps)] = gap
    return found


def draw_over_steps(gaps: Mapping[str, Mapping[int, Difference]], path: Path) -> None:
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
                [-gap.mean for _, gap in line],
                yerr=[
                    [gap.high - gap.mean for _, gap in line],
                    [gap.mean - gap.low for _, gap in line],
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


def _beside_plain(entry: Entry) -> Difference | None:
    found = [entry.against["target"].get(name) for name in PLAIN.values()]
    return next((one for one in found if one is not None), None)
