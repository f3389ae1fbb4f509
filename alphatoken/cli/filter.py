"""``alphatoken filter``: its options; ``filter_run`` does the work, and loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from alphatoken.cli.options import option, read_options
from alphatoken.corpus.options import (
    EarlierOptions,
    LeftOutOptions,
    ModelOptions,
    ReadingOptions,
    RunningOptions,
    ValuationOptions,
)

__all__ = ["FilterOptions", "read"]

_ABOUT = """\
Value whole rows: how much training on a response lowers the loss on the validation rows, how sure
that is, and whether to keep it. JSONL in, the same rows with three more fields out.

usage: alphatoken filter --model_name_or_path PATH --train_file FILE --output_file FILE
           (--validation_file FILE | --validation_rows N) [options]"""

_MORE = """\
output
  Every row of the input as it was, in its order (a line that holds no record, broken JSON say,
  cannot be written again: with --on_bad_rows skip it is counted in the last line), with
    value          mean of the values of its response tokens; null where it was not valued
    value_error    standard error of that over the draw of the validation rows
    verdict        "keep"; "drop": its value is below zero beyond doubt, or with --keep_ratio, it is
                   not among the best; or why it was not valued: "held out", "leak", "empty" (no
                   response within the length), "cannot be read" (with --on_bad_rows skip)

  Without --keep_ratio a row is dropped only where value + t * value_error < 0, one-sided at
  --confidence; with it the best rows by value are kept until they hold this share of the response
  tokens.
"""


@dataclass(kw_only=True)
class _Rows:
    """Options for rows to judge."""

    train_file: str = option(help="rows to judge")
    validation_file: str | None = option(
        None, "rows that define the objective", either="validation", required=True
    )
    validation_rows: int | None = option(
        None,
        "number of validation rows to draw from the training rows",
        least=2,
        either="validation",
    )
    fisher_file: str | None = option(
        None, "Fisher file of the reference model (default: no stability)"
    )
    output_file: str = option(help="JSONL file to write")


@dataclass(kw_only=True)
class _Rule:
    """Options for the judgement itself."""

    confidence: float = option(0.95, "confidence that a dropped row's value is below zero")
    ratio: float | None = option(
        None, "keep the best rows up to this share of the tokens instead", flag="keep_ratio"
    )
    validation_batches: int = option(
        8, "number of parts of the validation rows, for the errors", least=2
    )


@dataclass(kw_only=True)
class FilterOptions(
    ModelOptions,
    _Rows,
    ValuationOptions,
    _Rule,
    ReadingOptions,
    LeftOutOptions,
    EarlierOptions,
    RunningOptions,
):
    """Everything that ``alphatoken filter`` is told."""


read = partial(read_options, "filter", FilterOptions, description=_ABOUT, epilog=_MORE)
"""The options that the arguments after ``alphatoken filter`` stand for."""
