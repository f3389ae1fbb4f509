"""Tables of docs/paper.md: the paper's numbers beside those of the laptop scale."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alphatoken_lab.paper.exhibits import Exhibit, find, table_of
from alphatoken_lab.runner.records import Row
from alphatoken_lab.runner.tables import Column, Table, format_values
from benchmarks.pages import DOCS, table
from benchmarks.paper.store import RESULTS, kept_records, work_of

_MEASURES = ("retention", "target", "hours_per_epoch", "selection_gb")
"""Of the paper's columns those that stand beside ours: no single benchmarks, no mean of both."""


def tables(label: str, *answers: str) -> str:
    """The table of an exhibit, or answers of a figure (by number, else all) and its pictures."""
    exhibit = find(label)
    if exhibit.diagnosis is not None:
        return _figure(exhibit, [int(number) for number in answers])
    # No cell is read from the folder of cells, only what is kept.
    records = kept_records(work_of(exhibit, Path("build/paper")))
    return beside(exhibit, table_of(exhibit, "laptop", records))


def beside(exhibit: Exhibit, ours: Table) -> str:
    """Ours first, then the paper's, a column for each backbone and measure."""
    theirs = _theirs(exhibit)
    heads = [exhibit.first, *(f"ours: {_head(column)}" for column in ours.columns)]
    heads += [f"paper: {title}" for title in theirs]
    rows = []
    for group in ours.groups:
        if len(ours.groups) > 1:
            rows.append([f"**{group.title}**", *("" for _ in heads[1:])])
        for row in group.rows:
            own = (format_values(row.values(column.key), column) for column in ours.columns)
            rows.append([_name(row), *own, *(of.get(row.name, "–") for of in theirs.values())])
    return table(heads, rows)


def _name(row: Row) -> str:
    return f"{row.name} ({row.done} seed{'s' * (row.done != 1)})"


def _head(column: Column) -> str:
    """Short: the table has to hold three backbones beside ours."""
    short = {"retention": "general", "overall": "overall"} if column.best == "high" else {}
    return short.get(column.key, column.title)


def _theirs(exhibit: Exhibit) -> dict[str, Mapping[str, str]]:
    """Head -> row -> the printed mean, without its deviation."""
    printed: dict[str, dict[str, str]] = {}
    same = len({group.methods for group in exhibit.groups}) == 1
    for group in exhibit.groups:
        for i, column in enumerate(exhibit.columns["full"]):
            if column.key not in _MEASURES:
                continue
            place = f"{group.title}, " if same and len(exhibit.groups) > 1 else ""
            head = f"{place}{_head(column)}"
            for row in group.rows:
                if row.printed:
                    printed.setdefault(head, {})[row.name] = row.printed[i].split(" ±")[0]
    return dict(printed)


# --- figures ------------------------------------------------------------------------------------


def keep_figure(exhibit: Exhibit, work: Path) -> None:
    """The answers of a diagnosis and its pictures, where it has run; no row's text is in them."""
    wanted = exhibit.diagnosis
    assert wanted is not None
    folder = work / "laptop" / exhibit.name / "laptop" / wanted.name
    if not (folder / "diagnosis.json").is_file():
        return
    from alphatoken.diagnose.diagnosis import Diagnosis

    diagnosis = Diagnosis.load(folder)
    pictures = [f for f in diagnosis.figures if f.key.startswith(wanted.figures)]
    content = {
        "answer": [diagnosis.conclusion],
        "figures": [{"key": f.key, "title": f.title} for f in pictures],
    }
    (RESULTS / f"{exhibit.name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    for figure in pictures:
        path = DOCS / f"paper-{exhibit.name}-{figure.key}.svg"
        path.write_text(figure.svg, encoding="utf-8")


def _figure(exhibit: Exhibit, numbers: Sequence[int] = ()) -> str:
    kept = RESULTS / f"{exhibit.name}.json"
    if not kept.is_file():
        return "Not run at this scale yet.\n"
    content: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    answers = [s for at, s in enumerate(content["answer"]) if not numbers or at in numbers]
    parts = ["".join(f"- {sentence}\n" for sentence in answers)]
    parts += [
        f"![{one['title']}](paper-{exhibit.name}-{one['key']}.svg)\n" for one in content["figures"]
    ]
    return "\n".join(parts)
