"""Results of cells to tables, laid out as the paper's: quality and cost; Markdown and CSV.

``mean ± s``: s is the sample standard deviation over seeds (n - 1), as in the paper's tables. The
best of each column is bold, the second best underlined; what is printed alike is not marked, and
the model before training takes no part.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from alphatoken_lab.compare.folder import Status
from alphatoken_lab.compare.grid import Cell
from alphatoken_lab.compare.methods import START

__all__ = [
    "Line",
    "best_two",
    "cost_table",
    "lines_of",
    "markdown",
    "marked",
    "problem_table",
    "quality_table",
    "records",
    "setting_text",
    "settings_text",
    "to_csv",
]

Record = dict[str, Any]

_FIRST = (
    "task", "policy", "mode", "seed", "status", "kept_tokens", "response_tokens",
    "effective_tokens", "target", "retention", "overall", "unit", "time", "scoring_time",
    "direction_time", "setup_time", "peak_memory", "peak_memory_of", "steps",
    "static_time", "selection_memory", "epoch_steps",
)  # fmt: skip


def records(
    cells: Iterable[Cell],
    results: Mapping[str, Mapping[str, Any] | None],
    status: Mapping[str, Status],
) -> list[Record]:
    """One flat record a cell, failed and missing ones included; None where nothing was measured.

    Args:
        cells: of the grid; references are left out.
        results: by the cell's name.
        status: likewise.
    """
    found = []
    cells = [cell for cell in cells if cell.task != "references"]
    chosen = _chosen(cells, results, status)
    for cell in cells:
        result = results.get(cell.name) or {}
        state = status[cell.name]
        own = {"task": cell.task, "policy": cell.policy, "mode": cell.mode, "seed": cell.seed}
        figures = {name: result.get(name) for name in _FIRST[5:]}
        record = {**own, "status": state.state, **figures}
        if state.error:
            record["error"] = state.error
        if cell.tried:
            record |= {"tried": dict(cell.tried), "chosen": cell.name in chosen}
        if result.get("settings"):
            record["settings"] = result["settings"]
        found.append({**record, **{f"{k}": v for k, v in result.get("details", {}).items()}})
    return found


def _chosen(
    cells: Sequence[Cell],
    results: Mapping[str, Mapping[str, Any] | None],
    status: Mapping[str, Status],
) -> set[str]:
    """Best try of each method among the cells that try something, or the first still to run.

    A try that failed, such as a learning rate at which the loss diverged, is worse than any other.
    """
    groups: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        if cell.tried:
            groups.setdefault((cell.task, cell.policy, cell.mode), []).append(cell.name)

    def loss(name: str) -> float:
        found = results.get(name)
        if found:
            return float(found["details"]["choosing_loss"])
        return -math.inf if status[name].state == "missing" else math.inf

    return {min(names, key=loss) for names in groups.values()}


@dataclass(frozen=True)
class Line:
    """One method in one mode: its records, seed by seed."""

    policy: str
    mode: str
    records: tuple[Record, ...]

    def values(self, key: str) -> list[float]:
        """Values of the cells that are done."""
        found = [r.get(key) for r in self.records if r["status"] == "done"]
        return [float(value) for value in found if value is not None]

    def mean(self, key: str) -> float | None:
        """Mean over the seeds that are done."""
        found = self.values(key)
        return statistics.fmean(found) if found else None


def lines_of(found: Sequence[Record], task: str) -> list[Line]:
    """A task's lines in the grid's order."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in found:
        if record["task"] == task and record.get("chosen", True):
            groups.setdefault((record["policy"], record["mode"]), []).append(record)
    by_seed = itemgetter("seed")
    return [Line(*key, tuple(sorted(part, key=by_seed))) for key, part in groups.items()]


# --- tables -------------------------------------------------------------------------------------


def quality_table(lines: Sequence[Line]) -> str:
    """Tables 1 and 2: what each method learnt, what it kept, and on how many tokens."""
    details = _score_columns(lines)
    units = {r["unit"] for line in lines for r in line.records if r.get("unit")}
    higher = units == {"score"}
    columns: list[tuple[str, str, bool]] = [
        *((name, name.split("/")[1] + _shots(lines, name), True) for name in details),
        ("retention", "retention", higher),
        ("target", "target", higher),
        ("overall", "overall", higher),
    ]
    if any(line.values("target_accuracy") for line in lines):
        columns.insert(-1, ("target_accuracy", "pair accuracy (%)", True))
    heads = ["method", "mode", "seeds", "tokens trained on", "share"]
    heads += [f"{title} {'↑' if up else '↓'}" for _, title, up in columns]
    ranks = {key: _ranked(lines, key, up) for key, _, up in columns}
    rows = [
        [
            f"`{line.policy}`",
            line.mode if line.policy != START else "–",
            _seeds(line),
            *_tokens(line),
            *(marked(_figure(line, key), ranks[key].get(i)) for key, _, _ in columns),
        ]
        for i, line in enumerate(lines)
    ]
    return markdown(heads, rows)


def settings_text(lines: Sequence[Line]) -> str:
    """Settings of each score, a sentence a score; empty if none are known."""
    found = []
    for name in _score_columns(lines):
        ways = {setting_text(one) for one in _settings(lines, name)}
        if ways:
            found.append(f"`{name.split('/')[1]}`: {' or '.join(sorted(ways))}")
    return ". ".join(found) + ".\n" if found else ""


def setting_text(how: Mapping[str, Any]) -> str:
    """Settings of one score, in words.

    >>> setting_text({"shots": "5", "chat_template": False, "metric": "acc", "questions": 20})
    '5-shot, no chat template, acc, 20 questions'
    """
    parts = [f"{how['shots']}-shot"] if "shots" in how else []
    parts.append("chat template" if how.get("chat_template") else "no chat template")
    parts.append(str(how["metric"]))
    if "opponent" in how:
        asked = f" (prompt {how['judge_prompt']})" if how.get("judge_prompt") else ""
        parts += [f"against {how['opponent']}", f"judge {how['judge']}{asked}"]
    return ", ".join([*parts, f"{how['questions']:,} questions"])


def _settings(lines: Sequence[Line], name: str) -> list[Mapping[str, Any]]:
    found = [r.get("settings", {}).get(name) for line in lines for r in line.records]
    return [one for one in found if one]


def _shots(lines: Sequence[Line], name: str) -> str:
    """``(5-shot)``, of cells that differ ``(0/5-shot)``; nothing where there are no shots."""
    said = sorted({one["shots"] for one in _settings(lines, name) if "shots" in one})
    return f" ({'/'.join(said)}-shot)" if said else ""


def cost_table(lines: Sequence[Line]) -> str:
    """The runtime tables: training, the part of it that valued tokens, what came before, memory."""
    lines = [line for line in lines if line.values("time")]
    kinds = sorted({str(r["peak_memory_of"]) for line in lines for r in line.records
                    if r.get("peak_memory_of")})  # fmt: skip
    heads = ["method", "mode", "train time (s)", "of it scoring (s)", "of it gradients (s)"]
    heads.append("before training (s)")
    heads.append(f"peak memory (MB, {', '.join(kinds) or 'none'})")
    rows = [
        [
            f"`{line.policy}`",
            line.mode,
            _figure(line, "time", ".1f"),
            _part(line, "scoring_time"),
            _part(line, "direction_time"),
            _figure(line, "setup_time", ".1f"),
            _figure(line, "peak_memory", ",.0f", unit=1e6),
        ]
        for line in lines
    ]
    return markdown(heads, rows)


def _part(line: Line, key: str) -> str:
    """Seconds of a part of training; a dash where there is none."""
    return _figure(line, key, ".1f") if (line.mean(key) or 0.0) >= 0.05 else "–"


def problem_table(found: Sequence[Record]) -> str:
    """Cells without a result, and why; empty if there are none."""
    rows = [
        [
            f"`{r['task']}/{r['policy']}-{r['mode']}-seed{r['seed']}`",
            r["status"],
            str(r.get("error", "")).replace("|", "\\|") or "–",
        ]
        for r in found
        if r["status"] != "done"
    ]
    return markdown(["cell", "status", "why"], rows) if rows else ""


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown of a table."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def to_csv(found: Sequence[Record]) -> str:
    """Every record, one a line; first the columns that all have."""
    names = list(dict.fromkeys([*_FIRST, *(name for record in found for name in record)]))
    names = [name for name in names if name != "settings"]  # of the JSON records
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


# --- figures ------------------------------------------------------------------------------------


def _score_columns(lines: Sequence[Line]) -> list[str]:
    """Single tasks of lm-eval and the like, where there are some."""
    names = [key for line in lines for record in line.records for key in record if "/" in key]
    return list(dict.fromkeys(sorted(names, key=lambda n: not n.startswith("retention/"))))


def _figure(line: Line, key: str, form: str = ".3f", unit: float = 1.0) -> str:
    """Mean over the seeds, and their standard deviation where there are several."""
    found = [value / unit for value in line.values(key)]
    if not found:
        return "–"
    form = ".2f" if "/" in key or key.endswith("accuracy") else form
    mean = f"{statistics.fmean(found):{form}}"
    return mean if len(found) < 2 else f"{mean} ± {statistics.stdev(found):{form}}"


def _seeds(line: Line) -> str:
    done, asked = len([r for r in line.records if r["status"] == "done"]), len(line.records)
    return str(done) if done == asked else f"**{done} of {asked}**"


def _tokens(line: Line) -> list[str]:
    """Tokens with a weight, and their share; of soft weights what they amount to."""
    kept, seen = line.mean("kept_tokens"), line.mean("response_tokens")
    if kept is None or not seen:
        return ["–", "–"]
    effective = line.mean("effective_tokens")
    soft = effective is not None and effective < 0.99 * kept
    return [
        f"{kept:,.0f}" + (f" ({effective:,.0f} effective)" if soft else ""),
        f"{kept / seen:.3f}",
    ]


def best_two(order: Sequence[int], texts: Mapping[int, str]) -> dict[int, int]:
    """Rank, 0 or 1, of the best two places; places that print alike have none.

    >>> best_two([2, 0, 1], {2: "0.90", 0: "0.91", 1: "0.91"})
    {2: 0}
    """
    several = [texts[i] for i in order]
    unlike = [i for i in order[:2] if several.count(texts[i]) == 1] if len(order) > 2 else []
    return {i: order.index(i) for i in unlike}


def _ranked(lines: Sequence[Line], key: str, higher: bool) -> dict[int, int]:
    """Place of the line -> 0 for the best of a column, 1 for the second best."""
    sign: Callable[[float], float] = (lambda x: -x) if higher else (lambda x: x)
    means = {i: line.mean(key) for i, line in enumerate(lines) if line.policy != START}
    known = {i: m for i, m in means.items() if m is not None and math.isfinite(m)}
    order = sorted(known, key=lambda i: sign(known[i]))
    return best_two(order, {i: _figure(lines[i], key).partition(" ")[0] for i in order})


def marked(text: str, rank: int | None) -> str:
    """Bold where it is the best of a column, underlined where it is the second best."""
    return {0: f"**{text}**", 1: f"<u>{text}</u>"}.get(-1 if rank is None else rank, text)
