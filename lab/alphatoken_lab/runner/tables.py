"""Tables from records: Markdown, HTML, CSV.

``mean ± s``: s is the sample standard deviation over seeds (n - 1), as in the paper. The best of a
column is bold, the second best underlined, in HTML red and blue as in the paper; what is printed
alike is not marked, and the model before training takes no part.
"""

from __future__ import annotations

import csv
import html
import io
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from alphatoken.support.storage import write_json, write_text
from alphatoken_lab.runner.grid import Grid
from alphatoken_lab.runner.methods import START
from alphatoken_lab.runner.records import Group, Record, Row, records_csv, rows_of, with_costs


@dataclass(frozen=True)
class Column:
    """One measure of a table.

    Attributes:
        title: head of the column.
        key: of a record.
        over: head above several columns, such as "Target (%)".
        form: of a number.
        unit: behind the number.
        best: "high", "low", or "none" where no number is marked.
    """

    title: str
    key: str
    over: str = ""
    form: str = ".2f"
    unit: str = ""
    best: str = "high"

    @property
    def head(self) -> str:
        """Title with what stands over it."""
        return f"{self.over}: {self.title}" if self.over else self.title


@dataclass(frozen=True)
class Table:
    """Rows by group and the columns that show their records.

    Attributes:
        first: head of the first column.
        columns: of numbers.
        groups: of rows; one without a title has no line of its own.
        title: of the whole.
        caption: sentences for the reader.
    """

    first: str
    columns: tuple[Column, ...]
    groups: tuple[Group, ...]
    title: str = ""
    caption: str = ""

    @property
    def measured(self) -> int:
        """Number of rows that have a number."""
        rows = [row for group in self.groups for row in group.rows]
        return sum(any(row.values(column.key) for column in self.columns) for row in rows)


def format_values(values: Sequence[float], column: Column) -> str:
    """Mean ± standard deviation, the mean alone of one seed, a dash of none."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):{column.form}}{column.unit}"
    if len(values) < 2:
        return mean
    return f"{mean} ± {statistics.stdev(values):{column.form}}"


def best_two(order: Sequence[int], texts: Mapping[int, str]) -> dict[int, int]:
    """Rank, 0 or 1, of the best two places; places that print alike have none.

    >>> best_two([2, 0, 1], {2: "0.90", 0: "0.91", 1: "0.91"})
    {2: 0}
    """
    several = [texts[i] for i in order]
    unlike = [i for i in order[:2] if several.count(texts[i]) == 1] if len(order) > 2 else []
    return {i: order.index(i) for i in unlike}


def _ranks(rows: Sequence[Row], column: Column) -> dict[int, int]:
    if column.best == "none":
        return {}
    means = {i: row.mean(column.key) for i, row in enumerate(rows) if row.policy != START}
    finite = {i: mean for i, mean in means.items() if mean is not None and mean - mean == 0}
    order = sorted(finite, key=lambda i: finite[i], reverse=column.best == "high")
    return best_two(order, {i: f"{mean:{column.form}}" for i, mean in finite.items()})


def _cells(table: Table) -> Iterator[tuple[str, list[tuple[Row, list[tuple[str, int | None]]]]]]:
    """Group by group each row with its texts, and the rank of each in its column."""
    # Of several groups of few rows, such as the axes of an ablation, the best is of all of them.
    apart = len(table.groups) > 1 and all(
        START in group.methods or len(group.rows) > 3 for group in table.groups
    )
    together = [row for group in table.groups for row in group.rows]
    at = 0
    for group in table.groups:
        among = list(group.rows) if apart else together
        ranks = [_ranks(among, column) for column in table.columns]
        lines = []
        for i, row in enumerate(group.rows, 0 if apart else at):
            texts = [format_values(row.values(column.key), column) for column in table.columns]
            lines.append((row, [(t, rank.get(i)) for t, rank in zip(texts, ranks, strict=True)]))
        at += len(group.rows)
        yield group.title, lines


def _name(row: Row) -> str:
    count = len(row.records)
    return row.name if row.done == count else f"{row.name} ({row.done} of {count} seeds)"


# --- texts --------------------------------------------------------------------------------------


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown of heads and rows of texts."""
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def to_markdown(table: Table) -> str:
    """The table, the best two of each column marked."""
    marks = {0: "**{}**", 1: "<u>{}</u>", None: "{}"}
    rows = []
    for title, lines in _cells(table):
        if title:
            rows.append([f"**{title}**", *("" for _ in table.columns)])
        rows += [[_name(row), *(marks[rank].format(text) for text, rank in cells)]
                 for row, cells in lines]  # fmt: skip
    return markdown([table.first, *(column.head for column in table.columns)], rows)


_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}
th,td{padding:.25rem .7rem;text-align:right;font-variant-numeric:tabular-nums}
th:first-child,td:first-child{text-align:left}
thead th{border-bottom:1px solid #444} .over{text-align:center}
.group td{background:#f0f0f0;font-weight:600;text-align:left}
.best{color:#b3261e;font-weight:600} .second{color:#1f4fb3}
figure{margin:1rem 0} img{max-width:100%}
"""


def to_html(table: Table, picture: str | None = None) -> str:
    """A page of its own, with heads over columns and colours as in the paper.

    Args:
        table: to be shown.
        picture: SVG document of the figure, if it is one.
    """
    title, say = html.escape(table.title), html.escape
    spans = [(over, len(list(part))) for over, part in groupby(c.over for c in table.columns)]
    over = "".join(f'<th colspan="{n}" class="over">{say(name)}</th>' for name, n in spans)
    heads = "".join(f"<th>{say(column.title)}</th>" for column in table.columns)
    figure = "" if picture is None else f"<figure>{picture[picture.index('<svg') :]}</figure>"
    kinds = {0: ' class="best"', 1: ' class="second"', None: ""}
    lines = []
    for group, rows in _cells(table):
        width = len(table.columns) + 1
        lines.append(f'<tr class="group"><td colspan="{width}">{say(group)}</td></tr>')
        for row, cells in rows:
            texts = "".join(f"<td{kinds[rank]}>{say(text)}</td>" for text, rank in cells)
            lines.append(f"<tr><td>{say(_name(row))}</td>{texts}</tr>")
    return "\n".join(
        [
            f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>',
            f"<style>{_STYLE}</style><h1>{title}</h1><p>{say(table.caption)}</p>{figure}",
            f"<table><thead><tr><th></th>{over}</tr><tr><th>{say(table.first)}</th>{heads}</tr>",
            "</thead><tbody>",
            *lines,
            "</tbody></table></html>\n",
        ]
    )


def to_csv(table: Table) -> str:
    """A line for each row and column: mean, deviation, and the values by seed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["group", "row", "method", "column", "mean", "deviation", "values"])
    for group in table.groups:
        for row in group.rows:
            for column in table.columns:
                values = row.values(column.key)
                mean = statistics.fmean(values) if values else ""
                deviation = statistics.stdev(values) if len(values) > 1 else ""
                numbers = " ".join(f"{value:.6g}" for value in values)
                writer.writerow(
                    [group.title, row.name, row.policy, column.head, mean, deviation, numbers]
                )
    return text.getvalue()


# --- the page of a grid -------------------------------------------------------------------------

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
    write_text(folder / "comparison.csv", records_csv(every))
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
    return Table("method", tuple(columns), (_by_mode(rows),))


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
    return Table("method", tuple(columns), (_by_mode(timed),))


def _by_mode(rows: Sequence[Row]) -> Group:
    named = [row if row.policy == START else replace(row, name=f"{row.name}, {row.mode}")
             for row in rows]  # fmt: skip
    return Group("", tuple(named))


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
