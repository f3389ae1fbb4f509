"""Options of ``sft``, ``dpo`` and ``race`` beside TRL's: rows, and actions of the command.

Nothing here imports TRL, so that ``--help`` is quick; ``arguments`` joins them with TRL's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from alphatoken.errors import ConfigError
from alphatoken.race.options import RaceConfig
from alphatoken.score.options import (
    ColumnOptions,
    LeftOutOptions,
    PresetOptions,
    ReadingOptions,
)
from alphatoken.support.options import option, same_option

SOURCES = ("train_file", "dataset_name", "datasets")
"""Options that name the training rows, of which one is given; the others are TRL's."""
FILES = (
    "train_file", "validation_file", "retention_data", "fisher_data", "fisher_file", "eval_data",
)  # fmt: skip
"""Options that name a file or folder which must be there."""
RACE_FILES = ("choosing_file", "retention_file")
"""Those of a race alone."""


def missing_files(files: Mapping[str, str | None]) -> Iterator[ConfigError]:
    """An error for each option of these that names a path where nothing is."""
    for name, path in files.items():
        if path is not None and not Path(path).exists():
            yield ConfigError(f"{name} does not exist", got=path, remedy="check the path")


@dataclass
class RowArguments(ColumnOptions, LeftOutOptions):
    """Sources of rows, and the treatment of rows that cannot be trained on.

    A FILE is a local JSON, CSV or Parquet file, or a folder of such files.
    """

    train_file: str | None = option(
        None, "Local rows to train on: a data file or a folder (instead of dataset_name)."
    )
    train_limit: int | None = option(None, "Use at most this many training rows, the first ones.")
    without_rows: str | None = option(
        None,
        "Training rows to leave out, by their numbers as messages and pages name them, joined by "
        "commas (4,13,15-18): lines of a text file, items of a JSON list, rows of a Parquet file.",
        metavar="NUMBERS",
    )
    validation_file: str | None = option(
        None, "FILE of the validation rows; without it they are drawn from the training rows."
    )
    validation_rows: int | None = option(
        None,
        "Validation rows to draw from the training rows. Default: what one validation batch needs "
        "beside the held-out share; eight times that with validation_mode='pool'.",
    )
    retention_data: str | None = option(None, "FILE of the rows for retention='data'.")
    fisher_data: str | None = option(None, "FILE of the prompts that the Fisher is fitted on.")
    fisher_prompts: int | None = option(
        None,
        "Prompts for the Fisher to draw from the training rows, which then are not trained on. "
        "Default: fisher_samples, if a Fisher is fitted and no fisher_data given; 0 fits it on "
        "training prompts.",
    )
    fisher_file: str | None = option(None, "A Fisher fitted earlier, by `alphatoken fisher`.")
    eval_data: str | None = option(None, "FILE of rows for TRL's own evaluation.")
    chosen_column: str | None = option(None, "Column of the chosen response (DPO).")
    rejected_column: str | None = option(None, "Column of the rejected response (DPO).")
    chat_template: bool = same_option(ReadingOptions, "chat_template")
    on_bad_rows: Literal["error", "skip"] = same_option(ReadingOptions, "on_bad_rows")
    long_prompts: Literal["drop", "cut"] = option(
        "drop",
        "Pairs whose prompt is longer than max_prompt_length (DPO) count as bad rows ('drop'), or "
        "lose the beginning of their prompt ('cut').",
    )

    def unread_of_retention(
        self, *, reads_fisher: bool, reads_retention: bool
    ) -> Iterator[tuple[str, str]]:
        """Rows of a retention term that are given and not read: name, and the one that is read."""
        if self.retention_data and not reads_retention:
            yield "retention_data", ""
        instead = ""
        for name in ("fisher_file", "fisher_data", "fisher_prompts"):
            value = getattr(self, name)
            if value and (instead or not reads_fisher):
                yield name, instead
            elif value:
                instead = f"--{name} {value}"


@dataclass
class RunArguments:
    """Options of the command beside training."""

    value: str | None = same_option(PresetOptions, "value")
    resume: bool = option(
        False, "Continue after the last complete checkpoint in output_dir, if there is one."
    )
    allow_changed: list[str] | None = option(
        None,
        "With --resume: options (or train_dataset, validation_dataset, ...) whose other value is "
        "meant. Those that change no more than rounding need not be named.",
        metavar="NAME",
    )
    overwrite_output: bool = option(
        False, "Start anew in an output_dir that is not empty; its checkpoints are removed."
    )
    accelerate_config: str | None = option(
        None,
        "Layout of several processes that the run is meant for, started by accelerate: a file, or "
        "ddp, fsdp2, zero2 of ours; 'none' for one process.",
    )
    traceback: bool = option(False, "Show the whole traceback of an error.")


@dataclass
class RaceArguments(RaceConfig):
    """Options of ``alphatoken race`` beside those of a run."""

    arms: list[str] | None = same_option(RaceConfig, "arms")
    choosing_file: str | None = option(
        None, "FILE of the choosing rows; without it they are set aside of the validation rows."
    )
    retention_file: str | None = option(
        None, "FILE of rows of what the model knew before, measured at each look as well."
    )
    dpo: bool = option(False, "The run is that of `alphatoken dpo`: rows are pairs.")
