"""``alphatoken score``: its options; ``score_run`` does the work, and loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from alphatoken.cli.common import (
    ESTIMATORS,
    LAYERS,
    ModelOptions,
    ReadingOptions,
    RunningOptions,
    TrainingRowOptions,
)
from alphatoken.cli.options import option, read_options

__all__ = ["ScoreOptions", "run"]

_ABOUT = """\
Value every response token of a training file: how much training on it lowers the loss on the
validation rows (adaptation), and how far it keeps the model near what it was (stability; needs a
Fisher). Writes values, a summary and an HTML report to the folder given with --output_dir."""

_MORE = """\
data
  JSONL or Parquet rows with a prompt and a response (also: instruction/input/output,
  question/answer), or chats under "messages". Chats go through the tokenizer's chat template; a
  tokenizer without one gets: start token, prompt, line break, response, end token. Training rows
  that repeat a validation row or prompt, or a prompt of the Fisher, are removed and counted.

output
  OUT/values/part-*.parquet (or .jsonl)  one record a token: row, place, position, token_id, token,
                                         label, total and its components, kept
  OUT/summary.json                       settings, counts, distributions
  OUT/report.html                        heatmaps, distributions, highest and lowest tokens
  OUT/run.json                           what --resume compares

  Every file is written whole or not at all. Stop at any time; the same command with --resume
  continues after the last finished part.

examples
  alphatoken score --model_name_or_path ./model --train_file train.jsonl --validation_rows 64 \\
      --output_dir values
  alphatoken fisher --model_name_or_path ./model --data held_out.jsonl \\
      --output_file fisher.safetensors
  alphatoken score --model_name_or_path ./model-now --train_file train.jsonl \\
      --validation_file dev.jsonl --fisher_file fisher.safetensors --output_dir values
"""


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """What to value."""

    train_file: str = option(help="rows to value", metavar="FILE")
    validation_file: str | None = option(
        None, "rows that define the objective", metavar="FILE", either="validation", required=True
    )
    validation_rows: int | None = option(
        None, "draw them from the training rows", least=1, either="validation", required=True
    )
    fisher_file: str | None = option(
        None, "Fisher of the reference model; without it: no stability", metavar="FILE"
    )
    output_dir: str = option(help="folder for the results", metavar="DIR")


@dataclass(frozen=True, kw_only=True)
class _Valuation:
    """How to value."""

    estimator: str = option("alphatoken", "of token values", choices=ESTIMATORS)
    layers: str = option("3", LAYERS, metavar="K")
    parameters: str = option(
        "linears",
        "'all': embeddings, norms and head too (--estimator label only)",
        choices=("linears", "all"),
    )
    window: int | None = option(32, "causal window in tokens, or none", metavar="W")
    stability_weight: float = option(1.5, "of stability in the total", metavar="LAMBDA")
    head_reduction: str = option(
        "per_head", "attention weights in the causal part", choices=("per_head", "mean")
    )
    causal_position: str = option(
        "label", "where the causal part of a token is taken", choices=("label", "context")
    )
    ratio: float = option(0.5, "share to keep", metavar="RHO")
    scope: str = option(
        "batch",
        "rank tokens within a batch (the paper), a sequence, or all of them",
        choices=("batch", "sequence", "dataset"),
    )
    verify: int | None = option(
        None,
        "certify N tokens against the slow oracle; exit status 2 where a number is off",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class _Output:
    """How to write."""

    format: str | None = option(
        None, "default: parquet if pyarrow is installed", choices=("parquet", "jsonl")
    )
    shard_size: int = option(64, "rows a file", least=1)
    report_rows: int = option(40, "rows shown", least=1)
    report: bool = option(True, "write an HTML report")
    resume: bool = option(False, "continue an interrupted run", either="earlier")
    overwrite_output: bool = option(
        False, "replace an earlier run in --output_dir", either="earlier"
    )
    offload: bool = option(
        False, "leave the Fisher on disk and read it one matrix at a time; the same values"
    )


@dataclass(frozen=True, kw_only=True)
class ScoreOptions(
    ModelOptions, _Rows, _Valuation, ReadingOptions, TrainingRowOptions, _Output, RunningOptions
):
    """Everything that ``alphatoken score`` is told."""


def run(words: Sequence[str]) -> int:
    """Run what ``words``, the arguments after ``alphatoken score``, ask for; the exit status.

    Raises:
        AlphaTokenError: wrong arguments or input, with what and where.
    """
    options = read_options(
        "score",
        ScoreOptions,
        words,
        description=_ABOUT,
        epilog=_MORE,
        usage="alphatoken score --model_name_or_path PATH --train_file FILE --output_dir DIR\n"
        "           (--validation_file FILE | --validation_rows N) [options]",
    )
    import_module("alphatoken.cli.score_run").run(options)
    return 0
