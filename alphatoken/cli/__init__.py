"""The command line: ``alphatoken score``, ``fisher``, ``sft``, ``dpo``, ``diagnose`` and others.

Each command is listed below with the module that runs it, and a module is loaded only when its
command is called: ``alphatoken --help`` needs neither torch nor transformers.

- ``score``, ``filter``, ``fisher``, ``evaluate``: options in the module of that name, the work in
  ``score_run``, ``filter_run``, ``fisher_run``, ``evaluate_run``. ``folder`` says what a run's
  results depend on and whether it may be resumed; ``notes`` what a reader of the values must know.
- ``sft``, ``dpo``: ``training``, from ``arguments`` (TRL's convention) through ``training_rows``
  and ``training_data`` to a trainer; ``planning`` prints what ``--dry-run`` shows, ``launching``
  starts several processes, ``recipes`` reads options from a file.
- ``diagnose``: ``diagnose_options``, ``diagnose_subject``, ``diagnose_run``.
- ``compare`` (``compare_grid``), ``merge``, ``policies``.
- ``paper``: ``paper_plan`` says which cells and what they cost, ``paper_run`` runs them and lays a
  table out, ``paper_figures`` hands their models to a diagnostic, ``paper_list`` names everything.

Options are dataclasses. ``options`` makes the flags of them, ``common`` holds those that several
commands share, ``reading`` what the commands make of them (a model, rows, tokens). Model, rows,
files and output folder are called as in ``sft``; underscores and dashes in a flag are the same.

Exit status: 0 done, 1 a file could not be written or read (disk full, no permission), 2 wrong
arguments or input, 130 interrupted. An error is one line on stderr; ``--traceback`` shows where it
came from.

**May import** every other room. **Tests**: ``tests/integration/test_cli*.py``, in this process and
in processes of their own.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from alphatoken.cli.options import spelled
from alphatoken.errors import AlphaTokenError

__all__ = ["main"]

_COMMANDS = {
    "score": ("score.run", "value the response tokens of a training file"),
    "filter": ("filter.run", "value whole rows, and say which to keep"),
    "fisher": ("fisher.run", "fit and save the Fisher of the reference model"),
    "sft": ("training.run_sft", "train on responses, weighted by token value (TRL's options)"),
    "dpo": ("training.run_dpo", "the same on preference pairs"),
    "diagnose": ("diagnose.run", "show how far to trust the values on your own model"),
    "compare": ("compare.run", "train and measure a grid of policies and seeds"),
    "evaluate": ("evaluate.run", "measure a trained model: losses, tasks, code, judged answers"),
    "paper": ("paper.run", "make a table or figure of the paper, in full or on a laptop"),
    "merge": ("merge.run", "a model between two: before and after training (WiSE-FT)"),
    "policies": ("policies.run", "list the methods that can choose or weigh tokens"),
    "recipes": ("recipes.run", "list the packaged recipes of sft and dpo"),
}
"""Command -> where it is, and its line in the help. Nothing is imported before it is asked for."""

_EXAMPLES = """\
examples
  value the tokens of a file exactly, with a report to look at:
    alphatoken score --model_name_or_path MODEL --train_file rows.jsonl --validation_rows 64 \\
        --estimator label --value_parameters all --output_dir values
  train on a few clean rows of the target first, then on all rows (docs/should-i.md):
    alphatoken sft --config laptop-sft --config recommended --model_name_or_path MODEL \\
        --train_file rows.jsonl --validation_file clean.jsonl
  see how far to trust the values on your model:
    alphatoken diagnose all --model_name_or_path MODEL --train_file rows.jsonl \\
        --validation_rows 32 --output_dir diagnosis

alphatoken COMMAND --help explains one command."""

_WRONG_PATH = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
"""What the system says of a name that the user got wrong, and not of a disk or of permissions."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in _COMMANDS:
        _parser().parse_args(words)  # --help, --version, or no such command: it ends here
        words = [word for word in words if word != "--"]
    name, *rest = words
    rest = spelled(rest)

    def command() -> int:
        module, _, function = _COMMANDS[name][0].partition(".")
        status: int = getattr(import_module(f"alphatoken.cli.{module}"), function)(rest)
        return status

    # Most commands take abbreviations of their flags; this one is read before they are.
    asked = any(len(word) > 3 and "--traceback".startswith(word) for word in rest)
    with _said_what_is_read("--quiet" in rest):
        return _guarded(command, asked)


class _Notes(logging.Handler):
    """What the library logs of the rows, as any other note of a command."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"note: {record.getMessage()}", file=sys.stderr)


@contextmanager
def _said_what_is_read(quiet: bool) -> Iterator[None]:
    """Inside, the first process says what was read of each file as what."""
    log = logging.getLogger("alphatoken.data")
    before = log.handlers, log.propagate, log.level
    log.handlers, log.propagate = [_Notes()], False
    first = os.environ.get("RANK", "0") == "0"
    log.setLevel(logging.INFO if first and not quiet else logging.ERROR)
    try:
        yield
    finally:
        log.handlers, log.propagate = before[:2]
        log.setLevel(before[2])


def _parser() -> argparse.ArgumentParser:
    """Knows the names of the commands only."""
    parser = argparse.ArgumentParser(
        prog="alphatoken",
        description="Values of response tokens for fine-tuning language models.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"alphatoken {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in _COMMANDS.items():
        commands.add_parser(name, help=text)
    return parser


def _version() -> str:
    try:
        return version("alphatoken")
    except PackageNotFoundError:
        return "(not installed)"


def _guarded(command: Callable[[], int], traceback: bool) -> int:
    """Run it; an error becomes one line and a status."""
    try:
        return command()
    except KeyboardInterrupt as interrupt:
        _say(f"interrupted: {interrupt}" if str(interrupt) else "interrupted")
        return 130
    except AlphaTokenError as error:
        if traceback:
            raise
        _say(str(error))
        cause = error.__cause__
        return 1 if isinstance(cause, OSError) and not isinstance(cause, _WRONG_PATH) else 2
    except OSError as error:
        if traceback:
            raise
        if not (isinstance(error, BrokenPipeError) and _nobody_listens()):
            _say(str(error))
        return 1


def _nobody_listens() -> bool:
    """Whether who read the output has read enough and gone, as ``head`` does."""
    pipe = select.poll()
    pipe.register(sys.stdout.fileno(), 0)  # a lost reader is reported unasked
    if not any(event & select.POLLERR for _, event in pipe.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the last flush
    return True


def _say(message: str) -> None:
    rank = os.environ.get("RANK", "0")
    process = "" if rank == "0" else f" (process {rank})"
    print(f"alphatoken{process}: {' '.join(message.split())}", file=sys.stderr)
