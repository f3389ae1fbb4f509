"""A grid's results as files: tables in Markdown, records as CSV and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from alphatoken.support.storage import write_json, write_text
from alphatoken_lab.runner.grid import Grid
from alphatoken_lab.runner.methods import START
from alphatoken_lab.runner.records import Record, Row, rows_of, to_csv, with_costs
from alphatoken_lab.runner.tables import Column, Table, markdown, to_markdown

__all__ = ["cost_table", "problem_table", "quality_table", "setting_text", "write_results"]

_READ = """\
`mean ± s`, s the sample standard deviation over seeds. **Bold** is the best of a column, underlined
the second best; the model before training (`start`) takes no part. "Tokens trained on" counts
response tokens with a weight other than 0, over all steps; "effective" is (Σw)²/Σw² where weights
are soft. Time is of training: in it are scoring (a value or a weight for each token) and, for
methods by value, the validation and retention gradients of each step ("gradients"). Fitting a
Fisher, static passes and reference models are "before training" or not counted, as in the paper.
"""


def write_results(grid: Grid, every: Sequence[Record], folder: Path) -> Path:
    """Write ``comparison.json``, ``comparison.csv``, ``comparison.md``.

    Returns:
        The Markdown file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rounded = [
        {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in record.items()}
        for record in every
    ]
    write_json(folder / "comparison.json", rounded)
    write_text(folder / "comparison.csv", to_csv(every))
    text = [f"# {grid.about or 'Comparison'}\n", _READ]
    for task in grid.tasks:
        rows = rows_of(with_costs(every), task.name)
        text += [f"## {task.name}\n", to_markdown(quality_table(rows)), _settings_text(rows)]
        text += [f"### {task.name}: cost\n", to_markdown(cost_table(rows))]
    problems = problem_table(every)
    if problems:
        text += ["## Cells without a result\n", problems]
    write_text(folder / "comparison.md", "\n".join(filter(None, text)).rstrip() + "\n")
    return folder / "comparison.md"


def quality_table(rows: Sequence[Row]) -> Table:
    """Tables 1 and 2: what each method learnt, what it kept, and on how many tokens."""
    units = {r["unit"] for row in rows for r in row.records if r.get("unit")}
    best = "high" if units == {"score"} else "low"
    columns = [Column("tokens trained on", "kept_tokens", form=",.0f", best="none")]
    if any(row.values("effective") for row in rows):
        columns.append(Column("effective", "effective", form=",.0f", best="none"))
    columns.append(Column("share", "share", form=".3f", best="none"))
    for name, ways in _settings(rows).items():
        shots = "/".join(sorted({way["shots"] for way in ways if "shots" in way}))
        title = name.split("/")[1] + (f" ({shots}-shot)" if shots else "")
        columns.append(Column(f"{title} ↑", name))
    arrow = "↑" if best == "high" else "↓"
    for key in ("retention", "target", "overall"):
        columns.append(Column(f"{key} {arrow}", key, form=".3f", best=best))
    if any(row.values("target_accuracy") for row in rows):
        columns.insert(-1, Column("pair accuracy (%) ↑", "target_accuracy"))
    return Table("method", tuple(columns), _by_mode(rows))


def cost_table(rows: Sequence[Row]) -> Table:
    """The runtime tables: training, the part of it that valued tokens, what came before, memory."""
    timed = [row for row in rows if row.values("time")]
    kinds = {str(r["peak_memory_of"]) for row in timed for r in row.records if r["peak_memory_of"]}
    heads = {
        "train time (s)": "time",
        "of it scoring (s)": "scoring_time",
        "of it gradients (s)": "direction_time",
        "before training (s)": "setup_time",
    }
    columns = [Column(title, key, form=".1f", best="none") for title, key in heads.items()]
    memory = f"peak memory (MB, {', '.join(sorted(kinds)) or 'none'})"
    columns.append(Column(memory, "peak_mb", form=",.0f", best="none"))
    return Table("method", tuple(columns), _by_mode(timed))


def _by_mode(rows: Sequence[Row]) -> tuple[tuple[str, tuple[Row, ...]], ...]:
    """One group, in which the mode stands behind a method's name."""
    named = [row if row.policy == START else replace(row, name=f"{row.name}, {row.mode}")
             for row in rows]  # fmt: skip
    return (("", tuple(named)),)


def problem_table(every: Sequence[Record]) -> str:
    """Cells without a result, and why; empty if there are none."""
    rows = [
        [
            f"`{r['task']}/{r['policy']}-{r['mode']}-seed{r['seed']}`",
            r["status"],
            str(r.get("error", "")).replace("|", "\\|") or "–",
        ]
        for r in every
        if r["status"] != "done"
    ]
    return markdown(["cell", "status", "why"], rows) if rows else ""


# --- how scores were measured -------------------------------------------------------------------


def _settings(rows: Sequence[Row]) -> dict[str, list[Mapping[str, Any]]]:
    """What each score was measured with, cell by cell; those of retention first."""
    every = [r.get("settings", {}) for row in rows for r in row.records]
    names = dict.fromkeys(name for settings in every for name in settings)
    return {
        name: [settings[name] for settings in every if name in settings]
        for name in sorted(names, key=lambda name: not name.startswith("retention/"))
    }


def _settings_text(rows: Sequence[Row]) -> str:
    """A sentence a score; empty if there are none."""
    sentences = [
        f"`{name.split('/')[1]}`: {' or '.join(sorted({setting_text(way) for way in ways}))}"
        for name, ways in _settings(rows).items()
    ]
    return ". ".join(sentences) + ".\n" if sentences else ""


def setting_text(how: Mapping[str, Any]) -> str:
    """Settings of one score, in words.

    >>> setting_text({"shots": "5", "chat_template": False, "metric": "acc", "questions": 20})
    '5-shot, no chat template, acc, 20 questions'
    """
    parts = [f"{how['shots']}-shot"] if "shots" in how else []
    parts.append("chat template" if how.get("chat_template") else "no chat template")
    parts += [str(how["metric"])] if how.get("metric") else []
    parts += [f"scored by {how['scored_by']}"] if "scored_by" in how else []
    return ", ".join([*parts, f"{how['questions']:,} questions"])
