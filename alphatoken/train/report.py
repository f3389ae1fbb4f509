"""One self-contained page about a run: curves, options, and the accumulated value of each token.

It is made of the run's folder alone, of a run that has ended or still goes on, and needs no
network: drawings, style, script and data are inside the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken.errors import DataError
from alphatoken.report import Component, ScoredExample, read_values, summarise
from alphatoken.report.build import value_sections
from alphatoken.report.numbers import number
from alphatoken.report.page import Section, render_page, write_page
from alphatoken.support.storage import read_json
from alphatoken.train.curves import charts
from alphatoken.train.ledger import UNIT
from alphatoken.train.manifest import RESULTS, RUN, checkpoints

__all__ = ["REPORT", "VALUES", "RunRecord", "read_run", "write_run_report"]

REPORT = f"{RESULTS}/alphatoken-report.html"
VALUES = f"{RESULTS}/values"
"""The folder of value files in a run's folder."""
_STATE, _POLICY = "trainer_state.json", "policy.json"
_LEAD = (
    "What was trained on, and what it did: the curves of the run, then the value of each response "
    "token, added up over its visits."
)
_NO_VALUES = (
    "This run exported no token values (its policy needs none, export_values was off, or it has "
    "not ended)."
)
_ROW_NUMBERS = (
    "A row number counts the training rows from 0, without those that were left out or held out: "
    "it is no line of the file."
)
_TILES = {
    "loss": "last training loss",
    "alpha/validation_held_out": "held-out validation objective",
    "alpha/validation_gap": "validation gap",
    "alpha/relative_drift": "relative drift from the reference",
    "alpha/tokens_per_second": "tokens a second",
}

Texts = Callable[[Sequence[int]], list[str]]
"""Token ids -> the text of each token."""


_ACCUMULATED = (
    Component("total", "Total", UNIT),
    Component("adaptation", "Adaptation", "the part of it that is about the validation objective"),
    Component("stability", "Stability", "the part of it that is about retention, times lambda"),
)


@dataclass(frozen=True)
class RunRecord:
    """What a run's folder says.

    Attributes:
        name: of the folder.
        history: one entry a log, as transformers keeps them.
        step: of the state that was read.
        steps: planned.
        options: of the run, by name; empty where the folder does not say.
        versions: of the libraries.
        values: folder of the accumulated token values, if there are any.
        before: the log of a training that the policy put before the run.
    """

    name: str
    history: Sequence[Mapping[str, Any]]
    step: int
    steps: int
    options: Mapping[str, Any]
    versions: Mapping[str, Any]
    values: Path | None
    before: Sequence[Mapping[str, Any]] = ()


def read_run(folder: str | Path) -> RunRecord:
    """Read a run's folder: the newest trainer state in it, its options, its values.

    Raises:
        DataError: no such folder, or no trainer state in it that can be read.
    """
    folder = Path(folder)
    places = [folder, *(path for _, path in checkpoints(folder))]
    found = [state for path in places if (state := read_json(path / _STATE)) is not None]
    if not found:
        raise DataError(
            f"there is no trainer state in '{folder}'",
            got=f"looked for a readable {_STATE} there and in its checkpoint folders",
            remedy="give the output_dir of a run that has saved at least once",
        )
    state = max(found, key=lambda one: int(one.get("global_step", 0)))
    run = read_json(folder / RUN) or {}
    return RunRecord(
        name=folder.resolve().name,
        history=state.get("log_history", []),
        step=int(state.get("global_step", 0)),
        steps=int(state.get("max_steps", 0)),
        options=run.get("options", {}),
        versions=run.get("versions", {}),
        values=folder / VALUES if (folder / VALUES).is_dir() else None,
        before=(read_json(folder / _POLICY) or {}).get("before", ()),
    )


def write_run_report(folder: str | Path, texts: Texts | None = None) -> Path:
    """Write the page of a run, whole or not at all, and return its path.

    It goes into the folder's ``_alphatoken``, which ``push_to_hub`` does not upload: the page
    quotes training rows.

    Args:
        folder: the run's ``output_dir``.
        texts: token ids -> the text of each; without it tokens are shown by their numbers.

    Raises:
        ConfigError: jinja2 or matplotlib is not installed.
        DataError: the folder holds no run, or the page could not be written.
    """
    html = render(read_run(folder), texts or _numbers)
    target = Path(folder) / REPORT
    target.parent.mkdir(exist_ok=True)
    return write_page(target, html)


def _numbers(ids: Sequence[int]) -> list[str]:
    return [f" #{token}" for token in ids]


def render(run: RunRecord, texts: Texts) -> str:
    """The page as text."""
    told: Mapping[str, Any] = {}
    examples: Iterable[ScoredExample] = ()
    if run.values is not None:
        told = read_json(run.values / "summary.json") or {}
        examples = read_values(run.values)
    summary, notes = summarise(examples, texts=texts), []
    logs = [_finite(entry) for entry in run.history]
    if "rows_seen" in told:
        rows = told["rows_seen"] + told["rows_not_seen"]
        notes.append(f"{told['rows_seen']:,} of {rows:,} training rows were seen. {_ROW_NUMBERS}")
    sections, data = value_sections(summary, known=_ACCUMULATED)
    if not summary.sequences:
        sections = [Section("heatmaps", "Values over the text", remarks=[_NO_VALUES])]
    return render_page(
        f"Run {run.name}",
        _LEAD,
        [*_first(run.before), _curves(run.history), *sections],
        tiles=_tiles(run),
        notes=notes,
        settings={**run.options, **{f"{name} version": of for name, of in run.versions.items()}},
        data={**data, "history": logs, "options": dict(run.options)},
    )


def _first(before: Sequence[Mapping[str, Any]]) -> list[Section]:
    """The curves of a training that came before the run, if there was one."""
    if not before:
        return []
    remark = f"{len(before)} steps on the validation rows, from which the run's own weights start."
    return [Section("before", "Before the run", remarks=[remark], pictures=charts(before))]


def _curves(history: Sequence[Mapping[str, Any]]) -> Section:
    """The curves; the download holds the numbers behind them."""
    pictures = charts(history)
    remark = (
        "Optimizer steps run from left to right; the legend gives the last number. Move over a "
        "drawing, or focus it and use the arrow keys, to read the numbers of one step."
    )
    return Section(
        "curves",
        "Curves",
        remarks=[remark if pictures else "Nothing was logged."],
        pictures=pictures,
    )


def _finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A log that JSON can hold: what is not finite is None."""
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in entry.items()
    }


def _tiles(run: RunRecord) -> list[tuple[str, str]]:
    """The few numbers at the top: (number, what it is)."""
    last: dict[str, Any] = {}
    for entry in run.history:
        last |= entry
    last = {name: value for name, value in last.items() if isinstance(value, (int, float))}
    shown = [(f"{run.step:,} of {run.steps:,}", "optimizer steps")]
    for name, meaning in _TILES.items():
        if name in last:
            shown.append((number(last[name], 4, signed=name.endswith("_gap")), meaning))
    if "alpha/kept_share" in last:
        shown.append((f"{last['alpha/kept_share']:.1%}", "of the response tokens kept"))
    return shown
