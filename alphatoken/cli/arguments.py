"""Arguments of ``alphatoken sft`` and ``alphatoken dpo``: TRL's convention, with our data options.

A recipe sets defaults, the command line overrides them, dashes and underscores are the same. All
of TRL's options are there, and those of ``AlphaOptions``.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, get_type_hints

from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig, ScriptArguments, TrlParser
from trl.trainer.model_config import ModelConfig

from alphatoken.cli.recipes import Recipe, close_to, packaged_file, recipes_of
from alphatoken.cli.training_options import SOURCES, RaceArguments, RowArguments, RunArguments
from alphatoken.config import RESEARCH
from alphatoken.data.named_rows import as_typed
from alphatoken.errors import AlphaTokenError, ConfigError
from alphatoken.presets import PRESETS, written_options
from alphatoken.train.options import RENAMED
from alphatoken.train.policies import (
    OF_VALUES,
    STANDS_FOR,
    unread_by_estimator,
    unread_options,
)

__all__ = ["Arguments", "DataArguments", "RunArguments", "named_options", "read_arguments"]


@dataclass
class DataArguments(RowArguments, ScriptArguments, DatasetMixtureConfig):
    """Our options of rows, and TRL's, a mixture of data sets among them."""


@dataclass(frozen=True)
class Arguments:
    """Everything read: from the recipes, then from the command line.

    Attributes:
        command: "sft" or "dpo".
        data: where rows come from.
        training: the trainer's configuration.
        model: TRL's ``ModelConfig``.
        run: what to do.
        words: the command line.
        unread: options of recipes that gave way: to a policy or an estimator that was named after
            them, or, of a Fisher, to a run that wants none.
        race: options of ``alphatoken race``; None in other commands.
    """

    command: str
    data: DataArguments
    training: Any
    model: ModelConfig
    run: RunArguments
    words: tuple[str, ...]
    unread: tuple[str, ...] = ()
    race: RaceArguments | None = None

    @property
    def name(self) -> str:
        """Name of the command, as it was typed."""
        return self.command if self.race is None else "race"


class _Parser(TrlParser):
    """TRL's parser, with errors in one line; an option of several dataclasses has one flag."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing two hundred options."""
        raise ConfigError(f"the command line cannot be read: {message}")

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        hints = get_type_hints(dtype)
        for one in map(copy.copy, dataclasses.fields(dtype)):
            if one.init and f"--{one.name}" not in self._option_string_actions:
                one.type = hints[one.name]
                self._parse_dataclass_field(self, one)


def _parser(command: str, training: Any, race: bool) -> _Parser:
    kinds: Any = (RunArguments, DataArguments, training, ModelConfig)
    kinds += (RaceArguments,) if race else ()
    prog = f"alphatoken {'race' if race else command}"
    parser = _Parser(kinds, prog=prog, allow_abbrev=False)
    parser.add_argument(
        "--config", action="append", help="recipe: a packaged name or a YAML file; may be repeated"
    )
    return parser


def read_arguments(
    command: str,
    words: Sequence[str],
    training: Any,
    *,
    race: bool = False,
    over: Sequence[str] = (),
) -> Arguments:
    """Read the recipe and the command line.

    Args:
        command: "sft" or "dpo".
        words: what follows it.
        training: configuration class of the trainer.
        race: whether it is that of ``alphatoken race``.
        over: words of an arm of a race, which go before the command line.

    Raises:
        ConfigError: an unknown recipe or option, a value that cannot be read, options that
            contradict each other.
    """
    parser = _parser(command, training, race)
    recipes = recipes_of(words)
    for recipe in recipes:
        _refuse_other(recipe, command, race, words)
        _set_defaults(parser, recipe)
    options, unknown = parser.parse_known_args([*words, *over])
    if unknown:
        raise _unknown(unknown[0], parser, "the command line")
    _apply_null_and_source(options, words)
    options.without_rows = as_typed(options.without_rows)
    _refuse_numbers_of_another_file(options, recipes, words)
    template = getattr(options, "chat_template_path", None)  # dpo has none
    if template is not None:
        options.chat_template_path = packaged_file(template) or template
    said = [{name.replace("-", "_") for name in recipe.options} for recipe in recipes]
    named_policies = {str(r.options["policy"]) for r in recipes if "policy" in r.options}
    said += [named_options(words), named_options(over)]
    if named_policies - {options.policy} and "policy_options" in _earlier(said, {"policy"}):
        options.policy_options = None  # of another method
    if race and options.arms is None:
        options.arms = [f"{options.value or 'walk'}-80"]
    _apply_value(options, said, race)
    _refuse_unread_of_trl(options, words)
    if not race:
        _refuse_unread_words(options, training, words)
    unread = _give_way(options, training, said, race=race)
    if options.value and options.estimator != PRESETS[options.value].options["estimator"]:
        options.value = None  # an arm or a later recipe has another estimator
    options.datasets = _mixture(options)
    made = [_make(kind, options) for kind in parser.dataclass_types]
    run, data, config, model, *rest = made
    arguments = Arguments(command, data, config, model, run, tuple(words), unread, *rest)
    return without_unread_rows(arguments, config.reads_fisher, race or config.reads_retention)


def without_unread_rows(
    arguments: Arguments, reads_fisher: bool, reads_retention: bool
) -> Arguments:
    """The same, without rows of a retention term that a recipe names and nothing reads.

    A recipe serves several objectives, as a grid's does; what is typed is meant, and stays.

    Args:
        arguments: of the run.
        reads_fisher: whether it reads a Fisher, or any arm of its race that values tokens.
        reads_retention: the same of retention rows.
    """
    every = arguments.data.unread_of_retention(
        reads_fisher=reads_fisher, reads_retention=reads_retention
    )
    names = [name for name, _ in every if name not in named_options(arguments.words)]
    data = replace(arguments.data)
    for name in names:
        setattr(data, name, None)
    return replace(arguments, data=data, unread=(*arguments.unread, *names))


def named_options(words: Sequence[str]) -> set[str]:
    """Names of the options that a command line names."""
    return {w.split("=")[0].lstrip("-").replace("-", "_") for w in words if w[:2] == "--"}


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Options as they are typed."""
    words = []
    for name, value in options.items():
        text = json.dumps(value) if isinstance(value, (bool, dict, list)) else str(value)
        if name == "layers" and isinstance(value, list):  # "4," is one index, "4" the last four
            text = "".join(f"{index}," for index in value)
        words += [f"--{name}", "null" if value is None else text]
    return words


def _apply_value(options: argparse.Namespace, said: list[set[str]], race: bool) -> None:
    """Set the options of the preset in force, unless they are named beside it or later.

    Args:
        options: all of them; changed in place. ``value`` becomes the preset in force, or None.
        said: as of :func:`_give_way`; where the preset is named, its options are named too.
        race: whether the run is one of ``alphatoken race``.

    Raises:
        ConfigError: an estimator beside a preset of another one.
    """
    place = max((i for i, names in enumerate(said) if "value" in names), default=None)
    if place is None:
        named = set().union(*said)
        if named & {*RESEARCH} or "estimator" in STANDS_FOR.get(options.policy, ()):
            return
        # A walk has no stability side; of what trains without a race the default is the paper's.
        options.value = "walk" if race and options.retention == "none" else "paper"
        said.insert(0, set())
        place = 0
    if options.value is None:
        return
    later = set().union(*said[place + 1 :])
    beside = {name: getattr(options, name) for name in said[place] & {"estimator"} - later}
    preset = written_options(options.value, beside)
    for name in preset.keys() - said[place] - later:
        setattr(options, name, preset[name])
    said[place] |= preset.keys()


def _earlier(said: Sequence[set[str]], deciding: set[str]) -> set[str]:
    """Options that were said before the last of the ``deciding`` ones, and not again since."""
    last = max((i for i, names in enumerate(said) if names & deciding), default=0)
    return set().union(*said[:last]) - set().union(*said[last:])


def _refuse_unread_words(options: argparse.Namespace, training: Any, words: Sequence[str]) -> None:
    """Refuse what is typed and equals a default, so that no configuration can tell it from one.

    Raises:
        ConfigError: ``--value``, or ``--keep_ratio``, beside a policy that does not read it.
    """
    unread, typed = unread_options(vars(options), training.FAMILY), named_options(words)
    reasons = {
        "value": ("estimator", "it values no token", "leave it out, or --policy top"),
        "keep_ratio": ("keep_ratio", "a rule of its own says what is kept", "leave it out"),
    }
    for name, (read, why, remedy) in reasons.items():
        if name in typed and read in unread and getattr(options, name) is not None:
            raise ConfigError(
                f"--{name} has no effect on policy '{options.policy}'",
                got=f"--{name} {getattr(options, name)}",
                why=why,
                remedy=remedy,
            )


_READ_WITH: Mapping[tuple[str, ...], tuple[str, str, str]] = {
    ("lora_", "use_rslora", "use_dora"): (
        "use_peft", "no adapter is trained, but all weights", "--use_peft"
    ),
    ("bnb_4bit_", "use_bnb_nested_quant"): (
        "load_in_4bit", "the model is not loaded in 4 bits", "--load_in_4bit true"
    ),
    ("dataset_config", "dataset_train_split"): (
        "dataset_name", "the rows are none of a data set of the hub", "--dataset_name NAME"
    ),
    ("dataset_test_split",): ("", "rows for evaluation are of a file", "--eval_data FILE"),
    ("ignore_bias_buffers",): ("", "no buffer is left out", "leave it out"),
}  # fmt: skip
"""Beginnings of TRL's options -> the option without which nothing reads them, why, and a remedy."""


def _refuse_unread_of_trl(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Refuse options of TRL's that are typed and have no effect; a recipe's serve several runs.

    Raises:
        ConfigError: names the first.
    """
    for name in sorted(named_options(words)):
        for beginnings, (read_with, why, remedy) in _READ_WITH.items():
            if name.startswith(beginnings) and not getattr(options, read_with, None):
                raise ConfigError(
                    f"--{name} has no effect",
                    got=f"--{name} {getattr(options, name)}"
                    + (f" without --{read_with}" if read_with else ""),
                    why=why,
                    remedy=remedy,
                )


def _give_way(
    options: argparse.Namespace, training: Any, said: Sequence[set[str]], *, race: bool
) -> tuple[str, ...]:
    """Reset options that were said for another policy or estimator than a later one; their names.

    Args:
        options: all of them; changed in place.
        training: configuration class of the trainer.
        said: the options that each recipe names, in their order, then those of the command line.
        race: whether the run is one of ``alphatoken race``, where options of values that no arm
            names itself stand for the arms that have values.
    """
    changed = []
    stands_for = "estimator" in STANDS_FOR.get(options.policy, ())
    for neutral, deciding in (
        (unread_options(vars(options), training.FAMILY), {"policy"}),
        (unread_by_estimator(vars(options)), {"estimator", *(["policy"] if stands_for else [])}),
    ):
        common = OF_VALUES.keys() - said[-1] if race and deciding == {"policy"} else set()
        for name in (_earlier(said, deciding) | common) & set(neutral):
            if getattr(options, name) != neutral[name]:
                setattr(options, name, neutral[name])
                # Options of values serve other policies, and nothing is lost where there are none.
                if not (deciding == {"policy"} and name in OF_VALUES):
                    changed.append(name)
    return tuple(sorted(changed))


def _apply_null_and_source(options: argparse.Namespace, words: Sequence[str]) -> None:
    """Text "null" where an option may be none; and rows named here instead of the recipe's."""
    for one in dataclasses.fields(DataArguments):
        if one.default is None and getattr(options, one.name) in ("null", "none"):
            setattr(options, one.name, None)
    typed_names = named_options(words)
    named = {name for name in SOURCES if name in typed_names and getattr(options, name)}
    for name in SOURCES if named else ():
        if name not in typed_names:
            setattr(options, name, [] if name == "datasets" else None)


def _refuse_numbers_of_another_file(
    options: argparse.Namespace, recipes: Sequence[Recipe], words: Sequence[str]
) -> None:
    """Refuse numbers of rows that a recipe names beside another training file than the run's.

    Raises:
        ConfigError: the run's file would lose rows that nobody meant.
    """
    file: str | None = None
    own = dict[str, str | None]()  # option that names rows -> the file that they are of
    for recipe in recipes:
        said = {name.replace("-", "_"): value for name, value in recipe.options.items()}
        file = said.get("train_file", file)
        own |= {name: file for name in ("without_rows", "arms") if name in said}
    train_file = options.train_file
    for name, of_file in own.items():
        numbers = getattr(options, name, None)
        if name in named_options(words) or None in (numbers, train_file, of_file):
            continue
        if name == "arms" and "without_rows" not in str(numbers):
            continue
        if os.path.realpath(str(of_file)) != os.path.realpath(train_file):
            raise ConfigError(
                "without_rows of a recipe names rows of another file",
                got=f"{numbers} of {of_file}, and --train_file {train_file}",
                remedy=f"--{name} with numbers of this file, or --{name} null",
            )


def _refuse_other(recipe: Recipe, command: str, race: bool, words: Sequence[str]) -> None:
    """Refuse a recipe of another command, with the line that runs it.

    Raises:
        ConfigError: the recipe belongs to another command.
    """
    if recipe.command in (None, command) or (race and recipe.command == "race"):
        return
    remedy = f"alphatoken {recipe.command} --config {recipe.name}"
    if recipe.command == "race":
        pairs = ["--dpo"] if command == "dpo" else []
        remedy = shlex.join(["alphatoken", "race", *pairs, *words])
        if command == "sft" and "walk-80" in recipe.options.get("arms", ()):
            alone = "--policy top --value walk --keep_ratio 0.8"
            remedy += f"; or, without a race, {alone} in place of --config {recipe.name}"
    raise ConfigError(
        "the recipe belongs to another command",
        got=f"{recipe.name} is for `alphatoken {recipe.command}`",
        remedy=remedy,
    )


def _set_defaults(parser: _Parser, recipe: Recipe) -> None:
    """Take the options of a recipe as defaults; later recipes override earlier ones."""
    option_names = {action.dest for action in parser._actions}
    options = {name.replace("-", "_"): value for name, value in recipe.options.items()}
    for name in options:
        if name not in option_names:
            raise _unknown(name, parser, recipe.path.name)
    parser.set_defaults_with_config(**options)


def _unknown(word: str, parser: _Parser, place: str) -> ConfigError:
    name = word.split("=")[0].lstrip("-").replace("-", "_")
    option_names = [action.dest for action in parser._actions]
    today, dashes = RENAMED.get(name), "--" if word.startswith("--") else ""
    what = (
        "there is no such option"
        if word.startswith("-") or place != "the command line"
        else ("an argument belongs to no option")
    )
    return ConfigError(
        what,
        got=f"{word} in {place}",
        remedy=f"{today}, as it is called today"
        if today in option_names
        else close_to(f"{dashes}{name}", [f"{dashes}{own}" for own in option_names])
        or f"{parser.prog} --help lists them",
    )


def _mixture(options: argparse.Namespace) -> list[DatasetConfig]:
    """The data sets of a recipe's mixture.

    Raises:
        ConfigError: they are no list of options.
    """
    sets = options.datasets
    if not isinstance(sets, list) or any(isinstance(one, (str, list)) for one in sets):
        raise ConfigError(
            "datasets are no list of data sets",
            got=repr(sets)[:80],
            remedy="one `- path: ...` for each, as TRL's DatasetMixtureConfig has it",
        )
    made: list[DatasetConfig] = _make(DatasetMixtureConfig, options).datasets
    return made


def _make(kind: Any, options: argparse.Namespace) -> Any:
    """One dataclass of the values read; what its own checks find is one line."""
    names = [f.name for f in dataclasses.fields(kind) if f.init]
    values = {name: getattr(options, name) for name in names}
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
