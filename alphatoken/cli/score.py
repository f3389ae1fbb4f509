"""``alphatoken score``: its options, as a job of ``alphatoken.corpus``."""

from __future__ import annotations

from collections.abc import Sequence

from alphatoken.cli.options import read_options
from alphatoken.corpus.options import LogprobOptions, ScoreOptions
from alphatoken.errors import ConfigError

__all__ = ["read", "run"]

_ABOUT = """\
Value every response token of a training file: how much training on it lowers the loss on the
validation rows (adaptation), and how far it keeps the model near what it was (stability; needs a
Fisher). Writes values, a summary and an HTML report to the folder given with --output_dir.

usage: alphatoken score --model_name_or_path PATH --train_file FILE --output_dir DIR
           (--validation_file FILE | --validation_rows N | --query TEXT | --reference PATH)
           [options]"""

_OF_FILES = """\
Value response tokens along a walk by log-probabilities that any engine wrote: those after it less
those before it. Nothing is loaded but two Parquet files, one row an example in the same order, with
lists input_ids, labels (-100 where nothing is valued) and logprobs (entry i of token i).

usage: alphatoken score --logprobs BEFORE.parquet AFTER.parquet --output_dir DIR [options]"""

_MORE = """\
data
  JSONL or Parquet rows with a prompt and a response (also: instruction/input/output,
  question/answer), or chats under "messages"; a file of any size, or a folder of such files. Chats
  go through the tokenizer's chat template; a tokenizer without one gets: start token, prompt, line
  break, response, end token. Training rows that repeat a validation row or prompt, or a prompt of
  the Fisher, are removed and counted; those that repeat a --query stay.

output
  OUT/values/part-*.parquet, one record an example with lists of an entry a token; summary.json and
  report.html; with --write_dataset OUT/dataset. Every file is written whole or not at all. Stop at
  any time; the same command with --resume continues after the last finished part.
"""


def read(words: Sequence[str]) -> ScoreOptions | LogprobOptions:
    """The options that ``words``, the arguments after ``alphatoken score``, stand for.

    Raises:
        ConfigError: words that cannot be read.
    """
    if any(word.partition("=")[0] == "--logprobs" for word in words):
        found = read_options("score", LogprobOptions, words, description=_OF_FILES)
        if len(found.logprobs) != 2:
            raise ConfigError(
                "--logprobs takes two files",
                got=" ".join(found.logprobs),
                remedy="--logprobs BEFORE.parquet AFTER.parquet",
            )
        return found
    return read_options("score", ScoreOptions, words, description=_ABOUT, epilog=_MORE)


def run(options: ScoreOptions | LogprobOptions) -> None:
    """Value the rows and write everything to ``options.output_dir``.

    Raises:
        AlphaTokenError: wrong input, with what and where. KeyboardInterrupt: says how to go on.
    """
    if isinstance(options, LogprobOptions):
        from alphatoken.corpus.logprobs import score_logprobs  # torch, which --help does not need

        return score_logprobs(options)
    from alphatoken.corpus.run import score_corpus

    return score_corpus(options)
