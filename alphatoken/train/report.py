"""One self-contained page about a run: curves, options, and the accumulated value of each token.

``python -m alphatoken.train.report RUN_FOLDER`` writes it for a run that has ended, or that still
goes on. It needs no network: drawings, style, script and data are inside the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np

from alphatoken.errors import AlphaTokenError, DataError
from alphatoken.report import Component, ScoredExample, ValueSummary, summarise
from alphatoken.report.build import value_sections
from alphatoken.report.files import pyarrow_modules
from alphatoken.report.numbers import number
from alphatoken.report.page import Column, Section, ShownTable, render_page, write_page
from alphatoken.train.curves import charts
from alphatoken.train.ledger_unit import PLAIN
from alphatoken.train.manifest import RESULTS, RUN, checkpoints

__all__ = ["REPORT", "RunRecord", "read_run", "write_run_report"]

REPORT = f"{RESULTS}/alphatoken-report.html"
_STATE, _POLICY = "trainer_state.json", "policy.json"
_VALUES = tuple(
    f"{place}values.{kind}"
    for place in (f"{RESULTS}/values/", "", "values/")  # the last two as older runs left them
    for kind in ("parquet", "jsonl")
)
_ROWS_SHOWN = 60
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
_STRETCH = 10_000

MOST_TOKENS = 500_000
"""Tokens whose values are read for the page: keeps it to seconds for any size of run."""


def accumulated(unit: str) -> tuple[Component, ...]:
    """The columns of a run's values, of which the first has the unit that its export says."""
    return (
        Component("total", "Total", unit),
        Component(
            "adaptation", "Adaptation", "the part of it that is about the validation objective"
        ),
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
        values: the file of accumulated token values, if there is one.
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
        DataError: no such folder, no trainer state in it, or one that cannot be read.
    """
    folder = Path(folder)
    states = [folder / _STATE, *(path / _STATE for _, path in checkpoints(folder))]
    found = [_json(path) for path in states if path.is_file()]
    if not found:
        raise DataError(
            f"there is no trainer state in '{folder}'",
            got=f"looked for {_STATE} there and in its checkpoint folders",
            remedy="give the output_dir of a run that has saved at least once",
        )
    state = max(found, key=lambda one: int(one.get("global_step", 0)))
    run = _json(folder / RUN) if (folder / RUN).is_file() else {}
    return RunRecord(
        name=folder.resolve().name,
        history=state.get("log_history", []),
        step=int(state.get("global_step", 0)),
        steps=int(state.get("max_steps", 0)),
        options=run.get("options", {}),
        versions=run.get("versions", {}),
        values=next((folder / name for name in _VALUES if (folder / name).is_file()), None),
        before=_json(folder / _POLICY).get("before", ()) if (folder / _POLICY).is_file() else (),
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
        return found
    except (OSError, ValueError) as problem:
        raise DataError(
            f"the file '{path}' cannot be read", got=str(problem), remedy="it was cut or changed"
        ) from problem


def write_run_report(
    folder: str | Path,
    *,
    history: Sequence[Mapping[str, Any]] | None = None,
    path: str | Path | None = None,
) -> Path:
    """Write the page of a run, whole or not at all, and return its path.

    Args:
        folder: the run's ``output_dir``.
        history: the trainer's ``log_history`` where it is newer than what the folder holds.
        path: of the page; by default ``alphatoken-report.html`` in the folder's ``_alphatoken``,
            which ``push_to_hub`` does not upload: the page quotes training rows.

    Raises:
        ConfigError: jinja2 or matplotlib is not installed.
        DataError: the folder holds no run, or the page could not be written.
    """
    run = read_run(folder)
    html = render(run, run.history if history is None else history)
    target = Path(path) if path is not None else Path(folder) / REPORT
    if path is None:
        target.parent.mkdir(exist_ok=True)
    return write_page(target, html)


def render(run: RunRecord, history: Sequence[Mapping[str, Any]]) -> str:
    """The page as text."""
    summary = ValueSummary() if run.values is None else summarise(token_values(run.values))
    logs = [_finite(entry) for entry in history]
    notes = []
    if run.values is not None and (whole := count_tokens(run.values)) > MOST_TOKENS:
        notes.append(
            f"The value file holds {whole:,} tokens; what is said about them here is of "
            f"{summary.response_tokens:,}, in evenly spread stretches."
        )
    told = _told(run.values)
    if told.get("rows_seen") is not None:
        rows = told["rows_seen"] + told["rows_not_seen"]
        notes.append(f"{told['rows_seen']:,} of {rows:,} training rows were seen. {_ROW_NUMBERS}")
    unit = str(told.get("unit", PLAIN))
    sections, data = value_sections(summary, known=accumulated(unit))
    if not summary.sequences:
        sections = [Section("heatmaps", "Values over the text", remarks=[_NO_VALUES])]
    return render_page(
        f"Run {run.name}",
        _LEAD,
        [*_first(run.before), _curves(history, logs), *sections],
        tiles=_tiles(run, history),
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


def _told(values: Path | None) -> dict[str, Any]:
    """The summary beside the values; empty if there is none."""
    if values is None:
        return {}
    for name in ("summary.json", f"{values.stem}.summary.json"):
        if (values.parent / name).is_file():
            return _json(values.parent / name)
    return {}


def _curves(history: Sequence[Mapping[str, Any]], logs: Sequence[Mapping[str, Any]]) -> Section:
    """The curves, and the numbers behind them as a table."""
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
        tables=_log_table(logs),
    )


def _finite(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A log that JSON can hold: what is not finite is None."""
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in entry.items()
    }


def _tiles(run: RunRecord, history: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """The few numbers at the top: (number, what it is)."""
    last: dict[str, Any] = {}
    for entry in history:
        last |= entry
    last = {name: value for name, value in last.items() if isinstance(value, (int, float))}
    shown = [(f"{run.step:,} of {run.steps:,}", "optimizer steps")]
    for name, meaning in _TILES.items():
        if name in last:
            shown.append((number(last[name], 4, signed=name.endswith("_gap")), meaning))
    if "alpha/kept_share" in last:
        shown.append((f"{last['alpha/kept_share']:.1%}", "of the response tokens kept"))
    return shown


_COLUMNS = {
    "step": "Step",
    "loss": "Loss",
    "eval_loss": "Evaluation",
    "alpha/kept_share": "Kept",
    "alpha/total_mean": "Mean value",
    "alpha/balance": "Balance",
    "alpha/validation_held_out": "Held out",
    "alpha/validation_gap": "Gap",
    "alpha/relative_drift": "Drift",
    "rewards/margins": "Margin",
}


def _log_table(logs: Sequence[Mapping[str, Any]]) -> list[ShownTable]:
    """Evenly thinned logs, one a row; none if nothing was logged."""
    logs = [entry for entry in logs if "loss" in entry or "eval_loss" in entry]
    if len(logs) > _ROWS_SHOWN:
        places = np.linspace(0, len(logs) - 1, _ROWS_SHOWN).round().astype(int)
        logs = [logs[i] for i in places]
    columns = [
        Column(title, [number(entry.get(name), 4) for entry in logs])
        for name, title in _COLUMNS.items()
        if any(name in entry for entry in logs)
    ]
    note = f"{len(logs)} logs, evenly drawn; the download holds all of them."
    return [ShownTable("log", "Numbers of the log", columns, note, folded=True)] if logs else []


# --- values -------------------------------------------------------------------------------------


def token_values(path: str | Path, *, most: int = MOST_TOKENS) -> Iterator[ScoredExample]:
    """The exported values of a run as sequences: the response tokens of one document each.

    Values are accumulated over visits and weighted by the step size; a token counts as kept if
    its mean weight is at least one half.

    Args:
        path: the Parquet or JSONL file.
        most: of a file with more tokens, evenly spread stretches of about so many are read.

    Raises:
        DataError: the file cannot be read, or is none that the trainer exported.
    """
    path = Path(path)
    try:
        every = max(1, -(-count_tokens(path) // most))
        documents = _documents(stretches(path, _STRETCH, every), cut=every > 1)
        for index, records in enumerate(documents):
            yield _example(index, records)
    except (OSError, ValueError, KeyError, TypeError) as problem:  # pyarrow's are ValueErrors
        raise DataError(
            "a file of token values cannot be read",
            got=f"{path}: {type(problem).__name__}: {problem}",
            remedy="it is cut, or not what a trainer of this library exported",
        ) from problem


def stretches(path: Path, size: int = 4096, every: int = 1) -> Iterator[list[dict[str, Any]]]:
    """Each n-th stretch of so many neighbouring records of a Parquet or JSONL file."""
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as file:
            parts = iter(lambda: list(islice(file, size)), [])
            for lines in islice(parts, 0, None, every):
                yield [json.loads(line) for line in lines]
    else:
        _, pq = pyarrow_modules()
        with pq.ParquetFile(path) as file:
            for batch in islice(file.iter_batches(batch_size=size), 0, None, every):
                yield batch.to_pylist()


def count_tokens(path: Path) -> int:
    """Records of a value file, without reading them."""
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    import pyarrow.parquet as pq

    return int(pq.read_metadata(path).num_rows)


def _documents(
    parts: Iterator[list[dict[str, Any]]], *, cut: bool
) -> Iterator[list[dict[str, Any]]]:
    """The records of one document after the other; with ``cut``, of the whole ones in a stretch."""

    def key(record: dict[str, Any]) -> Any:
        return record["document"]

    if not cut:
        yield from (list(group) for _, group in groupby(chain.from_iterable(parts), key))
        return
    for part in parts:
        yield from [list(group) for _, group in groupby(part, key)][1:-1]


def _example(index: int, records: list[dict[str, Any]]) -> ScoredExample:
    """One document; a mark stands for its prompt, which the export does not hold."""
    first = records[0]
    rows = first["rows"] or []
    place = f"row {rows[0]}" if rows else f"document {str(first['document'])[:8]}"
    if first["branch"]:
        place += f", {first['branch']}"
    texts = [_text(record) for record in records]
    return ScoredExample(
        row=int(rows[0]) if rows else index,
        place=f"{place} ({first['visits']} visit{'s'[: first['visits'] != 1]})",
        tokens=["\u2026 ", *texts],
        ids=[-1, *(int(record["token_id"]) for record in records)],
        labels=[-100, *(int(record["token_id"]) for record in records)],
        kept=np.array([False, *(record["kept_share"] >= 0.5 for record in records)]),
        values={
            name: np.array([0.0, *(record[name] for record in records)], dtype=np.float64)
            for name in ("total", "adaptation", "stability")
        },
    )


def _text(record: Mapping[str, Any]) -> str:
    text = record["token"]
    return f" #{record['token_id']}" if text is None else str(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m alphatoken.train.report", description="Write the HTML report of a run."
    )
    parser.add_argument("folder", help="output_dir of the run")
    parser.add_argument("--out", help=f"the page (default: {REPORT} in the folder)")
    given = parser.parse_args(arguments)
    try:
        print(write_run_report(given.folder, path=given.out))
    except AlphaTokenError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
