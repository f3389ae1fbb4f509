"""``alphatoken-lab paper``: its options; ``paper_run`` does the work, and loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from alphatoken.cli.options import CommandParser, add_options
from alphatoken.errors import ConfigError
from alphatoken.support.options import option
from alphatoken_lab.commands.compare_grid import CellOptions

if TYPE_CHECKING:
    from alphatoken_lab.paper.exhibits import Exhibit

__all__ = ["Asked", "PaperOptions", "parse", "read"]

_ABOUT = """\
Make a table or figure of the paper: train what it compares, measure it, and lay it out as there,
with the spread over three seeds. Several tables share cells; a cell is trained once.
The same command again goes on with what is missing.

usage: alphatoken-lab paper --list
       alphatoken-lab paper NAME [--scale full|laptop] [--dry_run] [options] [trainer's options]"""

_MORE = """\
scales
  full     the paper's backbones and data sets, four GPUs: --devices 0,1,2,3 --devices_per_cell 4.
           What benchmarks and judges need lies in --evaluation_dir; docs/paper.md says what.
  laptop   SmolLM2-135M-Instruct from $ALPHATOKEN_MODELS (`make models`), one thread; rows of the
           Python standard library, or of the files named; losses in place of benchmarks.

output
  OUT/SCALE/NAME.md, .html, .csv   the table, or the figure's numbers; NAME.svg the figure
  OUT/SCALE/GRID/                  cells, as `alphatoken-lab compare` keeps them

examples
  alphatoken-lab paper tab:main_rq1_sft --scale laptop
  alphatoken-lab paper ablation_rq3 --devices 0,1,2,3 --devices_per_cell 4 \\
      --code_container code-eval
  alphatoken-lab paper ablation_rq3 --scale laptop --train_file mine.jsonl --max_steps 40"""


@dataclass(kw_only=True)
class _What:
    """Options for tables and figures."""

    scale: Literal["full", "laptop"] = option("full", "run as in the paper, or in small")
    dry_run: bool = option(False, "list trainings and missing files, and stop")
    only_report: bool = option(False, "write tables of finished cells, train nothing")
    seeds: list[int] | None = option(None, "seeds (default: 0 1 2)")
    output_dir: str = option("runs/paper", "folder for cells, tables and figures")


@dataclass(kw_only=True)
class _Inputs:
    """Options for models and rows."""

    evaluation_dir: str = option("paper-evaluation", "full: files of benchmarks and judges")
    judge_url: str | None = option(None, "full: the judge's endpoint, OpenAI's protocol")
    judge_model: str | None = option(None, "full: the judge's name at the endpoint")
    model: str | None = option(None, "laptop: another model than SmolLM2-135M-Instruct")
    train_file: str | None = option(None, "laptop: rows (pairs) to train on, cut into all parts")
    target_file: str | None = option(None, "laptop: held-out rows (pairs); else cut from those")
    warm_file: str | None = option(None, "laptop: rows of the warm-up before preferences")
    retention_file: str | None = option(None, "laptop: rows that must not be forgotten")
    probes_file: str | None = option(None, "laptop: rows whose states are compared")


@dataclass(kw_only=True)
class _Running(CellOptions):
    """Options for running the cells."""

    budget: str = option("10m", "time limit of a diagnostic for a figure, or none")
    code_container: str | None = option(
        None, "image in which lm-eval executes generated code (HumanEval)"
    )
    quiet: bool = option(False, "show no progress")
    traceback: bool = option(False, "show the whole traceback of an error")


@dataclass(kw_only=True)
class PaperOptions(_What, _Inputs, _Running):
    """Everything that ``alphatoken-lab paper`` itself is told."""


@dataclass(frozen=True)
class Asked:
    """The exhibit and options that a command asks for.

    Attributes:
        exhibit: a table or figure; None for the list of all.
        options: of the command.
        more: words that are options of the trainer.
    """

    exhibit: Exhibit | None
    options: PaperOptions
    more: tuple[str, ...] = ()


def read(words: Sequence[str]) -> Asked | None:
    """Read ``words``, the arguments after ``alphatoken-lab paper``.

    None where it is answered here: of what the paper has no numbers of.

    Raises:
        ConfigError: words that cannot be read, no name, or that of nothing in the paper.
    """
    if list(words) == ["--list"]:
        return Asked(None, PaperOptions())
    name, options, more = parse(words)
    if name is None:
        raise ConfigError(
            "the name of a table or figure comes first",
            got="nothing",
            remedy="alphatoken-lab paper --list names them",
        )
    from alphatoken_lab.paper.exhibits import find

    exhibit = find(name)
    if exhibit.kind == "none":
        print(f"{exhibit.label}: {exhibit.title}. {exhibit.note}")
        return None
    return Asked(exhibit, options, tuple(more))


def parse(words: Sequence[str]) -> tuple[str | None, PaperOptions, list[str]]:
    """The name, the options of the command, and the words that are options of the trainer."""
    parser = CommandParser(
        "paper", "alphatoken-lab", description=_ABOUT, epilog=_MORE, allow_abbrev=False
    )
    add_options(parser, PaperOptions)
    name = words[0] if words and not words[0].startswith("-") else None
    known, more = parser.parse_known_args(list(words[1:] if name else words))
    return name, PaperOptions(**vars(known)), more
