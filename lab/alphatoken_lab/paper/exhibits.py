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
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError

__all__ = ["LAPTOP", "SCALES", "Column", "Diagnosed", "Exhibit", "Group", "Line", "every", "find"]

SCALES = ("full", "laptop")
LAPTOP = "laptop"
"""The scale, and the name of its only task."""

_FOLDER = Path(str(files("alphatoken_lab"))) / "paper" / "exhibits"


@dataclass(frozen=True)
class Column:
    """One measure of an exhibit.

    Attributes:
        title: head of the column.
        key: of a cell's record, or of what ``layout`` makes of it.
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


@dataclass(frozen=True)
class Line:
    """One row: its name, the method of the grid, and what the paper prints, by column."""

    name: str
    method: str
    printed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Rows under one head, of one task of the grid."""

    title: str
    task: str
    lines: tuple[Line, ...]

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods of its rows."""
        return tuple(line.method for line in self.lines)


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

    def grid_of(self, scale: str) -> str:
        """The packaged grid of a scale."""
        return f"{self.grid}-{LAPTOP}" if scale == LAPTOP else self.grid

    def groups_of(self, scale: str) -> tuple[Group, ...]:
        """Groups at a scale; in small, all are of one task, and groups of the same rows are one."""
        if scale != LAPTOP:
            return self.groups
        found: dict[tuple[str, ...], Group] = {}
        for group in self.groups:
            lines = tuple(Line(line.name, line.method) for line in group.lines)
            alike = [g.title for g in self.groups if g.methods == group.methods]
            title = "in small" if len(alike) > 1 or len(self.groups) == 1 else group.title
            found.setdefault(group.methods, Group(title, LAPTOP, lines))
        return tuple(found.values())

    def wanted(self, scale: str) -> dict[str, tuple[str, ...]]:
        """Task -> the methods that have to be trained or measured, each once, in their order."""
        named = [(g.task, g.methods) for g in self.groups_of(scale)]
        if self.diagnosis is not None:
            tasks = (LAPTOP,) if scale == LAPTOP else self.diagnosis.tasks
            named += [(task, self.diagnosis.methods) for task in tasks]
        found: dict[str, tuple[str, ...]] = {}
        for task, methods in named:
            found[task] = tuple(dict.fromkeys([*found.get(task, ()), *methods]))
        return found


@cache
def every() -> tuple[Exhibit, ...]:
    """All of them: main text first, tables before figures, as the files are called."""
    found = [_read(path) for path in sorted(_FOLDER.glob("*.yaml"))]
    places, kinds = ["main text", "appendix"], ["table", "figure", "none"]
    return tuple(sorted(found, key=lambda e: (places.index(e.place), kinds.index(e.kind))))


def find(name: str) -> Exhibit:
    """Find an exhibit by its label, with or without ``tab:``, ``fig:`` and ``app:``.

    Raises:
        ConfigError: the paper has no such table or figure.
    """
    known = {exhibit.label: exhibit for exhibit in every()}
    short = {label.split(":")[-1]: exhibit for label, exhibit in known.items()}
    found = known.get(name) or short.get(name.split(":")[-1])
    if found is None:
        raise ConfigError(
            "the paper has no such table or figure",
            got=name,
            remedy="alphatoken-lab paper --list names them",
        )
    return found


# --- reading ------------------------------------------------------------------------------------


def _read(path: Path) -> Exhibit:
    import yaml

    given: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    small = given.pop("laptop", {})
    columns = {
        scale: tuple(Column(**one) for one in part)
        for scale, part in (("full", given.pop("columns", [])), (LAPTOP, small.get("columns", [])))
    }
    groups = tuple(
        Group(one["title"], one["task"], tuple(_line(row) for row in one["rows"]))
        for one in given.pop("groups", [])
    )
    diagnosis = given.pop("diagnosis", None)
    return Exhibit(
        **given,
        columns=columns,
        groups=groups,
        diagnosis=None if diagnosis is None else _diagnosed(diagnosis),
        small=small.get("note", ""),
    )


def _line(row: Sequence[Any]) -> Line:
    name, method, *printed = map(str, row)
    return Line(name, method, tuple(printed))


def _diagnosed(given: Mapping[str, Any]) -> Diagnosed:
    several = ("tasks", "others", "figures")
    listed = {key: tuple(given[key]) for key in several if key in given}
    return Diagnosed(**{**given, **listed})
