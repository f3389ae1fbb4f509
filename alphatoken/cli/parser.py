"""Arguments of the command line; nothing here imports torch, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
from importlib.metadata import PackageNotFoundError, version

__all__ = ["ELSEWHERE", "build_parser"]

ELSEWHERE = {
    "sft": "--traceback",
    "dpo": "--traceback",
    "diagnose": "--debug",
    "compare": "--debug",
    "merge": "--debug",
}
"""Commands that read their options themselves, and the one that shows where an error came from."""

ESTIMATORS = ("alphatoken", "direct", "same_layer_hop", "path", "label", "paper_literal")

_SCORE = """\
Value every response token of a training file: how much training on it lowers the loss on the
validation rows (adaptation), and how far it keeps the model near what it was (stability; needs a
Fisher). Writes values, a summary and an HTML report to the folder given with --out."""

_SCORE_MORE = """\
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
  alphatoken score --model ./model --train train.jsonl --validation-rows 64 --out values
  alphatoken fisher --model ./model --data held_out.jsonl --out fisher.safetensors
  alphatoken score --model ./model-now --train train.jsonl --validation dev.jsonl \\
      --fisher fisher.safetensors --out values --batch-size 8
"""

_FISHER = """\
Fit the Fisher of the reference model (the one that training starts from) on responses that it
samples itself to the prompts of a held-out file, and save it with the reference weights."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``alphatoken``; of the commands in ``ELSEWHERE`` it knows the names only."""
    parser = argparse.ArgumentParser(
        prog="alphatoken",
        description="Values of response tokens for fine-tuning language models.",
        epilog="alphatoken COMMAND --help explains one command.",
    )
    parser.add_argument("--version", action="version", version=f"alphatoken {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_score(commands)
    _add_fisher(commands)
    commands.add_parser("sft", help="train on responses, weighted by token value (TRL's options)")
    commands.add_parser("dpo", help="the same on preference pairs")
    commands.add_parser("diagnose", help="show how far to trust the values on your own model")
    commands.add_parser("compare", help="train and measure a grid of policies and seeds")
    commands.add_parser("merge", help="a model between two: before and after training (WiSE-FT)")
    _add_policies(commands)
    recipes = commands.add_parser("recipes", help="list the packaged recipes of sft and dpo")
    recipes.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)
    return parser


def _add_policies(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "policies",
        help="list the methods that can choose or weigh tokens",
        description="List the methods that --policy takes, or describe one of them.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="describe this one")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)


def _version() -> str:
    try:
        return version("alphatoken")
    except PackageNotFoundError:
        return "(not installed)"


def _add_score(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "score",
        help="value the response tokens of a training file",
        description=_SCORE,
        epilog=_SCORE_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    needed = parser.add_argument_group("what to value")
    _model(needed)
    needed.add_argument("--train", required=True, metavar="FILE", help="rows to value")
    held = needed.add_mutually_exclusive_group(required=True)
    held.add_argument("--validation", metavar="FILE", help="rows that define the objective")
    held.add_argument(
        "--validation-rows", type=_positive, metavar="N", help="draw them from the training rows"
    )
    needed.add_argument(
        "--fisher", metavar="FILE", help="Fisher of the reference model; without it: no stability"
    )
    needed.add_argument("--out", required=True, metavar="DIR", help="folder for the results")
    _valuation(parser.add_argument_group("how to value"))
    _reading(parser.add_argument_group("how to read the rows"), training=True)
    output = parser.add_argument_group("how to write")
    output.add_argument(
        "--format", choices=("parquet", "jsonl"), help="default: parquet if pyarrow is installed"
    )
    output.add_argument(
        "--shard-size", type=_positive, default=64, metavar="N", help="rows a file (default 64)"
    )
    output.add_argument(
        "--report-rows", type=_positive, default=40, metavar="N", help="rows shown (default 40)"
    )
    output.add_argument("--no-report", action="store_true", help="write no HTML report")
    again = output.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="continue an interrupted run")
    again.add_argument("--overwrite", action="store_true", help="replace an earlier run in --out")
    how = parser.add_argument_group("how to run")
    _running(how)
    how.add_argument(
        "--offload",
        action="store_true",
        help="leave the Fisher on disk and read it one matrix at a time; the same values",
    )


def _add_fisher(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "fisher",
        help="fit and save the Fisher of the reference model",
        description=_FISHER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    needed = parser.add_argument_group("what to fit")
    _model(needed)
    needed.add_argument("--data", required=True, metavar="FILE", help="rows with held-out prompts")
    needed.add_argument("--out", required=True, metavar="FILE", help="safetensors file to write")
    how = parser.add_argument_group("how to fit")
    how.add_argument(
        "--samples", type=_positive, default=1000, metavar="N", help="sequences (default 1000)"
    )
    how.add_argument(
        "--layers", default="3", metavar="K", help="last K layers, 'all', or indices such as 0,4"
    )
    how.add_argument("--structure", choices=("diagonal", "kronecker"), default="diagonal")
    how.add_argument(
        "--labels",
        choices=("sequence", "token"),
        default="sequence",
        help="sample whole responses (the paper), or labels on the given responses",
    )
    how.add_argument(
        "--max-new-tokens", type=_positive, default=256, metavar="N", help="default 256"
    )
    how.add_argument(
        "--checkpoint", metavar="FILE", help="keep the state here; the same command resumes from it"
    )
    _reading(parser.add_argument_group("how to read the rows"), training=False)
    _running(parser.add_argument_group("how to run"))


def _model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", required=True, metavar="PATH", help="model folder or hub name")
    group.add_argument("--adapter", metavar="PATH", help="LoRA adapter to load onto it (peft)")


def _valuation(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--estimator", choices=ESTIMATORS, default="alphatoken", help="default: alphatoken")
    add("--layers", default="3", metavar="K", help="last K layers, 'all', or indices such as 0,4")
    add(
        "--parameters",
        choices=("linears", "all"),
        default="linears",
        help="'all': embeddings, norms and head too (--estimator label only)",
    )
    add("--window", default="32", metavar="W", help="causal window in tokens, or 'none'")
    add("--stability-weight", type=float, default=1.5, metavar="LAMBDA", help="default 1.5")
    add("--head-reduction", choices=("per_head", "mean"), default="per_head")
    add("--causal-position", choices=("label", "context"), default="label")
    add("--ratio", type=float, default=0.5, metavar="RHO", help="share to keep (default 0.5)")
    add(
        "--scope",
        choices=("batch", "sequence", "dataset"),
        default="batch",
        help="rank tokens within a batch (default, the paper), a sequence, or all of them",
    )
    add(
        "--verify",
        type=_positive,
        metavar="N",
        help="certify N tokens against the slow oracle; exit status 2 where a number is off",
    )


def _reading(group: argparse._ArgumentGroup, *, training: bool) -> None:
    add = group.add_argument
    add("--prompt-field", metavar="NAME", help="field with the prompt")
    add("--response-field", metavar="NAME", help="field with the response")
    add("--messages-field", metavar="NAME", help="field with the chat")
    add("--limit", type=_positive, metavar="N", help="read at most N rows")
    add("--max-length", type=_positive, metavar="N", help="default: what the model allows")
    add("--no-chat-template", action="store_true", help="use the plain format")
    if not training:
        return
    add("--on-long", choices=("truncate", "skip", "error"), default="truncate")
    add("--on-empty", choices=("error", "skip"), default="error", help="rows without response")
    add("--on-leak", choices=("remove", "error"), default="remove")
    add("--turns", choices=("all", "last"), default="all", help="assistant turns to value")
    add("--no-end-token", action="store_true", help="plain format: end no response with it")


def _running(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--batch-size", type=_positive, default=8, metavar="N", help="default 8")
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    add("--device", default="auto", metavar="NAME", help="default: cuda if there is one, else cpu")
    add("--seed", type=int, default=0, metavar="N", help="of every draw (default 0)")
    add("--trust-remote-code", action="store_true", help="run code that comes with the model")
    add("--quiet", action="store_true", help="no progress and no notes")
    add("--debug", action="store_true", help="show the whole traceback of an error")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1: {text}")
    return value
