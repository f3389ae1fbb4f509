"""``alphatoken score``: its options, as a job of ``alphatoken.score``."""

from __future__ import annotations

from collections.abc import Sequence

from alphatoken.cli.program import HELP_ALL, option_parser
from alphatoken.cli.value_options import parse_values
from alphatoken.score.options import ScoreOptions, rules_out_walk

_ABOUT = """\
Value every response token of a training file against rows that you trust, and write the values and
a page that colours the text by them to the folder given with --output_dir.

usage: alphatoken score --model_name_or_path PATH --train_file FILE --output_dir DIR
           (--validation_file FILE | --validation_rows N | --query TEXT | --reference PATH)
           [options]"""

_MORE = """\
data
  JSON, CSV or Parquet rows with a prompt and a response (also: instruction/input/output,
  question/answer), or chats under "messages"; a file of any size, or a folder of such files. Chats
  go through the tokenizer's chat template; a tokenizer without one gets: start token, prompt, line
  break, response, end token. Training rows that repeat a validation row or prompt, or a prompt of
  the Fisher, are removed and counted; those that repeat a --query stay.

output
  OUT/values/part-*.parquet, one record an example with lists of an entry a token; summary.json and
  report.html; with --rows OUT/rows.jsonl. Every file is written whole or not at all. The rows of
  lowest mean value, highest mean loss and highest mean value (with --rows sum: of the sum) are
  printed. Stop at any time; the same command with --resume continues after the last finished part.
"""


_SHOWN = (
    *("train_file", "validation_file", "validation_rows", "query", "output_dir", "keep_ratio"),
    *("rows", "resume", "overwrite_output", "model_name_or_path", "device", "value"),
    *("train_limit", "max_length", "per_device_train_batch_size", "quiet"),
)
"""Options that ``--help`` shows."""


def read(words: Sequence[str]) -> ScoreOptions:
    """The options that the arguments after ``alphatoken score`` stand for.

    Raises:
        ConfigError: words that cannot be read, or that contradict each other.
    """
    more = {"description": _ABOUT, "epilog": _MORE if HELP_ALL in words else ""}
    parser = option_parser("score", ScoreOptions, words, shown=_SHOWN, **more)
    return ScoreOptions(
        **parse_values(parser, words, lambda said: "paper" if rules_out_walk(said) else "walk")
    )


def run(options: ScoreOptions) -> None:
    """Value the rows and write everything to ``options.output_dir``.

    Raises:
        AlphaTokenError: wrong input, with what and where. KeyboardInterrupt: says how to go on.
    """
    from alphatoken.score.run import score_corpus  # torch, which --help does not need

    return score_corpus(options)
