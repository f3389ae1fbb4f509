"""docs/selection.md, its data and its picture, from the folders of the grids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from alphatoken.compare.folder import GridFolder
from alphatoken.compare.grid import Cell, Grid, all_cells
from alphatoken.compare.methods import START
from alphatoken.compare.page import collect
from alphatoken.compare.tables import Line, lines_of, markdown
from alphatoken.report.drawing import COLOURS, canvas, save
from alphatoken.support.storage import write_json
from benchmarks.selection.paired import Difference, Each, difference
from benchmarks.selection.store import RESULTS, synchronised

__all__ = ["MODELS", "write_report"]

DOCS = Path(__file__).parents[2] / "docs"
CONCLUSIONS = Path(__file__).with_name("conclusions.md")

MODELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma 3 270M"}
"""Grid -> its model, as the page has it."""

BASELINES = ("standard", "random", "after-validation")


@dataclass(frozen=True)
class Entry:
    """One method of one task, over its seeds."""

    method: str
    share: float | None
    tokens: float | None
    seconds: float | None
    rate: float | None
    target: float | None
    retention: float | None
    against: dict[str, dict[str, Difference | None]]


def write_report(work: Path, docs: Path = DOCS) -> Path:
    """The page from whatever is finished.

    Args:
        work: with a folder of cells for each grid, and what is kept in results/.
        docs: where page, data and picture go.
    """
    found: dict[str, Any] = {"grids": {}, "finding": {}}
    text = [INTRODUCTION]
    if CONCLUSIONS.exists():
        text.append(CONCLUSIONS.read_text(encoding="utf-8"))
    drawn: dict[str, list[Entry]] = {}
    for name, model in _folders(work).items():
        grid, tasks, missing = _grid(work / name)
        found["grids"][name] = {
            "model": model,
            "cells": len(all_cells(grid)),
            "missing": missing,
            "tasks": {
                task: [asdict(entry) for entry in entries] for task, entries in tasks.items()
            },
        }
        text.append(f"## {model}\n")
        for task, entries in tasks.items():
            text += [f"### {task}\n", ABOUT.get(task, ""), _table(entries)]
            drawn[f"{model}: {task}"] = entries
        if missing:
            text.append(
                f"{len(missing)} of the grid's {len(all_cells(grid))} cells have not run.\n"
            )
        finding = RESULTS / f"finding-{name}.json"
        if finding.exists():
            found["finding"][name] = json.loads(finding.read_text(encoding="utf-8"))
            text += [f"### Who finds the dirt on {model}\n", FINDING]
            text.append(_finding(found["finding"][name]))
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


def _grid(folder: Path) -> tuple[Grid, dict[str, list[Entry]], list[str]]:
    grid = synchronised(folder)
    cells, place = all_cells(grid), GridFolder(folder)
    found = collect(cells, place)
    tasks = {}
    for task in grid.tasks:
        lines = [line for line in lines_of(found, task.name) if line.values("target")]
        losses = _losses(cells, place, task.name)
        tasks[task.name] = [_entry(line, losses) for line in lines]
    missing = [f"{r['task']}/{r['policy']}-seed{r['seed']}" for r in found if r["status"] != "done"]
    # Nothing can be said of a task before its plain training.
    begun = {k: v for k, v in tasks.items() if any(entry.method == "standard" for entry in v)}
    return grid, begun, missing


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
        for kind in ("target", "retention"):
            found.setdefault(cell.policy, {}).setdefault(kind, {})[cell.seed] = rows[kind]
    return found


def _entry(line: Line, losses: Losses) -> Entry:
    own = losses.get(line.policy, {})
    against = {
        kind: {
            other: difference(own.get(kind, {}), losses.get(other, {}).get(kind, {}))
            for other in BASELINES
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
        rate=rates[0] if rates else None,
        target=line.mean("target_loss"),
        retention=line.mean("retention_loss"),
        against=against,
    )


# --- tables ---------------------------------------------------------------------------------------


def _table(entries: Sequence[Entry]) -> str:
    standard = next((e.seconds for e in entries if e.method == "standard"), None)
    heads = [
        "method", "seeds", "rate", "tokens", "time", "target", *(f"− {name}" for name in BASELINES),
        "retention", "− standard",
    ]  # fmt: skip
    rows = []
    for e in entries:
        seeds = _seeds(e)
        time = None if not e.seconds or not standard else e.seconds / standard
        rows.append([
            f"`{e.method}`",
            str(seeds) if seeds else "–",
            "–" if e.rate is None else f"{e.rate:g}",
            "–" if not e.tokens else f"{e.tokens:,.0f}",
            "–" if time is None else f"{time:.1f}",
            _number(e.target),
            *(_gap(e.against["target"].get(name)) for name in BASELINES),
            _number(e.retention),
            _gap(e.against["retention"].get("standard")),
        ])  # fmt: skip
    return markdown(heads, rows)


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


def _finding(found: Mapping[str, Any]) -> str:
    tasks = list(found)
    names = [name for name in found[tasks[0]] if isinstance(found[tasks[0]][name], dict)]
    rows = []
    for name in names:
        areas = [found[task][name] for task in tasks]
        rows.append([name, *(f"{a['auc']:.2f} [{a['low']:.2f}, {a['high']:.2f}]" for a in areas)])
    heads = ["number", *(f"{task} ({found[task]['planted']:.0%} planted)" for task in tasks)]
    return markdown(heads, rows)


# --- picture --------------------------------------------------------------------------------------


def draw(tasks: Mapping[str, Sequence[Entry]], path: Path) -> None:
    """Target loss minus that of training on all tokens, by method, one panel a task."""
    shown = {
        title: [e for e in entries if e.against["target"].get("standard") and e.method != START]
        for title, entries in tasks.items()
    }
    shown = {title: entries for title, entries in shown.items() if entries}
    if not shown:
        return
    height = 0.9 + 0.24 * max(len(entries) for entries in shown.values())
    with canvas(4.3 * len(shown), height) as figure:
        panels = figure.subplots(1, len(shown), squeeze=False)[0]
        for axes, (title, entries) in zip(panels, shown.items(), strict=True):
            for place, entry in enumerate(reversed(entries)):
                gap = entry.against["target"]["standard"]
                assert gap is not None
                colour = COLOURS[0] if gap.apart else "#888888"
                axes.plot([gap.low, gap.high], [place, place], color=colour, lw=2)
                axes.plot([gap.mean], [place], "o", color=colour, ms=5)
            axes.axvline(0, color="black", lw=0.8, ls="--")
            axes.set_yticks(range(len(entries)), [e.method for e in reversed(entries)])
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("target loss minus that of all tokens, nats")
        save(figure, path)


ABOUT = {
    "noisy-words": "30 % of the words of each response are replaced by words drawn from all "
    "responses. `oracle` trains on the same rows as they were.\n",
    "noisy-responses": "30 % of the responses belong to other rows. `oracle` trains on the rows "
    "that have their own.\n",
    "mixed": "Half of the rows are general instructions; the target is mathematics. `oracle` "
    "trains on the mathematics alone.\n",
    "clean": "Nothing is planted.\n",
}

FINDING = """Before any step: the chance that a planted token (`noisy-words`) or row
(`noisy-responses`) has a lower number than a real one; 0.5 is a coin, 95 % interval over rows. The
loss is turned round, and so is the length: a high one marks the planted.
"""

INTRODUCTION = """# Does selection pay?

Written by `python -m benchmarks.selection report` from measured runs; do not edit by hand. The
figures are in [selection.json](selection.json).

![Target loss of each method minus that of training on all tokens, by task](selection.svg)

## What was run

```
make models
export ALPHATOKEN_DATA=...                      # GSM8K, dolly, TinyStories
python -m benchmarks.selection run smollm2      # hours; started again it goes on
python -m benchmarks.selection run smollm2 --draw 1      # other rows and other dirt
python -m benchmarks.selection find smollm2
python -m benchmarks.selection report
```

`run` is `alphatoken compare --config benchmarks/selection/GRID.yaml` on rows that it writes
first; what it measured is kept in benchmarks/selection/results, so that a grid goes on where it
was, also on another machine. A run takes 16 steps of AdamW, 4 rows (of at most 160 tokens) a
step, with 2 steps of warm-up and a linearly falling rate; arithmetic in bf16, weights in float32,
one thread. All parameters of SmolLM2 are trained, Gemma by LoRA. `standard-twice` takes 32 steps;
`rows-of-two` and `rho-1-responses` draw 8 rows a step and train on half of them.

There are 320 training rows, 16 clean *validation rows* of the target (what values and references
are made from), 16 *choosing rows* (each method tries the same three learning rates at the first
seed and the one with the lowest loss on them is taken at all seeds; `noisy-responses` and `clean`
take what was chosen on `mixed`, and methods without a rate in the tables have a fixed one), 40
*target* problems of the data's own test file, and for *retention* 20 general instructions and 8
stories. No two of these share a row. Values are taken against 8 of the validation rows, drawn anew
every second step.

Every method has the 16 validation rows. So the plain ways of using them stand beside the
selecting ones:

* `on-validation` trains on them alone, 16 steps;
* `after-validation` trains on them for 24 steps, then 16 steps on all tokens of the task's rows;
* the reference of `rho-1`, `rho-1-responses` and `token-cleaning` is the model after these 24;
* `validation-first`, a policy, does the same in one command;
* `after-validation-rho-1` starts from that reference and goes on by `rho-1`.

"Tokens" are response tokens with a weight, over all steps; "time" is training, as a multiple of
that on all tokens, measured beside other work and good to some ten percent. Differences are
paired by row and seed: mean and 95 % interval in nats, negative is better, rows and seeds both
drawn anew; **bold** where three seeds leave 0 outside. With three seeds, intervals over seeds are
rough.
"""
