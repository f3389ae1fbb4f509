"""``alphatoken-lab evaluate``: its options; ``evaluate_run`` does the work, and loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from alphatoken.cli.options import option, read_options
from alphatoken.score.options import ColumnOptions, ModelOptions

__all__ = ["EvaluateOptions", "read"]

_ABOUT = """\
Measure a trained model: a folder, a LoRA adapter's folder (its base is loaded), or a name of the
hub. What is measured is what `alphatoken-lab compare` measures of every cell.

usage: alphatoken-lab evaluate MODEL (--tasks NAME ... | --target_file FILE | ...) [options]"""

_MORE = """\
output
  OUT/evaluation.md     every score with its shots and whether the chat template was used, the means
                        General (--tasks), Target or Preference, and Overall where both are there
  OUT/evaluation.json   the same, and the loss of each row
  OUT/answers-SET.json, code-TASK.json   what the model wrote

shots
  --shots mmlu=5 gsm8k=0. Without it: what the task's own file says, or else the paper's number
  (ARC-C 0, HellaSwag 0, MMLU 5, GSM8K 5), or else none.

examples
  alphatoken-lab evaluate runs/sft --tasks arc_challenge hellaswag mmlu gsm8k \\
      --target_tasks humaneval --code_container code-eval
  alphatoken-lab evaluate runs/lora --tasks tasks/arc.yaml --task_limit 100
  alphatoken-lab evaluate runs/dpo --judge_set alpaca=questions.jsonl,opponent.json \\
      --judge endpoint --judge_url http://localhost:8000/v1 --judge_model NAME

docs/evaluate.md says how stored answers, judges and their prompts look."""


@dataclass(kw_only=True)
class _Tasks:
    """Options for the measures."""

    tasks: list[str] | None = option(
        None, "lm-eval tasks of general capability: NAME, NAME:METRIC or a YAML file"
    )
    target_tasks: list[str] | None = option(None, "lm-eval tasks of the target")
    shots: list[str] | None = option(None, "examples before each question: NAME=N ...")
    task_path: str | None = option(None, "YAML files of local lm-eval tasks")
    task_limit: int | None = option(
        None, "measure only the first N questions of each task or set", least=1
    )
    task_chat: bool = option(False, "put lm-eval's prompts into the chat template")
    target_file: str | None = option(None, "held-out rows, or preference pairs: the target loss")
    retention_file: str | None = option(None, "rows that must not be forgotten")
    code_container: str | None = option(
        None, "image in which lm-eval executes generated code (humaneval, mbpp)"
    )
    measures: str | None = option(None, "YAML file with all of this, as a grid's `measures`")


@dataclass(kw_only=True)
class _Judging:
    """Answers that are judged."""

    judge_set: list[str] | None = option(
        None, "NAME=QUESTIONS[,OPPONENT]; may be repeated. Without OPPONENT it is --start"
    )
    start: str | None = option(
        None, "model before training: opponent, and reference of pairs (default: an adapter's base)"
    )
    judge: Literal["likelihood", "endpoint"] | None = option(None, "kind of judge")
    judge_model: str | None = option(None, "folder of the judge, or its name at the endpoint")
    judge_url: str | None = option(None, "endpoint of OpenAI's chat completions")
    judge_key_variable: str | None = option(None, "environment variable with the endpoint's key")
    judge_prompt: str | None = option(None, "file of the judge's prompt (default: our own)")


@dataclass(kw_only=True)
class _Reading:
    """Options for reading and writing."""

    chat: bool = option(True, "put rows and judged questions into the chat template")
    max_new_tokens: int | None = option(
        None, "maximum number of tokens of an answer (default 256)", least=1
    )
    max_length: int | None = option(None, "cut rows to N tokens", least=1)
    batch_size: int | None = option(None, "number of rows of one forward (default 16)", least=1)
    beta: float = option(0.1, "beta of DPO, for pairs")
    output_dir: str = option("runs/evaluate", "folder for results")
    overwrite_output: bool = option(False, "replace an earlier evaluation there")
    dry_run: bool = option(False, "check everything, list the measures, and stop")
    quiet: bool = option(False, "show no progress")
    traceback: bool = option(False, "show the whole traceback of an error")


@dataclass(kw_only=True)
class EvaluateOptions(ModelOptions, _Tasks, ColumnOptions, _Judging, _Reading):
    """Everything that ``alphatoken-lab evaluate`` is told."""


def read(words: Sequence[str]) -> EvaluateOptions:
    """The options that ``words``, the arguments after ``alphatoken-lab evaluate``, stand for.

    Raises:
        ConfigError: words that cannot be read.
    """
    named = list(words)
    if named and not named[0].startswith("-"):
        named = ["--model_name_or_path", *named]
    return read_options(
        "evaluate",
        EvaluateOptions,
        named,
        program="alphatoken-lab",
        description=_ABOUT,
        epilog=_MORE,
        allow_abbrev=False,
    )
