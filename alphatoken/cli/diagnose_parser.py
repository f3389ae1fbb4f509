"""Arguments of ``alphatoken diagnose NAME``, the diagnostic's own options among them."""

from __future__ import annotations

import argparse
import inspect
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, NoReturn

from alphatoken.cli.diagnose_fields import OptionField, assignments, option_fields
from alphatoken.cli.parser import ESTIMATORS, _model, _positive, _reading, _running
from alphatoken.errors import AlphaTokenError, ConfigError
from alphatoken.fidelity.registry import DIAGNOSTICS, Entry

__all__ = ["ALL", "Request", "build_parser", "overview", "read_request"]

ALL = "all"
ALL_QUESTION = "How far can I trust the values on my model? All diagnostics, in one report."

_WRITES = """\
Writes to the folder given with --out:
  {name}/diagnosis.json   the answer, the tables and notes; it is written last
  {name}/*.csv            each table, and what each figure shows
  {name}/*.svg, *.png     each figure
  report.html{pad}all diagnoses of the folder on one page that needs nothing from elsewhere
  run.json{pad}   what the numbers depend on; --resume compares it

Exit status: 0 done, 1 a diagnostic of "all" could not run or a file could not be written, 2 wrong
arguments or input, 130 interrupted."""

_ROWS = """\
rows
  JSONL or Parquet rows with a prompt and a response (also: instruction/input/output,
  question/answer), or chats under "messages". Plain text: --response-field text. Retention files
  say their fields themselves: --retention code=mbpp.jsonl,prompt=text,response=code. Training rows
  that repeat a validation or retention row or prompt are removed and counted."""


@dataclass(frozen=True)
class Request:
    """What is to be run: diagnostics with their options, and what they share.

    Attributes:
        entries: the diagnostics, in their order.
        options: name -> its ``Options``.
        shared: everything else, as ``argparse`` read it.
        command: the whole command line, for the report.
    """

    entries: tuple[Entry, ...]
    options: Mapping[str, Any]
    shared: argparse.Namespace
    command: str


def overview() -> str:
    """What ``alphatoken diagnose --help`` says; no diagnostic is loaded for it."""
    width = max(len(entry.name) for entry in DIAGNOSTICS) + 2
    lines = [
        "How far can I trust the values on my own model? Each diagnostic answers one question:",
        "",
        *(f"  {entry.name:{width}}{entry.question}" for entry in DIAGNOSTICS),
        f"  {ALL:{width}}all of these, in one report",
        "",
        "usage: alphatoken diagnose NAME --model PATH --train FILE --validation FILE --out DIR ...",
        "       alphatoken diagnose NAME --help    what one of them writes, and its options",
        "       alphatoken diagnose --list         the names, one a line",
    ]
    return "\n".join(lines)


def read_request(name: str, entries: Sequence[Entry], words: Sequence[str]) -> Request:
    """The arguments after ``alphatoken diagnose NAME``, checked.

    Raises:
        ConfigError: whatever is wrong with them.
    """
    modules = {entry.name: entry.load() for entry in entries}
    known = {key: option_fields(module.Options) for key, module in modules.items()}
    parser = build_parser(name, entries, known)
    shared = parser.parse_args(list(words))
    if name == ALL:
        given = assignments(shared.set, known)
    else:
        said = vars(shared)
        own = {field.name: said[_own(field)] for field in known[name] if _own(field) in said}
        given = {name: own}
    options = {key: _options(key, module, given.get(key, {})) for key, module in modules.items()}
    command = shlex.join(["alphatoken", "diagnose", name, *words])
    return Request(tuple(entries), options, shared, command)


def _options(name: str, module: ModuleType, given: Mapping[str, Any]) -> Any:
    try:
        return module.Options(**given)
    except AlphaTokenError as error:
        raise ConfigError(f"an option of {name} has no meaning: {error}") from None


class _Parser(argparse.ArgumentParser):
    """The description stands first in the help; an error is one line."""

    def format_help(self) -> str:
        formatter = self._get_formatter()
        formatter.add_text(self.description)
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_text(group.description)
            formatter.add_arguments(group._group_actions)
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, remedy=f"{self.prog} --help")


def build_parser(
    name: str, entries: Sequence[Entry], known: Mapping[str, Sequence[OptionField]]
) -> argparse.ArgumentParser:
    """The parser of one diagnostic, or of all of them together.

    Args:
        name: of the diagnostic, or "all".
        entries: the diagnostics that are run.
        known: the options of each.
    """
    parser = _Parser(
        prog=f"alphatoken diagnose {name}",
        usage=f"alphatoken diagnose {name} --model PATH --train FILE --out DIR "
        "(--validation FILE | --validation-rows N) [options]",
        description=_description(name, entries),
        epilog=_ROWS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_subject(parser.add_argument_group("what to diagnose"))
    own = parser.add_argument_group(f"options of {name}" if name != ALL else "options of each")
    _add_run(parser.add_argument_group("the run that is diagnosed"))
    _add_work(parser.add_argument_group("how much work"))
    _reading(parser.add_argument_group("how to read the rows"), training=True)
    _add_output(parser.add_argument_group("how to write"))
    _running(parser.add_argument_group("how to run"))
    if name == ALL:
        _add_assignments(own, known)
    else:
        _add_own(parser, own, name, known[name])
    return parser


def _description(name: str, entries: Sequence[Entry]) -> str:
    place = "NAME" if name == ALL else name
    writes = _WRITES.format(name=place, pad=" " * (len(place) + 7))
    if name == ALL:
        width = max(len(entry.name) for entry in entries) + 2
        lines = [f"  {entry.name:{width}}{entry.question}" for entry in entries]
        return "\n".join([ALL_QUESTION, "", *lines, "", writes])
    (entry,) = entries
    about = (inspect.getdoc(entry.load()) or "").removeprefix(entry.question).strip()
    return f"{entry.question}\n\n{about}\n\n{writes}"


def _add_subject(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    _model(group)
    add("--reference", metavar="PATH", help="the model before fine-tuning (default: --model is it)")
    add("--train", required=True, metavar="FILE", help="rows whose tokens are valued")
    add("--validation", metavar="FILE", help="rows that define the objective")
    add(
        "--validation-rows",
        type=_positive,
        metavar="N",
        help="draw N rows of --validation (default: at most 32), or else of the training rows",
    )
    add(
        "--retention",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="rows of what must not be forgotten; repeat it for several sets. Other fields: "
        "FILE,prompt=FIELD,response=FIELD",
    )
    add("--fisher", metavar="FILE", help="Fisher of the reference (default: one is fitted)")
    add("--out", required=True, metavar="DIR", help="folder for the results")


def _add_run(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--estimator", choices=ESTIMATORS, default="alphatoken", help="default: alphatoken")
    add("--layers", default="3", metavar="K", help="last K layers, 'all', or indices such as 0,4")
    add("--window", default="32", metavar="W", help="causal window in tokens, or 'none'")
    add("--stability-weight", type=float, default=1.5, metavar="LAMBDA", help="default 1.5")
    add("--ratio", type=float, default=0.5, metavar="RHO", help="share to keep (default 0.5)")


def _add_work(group: argparse._ArgumentGroup) -> None:
    from alphatoken.fidelity.subject import Subject

    default = {field.name: field.default for field in fields(Subject)}
    for name, metavar, meaning in (
        ("tokens", "N", "most response tokens that are valued"),
        ("oracle_tokens", "N", "most tokens sent one by one through the slow oracle"),
        ("fisher_samples", "N", "samples of a Fisher that is fitted here"),
        ("tuning_steps", "N", "steps of the fine-tuning that stands in for a missing reference"),
        ("tuning_rate", "RATE", "its learning rate (AdamW)"),
    ):
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=float if name == "tuning_rate" else _positive,
            default=default[name],
            metavar=metavar,
            help=f"{meaning} (default {default[name]})",
        )
    group.add_argument(
        "--train-rows", type=_positive, default=500, metavar="N",
        help="training rows drawn for all of this (default: at most 500)",
    )  # fmt: skip
    group.add_argument(
        "--retention-rows", type=_positive, default=32, metavar="N",
        help="rows drawn of each retention set (default: at most 32)",
    )  # fmt: skip


def _add_output(group: argparse._ArgumentGroup) -> None:
    again = group.add_mutually_exclusive_group()
    again.add_argument(
        "--resume", action="store_true", help="keep what is finished in --out, run the rest"
    )
    again.add_argument("--overwrite", action="store_true", help="replace an earlier run in --out")


def _add_own(
    parser: argparse.ArgumentParser,
    group: argparse._ArgumentGroup,
    name: str,
    known: Sequence[OptionField],
) -> None:
    """Flags of the diagnostic; one that all diagnostics have already gets its name before it."""
    for field in known:
        taken = field.flag in parser._option_string_actions
        flag = f"--{name}-{field.flag.removeprefix('--')}" if taken else field.flag
        said = f"{field.help} (default {field.shown})".strip().replace("%", "%%")
        if field.kind is bool:
            group.add_argument(
                flag,
                dest=_own(field),
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=said,
            )
        else:
            group.add_argument(
                flag,
                dest=_own(field),
                type=field.argument,
                default=argparse.SUPPRESS,
                metavar=field.metavar,
                help=said,
            )


def _own(field: OptionField) -> str:
    return f"own_{field.name}"


def _add_assignments(
    group: argparse._ArgumentGroup, known: Mapping[str, Sequence[OptionField]]
) -> None:
    listed = [
        f"\n  {name}.{field.name}={field.shown}" for name, own in known.items() for field in own
    ]
    about = "with their defaults; alphatoken diagnose NAME --help says what they mean:"
    group.description = about + "".join(listed)
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME.option=value",
        help="option of one diagnostic; repeat it for several",
    )
