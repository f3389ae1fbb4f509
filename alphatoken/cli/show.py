"""``alphatoken show``: its options; ``show_run`` does the work, and loads TRL.

Beside its own options the command takes those of ``sft`` (or ``dpo``), so that a command line that
trains shows what it trains on when its first word is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from alphatoken.cli.program import HELP_ALL, CommandParser, add_option, add_options, kinds_of
from alphatoken.cli.training_options import RowArguments
from alphatoken.support.options import option

_ABOUT = """\
Show which tokens of your rows are trained on, and with which weight, as `alphatoken sft` (for pairs
`alphatoken dpo`) makes them of the same rows under the same options. Only the tokenizer is loaded.

usage: alphatoken show FILE --model_name_or_path MODEL [--rows N | --row N ...] [options]"""

_MORE = """\
FILE is a local JSON, CSV or Parquet file or a folder of such files, in any form that the trainers
read: chats, prompt and response, texts, pairs, tokens with labels. It comes first; --train_file,
--dataset_name and --config work as in sft, and so does every other option of sft and dpo, such as
--max_length, --truncation_mode, --completion_only_loss, --chat_template_path and --policy. Unless
a policy is named, weights are read where rows bring them. Unless --on_bad_rows is named, rows that
cannot be read are counted, and the others are shown.

output
  In a terminal trained tokens are bold green; yellow, magenta and red are weights below 1, above 1
  and below 0; all else is dim. In a file or a pipe trained text stands between \u27e6 and \u27e7.
  \u00d7 and a number behind it is a weight other than 1. Special tokens are shown, and line breaks
  as \u21b5. A policy that chooses tokens by value (the default) chooses among these while it
  trains. Rows that sft would hold out for validation are shown like all others. A summary of all
  rows of the file follows, and the command that trains on them.

examples
  alphatoken show rows.jsonl --model_name_or_path MODEL
  alphatoken show rows.jsonl --model_name_or_path MODEL --row 17 --max_length 512
  alphatoken show pairs.jsonl --model_name_or_path MODEL --rows 1"""

_OF_ROWS = (
    "train_limit", "without_rows", "prompt_column", "response_column", "messages_column",
    "chosen_column", "rejected_column", "unread_columns", "turns", "chat_template", "on_bad_rows",
    "on_empty", "long_prompts",
)  # fmt: skip


@dataclass(kw_only=True)
class ShowOptions:
    """Options for what is shown."""

    rows: int = option(
        3, "number of rows to show, the first ones; 0: the summary alone", at_least=0
    )
    row: list[int] | None = option(
        None,
        "rows to show in place of the first ones, by their number in the file, from 1",
        metavar="N",
    )
    dpo: bool = option(
        False,
        "read pairs, as dpo does (default where the first row has chosen and rejected responses)",
    )
    color: Literal["auto", "always", "never"] = option(
        "auto", "colours: in a terminal without NO_COLOR, always or never"
    )
    traceback: bool = option(False, "show the whole traceback of an error")
    quiet: bool = option(False, "no notes on how the file was read")


@dataclass(frozen=True)
class ShowRequest:
    """What is to be shown.

    Attributes:
        options: those of the command itself.
        file: the first word, where it is no flag.
        words: the rest, for ``sft`` or ``dpo``.
    """

    options: ShowOptions
    file: str | None
    words: tuple[str, ...]


def read(words: Sequence[str]) -> ShowRequest | None:
    """The request that the words after ``alphatoken show`` stand for; None after ``--help``.

    Raises:
        ConfigError: an option of its own that cannot be read.
    """
    if {"--help", "-h", HELP_ALL} & set(words):
        print(help_text())
        return None
    parser = CommandParser("show", add_help=False, allow_abbrev=False)
    add_options(parser, ShowOptions)
    file = words[0] if words and not words[0].startswith("-") else None
    options, rest = parser.parse_known_args(list(words[file is not None :]))
    return ShowRequest(ShowOptions(**vars(options)), file, tuple(rest))


def help_text() -> str:
    """Text of ``alphatoken show --help``."""
    parser = CommandParser("show", description=_ABOUT, epilog=_MORE)
    add_options(parser, ShowOptions)
    group, kinds = _rows_group(parser), kinds_of(RowArguments)
    own = {one.name: one for one in fields(RowArguments)}
    for name in _OF_ROWS:
        add_option(group, own[name], kinds[name], f"--{name}")
    return parser.format_help()


def _rows_group(parser: CommandParser) -> Any:
    group = parser.add_argument_group("options of sft and dpo that say how rows are read")
    group.add_argument("--model_name_or_path", metavar="PATH", help="model folder or hub name")
    group.add_argument(
        "--max_length", metavar="N", help="length that rows are cut to (default: as in sft and dpo)"
    )
    return group
