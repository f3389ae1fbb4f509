"""Every table and figure of the paper, read from ``exhibits/*.yaml``.

label: tab:ablation_rq3         the paper's LaTeX label, by which it is asked for
kind: table                     table, figure, or none: nothing to run
title, place, note              of the caption
grid: paper-sft                 packaged grid; its laptop scale is paper-sft-laptop
first: Variant                  head of the first column
columns: [{title, over, key, form, unit, best}, ...]
groups: [{title, task, rows: [[name, method, printed, ...], ...]}, ...]
picture: bars                   of a figure that shows the groups' numbers: bars or lines
diagnosis: {...}                of a figure that `alphatoken diagnose` makes
laptop: {note, columns}         what differs in small, where every group is of the one task
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError
from alphatoken_lab.runner.records import Group, Record, Row, rows_of, with_costs
from alphatoken_lab.runner.tables import Column, Table, markdown

SCALES = ("full", "laptop")
LAPTOP = "laptop"
"""The scale, and the name of its only task."""

_FOLDER = Path(str(files("alphatoken_lab"))) / "paper" / "exhibits"


@dataclass(frozen=True)
class Diagnosed:
    """A figure that ``alphatoken diagnose`` makes of models of the grid.

    Attributes:
        name: of the diagnostic.
        tasks: tasks whose models are looked at.
        model: method whose model of the first seed it is; "start" for the one before training.
        reference: method of the model before; None for none.
        others: methods whose models are looked at beside it.
        retention: by scale, files of what must not be forgotten: their names among the rows, or in
            the folder of the evaluation.
        figures: its figures that are the paper's, by the beginning of their keys.
        collected: whether the model's run left pairs that it looked at while it trained.
        options: of the diagnostic, by scale.
    """

    name: str
    tasks: tuple[str, ...]
    model: str = "alphatoken"
    reference: str | None = "start"
    others: tuple[str, ...] = ()
    retention: Mapping[str, Sequence[str]] = field(default_factory=dict)
    figures: tuple[str, ...] = ()
    collected: bool = False
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def methods(self) -> tuple[str, ...]:
        """Those that have to be trained."""
        named = (self.model, self.reference, *self.others)
        return tuple(name for name in named if name not in (None, "start"))


@dataclass(frozen=True)
class Exhibit:
    """One table or figure.

    Attributes:
        label: of the paper.
        kind: "table", "figure" or "none".
        title: what it shows.
        place: "main text" or "appendix".
        grid: packaged grid whose cells fill it.
        note: sentences for the caption.
        first: head of the first column.
        columns: by scale.
        groups: of rows, as in the paper.
        picture: "bars", "lines" or None.
        diagnosis: where the figure is a diagnostic's.
        small: sentences for the caption of the laptop scale.
    """

    label: str
    kind: str
    title: str
    place: str
    grid: str = ""
    note: str = ""
    first: str = "Method"
    columns: Mapping[str, tuple[Column, ...]] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()
    picture: str | None = None
    diagnosis: Diagnosed | None = None
    small: str = ""

    @property
    def name(self) -> str:
        """Name for files: the label without characters that files cannot have."""
        return self.label.replace(":", "-")

    def groups_of(self, scale: str) -> tuple[Group, ...]:
        """Groups at a scale; in small, all are of one task, and groups of the same rows are one."""
        if scale != LAPTOP:
            return self.groups
        small: dict[tuple[str, ...], Group] = {}
        for group in self.groups:
            rows = tuple(replace(row, printed=()) for row in group.rows)
            alike = [g.title for g in self.groups if g.methods == group.methods]
            title = "in small" if len(alike) > 1 or len(self.groups) == 1 else group.title
            small.setdefault(group.methods, Group(title, rows, LAPTOP))
        return tuple(small.values())

    def wanted(self, scale: str) -> dict[str, tuple[str, ...]]:
        """Task -> the methods that have to be trained or measured, each once, in their order."""
        named = [(g.task, g.methods) for g in self.groups_of(scale)]
        if self.diagnosis is not None:
            tasks = (LAPTOP,) if scale == LAPTOP else self.diagnosis.tasks
            named += [(task, self.diagnosis.methods) for task in tasks]
        wanted: dict[str, tuple[str, ...]] = {}
        for task, methods in named:
            wanted[task] = tuple(dict.fromkeys([*wanted.get(task, ()), *methods]))
        return wanted


@cache
def every() -> tuple[Exhibit, ...]:
    """All of them: main text first, tables before figures, as the files are called."""
    exhibits = [_read(path) for path in sorted(_FOLDER.glob("*.yaml"))]
    places, kinds = ["main text", "appendix"], ["table", "figure", "none"]
    return tuple(sorted(exhibits, key=lambda e: (places.index(e.place), kinds.index(e.kind))))


def find(name: str) -> Exhibit:
    """Find an exhibit by its label, with or without ``tab:``, ``fig:`` and ``app:``.

    Raises:
        ConfigError: the paper has no such table or figure.
    """
    for exhibit in every():
        if name == exhibit.label or name.split(":")[-1] == exhibit.label.split(":")[-1]:
            return exhibit
    raise ConfigError(
        "the paper has no such table or figure",
        got=name,
        remedy="alphatoken-lab paper --list names them",
    )


def _read(path: Path) -> Exhibit:
    import yaml

    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    small = content.pop("laptop", {})
    by_scale = {"full": content.pop("columns", []), LAPTOP: small.get("columns", [])}
    groups = []
    for group in content.pop("groups", []):
        rows = (map(str, row) for row in group["rows"])
        named = (Row(name, method, printed=tuple(numbers)) for name, method, *numbers in rows)
        groups.append(Group(group["title"], tuple(named), group["task"]))
    diagnosis = content.pop("diagnosis", None)
    if diagnosis is not None:
        several = ("tasks", "others", "figures")
        diagnosis |= {key: tuple(diagnosis[key]) for key in several if key in diagnosis}
    return Exhibit(
        **content,
        columns={scale: tuple(Column(**c) for c in part) for scale, part in by_scale.items()},
        groups=tuple(groups),
        diagnosis=None if diagnosis is None else Diagnosed(**diagnosis),
        small=small.get("note", ""),
    )


# --- filled with records ------------------------------------------------------------------------


def table_of(exhibit: Exhibit, scale: str, records: Sequence[Record], on: str = "") -> Table:
    """The exhibit with the numbers of these records, whichever of them there are.

    Args:
        exhibit: with columns and groups.
        scale: "full" or "laptop".
        records: of the grid's cells.
        on: model, rows and steps, in a sentence for the caption.
    """
    costly = with_costs(records)
    groups = []
    for group in exhibit.groups_of(scale):
        measured = {row.policy: row for row in rows_of(costly, group.task)}
        rows = (replace(measured.get(row.policy, row), name=row.name) for row in group.rows)
        groups.append(replace(group, rows=tuple(rows)))
    seeds = sorted({row.done for group in groups for row in group.rows if row.done})
    spread = ""
    if seeds:
        counts = " to ".join(str(n) for n in dict.fromkeys((seeds[0], seeds[-1])))
        spread = f"Mean ± sample standard deviation over {counts} seed{'s' * (seeds != [1])}."
    small = exhibit.small if scale == LAPTOP else ""
    parts = (f"{exhibit.title}.", on, exhibit.note, small, spread)
    return Table(
        exhibit.first,
        exhibit.columns[scale],
        tuple(groups),
        f"{exhibit.label}: {exhibit.title}",
        " ".join(part.strip() for part in parts if part),
    )


def printed_table(exhibit: Exhibit) -> str:
    """The paper's own numbers in Markdown; empty where it prints none."""
    columns = exhibit.columns["full"]
    rows = []
    for group in exhibit.groups:
        rows.append([f"**{group.title}**", *("" for _ in columns)])
        rows += [[row.name, *(row.printed or ["–"] * len(columns))] for row in group.rows]
    if not any(row.printed for group in exhibit.groups for row in group.rows):
        return ""
    return markdown([exhibit.first, *(column.head for column in columns)], rows)
