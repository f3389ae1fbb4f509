"""``alphatoken fisher``: its options; ``fisher_run`` does the work, and loads torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from alphatoken.cli.common import LAYERS, ModelOptions, ReadingOptions, RunningOptions
from alphatoken.cli.options import option, read_options

__all__ = ["FisherOptions", "run"]

_ABOUT = """\
Fit the Fisher of the reference model (the one that training starts from) on responses that it
samples itself to the prompts of a held-out file, and save it with the reference weights."""


@dataclass(frozen=True, kw_only=True)
class _Fit:
    """What to fit."""

    data: str = option(help="rows with held-out prompts", metavar="FILE")
    output_file: str = option(help="safetensors file to write", metavar="FILE")
    samples: int = option(1000, "sequences", least=1)
    layers: str = option("3", LAYERS, metavar="K")
    structure: str = option(
        "diagonal",
        "one number a weight, or two factors a matrix",
        choices=("diagonal", "kronecker"),
    )
    labels: str = option(
        "sequence",
        "sample whole responses (the paper), or labels on the given responses",
        choices=("sequence", "token"),
    )
    max_new_tokens: int = option(256, "longest sampled response", least=1)
    checkpoint: str | None = option(
        None, "keep the state here; the same command resumes from it", metavar="FILE"
    )


@dataclass(frozen=True, kw_only=True)
class FisherOptions(ModelOptions, _Fit, ReadingOptions, RunningOptions):
    """Everything that ``alphatoken fisher`` is told."""


def run(words: Sequence[str]) -> int:
    """Run what ``words``, the arguments after ``alphatoken fisher``, ask for; the exit status.

    Raises:
        AlphaTokenError: wrong arguments or input, with what and where.
    """
    options = read_options(
        "fisher",
        FisherOptions,
        words,
        description=_ABOUT,
        usage="alphatoken fisher --model_name_or_path PATH --data FILE --output_file FILE "
        "[options]",
    )
    import_module("alphatoken.cli.fisher_run").run(options)
    return 0
