"""Running a table or figure of the paper: rows, cells, then the layout or the diagnostic."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from alphatoken.errors import ConfigError
from alphatoken.support.storage import read_json, write_json, write_text
from alphatoken_lab.commands.paper import Asked
from alphatoken_lab.commands.paper_list import lines
from alphatoken_lab.commands.paper_plan import Work, kinds
from alphatoken_lab.compare.grid import Cell
from alphatoken_lab.paper.exhibits import LAPTOP

__all__ = ["run"]


def run(asked: Asked) -> int:
    """Make the exhibit, or list all; the exit status, 1 where cells have no result.

    Raises:
        AlphaTokenError: models, rows or files that are not there; cells that could not run.
    """
    if asked.exhibit is None:
        print("\n".join(lines()))
        return 0
    exhibit, options = asked.exhibit, asked.options
    work = Work(exhibit, options, asked.more)
    if options.dry_run:
        return _show(work)
    from alphatoken.support.resume import require_writable

    require_writable(work.root)
    if options.scale == LAPTOP:
        _prepare_rows(work)
    if not options.only_report:
        require_all(work)
        _run_cells(work)
    if exhibit.diagnosis is not None:
        from alphatoken_lab.commands.paper_figures import diagnose

        return diagnose(work)
    return _lay_out(work)


# --- what would be done -------------------------------------------------------------------------


def _show(work: Work) -> int:
    """Every kind of cell, and what is not here.

    Raises:
        ConfigError: the model's folder is not here; lm-eval knows none of some tasks.
    """
    from alphatoken_lab.commands.compare import look_up_tasks

    absent = [
        name for name in work.models() if Path(name).is_absolute() and not _has(name, "model")
    ]
    if absent:
        raise ConfigError(
            "the model is not here",
            got=", ".join(absent),
            remedy="`make models` in the clone, ALPHATOKEN_MODELS=FOLDER, or --model FOLDER",
        )
    exhibit = work.exhibit
    print(f"{exhibit.label}: {exhibit.title} ({work.scale} scale)")
    for line in kinds(work):
        print(f"  {line}")
    print(f"  {len(work.cells)} cells")
    for missing in missing_parts(work):
        print(f"  not here: {missing}")
    look_up_tasks(work.cells)
    return 0


# --- what has to be there -----------------------------------------------------------------------


def missing_parts(work: Work) -> list[str]:
    """Models, data sets, files and settings that the exhibit needs and that are not here."""
    found = [f"model {name}" for name in work.models() if not _has(name, "model")]
    found += [f"data set {name}" for name in work.datasets() if not _has(name, "dataset")]
    every = [*work.files(), *work.retention_files()]
    files = [name for name in every if not Path(name).is_file()]
    if work.scale == LAPTOP:  # written before anything is trained
        files = [name for name in files if work.rows not in Path(name).parents]
    found += [f"file {name}" for name in files]
    if any(_tasks_of(cell) for cell in work.cells) and find_spec("lm_eval") is None:
        found.append("lm-eval, which runs the tasks: pip install 'alphatoken-lab[eval]'")
    judged = any((cell.measures or {}).get("judge") for cell in work.cells)
    if judged and not (work.options.judge_url and work.options.judge_model):
        found.append("a judge: --judge_url and --judge_model")
    return found


def _tasks_of(cell: Cell) -> list[str]:
    """The lm-eval tasks that a cell is measured by."""
    measures = cell.measures or {}
    return [*measures.get("target_tasks", ()), *measures.get("retention_tasks", ())]


def require_all(work: Work) -> None:
    """Refuse to start where something is missing.

    Raises:
        ConfigError: names all of it.
    """
    missing = missing_parts(work)
    if missing:
        small = work.scale == LAPTOP
        raise ConfigError(
            f"what {work.exhibit.label} needs is not here",
            got="; ".join(missing),
            why="cells would fail one after the other",
            remedy="`make models` fetches SmolLM2"
            if small
            else "fetch it (docs/paper.md says from where), or --scale laptop",
        )
    coded = any("humaneval" in _tasks_of(cell) for cell in work.cells)
    if coded and work.options.code_container is None:
        raise ConfigError(
            "this exhibit executes generated code",
            got=f"{work.exhibit.label} without --code_container",
            why="HumanEval's tests run it",
            remedy="--code_container IMAGE, an image with lm-eval in it (docs/evaluate.md)",
        )


def _has(name: str, kind: str) -> bool:
    """True if a model or data set is a local folder, in the hub's cache, or on the hub."""
    if Path(name).expanduser().exists():
        return True
    if "/" not in name or name.startswith(("/", ".")):
        return False
    from huggingface_hub import HfApi, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = {(repo.repo_id, repo.repo_type) for repo in scan_cache_dir().repos}
    except CacheNotFound:
        cached = set()
    if (name, kind) in cached:
        return True
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    try:
        HfApi().auth_check(name, repo_type=kind)
    except Exception:  # not there, not allowed, or no network: for the table the same
        return False
    return True


# --- rows and cells -----------------------------------------------------------------------------


def _prepare_rows(work: Work) -> None:
    """Write the rows of the laptop scale, unless they are there and made of the same files.

    Raises:
        ConfigError: they are there, were made of others, and are to be trained on.
    """
    from alphatoken.support.resume import file_digest
    from alphatoken_lab.paper.rows import SOURCES, write_rows

    asked = {name: getattr(work.options, f"{name}_file") for name in SOURCES[work.family]}
    files = {name: Path(path).absolute() for name, path in asked.items() if path}
    for path in files.values():
        if not path.is_file():
            raise ConfigError("a file of rows does not exist", got=str(path))
    # With a digest, or a file that was changed since would be taken for what is there.
    now = {name: f"{path}, sha256 {file_digest(path)}" for name, path in files.items()}
    record = work.rows / "sources.json"
    if work.rows.is_dir():
        before = read_json(record) or {}
        if before != now and not work.options.only_report:
            own = "the standard library"
            raise ConfigError(
                "the rows of this folder are of other files",
                got=f"{before or own}, not {now or own}",
                why="cells of one table would have been trained on different rows",
                remedy="the same files, or another --output_dir",
            )
        return
    write_rows(work.rows, work.family, files)
    write_json(record, now)


def _run_cells(work: Work) -> None:
    from alphatoken_lab.commands.compare import CompareOptions, check_named_files, run_cells

    check_named_files(work.cells, work.options.code_container)

    options = work.options
    compare = CompareOptions(
        output_dir=str(work.folder.path),
        processes=options.processes,
        devices=options.devices,
        devices_per_cell=options.devices_per_cell,
        launcher=options.launcher,
        queue=options.queue,
        code_container=options.code_container,
        quiet=options.quiet,
    )
    run_cells(compare, work.cells, work.folder)


# --- the table ----------------------------------------------------------------------------------


def _lay_out(work: Work) -> int:
    from alphatoken_lab.commands.compare import say_results
    from alphatoken_lab.compare.page import collect
    from alphatoken_lab.paper.layout import filled, to_csv, to_html, to_markdown

    records = collect(work.cells, work.folder)
    table = filled(work.exhibit, work.scale, records, on=work.conditions())
    place, name = work.root, work.exhibit.name
    place.mkdir(parents=True, exist_ok=True)
    picture = None
    if work.exhibit.picture and table.measured and find_spec("matplotlib") is not None:
        from alphatoken_lab.paper.pictures import drawn

        picture = drawn(table).svg
        write_text(place / f"{name}.svg", picture)
    text = to_markdown(table)
    if picture is not None:
        text = f"{text}\n![{work.exhibit.title}]({name}.svg)\n"
    write_text(place / f"{name}.md", text)
    write_text(place / f"{name}.html", to_html(table, picture))
    write_text(place / f"{name}.csv", to_csv(table))
    return say_results(records, work.cells, work.folder, place / f"{name}.md")
