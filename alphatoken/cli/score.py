"""``alphatoken score``: its options, as a job of ``alphatoken.corpus``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from alphatoken.cli.options import (
    PARAMETERS,
    BudgetOptions,
    EarlierOptions,
    LeftOutOptions,
    ReadingOptions,
    RunningOptions,
    ValuationOptions,
    option,
    read_options,
)
from alphatoken.corpus.options import EngineOptions, ModelOptions, ResultOptions
from alphatoken.errors import ConfigError

__all__ = ["ScoreOptions", "read", "run"]

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


@dataclass(kw_only=True)
class _Rows:
    """Options for rows to value."""

    train_file: str = option(help="rows to value")
    validation_file: str | None = option(
        None, "rows that define the objective", either="validation", required=True
    )
    validation_rows: int | None = option(
        None,
        "number of validation rows to draw from the training rows",
        least=1,
        either="validation",
    )
    queries: list[str] | None = option(
        None,
        "a text, or a row as a JSON object: which training rows raise or lower its probability; "
        "repeat it for several",
        flag="query",
        metavar="TEXT",
        append=True,
        either="validation",
    )
    reference: str | None = option(
        None,
        "model folder, hub name or adapter (--estimator walk): losses less its losses, no walk",
        either="validation",
    )
    fisher_file: str | None = option(
        None, "Fisher file of the reference model (default: no stability)"
    )
    output_dir: str = option(help="folder for the results")


@dataclass(kw_only=True)
class _Scope:
    """Options for tokens ranked together."""

    scope: Literal["batch", "sequence", "dataset"] = option(
        "batch",
        "rank tokens within a batch (the paper), a sequence, or all of them",
        flag="keep_scope",
    )


@dataclass(kw_only=True)
class _Finer:
    """Further options for valuing tokens."""

    parameters: str = option(
        "linears",
        f"{PARAMETERS} (all and patterns: --estimator label only)",
        flag="value_parameters",
    )


@dataclass(kw_only=True)
class _Output:
    """Options for writing the values."""

    shard_size: int | None = option(
        None, "rows in each value file (default: 64 or more, for about 1,000 files)", least=1
    )


@dataclass(kw_only=True)
class ScoreOptions(
    ModelOptions,
    _Rows,
    ValuationOptions,
    BudgetOptions,
    _Scope,
    _Finer,
    ReadingOptions,
    LeftOutOptions,
    _Output,
    ResultOptions,
    EngineOptions,
    EarlierOptions,
    RunningOptions,
):
    """Everything that ``alphatoken score`` is told."""


@dataclass(kw_only=True)
class _Files:
    """Options for log-probabilities that another engine wrote."""

    logprobs: list[str] = option(help="two Parquet files: of the model before and after the walk")
    model_name_or_path: str | None = option(
        None, "model whose tokenizer made the tokens, for the report's texts"
    )
    estimator: Literal["walk"] = option("walk", "estimator of token values")
    output_dir: str = option(help="folder for the results")
    report: bool = option(True, "write an HTML report")
    overwrite_output: bool = option(False, "replace existing output")


@dataclass(kw_only=True)
class LogprobOptions(_Files, BudgetOptions, _Scope, RunningOptions):
    """Everything that ``alphatoken score --logprobs`` is told."""


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
    """Value ``options.train_file`` and write everything to ``options.output_dir``.

    Raises:
        AlphaTokenError: wrong input, with what and where. KeyboardInterrupt: says how to go on.
    """
    if isinstance(options, LogprobOptions):
        from alphatoken.corpus.logprobs import LogprobSpec, score_logprobs

        said = {one.name: getattr(options, one.name) for one in fields(LogprobSpec)}
        return score_logprobs(LogprobSpec(**said), overwrite=options.overwrite_output)
    from alphatoken.cli.reading import job_spec  # loads torch, which --help does not need
    from alphatoken.corpus.run import score_corpus

    spec = job_spec(options, options.output_dir, parameters=options.parameters)
    score_corpus(spec, options, options, resume=options.resume, overwrite=options.overwrite_output)
    return None
