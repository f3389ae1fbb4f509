"""docs/paper.md: the paper's numbers beside those of the laptop scale, from what is kept."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alphatoken_lab.compare.tables import markdown
from alphatoken_lab.paper.exhibits import Column, Exhibit, every, find
from alphatoken_lab.paper.layout import Filled, Row, filled, shown
from benchmarks.paper.store import RESULTS, kept_records, synchronise, work_of
from benchmarks.paper.texts import CARRIES, FIGURES, INTRODUCTION, LAST

__all__ = ["keep_figure", "write_page"]

DOCS = Path(__file__).parents[2] / "docs"

TABLES = (
    "tab:main_rq1_sft", "tab:main_rq1_dpo", "tab:ablation_rq3", "fig:intervention_rq2",
    "tab:runtime_sft", "tab:runtime_po",
)  # fmt: skip

_MEASURES = ("retention", "target", "overall", "hours_per_epoch", "selection_gb")
"""Of the paper's columns those that stand beside ours: means, not single benchmarks."""


def write_page(work: Path, docs: Path = DOCS) -> Path:
    """The page from what is kept, that of the folder of cells included where there is one."""
    synchronise(work)
    text = [INTRODUCTION]
    for label in TABLES:
        exhibit = find(label)
        table = filled(exhibit, "laptop", kept_records(work_of(exhibit, work)))
        text += [
            f"## {exhibit.title}\n",
            f"`alphatoken-lab paper {label}`. {_sentences(exhibit)}\n",
        ]
        text += [beside(table), CARRIES.get(label, "")]
    for label in FIGURES:
        text += _figure(find(label), work, docs)
    text += _missing()
    text.append(LAST)
    path = docs / "paper.md"
    path.write_text("\n".join(part for part in text if part).rstrip() + "\n", encoding="utf-8")
    return path


def _missing() -> list[str]:
    """What runs at this scale, and has no figures here."""
    absent = [e for e in every() if e.kind != "none" and e.label not in (*TABLES, *FIGURES)]
    lines = [f"- `{one.label}`: {one.title}\n" for one in absent]
    return ["## Not run at this scale\n", "".join(lines)] if lines else []


def beside(table: Filled) -> str:
    """Ours first, then the paper's, a column for each backbone and measure."""
    exhibit = table.exhibit
    theirs = _theirs(exhibit)
    heads = [exhibit.first, *(f"ours: {_head(column)}" for column in table.columns)]
    heads += [f"paper: {title}" for title in theirs]
    rows = []
    for group, lines in table.groups:
        if len(table.groups) > 1:
            rows.append([f"**{group.title}**", *("" for _ in heads[1:])])
        rows += [[_name(row), *_ours(table, row), *_of(theirs, row.name)] for row in lines]
    return markdown(heads, rows)


def _ours(table: Filled, row: Row) -> list[str]:
    pairs = zip(row.values, table.columns, strict=True)
    return [shown(values, column) for values, column in pairs]


def _name(row: Row) -> str:
    done = row.seeds[0]
    return f"{row.name} ({done} seed{'s' * (done != 1)})"


def _head(column: Column) -> str:
    """Short: the table has to hold three backbones beside ours."""
    short = {"retention": "general", "overall": "overall"} if column.best == "high" else {}
    return short.get(column.key, column.title)


def _theirs(exhibit: Exhibit) -> dict[str, dict[str, str]]:
    """Head -> row -> what is printed."""
    found: dict[str, dict[str, str]] = {}
    same = len({group.methods for group in exhibit.groups}) == 1
    for group in exhibit.groups:
        for i, column in enumerate(exhibit.columns["full"]):
            if column.key not in _MEASURES:
                continue
            place = f"{group.title}, " if same and len(exhibit.groups) > 1 else ""
            head = f"{place}{_head(column)}"
            for line in group.lines:
                if line.printed:
                    found.setdefault(head, {})[line.name] = line.printed[i]
    return found


def _of(theirs: Mapping[str, Mapping[str, str]], name: str) -> list[str]:
    return [by_row.get(name, "–") for by_row in theirs.values()]


# --- figures ------------------------------------------------------------------------------------


def keep_figure(exhibit: Exhibit, work: Path) -> None:
    """The answers of a diagnosis and its pictures, where it has run; no row's text is in them."""
    asked = exhibit.diagnosis
    assert asked is not None
    folder = work / "laptop" / exhibit.name / "laptop" / asked.name
    if not (folder / "diagnosis.json").is_file():
        return
    from alphatoken.fidelity.diagnosis import Diagnosis

    found = Diagnosis.load(folder)
    pictures = [f for f in found.figures if f.key.startswith(asked.figures)]
    content = {
        "answer": found.answer.lines(),
        "figures": [{"key": f.key, "title": f.title} for f in pictures],
    }
    (RESULTS / f"{exhibit.name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    for figure in pictures:
        (RESULTS / f"{exhibit.name}-{figure.key}.svg").write_text(figure.svg, encoding="utf-8")


def _figure(exhibit: Exhibit, work: Path, docs: Path) -> list[str]:
    keep_figure(exhibit, work)
    text = [
        f"## {exhibit.title}\n",
        f"`alphatoken-lab paper {exhibit.label}`. {_sentences(exhibit)}\n",
    ]
    kept = RESULTS / f"{exhibit.name}.json"
    if not kept.is_file():
        return [*text, "Not run at this scale yet.\n"]
    found: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
    text.append("".join(f"- {sentence}\n" for sentence in found["answer"]))
    for figure in found["figures"]:
        name = f"paper-{exhibit.name}-{figure['key']}.svg"
        shutil.copyfile(RESULTS / f"{exhibit.name}-{figure['key']}.svg", docs / name)
        text.append(f"![{figure['title']}]({name})\n")
    return [*text, CARRIES.get(exhibit.label, "")]


def _sentences(exhibit: Exhibit) -> str:
    return " ".join(f"{exhibit.note} {exhibit.small}".split())
