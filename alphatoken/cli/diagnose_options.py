"""``alphatoken diagnose NAME``: its names, and its options, the diagnostic's own among them.

Nothing heavy is imported here, so that ``--help`` and a wrong name are answered quickly.
"""

from __future__ import annotations

import argparse
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from alphatoken.cli.program import (
    HELP_ALL,
    CommandParser,
    add_option,
    add_options,
    kinds_of,
    replace_default,
    shorten_help,
)
from alphatoken.cli.value_options import parse_values
from alphatoken.diagnose import DIAGNOSTICS, SIZES, Entry, find
from alphatoken.errors import AlphaTokenError, ConfigError
from alphatoken.score.options import CorpusOptions
from alphatoken.support.options import option

ALL = "all"

_ALL_QUESTION = "How far can I trust the values on my model? All diagnostics, in one report."

_WRITES = """\
Writes {name}/diagnosis.json, its tables (CSV) and figures (SVG), report.html of all diagnoses, and
run.json, which --resume compares, to the folder given with --output_dir; where that is a folder of
`alphatoken score`, to "diagnosis" in it. Exit status 1: a diagnostic of "all" could not run, other
than for want of --retention_set or --validation_file.

usage: alphatoken diagnose {name} --model_name_or_path PATH --train_file FILE --output_dir DIR
           {trusted} [options]"""

_ROWS = """\
rows
  JSON, CSV or Parquet rows with a prompt and a response (also: instruction/input/output,
  question/answer), or chats under "messages". Plain text: --response_column text. Retention files
  say their columns themselves: --retention_set code=mbpp.jsonl,prompt=text,response=code. Training
  rows that repeat a validation or retention row or prompt are removed and counted."""


PROMPTS = 200
"""Most rows that are held out for a Fisher where no number is given."""


def _size(text: str, name: str) -> Any:
    """An option for a size: given, it is fixed; else the budget may read less than the default."""
    most = SIZES[name]
    return option(None, f"{text} (default {most}, fewer where the budget stops before)", at_least=1)


@dataclass(kw_only=True)
class DiagnoseOptions(CorpusOptions):
    """Options that all diagnostics share: what is diagnosed, and how much work it may be."""

    reference: str | None = option(
        None,
        "model before fine-tuning (default: the model itself)",
        group="options for the model and rows to diagnose",
    )
    beside: list[str] = option(
        [],
        "another model fine-tuned from the reference, which drift lays out beside the model; "
        "repeat it for several. Without --reference the model itself is the one before",
        metavar="NAME=MODEL",
        append=True,
    )
    train_file: str = option(help="rows whose tokens are valued")
    validation_file: str | None = option(None, "rows that define the objective")
    validation_rows: int | None = option(
        None, "number of validation rows to draw (default: at most 32)", at_least=1
    )
    retention_set: list[str] = option(
        [],
        "file of rows that must not be forgotten; may be repeated. Other columns: "
        "FILE,prompt=COLUMN,response=COLUMN",
        metavar="[NAME=]FILE",
        append=True,
    )
    fisher_file: str | None = option(None, "file of the reference's Fisher (default: fit one)")
    fisher_prompts: int | None = option(
        None,
        "rows drawn from the training file for fitting a Fisher, then neither valued nor tuned on "
        f"(default: a fifth of them, at most {PROMPTS}, none of fewer than 40; 0: the training "
        "rows themselves)",
        at_least=0,
    )
    output_dir: str = option(help="folder for the results")
    budget: str = option(
        "10m",
        "time in which each diagnostic should end (15m, 90s, 2h), or none; it then reads less, but "
        "sizes that are given stay",
        metavar="TIME",
        group="options for the amount of work",
    )
    tokens: int | None = _size("most response tokens that are valued", "tokens")
    oracle_tokens: int | None = _size("most tokens sent one by one", "oracle_tokens")
    fisher_samples: int | None = _size("of a Fisher fitted here", "fisher_samples")
    tuning_steps: int | None = _size(
        "of the fine-tuning that stands in for a missing reference", "tuning_steps"
    )
    tuning_rate: float | None = option(
        None, "learning rate of these steps (AdamW; default: 0.064 / model width)"
    )
    train_rows: int = option(500, "maximum number of training rows to draw", at_least=1)
    retention_rows: int = option(
        32, "maximum number of rows to draw from each retention set", at_least=1
    )

    @property
    def fixed(self) -> frozenset[str]:
        """Names of the sizes that are given, which no budget makes smaller."""
        fixed = {name for name in SIZES if getattr(self, name) is not None}
        # Whoever draws validation rows from the training rows must say how many; the budget may
        # stop before.
        if self.validation_rows is not None and self.validation_file is not None:
            fixed.add("objective_rows")
        return frozenset(fixed)

    @property
    def seconds(self) -> float | None:
        """The budget of each diagnostic; None for no limit.

        Raises:
            ConfigError: it is no time.
        """
        return parse_budget(self.budget)

    def lacks(self, entry: Entry) -> str:
        """The option that the diagnostic cannot do without and that is not given, or ""."""
        if entry.needs_retention and not self.retention_set:
            return "--retention_set"
        if entry.needs_trusted and self.validation_file is None:
            return "--validation_file"
        return ""


# --- which diagnostics ----------------------------------------------------------------------------


def overview() -> str:
    """Text of ``alphatoken diagnose --help``; no diagnostic is loaded for it."""
    questions = _questions(all="all of these, in one report")
    lines = [
        "How far can I trust the values on my own model? Each diagnostic answers one question:",
        "",
        *questions,
        "",
        "usage: alphatoken diagnose NAME --model_name_or_path PATH --train_file FILE",
        "           --validation_file FILE --output_dir DIR",
        "           [--retention_set FILE] ...      drift and fisher need rows to retain",
        "       alphatoken diagnose NAME --help    what one of them writes, and its options",
    ]
    return "\n".join(lines)


def _questions(**more: str) -> list[str]:
    """A line for each diagnostic and its question, and for what else has a name."""
    questions = {entry.name: entry.question for entry in DIAGNOSTICS} | more
    width = max(map(len, questions)) + 2
    return [f"  {name:{width}}{question}" for name, question in questions.items()]


def entries_of(name: str) -> tuple[Entry, ...]:
    """The diagnostic of this name, or all.

    Raises:
        ConfigError: there is none.
    """
    return DIAGNOSTICS if name == ALL else (find(name),)


def read(words: Sequence[str]) -> Sequence[str] | None:
    """The arguments after ``diagnose``, of which the first is a name; None where it is answered.

    Raises:
        ConfigError: no name, or that of no diagnostic.
    """
    first = words[0] if words else ""
    if first in ("-h", "--help"):
        print(overview())
        return None
    if not first or first.startswith("-"):
        raise ConfigError(
            "the name of a diagnostic comes first",
            got=first or "nothing",
            remedy="alphatoken diagnose --help names them; or: all",
        )
    entries_of(first)
    return words


# --- arguments -----------------------------------------------------------------------


_SHOWN = (
    *("train_file", "validation_file", "validation_rows", "retention_set", "reference", "value"),
    *("output_dir", "budget", "tokens", "train_rows", "resume", "overwrite_output", "quiet"),
    *("model_name_or_path", "adapter", "device", "max_length"),
)
"""Options that ``--help`` shows, beside the diagnostic's own."""

_NOT_OF_WALKS = ("value", "budget", "tokens", "retention_set", "reference")
"""Those of them that a diagnostic of walk values refuses, or that do not bound or change it."""


def read_request(name: str, *words: str) -> tuple[DiagnoseOptions, dict[str, Any]]:
    """The arguments after ``alphatoken diagnose``, checked.

    Returns:
        The options that all diagnostics share, and name -> ``Options`` of each one to run.

    Raises:
        ConfigError: whatever is wrong with them.
    """
    modules = {entry.name: entry.load() for entry in entries_of(name)}
    parser = build_parser(name, modules[name].Options if name in modules else None)
    if HELP_ALL not in words:
        parser.epilog = None
    default = "paper" if name == ALL else find(name).value
    hidden = _NOT_OF_WALKS if default == "walk" else ()
    shorten_help(parser, [one for one in _SHOWN if one not in hidden], words)
    arguments = parse_values(parser, words, lambda _: default)
    shared = DiagnoseOptions(**{one.name: arguments[one.name] for one in fields(DiagnoseOptions)})
    own = {
        key.removeprefix(_OWN): value for key, value in arguments.items() if key.startswith(_OWN)
    }
    try:
        # "all" has no options of one diagnostic: ``own`` is empty there.
        options = {key: module.Options(**own) for key, module in modules.items()}
    except AlphaTokenError as error:
        raise ConfigError(f"an option of {name} has no meaning: {error}") from None
    _ = shared.seconds  # its own error
    if default == "walk" and shared.estimator != "walk":
        raise ConfigError(
            f"the diagnostic {name} compares walk values",
            got=f"--value {shared.value}" if shared.value else f"--estimator {shared.estimator}",
            why="other values are derivatives at one point, and say little about whole rows",
            remedy="leave it out, or --value walk; options of walks (--walk_steps) are read",
        )
    return shared, options


def parse_budget(text: str) -> float | None:
    """Seconds of a budget as a user writes it; None for "none".

    >>> parse_budget("15m"), parse_budget("90s"), parse_budget("1.5h"), parse_budget("none")
    (900.0, 90.0, 5400.0, None)

    Raises:
        ConfigError: it is no such time.
    """
    if text.strip().lower() == "none":
        return None
    scale = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = text.strip().lower()[:-1], text.strip().lower()[-1:]
    try:
        seconds = float(number) * scale[unit]
    except (ValueError, KeyError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(
            "the budget is not a time",
            got=repr(text),
            remedy="a number with its unit, such as 15m, 90s or 1.5h, or none for no limit",
        )
    return seconds


_OWN = "own_"
"""Before the names of a diagnostic's own options, which may be called as one that all share."""


def build_parser(name: str, options: type | None) -> argparse.ArgumentParser:
    """The parser of one diagnostic with the dataclass of its own options; of all without one."""
    parser = CommandParser(
        f"diagnose {name}", description=_description(name), epilog=_ROWS, allow_abbrev=False
    )
    add_options(parser, DiagnoseOptions)
    for changed, value in find(name).defaults.items() if name != ALL else ():
        replace_default(parser, changed, f"(here {value})")
        parser.set_defaults(**{changed: value})
    if options is None:
        return parser
    own = parser.add_argument_group(f"options of {name}")
    kinds = kinds_of(options)
    for one in fields(options):
        # One that all diagnostics have already gets the diagnostic's name before it.
        clashes = {f"--{one.name}", f"--score_{one.name}"} & set(parser._option_string_actions)
        flag = f"--{name.replace('-', '_')}_{one.name}" if clashes else f"--{one.name}"
        add_option(own, one, kinds[one.name], flag, f"{_OWN}{one.name}", default=argparse.SUPPRESS)
    return parser


def _description(name: str) -> str:
    needs = name != ALL and find(name).needs_trusted
    trusted = (
        "--validation_file FILE" if needs else "(--validation_file FILE | --validation_rows N)"
    )
    writes = _WRITES.format(name="NAME" if name == ALL else name, trusted=trusted)
    if name == ALL:
        return "\n".join([_ALL_QUESTION, "", *_questions(), "", writes])
    entry = find(name)
    about = (inspect.getdoc(entry.load()) or "").removeprefix(entry.question).strip()
    return f"{entry.question}\n\n{about}\n\n{writes}"
