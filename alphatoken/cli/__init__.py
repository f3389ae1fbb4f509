"""The command line: ``alphatoken show``, ``score``, ``sft``, ``race``, ``diagnose`` and others.

Each command is listed below with the module that runs it, and a module is loaded only when its
command is called: ``alphatoken --help`` needs neither torch nor transformers.

- ``score``, ``fisher``: options in the module of that name, the work in ``alphatoken.score``,
  which reads and values rows, or in ``fisher_run``.
- ``sft``, ``dpo``: ``training``, from ``arguments`` (TRL's convention) through ``training_rows``
  to a trainer; ``recipes`` reads options from a file.
- ``race``: ``race``, with the parts and options of these.
- ``diagnose``: ``diagnose_options``, ``diagnose_run``.
- ``show``: ``show``, ``show_run``, and ``marked_text``, which marks tokens in a terminal.

``value_options`` and ``arguments`` put the options of ``--value`` in force. Options are
dataclasses. ``program`` makes the flags of them; ``alphatoken.score.options`` holds those that
several commands share. Model, rows, files and output folder are called as in ``sft``; underscores
and dashes in a flag are the same.

Exit status: 0 done, 1 a file could not be written or read (disk full, no permission), 2 wrong
arguments or input, 130 interrupted. An error is one line on stderr; ``--traceback`` shows where it
came from.

**May import** every other room. **Tests**: ``tests/integration/test_cli*.py``, in this process and
in processes of their own.
"""

from __future__ import annotations

from functools import partial

from alphatoken.cli.program import Command, run_program

__all__ = ["main"]

_COMMANDS = {
    "show": Command(
        "show which tokens of your rows are trained on, with which weight",
        "alphatoken.cli.show_run:run",
        "alphatoken.cli.show:read",
    ),
    "score": Command(
        "value the response tokens of a training file",
        "alphatoken.cli.score:run",
        "alphatoken.cli.score:read",
    ),
    "diagnose data": Command(
        "say whether your rows look like rows that you trust, before any training",
        "alphatoken.cli.diagnose_run:run",
    ),
    "race": Command(
        "train short runs, compare them on trusted rows, and go on with the winner",
        "alphatoken.cli.race:run",
    ),
    "sft": Command(
        "train on responses, weighted by token value (TRL's options)",
        "alphatoken.cli.training:run_sft",
    ),
    "dpo": Command("the same on preference pairs", "alphatoken.cli.training:run_dpo"),
    "diagnose": Command(
        "show how far to trust the values on your own model",
        "alphatoken.cli.diagnose_run:run",
        "alphatoken.cli.diagnose_options:read",
    ),
    "fisher": Command(
        "fit and save the Fisher of the reference model",
        "alphatoken.cli.fisher_run:run",
        "alphatoken.cli.fisher:read",
    ),
}

_EXAMPLES = """\
examples
  see which tokens of a file are trained on:
    alphatoken show rows.jsonl --model_name_or_path MODEL
  see whether rows look like a few that you trust, and which do not:
    alphatoken diagnose data --model_name_or_path MODEL --train_file rows.jsonl \\
        --validation_file trusted.jsonl --output_dir verdict
  measure whether selecting tokens pays on them, and train by what wins:
    alphatoken race --config laptop-sft --model_name_or_path MODEL --train_file rows.jsonl \\
        --validation_file trusted.jsonl
  look at what each token teaches, measured against the trusted rows:
    alphatoken score --model_name_or_path MODEL --train_file rows.jsonl \\
        --validation_file trusted.jsonl --output_dir values
  see how far to trust the values on your model:
    alphatoken diagnose all --model_name_or_path MODEL --train_file rows.jsonl \\
        --validation_rows 32 --output_dir diagnosis

alphatoken COMMAND --help explains one command."""

_ABOUT = "Values of response tokens for fine-tuning language models."

main = partial(run_program, "alphatoken", _ABOUT, _EXAMPLES, _COMMANDS)
