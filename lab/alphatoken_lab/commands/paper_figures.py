"""Figures of the paper that a diagnostic makes: its files, its models, and where pictures go."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alphatoken.errors import ConfigError
from alphatoken.support.storage import write_text
from alphatoken_lab.commands.paper_plan import Work
from alphatoken_lab.paper.exhibits import LAPTOP, Diagnosed

if TYPE_CHECKING:
    from alphatoken_lab.compare.grid import Cell, TaskSpec

__all__ = ["COLLECTED", "about_fisher", "diagnose", "unfit", "words_of"]

COLLECTED = "value-propagation.safetensors"
"""File of a cell with collect_value_propagation."""

_TRAIN, _VALIDATION = 2000, 32
"""Rows of the hub's data set that a figure at full scale is made of."""


def diagnose(work: Work) -> int:
    """Hand the models of the cells to the diagnostic, task by task; its exit status.

    Raises:
        AlphaTokenError: whatever the diagnostic refuses.
    """
    from alphatoken.cli.diagnose_run import run

    asked = work.exhibit.diagnosis
    assert asked is not None
    status, lines = 0, [f"# {work.exhibit.label}\n", f"{work.exhibit.title}. {work.exhibit.note}\n"]
    for task in work.grid.tasks:
        out = work.root / work.exhibit.name / task.name
        status = max(status, run(words_of(work, asked, task, out)))
        lines += _shown(work, asked, task, out)
    page = work.root / f"{work.exhibit.name}.md"
    write_text(page, "\n".join(lines))
    print(page)
    return status


def words_of(work: Work, asked: Diagnosed, task: TaskSpec, out: Path) -> list[str]:
    """The arguments of ``alphatoken diagnose`` for one task."""
    rows = _rows(work, task)
    start = work.backbone_of(_cell(work, task, asked.methods[0]))

    def model(method: str) -> str:
        return start if method == "start" else str(work.folder.of(_cell(work, task, method)).model)

    words = [asked.name, "--model_name_or_path", model(asked.model), "--output_dir", str(out)]
    words += ["--train_file", str(rows / "train.jsonl")]
    words += ["--validation_file", str(rows / "validation.jsonl"), "--resume"]
    words += ["--budget", work.options.budget]
    if asked.reference is not None:
        words += ["--reference", model(asked.reference)]
    for method in asked.others:
        words += ["--beside", f"{method}={model(method)}"]
    for name in asked.retention.get(work.scale, ()):
        words += ["--retention_set", f"{name}={rows / f'{name}.jsonl'}"]
    cell = _cell(work, task, asked.model)
    if asked.collected:
        words += ["--collected", str(work.folder.of(cell).path / COLLECTED)]
    if asked.name == "fisher" and not unfit(work, cell):
        words += ["--fisher_file", str(_fisher(work, cell))]
        words += ["--layers", str(cell.options.get("layers", "3"))]
    words += [*_shared(task), *_own(asked.options.get(work.scale, {}))]
    return words + (["--quiet"] if work.options.quiet else [])


def _fisher(work: Work, cell: Cell) -> Path:
    """The file of the Fisher that a cell trained with, among those of its grid."""
    key = (work.folder.of(cell).result() or {}).get("fisher")
    return work.folder.path / "fishers" / f"{key}.safetensors"


def unfit(work: Work, cell: Cell) -> str:
    """Reason why the Fisher that a cell trained with does not fit; "" if it does."""
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
    if reason := unfit(work, cell):
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


def _shared(task: TaskSpec) -> list[str]:
    """Row options of the cells; rows with no response left are skipped."""
    found = ["--max_length", str(task.options.get("max_length", 1024)), "--on_empty", "skip"]
    if not task.options.get("chat_template", True):
        found += ["--no_chat_template"]
    return found


def _own(options: Any) -> Iterator[str]:
    for name, value in options.items():
        yield f"--{name}"
        yield from map(str, value) if isinstance(value, list) else [str(value)]


def _cell(work: Work, task: TaskSpec, method: str) -> Cell:
    """Cell of the first seed, whose model was kept."""
    named = [c for c in work.cells if (c.task, c.policy) == (task.name, method)]
    return named[0]


def _rows(work: Work, task: TaskSpec) -> Path:
    """The folder of rows: the laptop's, or some of the data set and the evaluation's files."""
    if work.scale == LAPTOP:
        return work.rows
    place = work.rows / task.name
    if not place.is_dir():
        _export(task, place)
    asked = work.exhibit.diagnosis
    for name in asked.retention[work.scale] if asked is not None and asked.retention else ():
        file = Path(work.options.evaluation_dir) / f"{name}.jsonl"
        if not file.is_file():
            raise ConfigError("a figure needs rows of what must not be forgotten", got=str(file))
        shutil.copyfile(file, place / file.name)
    return place


def _export(task: TaskSpec, place: Path) -> None:
    """Rows of the task's data set as files, those for validation apart."""
    import datasets

    named = task.options
    found = datasets.load_dataset(
        named["dataset_name"], split=named.get("dataset_train_split", "train")
    ).shuffle(seed=0)
    columns = {named.get("prompt_column"): "prompt", named.get("response_column"): "response"}
    found = found.rename_columns({old: new for old, new in columns.items() if old})
    partial = place.with_name(f"{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    count = min(len(found) - _VALIDATION, _TRAIN)
    found.select(range(_VALIDATION)).to_json(partial / "validation.jsonl")
    found.select(range(_VALIDATION, _VALIDATION + count)).to_json(partial / "train.jsonl")
    partial.rename(place)


def _shown(work: Work, asked: Diagnosed, task: TaskSpec, out: Path) -> list[str]:
    """The figures that are the paper's, beside the other pages of the scale, and what they say."""
    from alphatoken.fidelity.diagnosis import Diagnosis

    found = Diagnosis.load(out / asked.name)
    said = [found.conclusion]
    if asked.name == "fisher":
        said.append(about_fisher(work, _cell(work, task, asked.model)))
    text = [f"## {task.name}\n", *(f"- {sentence}" for sentence in said), ""]
    for figure in found.figures:
        if figure.key.startswith(asked.figures):
            name = f"{work.exhibit.name}-{task.name}-{figure.key}.svg"
            write_text(work.root / name, figure.svg)
            text += [f"![{figure.title}]({name})\n"]
    whole = out.relative_to(work.root) / "report.html"
    return [*text, f"All of the diagnosis: [{whole}]({whole})\n"]
