"""Figures of the paper that a diagnostic makes: its files, its models, and where pictures go."""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import Any

from alphatoken.diagnose.diagnosis import Drawing
from alphatoken.diagnose.diagnosis import Table as Data
from alphatoken.diagnose.figures import Figure, draw
from alphatoken.diagnose.statistics import Estimate
from alphatoken.errors import ConfigError, require_choice
from alphatoken.support.storage import replacing_folder, write_text
from alphatoken_lab.paper.exhibits import LAPTOP, Diagnosed, Exhibit
from alphatoken_lab.paper.work import Work
from alphatoken_lab.runner.grid import Cell, Task
from alphatoken_lab.runner.running import COLLECTED
from alphatoken_lab.runner.tables import Table

_TRAIN, _VALIDATION = 2000, 32
"""Rows of the hub's data set that a figure at full scale is made of."""


def diagnose(work: Work, diagnosed: Diagnosed) -> int:
    """Hand the models of the cells to the diagnostic, task by task; its exit status.

    Raises:
        AlphaTokenError: whatever the diagnostic refuses.
    """
    from alphatoken.cli.diagnose_run import run

    exhibit = work.exhibit
    status, lines = 0, [f"# {exhibit.label}\n", f"{exhibit.title}. {exhibit.note}\n"]
    for task in work.grid.tasks:
        out = work.root / exhibit.name / task.name
        status = max(status, run(words_of(work, diagnosed, task, out)))
        lines += _section(work, diagnosed, task, out)
    page = work.root / f"{exhibit.name}.md"
    write_text(page, "\n".join(lines))
    print(page)
    return status


def words_of(work: Work, diagnosed: Diagnosed, task: Task, out: Path) -> list[str]:
    """The arguments of ``alphatoken diagnose`` for one task."""
    rows = _rows(work, task)
    start = work.backbone_of(_cell(work, task, diagnosed.methods[0]))

    def model(method: str) -> str:
        own = work.folder.place(_cell(work, task, method)) / "model" if method != "start" else start
        return str(own)

    words = [diagnosed.name, "--model_name_or_path", model(diagnosed.model)]
    words += ["--output_dir", str(out), "--resume", "--budget", work.options.budget]
    words += ["--train_file", str(rows / "train.jsonl")]
    words += ["--validation_file", str(rows / "validation.jsonl")]
    if diagnosed.reference is not None:
        words += ["--reference", model(diagnosed.reference)]
    for method in diagnosed.others:
        words += ["--beside", f"{method}={model(method)}"]
    for name in diagnosed.retention.get(work.scale, ()):
        words += ["--retention_set", f"{name}={rows / f'{name}.jsonl'}"]
    cell = _cell(work, task, diagnosed.model)
    if diagnosed.collected:
        words += ["--collected", str(work.folder.place(cell) / COLLECTED)]
    if diagnosed.name == "fisher" and not refit_reason(work, cell):
        words += ["--fisher_file", str(_fisher(work, cell))]
        words += ["--layers", str(cell.options.get("layers", "3"))]
    words += ["--max_length", str(task.options.get("max_length", 1024)), "--on_empty", "skip"]
    words += [] if task.options.get("chat_template", True) else ["--no_chat_template"]
    for name, value in diagnosed.options.get(work.scale, {}).items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words + ["--quiet"] * work.options.quiet


def _cell(work: Work, task: Task, method: str) -> Cell:
    # Of the first seed: its model is the one that was kept.
    return next(c for c in work.cells if (c.task, c.policy) == (task.name, method))


def _fisher(work: Work, cell: Cell) -> Path:
    key = (work.folder.result(cell) or {}).get("fisher")
    return work.folder.path / "fishers" / f"{key}.safetensors"


def refit_reason(work: Work, cell: Cell) -> str:
    """Reason why the Fisher that a cell trained with cannot be looked at; "" if it can."""
    options = cell.options
    if options.get("use_peft"):
        return "the cell's is of the adapters' weights, and the model is merged"
    if options.get("parameters", "linears") != "linears":
        return f"the cell's is of other weights ({options['parameters']})"
    if options.get("retention") != "diagonal":
        return f"the cell's retention is {options.get('retention', 'none')}, not a diagonal Fisher"
    if not _fisher(work, cell).is_file():
        return "the cell's own is not among the files of its grid"
    return ""


def about_fisher(work: Work, cell: Cell) -> str:
    """A sentence on the Fisher that is looked at."""
    if reason := refit_reason(work, cell):
        return f"The diagonal Fisher is fitted anew, on rows of this figure: {reason}."
    prompts = cell.options.get("fisher_data")
    of = (
        f"prompts of {Path(prompts).name}, a file of its own"
        if prompts
        else "prompts drawn from its data set, some of which may be among the rows valued here"
    )
    return (
        f"The diagonal Fisher is the one that the model was trained with: "
        f"{cell.options['fisher_samples']} samples on {of}."
    )


def _rows(work: Work, task: Task) -> Path:
    """The folder of rows: the laptop's, or some of the data set and the evaluation's files."""
    if work.scale == LAPTOP:
        return work.rows
    place = work.rows / task.name
    if not place.is_dir():
        export_rows(task, place)
    diagnosed = work.exhibit.diagnosis
    for name in diagnosed.retention.get(work.scale, ()) if diagnosed is not None else ():
        file = Path(work.options.evaluation_dir) / f"{name}.jsonl"
        if not file.is_file():
            raise ConfigError("a figure needs rows of what must not be forgotten", got=str(file))
        shutil.copyfile(file, place / file.name)
    return place


def export_rows(task: Task, place: Path) -> None:
    """Write rows of the task's data set as files, those for validation apart."""
    import datasets

    named = task.options
    rows = datasets.load_dataset(
        named["dataset_name"], split=named.get("dataset_train_split", "train")
    ).shuffle(seed=0)
    columns = {named.get("prompt_column"): "prompt", named.get("response_column"): "response"}
    rows = rows.rename_columns({old: new for old, new in columns.items() if old})
    count = min(len(rows) - _VALIDATION, _TRAIN)
    with replacing_folder(place) as partial:
        rows.select(range(_VALIDATION)).to_json(partial / "validation.jsonl")
        rows.select(range(_VALIDATION, _VALIDATION + count)).to_json(partial / "train.jsonl")


def _section(work: Work, diagnosed: Diagnosed, task: Task, out: Path) -> list[str]:
    """The figures that are the paper's, beside the other pages of the scale, and what they say."""
    from alphatoken.diagnose.diagnosis import Diagnosis

    diagnosis = Diagnosis.load(out / diagnosed.name)
    sentences = [diagnosis.conclusion]
    if diagnosed.name == "fisher":
        sentences.append(about_fisher(work, _cell(work, task, diagnosed.model)))
    text = [f"## {task.name}\n", *(f"- {sentence}" for sentence in sentences), ""]
    for figure in diagnosis.figures:
        if figure.key.startswith(diagnosed.figures):
            name = f"{work.exhibit.name}-{task.name}-{figure.key}.svg"
            write_text(work.root / name, figure.svg)
            text += [f"![{figure.title}]({name})\n"]
    whole = out.relative_to(work.root) / "report.html"
    return [*text, f"All of the diagnosis: [{whole}]({whole})\n"]


# --- of a grid's numbers --------------------------------------------------------------------------


def draw_table(exhibit: Exhibit, table: Table) -> Drawing:
    """The figure of an exhibit; bars reach from the least to the largest of the seeds.

    Raises:
        ConfigError: the exhibit shows no picture, or nothing was measured yet.
    """
    kind = str(exhibit.picture)
    require_choice(f"the picture of {exhibit.label}", kind, ("bars", "lines"))
    if not table.measured:
        raise ConfigError(
            "there is nothing to draw yet", got=exhibit.label, remedy="run its cells first"
        )
    # One record a column and row; lines have a panel for each group too, over its numbers.
    points: list[dict[str, Any]] = []
    for column in table.columns:
        for group in table.groups:
            for row in group.rows:
                values = row.values(column.key)
                value: Any = values[0] if values else None
                if len(values) > 1:
                    value = Estimate(
                        statistics.fmean(values), min(values), max(values), len(values)
                    )
                panel = f"{group.title}\n{column.head}" if kind == "lines" else column.head
                name = float(row.name) if kind == "lines" else row.name
                points.append({"panel": panel, "row": name, "value": value})
    figure = Figure(
        kind,
        exhibit.name,
        Data.of(exhibit.name, exhibit.title, points),
        exhibit.title,
        table.caption,
        x="row",
        y="value",
        facets="panel",
        xlabel=" ",
        ylabel="mean over the seeds",
        across=len(table.columns) if kind == "bars" else len(table.groups),
    )
    return draw(figure)
