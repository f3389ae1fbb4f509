"""docs/selection.md, its data and its picture, from the folders of the grids."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from alphatoken.report.drawing import COLOURS, canvas, save
from alphatoken.support.storage import write_json
from alphatoken_lab.compare.folder import GridFolder
from alphatoken_lab.compare.grid import Cell, Grid, all_cells
from alphatoken_lab.compare.methods import PLAIN, START
from alphatoken_lab.compare.page import collect
from alphatoken_lab.compare.tables import Line, lines_of, markdown
from benchmarks.selection.answers import solved, table
from benchmarks.selection.choices import answered, read_questions
from benchmarks.selection.hypotheses import Effect, effects
from benchmarks.selection.paired import Difference, Each, difference
from benchmarks.selection.rows import BENCHMARKS
from benchmarks.selection.store import RESULTS, synchronised, to_read
from benchmarks.selection.texts import (
    ABOUT,
    AGREEMENT,
    ANSWERED,
    CHOICES,
    FINDING,
    INTRODUCTION,
    KEPT,
    OPTIONS,
    SECONDS,
)

__all__ = ["MODELS", "in_nats", "write_report"]

DOCS = Path(__file__).parents[2] / "docs"
CONCLUSIONS = Path(__file__).with_name("conclusions.md")

MODELS = {
    "smollm2": "SmolLM2-135M-Instruct",
    "lora": "SmolLM2-135M-Instruct, LoRA",
    "code": "SmolLM2-135M-Instruct, Python",
    "pairs": "SmolLM2-135M-Instruct, preferences",
    "gemma3": "Gemma 3 270M",
    "merged": "SmolLM2-135M-Instruct, merged with its start",
    "choices": "SmolLM2-135M-Instruct, benchmarks of knowledge",
    "answers": "SmolLM2-135M-Instruct, answers in its own words",
}
"""Grid -> its title on the page: the model, and what it learns if not mathematics."""

BASELINES = (tuple(PLAIN.values()), ("random",), ("after-validation", "validation-first"))
"""What every method is compared with; of several names the first that a task has."""

LONGER = "standard-longer"
FIRST = 24 / 16
"""Steps on the clean rows before the first step, as a multiple of those of a run."""


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
    first: float
    against: dict[str, dict[str, Difference | None]]


def write_report(work: Path, docs: Path = DOCS) -> Path:
    """The page from whatever is finished.

    Args:
        work: with a folder of cells for each grid, and what is kept in results/.
        docs: where page, data and picture go.
    """
    found: dict[str, Any] = {"grids": {}, "finding": {}, "kept": {}}
    text = [INTRODUCTION]
    if CONCLUSIONS.exists():
        text.append(CONCLUSIONS.read_text(encoding="utf-8"))
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
        }
        text.append(f"## {model}\n")
        if name.startswith("answers"):
            found["grids"][name]["solved"] = problems = solved(grid, GridFolder(work / name))
            text += [ANSWERED, table(problems)]
            continue
        if name.startswith("choices"):
            text += [CHOICES, *(_choices(of) for of in losses.values())]
            continue
        for task, entries in tasks.items():
            text += [f"### {task}\n", ABOUT.get(task, ""), _table(entries)]
            longer = _beside_longer(entries, losses[task])
            text += [SECONDS, longer] if longer else []
            if "-draw" not in name:
                drawn[f"{model}: {task}"] = entries
        tried = effects(losses)
        if tried:
            found["grids"][name]["options"] = [asdict(one) for one in tried]
            valuing = {(task, e.method): e.valuing for task, of in tasks.items() for e in of}
            text += ["### One option at a time\n", OPTIONS, _options(tried, valuing)]
        if missing:
            text.append(
                f"{len(missing)} of the grid's {len(all_cells(grid))} cells have not run.\n"
            )
        finding = RESULTS / f"finding-{name}.json"
        if finding.exists():
            found["finding"][name] = json.loads(finding.read_text(encoding="utf-8"))
            text += [f"### Who finds the dirt on {model}\n", FINDING]
            text.append(_finding(found["finding"][name]))
        kept = RESULTS / f"kept-{name}.json"
        if kept.exists():
            found["kept"][name] = json.loads(kept.read_text(encoding="utf-8"))
            text += [f"### What a half keeps of the dirt on {model}\n", KEPT]
            text.append(_kept(found["kept"][name]["kept"]))
            text += [AGREEMENT, _agreement(found["kept"][name]["agreement"])]
    draw(drawn, docs / "selection.svg")
    write_json(docs / "selection.json", found)
    page = docs / "selection.md"
    page.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    return page


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
    """The grid, its tables and losses by task, and the cells that have not run."""
    grid = synchronised(folder, to_read)
    cells, place = to_read(grid), GridFolder(folder)
    found = collect(cells, place)
    tasks, losses = {}, {}
    for task in grid.tasks:
        lines = [line for line in lines_of(found, task.name) if line.values("target")]
        losses[task.name] = _losses(cells, place, task.name)
        prepared = {
            cell.policy for cell in cells if any(n.startswith("references/") for n in cell.needs)
        }
        tasks[task.name] = [
            _entry(line, losses[task.name], line.policy in prepared | {"validation-first"})
            for line in lines
        ]
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
        done = [cell.name for cell in group if folder.of(cell).result() is not None]
        failed = [cell.name for cell in group if folder.of(cell).error() is not None]
        if not done or len(done) + len(failed) < len(group):
            continue
        best = done[0] if len(group) == 1 else folder.best(done)
        cell = next(one for one in group if one.name == best)
        rows = (folder.of(cell).result() or {})["rows"]
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


def _entry(line: Line, losses: Losses, prepared: bool) -> Entry:
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
        first=FIRST if prepared else 0.0,
        against=against,
    )


def _valuing(line: Line) -> float | None:
    """Share of the time of training that goes into values and their directions."""
    time = line.mean("time")
    parts = (line.mean("scoring_time") or 0.0) + (line.mean("direction_time") or 0.0)
    return parts / time if time else None


# --- tables ---------------------------------------------------------------------------------------


def _table(entries: Sequence[Entry]) -> str:
    plain = next(e for e in entries if e.method in PLAIN.values())
    others = [
        o for names in BASELINES for o in names if any(o in e.against["target"] for e in entries)
    ]
    heads = [
        "method", "seeds", "rate", "tokens", "time", "values", "target",
        *(f"− {name}" for name in others), "retention", f"− {plain.method}",
    ]  # fmt: skip
    rows = []
    for e in entries:
        seeds = _seeds(e)
        time = None if not e.seconds or not plain.seconds else e.seconds / plain.seconds
        rows.append([
            f"`{e.method}`",
            str(seeds) if seeds else "–",
            "–" if e.rate is None else f"{e.rate:g}",
            "–" if not e.tokens else f"{e.tokens:,.0f}",
            "–" if time is None else f"{time:.1f}",
            _share(e.valuing),
            _number(e.target),
            *(_gap(e.against["target"].get(name)) for name in others),
            _number(e.retention),
            _gap(e.against["retention"].get(plain.method)),
        ])  # fmt: skip
    return markdown(heads, rows)


def _beside_longer(entries: Sequence[Entry], losses: Losses) -> str:
    """The table of equal seconds; empty where plain training has not run for longer."""
    seconds = {e.method: e.seconds for e in entries}
    plain = seconds.get(PLAIN["sft"])
    if not losses.get(LONGER) or not plain:
        return ""
    rows = []
    for e in entries:
        gaps = [
            difference(losses[e.method].get(kind, {}), losses[LONGER][kind])
            for kind in ("target", "retention")
        ]
        if e.seconds and gaps[0] is not None:
            whole = e.seconds / plain + e.first
            said = ["–" if e.method == LONGER else _gap(gap) for gap in gaps]
            rows.append([f"`{e.method}`", f"{whole:.1f}", _number(e.target), *said])
    return markdown(["method", "seconds", "target", f"− {LONGER}", "retention, difference"], rows)


def _seeds(entry: Entry) -> int:
    gaps = [d.seeds for by in entry.against.values() for d in by.values() if d is not None]
    return max(gaps, default=0)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _gap(gap: Difference | None) -> str:
    if gap is None:
        return "–"
    said = f"{gap.mean:+.3f} [{gap.low:+.3f}, {gap.high:+.3f}]"
    return f"**{said}**" if gap.apart else said


def _options(tried: Sequence[Effect], valuing: Mapping[tuple[str, str], float | None]) -> str:
    heads = ["option", "task", "method", "beside", "seeds", "target", "retention", "values"]
    rows = []
    for one in tried:
        what = one.hypothesis
        names = [what.what, what.task, f"`{what.method}`", f"`{what.base}`"]
        gaps = [_gap(one.target), _gap(one.retention)]
        price = _share(valuing.get((what.task, what.method)))
        rows.append([*names, str(one.target.seeds), *gaps, price])
    return markdown(heads, rows)


def _share(value: float | None) -> str:
    return f"{value:.0%}" if value else "–"


def _choices(losses: Losses) -> str:
    """Shares of right answers, and differences to the start and to plain training."""
    questions = read_questions(Path(os.environ["SELECTION_ROWS"]))
    right: dict[str, dict[str, dict[int, Each]]] = {name: {} for name in BENCHMARKS}
    for method, found in losses.items():
        for seed, rows in found["retention"].items():
            for name, each in answered(rows, questions).items():
                right[name].setdefault(method, {})[seed] = each
    heads = ["method", "seeds"]
    lines = [[f"`{method}`", str(len(found["retention"]))] for method, found in losses.items()]
    for name, of in right.items():
        heads += [name, f"− {START}", f"− {PLAIN['sft']}"]
        for line, (method, own) in zip(lines, of.items(), strict=True):
            # The start has no seeds: it is the same beside each of them.
            start = dict.fromkeys(own, next(iter(of[START].values())))
            share = fmean(fmean(each["loss"]) for each in own.values())
            gaps = [difference(own, other) for other in (start, of.get(PLAIN["sft"], {}))]
            names = (START, PLAIN["sft"])
            line += [f"{share:.1f}", *("–" if method == other else _points(gap)
                                      for other, gap in zip(names, gaps, strict=True))]  # fmt: skip
    return markdown(heads, lines)


def _points(gap: Difference | None) -> str:
    if gap is None:
        return "–"
    said = f"{gap.mean:+.1f} [{gap.low:+.1f}, {gap.high:+.1f}]"
    return f"**{said}**" if gap.apart else said


def _finding(found: Mapping[str, Any]) -> str:
    tasks = list(found)
    names = [name for name in found[tasks[0]] if isinstance(found[tasks[0]][name], dict)]
    rows = []
    for name in names:
        areas = [found[task][name] for task in tasks]
        rows.append([name, *(f"{a['auc']:.2f} [{a['low']:.2f}, {a['high']:.2f}]" for a in areas)])
    heads = ["number", *(f"{task} ({found[task]['planted']:.0%} planted)" for task in tasks)]
    return markdown(heads, rows)


def _kept(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    quarters = range(1, 1 + len(next(iter(found.values()))))
    rows = [
        [f"`{method}`", *(f"{one['planted']:.0%} / {one['real']:.0%}" for one in by)]
        for method, by in found.items()
    ]
    return markdown(["method", *(f"quarter {k}" for k in quarters)], rows)


def _agreement(found: Mapping[str, Mapping[str, float]]) -> str:
    rows = [[k, f"{v['rho']:.2f} [{v['low']:.2f}, {v['high']:.2f}]"] for k, v in found.items()]
    return markdown(["value", "correlation"], rows)


DRAWN = (
    "oracle", "random", "alphatoken", "label", "full-step-all", "label-responses", "rho-1",
    "rho-1-responses", "on-validation", "after-validation", "validation-first",
)  # fmt: skip
"""Methods of the picture, where three seeds have run; the tables have all."""

NAMES = dict.fromkeys(("after-validation", "validation-first"), "clean rows first")
NAMES["on-validation"] = "clean rows alone"
"""What the picture says in place of a method's name: two ways of one method are one."""

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
        panels = figure.subplots(len(most), wide, squeeze=False, gridspec_kw=grid).ravel()
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
        save(figure, path)


def _beside_plain(entry: Entry) -> Difference | None:
    found = [entry.against["target"].get(name) for name in PLAIN.values()]
    return next((one for one in found if one is not None), None)
