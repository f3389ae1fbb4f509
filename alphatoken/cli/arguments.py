"""Arguments of ``alphatoken sft`` and ``alphatoken dpo``: TRL's convention, with our data options.

A recipe sets defaults, the command line overrides them, dashes and underscores are the same. All
of TRL's options are there, and those of ``AlphaOptions``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, NoReturn, get_type_hints

from trl.scripts.utils import DatasetMixtureConfig, ScriptArguments, TrlParser
from trl.trainer.model_config import ModelConfig

from alphatoken.cli.options import option
from alphatoken.cli.recipes import Recipe, close_to, find_recipe, joined, packaged_file
from alphatoken.errors import AlphaTokenError, ConfigError
from alphatoken.train.options import AlphaOptions
from alphatoken.train.policy_names import unread_options

__all__ = ["Arguments", "DataArguments", "RunArguments", "read_arguments"]


@dataclass
class DataArguments(ScriptArguments):
    """Where rows come from, and what is done with those that cannot be trained on.

    A SOURCE is a local .jsonl, .json or .parquet file, or a data set of the hub, written
    ``name``, ``name:split`` or ``name#config:split``.
    """

    train_file: str | None = option(
        None, "Local rows to train on: .jsonl, .json or .parquet (instead of dataset_name)."
    )
    train_limit: int | None = option(None, "Use at most this many training rows, the first ones.")
    validation_data: str | None = option(
        None, "SOURCE of the validation rows; without it they are drawn from the training rows."
    )
    validation_rows: int | None = option(
        None,
        "Validation rows to draw from the training rows. Default: what one validation batch needs "
        "beside the held-out share; eight times that with validation_mode='pool'.",
    )
    retention_data: str | None = option(None, "SOURCE of the rows for retention='data'.")
    fisher_data: str | None = option(None, "SOURCE of the prompts that the Fisher is fitted on.")
    fisher_prompts: int | None = option(
        None,
        "Prompts for the Fisher to draw from the training rows, which then are not trained on. "
        "Default: fisher_samples, if a Fisher is fitted and no fisher_data given; 0 fits it on "
        "training prompts.",
    )
    fisher_file: str | None = option(None, "A Fisher fitted earlier, by `alphatoken fisher`.")
    eval_data: str | None = option(
        None, "SOURCE of rows for TRL's own evaluation; default: dataset_test_split of the hub."
    )
    prompt_column: str | None = option(None, "Column of the prompt, where it has another name.")
    response_column: str | None = option(None, "Column of the response (SFT).")
    messages_column: str | None = option(None, "Column of the chat (SFT).")
    chosen_column: str | None = option(None, "Column of the chosen response (DPO).")
    rejected_column: str | None = option(None, "Column of the rejected response (DPO).")
    row_format: Literal["auto", "chat", "text"] = option(
        "auto",
        "'chat' writes rows through the tokenizer's chat template, 'text' as plain "
        "text; 'auto': chat where there is a template.",
    )
    turns: Literal["all", "last"] = option(
        "all",
        "Train on 'all' assistant turns of a chat or on the 'last' one (SFT).",
    )
    separator: str = option("\n", "What ends a prompt in plain text.")
    long_prompts: Literal["drop", "cut"] = option(
        "drop",
        "Pairs whose prompt is longer than max_prompt_length (DPO) count as bad rows ('drop'), or "
        "lose the beginning of their prompt ('cut').",
    )
    on_bad_rows: Literal["drop", "error"] = option(
        "drop",
        "Rows without a response, pairs with equal responses, prompts too long: 'drop' "
        "and count them, or stop with an 'error'.",
    )
    on_leak: Literal["remove", "error"] = option(
        "remove",
        "Training rows that repeat a validation, retention or Fisher row: 'remove' and "
        "count them, or stop with an 'error'.",
    )
    split_seed: int = option(0, "Seed of what is drawn from the training rows.")


@dataclass
class RunArguments:
    """What the command does beside training."""

    dry_run: bool = option(
        False, "Print the plan and stop: no network, no weights, no training data."
    )
    json: bool = option(False, "Print the plan as JSON.")
    memory_check: bool = option(True, "Refuse a run that will not fit into memory.")
    resume: bool = option(
        False, "Continue after the last complete checkpoint in output_dir, if there is one."
    )
    overwrite_output: bool = option(
        False, "Start anew in an output_dir that is not empty; its checkpoints are removed."
    )
    accelerate_config: str | None = option(
        None,
        "Launch on several processes: an accelerate file, one of ours (ddp, fsdp2, zero2) "
        "or of TRL's; 'none' for one process. Default: ddp where there are several GPUs, or "
        "num_processes asks for them.",
    )
    num_processes: int | None = option(
        None, "Number of processes, instead of the file's; without a file, of GPUs to take."
    )
    traceback: bool = option(False, "Show the whole traceback of an error.")


@dataclass(frozen=True)
class Arguments:
    """Everything read: from the recipe, then from the command line.

    Attributes:
        command: "sft" or "dpo".
        data: where rows come from.
        training: the trainer's configuration.
        model: TRL's ``ModelConfig``.
        mixture: TRL's mixture of data sets.
        run: what to do.
        recipe: that was read, or None.
        changed: option -> (value, default), for all that differ from their defaults.
        words: the command line.
        unread: options of recipes that gave way to a policy that was named after them.
    """

    command: str
    data: DataArguments
    training: Any
    model: ModelConfig
    mixture: DatasetMixtureConfig
    run: RunArguments
    recipe: Recipe | None
    changed: dict[str, tuple[Any, Any]]
    words: tuple[str, ...]
    unread: tuple[str, ...] = ()


class _Parser(TrlParser):
    """TRL's parser, with options in groups and errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing two hundred options."""
        raise ConfigError(f"the command line cannot be read: {message}")

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        own = {f.name for f in dataclasses.fields(AlphaOptions)}
        title = _TITLES.get(dtype, "training (TRL and transformers)")
        groups = {True: "token values (AlphaToken)", False: title}
        hints = get_type_hints(dtype)
        for name in (True, False):
            chosen = [f for f in dataclasses.fields(dtype) if f.init and (f.name in own) == name]
            if not chosen:
                continue
            group: Any = self.add_argument_group(groups[name])
            for one in chosen:
                one.type = hints[one.name]
                self._parse_dataclass_field(group, one)


_TITLES: dict[Any, str] = {
    DataArguments: "data",
    RunArguments: "this command",
    ModelConfig: "model (TRL)",
    DatasetMixtureConfig: "mixture of data sets (TRL)",
}


def _parser(command: str, training: Any) -> _Parser:
    """The parser of one command; ``training`` is the trainer's configuration class."""
    kinds: Any = (RunArguments, DataArguments, training, ModelConfig, DatasetMixtureConfig)
    parser = _Parser(
        kinds,
        prog=f"alphatoken {command}",
        usage=f"alphatoken {command} --config RECIPE [--OPTION VALUE ...]",
        description=f"Alpha-{command.upper()}: TRL's trainer with a gradient weighted by token "
        "value. Options of a recipe are overridden on the command line; `alphatoken recipes` lists "
        "the packaged ones.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        action="append",
        metavar="RECIPE",
        help="YAML file, or name of a packaged one; given again, the later one goes first",
    )
    return parser


def read_arguments(command: str, words: Sequence[str], training: Any) -> Arguments:
    """Read the recipe and the command line.

    Args:
        command: "sft" or "dpo".
        words: what follows it.
        training: configuration class of the trainer.

    Raises:
        ConfigError: an unknown recipe or option, a value that cannot be read, options that
            contradict each other.
    """
    parser = _parser(command, training)
    recipes = _recipes(command, words)
    recipe = reduce(joined, recipes) if recipes else None
    if recipe is not None:
        os.environ.update(recipe.env)
        _set_defaults(parser, recipe)
    found, unknown = parser.parse_known_args(list(words))
    if unknown:
        raise _unknown(unknown[0], parser, "the command line")
    _apply_null_and_source(found, words)
    unread = _give_way(found, training, _earlier_than_policy(recipes, words))
    if found.dry_run and not _has_gpu():
        found.use_cpu = True  # else bf16 would be refused where the plan is made, not the run
    made = [_make(kind, found) for kind in parser.dataclass_types]
    run, data, config, model, mixture = made
    default = _parser(command, training).parse_known_args([])[0]
    changed = _changed(found, default, (DataArguments, training, ModelConfig))
    if found.dry_run and not _has_gpu():
        changed.pop("use_cpu", None)
    return Arguments(
        command, data, config, model, mixture, run, recipe, changed, tuple(words), unread
    )


def _named(words: Sequence[str]) -> set[str]:
    """Options that the command line names."""
    return {w.split("=")[0].lstrip("-").replace("-", "_") for w in words if w[:2] == "--"}


def _earlier_than_policy(recipes: Sequence[Recipe], words: Sequence[str]) -> set[str]:
    """Options that were said before the policy was: in recipes before the one that names it."""
    said = [{name.replace("-", "_") for name in recipe.options} for recipe in recipes]
    said.append(_named(words))
    last = max((i for i, names in enumerate(said) if "policy" in names), default=0)
    return set().union(*said[:last]) - set().union(*said[last:])


def _give_way(found: argparse.Namespace, training: Any, earlier: set[str]) -> tuple[str, ...]:
    """What earlier recipes say to another policy gives way to one that is named after them.

    Returns:
        The options that were set back.
    """
    neutral = unread_options(vars(found), training.FAMILY)
    names = [n for n, value in neutral.items() if n in earlier and getattr(found, n) != value]
    for name in names:
        setattr(found, name, neutral[name])
    return tuple(names)


def _apply_null_and_source(found: argparse.Namespace, words: Sequence[str]) -> None:
    """Text "null" where an option may be none; and rows named here instead of the recipe's."""
    ours = (*dataclasses.fields(AlphaOptions), *dataclasses.fields(DataArguments))
    for one in ours:
        if one.default is None and getattr(found, one.name) in ("null", "none"):
            setattr(found, one.name, None)
    given = _named(words)
    for name, other in (("train_file", "dataset_name"), ("dataset_name", "train_file")):
        if name in given and other not in given and getattr(found, name) is not None:
            setattr(found, other, None)


def _recipes(command: str, words: Sequence[str]) -> list[Recipe]:
    """What ``--config`` names; of several recipes a later one goes before an earlier one."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config", action="append", default=[])
    try:
        names = first.parse_known_args(list(words))[0].config
    except argparse.ArgumentError as error:
        raise ConfigError(f"the command line cannot be read: {error}") from None
    recipes = [find_recipe(name) for name in names]
    for name, recipe in zip(names, recipes, strict=True):
        if recipe.command not in (None, command):
            raise ConfigError(
                "the recipe belongs to another command",
                got=f"{recipe.name} is for `alphatoken {recipe.command}`",
                remedy=f"alphatoken {recipe.command} --config {name}",
            )
    return recipes


def _set_defaults(parser: _Parser, recipe: Recipe) -> None:
    known = {action.dest for action in parser._actions}
    options = {name.replace("-", "_"): value for name, value in recipe.options.items()}
    for name in options:
        if name not in known:
            raise _unknown(name, parser, recipe.path.name)
    template = options.get("chat_template_path")
    if isinstance(template, str):
        options["chat_template_path"] = packaged_file(template) or template
    parser.set_defaults_with_config(**options)


def _unknown(word: str, parser: _Parser, place: str) -> ConfigError:
    name = word.split("=")[0].lstrip("-").replace("-", "_")
    known = [action.dest for action in parser._actions]
    what = (
        "there is no such option"
        if word.startswith("-") or place != "the command line"
        else ("an argument belongs to no option")
    )
    return ConfigError(
        what,
        got=f"{word} in {place}",
        remedy=close_to(name, known) or f"{parser.prog} --help lists them",
    )


def _make(kind: Any, found: argparse.Namespace) -> Any:
    """One dataclass of the values read; what its own checks find is one line."""
    names = [f.name for f in dataclasses.fields(kind) if f.init]
    values = {name: getattr(found, name) for name in names}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # deprecated options left at None
            return kind(**values)
    except AlphaTokenError:
        raise
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            "the options are refused by the trainer's configuration",
            got=text[:400],
            remedy="use_cpu: true and bf16: false train without a GPU" if "bf16" in text else "",
        ) from None


def _changed(
    found: argparse.Namespace, default: argparse.Namespace, kinds: Sequence[Any]
) -> dict[str, tuple[Any, Any]]:
    """What differs from what a command line without recipe and options gives."""
    names = [f.name for kind in kinds for f in dataclasses.fields(kind) if f.init]
    pairs = {name: (getattr(found, name), getattr(default, name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
