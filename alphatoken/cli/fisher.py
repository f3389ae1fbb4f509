"""``alphatoken fisher``: its options; ``fisher_run`` does the work, and loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from alphatoken.cli.program import read_options
from alphatoken.config import ValueOptions
from alphatoken.score.options import ModelOptions, ReadingOptions, RunningOptions
from alphatoken.support.options import option, same_option

_ABOUT = """\
Fit the Fisher of the reference model (the one that training starts from) on responses that it
samples itself to the prompts of a held-out file, and save it with the reference weights.

usage: alphatoken fisher --model_name_or_path PATH --train_file FILE --output_file FILE [options]"""


@dataclass(kw_only=True)
class FisherOptions(ModelOptions, ReadingOptions, RunningOptions):
    """Everything that ``alphatoken fisher`` is told: what is fitted, on which rows."""

    train_file: str = option(help="file with held-out prompts", group="options for the fit itself")
    output_file: str = option(help="safetensors file to write")
    samples: int = option(1000, "number of sequences that the model samples", at_least=1)
    layers: str = same_option(ValueOptions, "layers")
    parameters: str = same_option(ValueOptions, "parameters")
    structure: Literal["diagonal", "kronecker"] = option("diagonal", "structure of the Fisher")
    labels: Literal["sequence", "token"] = option(
        "sequence", "sample whole responses (the paper), or labels on the given responses"
    )
    max_new_tokens: int = option(256, "maximum number of tokens of a sampled response", at_least=1)
    overwrite_output: bool = option(False, "replace an existing file")
    checkpoint: str | None = option(None, "file for the state, from which the same command resumes")


read = partial(read_options, "fisher", FisherOptions, description=_ABOUT)
"""The options that the arguments after ``alphatoken fisher`` stand for."""
