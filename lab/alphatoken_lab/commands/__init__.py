"""The command ``alphatoken-lab``: ``policies``, ``compare``, ``evaluate``, ``merge``, ``paper``.

A command a file: its options, its checks before any work, and what it prints.
Options, errors and exit status are as those of ``alphatoken`` (:mod:`alphatoken.cli`).
**Tests**: ``tests/lab/test_compare.py``, ``test_evaluate.py``, ``test_merge.py``,
``test_paper.py``.
"""

from __future__ import annotations

from functools import partial

from alphatoken.cli.program import Command, run_program

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "policies": Command(
        "list the methods that can choose or weigh tokens", "alphatoken_lab.commands.policies:run"
    ),
    "compare": Command(
        "train and measure a grid of policies and seeds", "alphatoken_lab.commands.compare:run"
    ),
    "evaluate": Command(
        "measure a trained model: losses, tasks, answers to be judged",
        "alphatoken_lab.commands.evaluate:run",
        "alphatoken_lab.commands.evaluate:read",
    ),
    "merge": Command(
        "a model between two: before and after training (WiSE-FT)",
        "alphatoken_lab.commands.merge:run",
        "alphatoken_lab.commands.merge:read",
    ),
    "paper": Command(
        "make a table or figure of the paper, in full or on a laptop",
        "alphatoken_lab.commands.paper:run",
    ),
}

_EXAMPLES = """\
examples
  the methods that --policy takes:
    alphatoken-lab policies
  three methods and three seeds on one model and data:
    alphatoken-lab compare --recipe laptop-sft --policies standard random stm --seeds 0 1 2 \\
        --model_name_or_path MODEL --train_file rows.jsonl --validation_file clean.jsonl \\
        --target_file held_out.jsonl --output_dir runs/grid
  every table and figure of the paper, with what each needs:
    alphatoken-lab paper --list

alphatoken-lab COMMAND --help explains one command."""

_ABOUT = "Published token selection methods, grids, evaluation, and the AlphaToken paper."

main = partial(run_program, "alphatoken-lab", _ABOUT, _EXAMPLES, COMMANDS)
