"""``alphatoken-lab paper``: a table or figure of the paper, from rows and cells to its layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from alphatoken.cli.program import CommandParser, add_options
from alphatoken.errors import ConfigError
from alphatoken_lab.paper.options import PaperOptions

if TYPE_CHECKING:
    from alphatoken_lab.paper.work import Work

_ABOUT = """\
Make a table or figure of the paper: train what it compares, measure it, and lay it out as there,
with the spread over three seeds. Several tables share cells; a cell is trained once.
The same command again goes on with what is missing.

usage: alphatoken-lab paper --list
       alphatoken-lab paper NAME [--scale full|laptop] [--dry_run] [options] [trainer's options]"""

_MORE = """\
scales
  full     the paper's backbones and data sets, four GPUs: --devices 0,1,2,3 --devices_per_cell 4.
           Questions and rows of benchmarks lie in --evaluation_dir; docs/paper.md says which.
  laptop   SmolLM2-135M-Instruct from $ALPHATOKEN_MODELS (`make models`), one thread; rows of the
           Python standard library, or of the files named; losses in place of benchmarks.

output
  OUT/SCALE/NAME.md, .html, .csv   the table, or the figure's numbers; NAME.svg the figure
  OUT/SCALE/GRID/                  cells, as `alphatoken-lab compare` keeps them

examples
  alphatoken-lab paper tab:main_rq1_sft --scale laptop
  alphatoken-lab paper ablation_rq3 --devices 0,1,2,3 --devices_per_cell 4
  alphatoken-lab paper ablation_rq3 --scale laptop --train_file mine.jsonl --max_steps 40"""

_LIST = """\
Each by its label: alphatoken-lab paper NAME [--scale full|laptop]; --dry_run says what each of its
cells trains. Several tables share cells; a cell is trained once."""


def parse(words: Sequence[str]) -> tuple[str | None, PaperOptions, list[str]]:
    """The name, the options of the command, and the words that are options of the trainer."""
    parser = CommandParser(
        "paper", "alphatoken-lab", description=_ABOUT, epilog=_MORE, allow_abbrev=False
    )
    add_options(parser, PaperOptions)
    name = words[0] if words and not words[0].startswith("-") else None
    options, more = parser.parse_known_args(list(words[1:] if name else words))
    return name, PaperOptions(**vars(options)), more


def run(words: Sequence[str]) -> int:
    """Make the exhibit, or list all; the exit status, 1 where cells have no result.

    Raises:
        AlphaTokenError: no such exhibit; models, rows or files that are not there; cells that could
            not run.
    """
    if list(words) == ["--list"]:
        print("\n".join(_lines()))
        return 0
    name, options, more = parse(words)
    if name is None:
        raise ConfigError(
            "the name of a table or figure comes first",
            got="nothing",
            remedy="alphatoken-lab paper --list names them",
        )
    from alphatoken.support.resume import require_writable
    from alphatoken_lab.commands.compare import check_measures
    from alphatoken_lab.paper.exhibits import LAPTOP, find
    from alphatoken_lab.paper.work import Work
    from alphatoken_lab.runner.running import run_cells

    exhibit = find(name)
    if exhibit.kind == "none":
        print(f"{exhibit.label}: {exhibit.title}. {exhibit.note}")
        return 0
    work = Work(exhibit, options, tuple(more))
    if options.dry_run:
        return _show(work)
    require_writable(work.root)
    if options.scale == LAPTOP:
        prepare_rows(work)
    if not options.only_report:
        work.require_all()
        check_measures(work.cells)
        run_cells(options, work.cells, work.folder)
    if exhibit.diagnosis is not None:
        from alphatoken_lab.paper.figures import diagnose

        return diagnose(work, exhibit.diagnosis)
    return _lay_out(work)


# --- what there is, and what would be done ------------------------------------------------------


def _lines() -> Iterator[str]:
    """Lines of ``--list``: every table and figure, its cells, and what they need."""
    from alphatoken_lab.paper.exhibits import LAPTOP, SCALES, every
    from alphatoken_lab.paper.work import Work

    yield _LIST
    for exhibit in every():
        yield f"\n{exhibit.label}  {exhibit.kind}, {exhibit.place}: {exhibit.title}"
        if exhibit.kind == "none":
            yield f"  {' '.join(exhibit.note.split())}"
            continue
        for scale in SCALES:
            work = Work(exhibit, PaperOptions(scale=scale))  # type: ignore[arg-type]
            cells = f"{len(work.cells)} cell{'s' * (len(work.cells) != 1)}"
            if exhibit.diagnosis is not None:
                count = len(work.grid.tasks)
                cells += f" and {count} diagnos{'i' if count == 1 else 'e'}s"
            small = scale == LAPTOP
            models = [Path(name).name if small else name for name in work.models()]
            files = [] if small else [Path(name).name for name in work.files()]
            rows = work.datasets() or ["rows of the standard library"]
            yield f"  {scale:<7} {cells} of {', '.join([*models, *rows, *files])}"


def _show(work: Work) -> int:
    """Print every kind of cell, and what is not here.

    Raises:
        ConfigError: the model's folder is not here; lm-eval knows none of some tasks.
    """
    from alphatoken_lab.commands.compare import look_up_tasks

    absent = [
        name for name in work.models() if Path(name).is_absolute() and not Path(name).exists()
    ]
    if absent:
        raise ConfigError(
            "the model is not here",
            got=", ".join(absent),
            remedy="`make models` in the clone, ALPHATOKEN_MODELS=FOLDER, or --model FOLDER",
        )
    print(f"{work.exhibit.label}: {work.exhibit.title} ({work.scale} scale)")
    kinds: dict[str, list[str]] = {}
    for cell in work.cells:
        kinds.setdefault(cell.name.partition("-seed")[0], []).append(cell.kind)
    for name, each in kinds.items():
        print(f"  {name}: {len(each)} x {'trained' if each[0] == 'train' else 'measured only'}")
    print(f"  {len(work.cells)} cells")
    for missing in work.missing():
        print(f"  not here: {missing}")
    look_up_tasks(work.cells)
    return 0


# --- rows, and the table ------------------------------------------------------------------------


def prepare_rows(work: Work) -> None:
    """Write the rows of the laptop scale, unless they are there and made of the same files.

    Raises:
        ConfigError: they are there, were made of others, and are to be trained on.
    """
    from alphatoken.support.resume import file_digest
    from alphatoken.support.storage import read_json, write_json
    from alphatoken_lab.paper.rows import SOURCES, write_rows

    named = {name: getattr(work.options, f"{name}_file") for name in SOURCES[work.family]}
    files = {name: Path(path).absolute() for name, path in named.items() if path}
    for path in files.values():
        if not path.is_file():
            raise ConfigError("a file of rows does not exist", got=str(path))
    # With a digest, or rows of a file that was changed since would pass for those of the new one.
    now = {name: f"{path}, sha256 {file_digest(path)}" for name, path in files.items()}
    record = work.rows / "sources.json"
    if not work.rows.is_dir():
        write_rows(work.rows, work.family, files)
        write_json(record, now)
        return
    before = read_json(record) or {}
    if before != now and not work.options.only_report:
        own = "the standard library"
        raise ConfigError(
            "the rows of this folder are of other files",
            got=f"{before or own}, not {now or own}",
            why="cells of one table would have been trained on different rows",
            remedy="the same files, or another --output_dir",
        )


def _lay_out(work: Work) -> int:
    from alphatoken.support.storage import write_text
    from alphatoken_lab.commands.compare import print_results
    from alphatoken_lab.paper.exhibits import printed_table, table_of
    from alphatoken_lab.runner.records import collect
    from alphatoken_lab.runner.tables import to_csv, to_html, to_markdown

    every, exhibit = collect(work.cells, work.folder), work.exhibit
    table = table_of(exhibit, work.scale, every, on=work.conditions())
    work.root.mkdir(parents=True, exist_ok=True)
    page = work.root / f"{exhibit.name}.md"
    text = f"# {exhibit.label}\n\n{table.caption}\n\n{to_markdown(table)}"
    if theirs := printed_table(exhibit):
        text += f"\nAs the paper prints them:\n\n{theirs}"
    picture = None
    if exhibit.picture and table.measured and find_spec("matplotlib") is not None:
        from alphatoken_lab.paper.figures import draw_table

        picture = draw_table(exhibit, table).svg
        write_text(page.with_suffix(".svg"), picture)
        text += f"\n![{exhibit.title}]({exhibit.name}.svg)\n"
    write_text(page, text)
    write_text(page.with_suffix(".html"), to_html(table, picture))
    write_text(page.with_suffix(".csv"), to_csv(table))
    return print_results(every, work.cells, work.folder, page)
