"""The file of a grid, overridden by the command line.

The file is YAML. ``$NAME`` and ``${NAME}`` in any text are environment variables.

    about: one line
    model_name_or_path: PATH
    policies: [standard, alphatoken]    # all of them, if left out
    modes: [native, budget]
    seeds: [0, 1, 2]
    keep_ratio: 0.5
    options: {...}                      # of the trainer, for every cell
    measures: {...}                     # see alphatoken_lab.measure.measures.Measures
    tasks:
      NAME: {command: sft, options: {...}, measures: {...}, policies: [...], tuned_on: NAME}
    references: {NAME: {command: sft, options: {...}}, ...}
    methods: {NAME: {policy: top, objective: adaptation}, ...}
    tune: {learning_rate: [1.0e-4, 3.0e-4, 1.0e-3]}     # one option, and what every method tries
    keep: [alphatoken]                  # methods whose models of the first seed stay
    extends: FILE_OR_NAME               # another grid, whose keys hold where this one says nothing

``recipe: NAME`` in a task or a reference adopts the options of a recipe of sft or dpo, over which
go those of the grid. A grid that extends another adds to its methods by name; every other key that
it has itself is its own.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alphatoken.cli.recipes import close_to, find_recipe, is_packaged
from alphatoken.errors import ConfigError
from alphatoken.support.options import option
from alphatoken_lab.measure.measures import MeasureOptions, read_measures, require_allowed
from alphatoken_lab.runner.launchers import CellOptions

if TYPE_CHECKING:
    from alphatoken_lab.runner.grid import Grid, Task
    from alphatoken_lab.runner.methods import Method

_KEYS = {
    "about", "model_name_or_path", "policies", "modes", "seeds", "keep_ratio", "options",
    "measures", "tasks", "references", "methods", "tune", "keep",
}  # fmt: skip
_TASK_KEYS = {"command", "recipe", "options", "measures", "policies", "tuned_on"}
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")
_ON_ALL: dict[str, Any] = {
    "policy": "all", "seed": 0, "validation_rows": 0, "validation_file": None, "retention": "none",
    "fisher_data": None, "fisher_file": None,
}  # fmt: skip
"""The options that references set: they train on all tokens of all their rows."""


@dataclass(kw_only=True)
class CompareOptions(MeasureOptions, CellOptions):
    """Options for the folder of the grid."""

    output_dir: str = option("runs/compare", "folder for cells and tables")
    only: str = option("", "cells whose name contains it, and their needs")
    dry_run: bool = option(False, "list the cells, look up their tasks, and stop")
    cell: str | None = option(None, argparse.SUPPRESS)
    config: str | None = option(
        None, "YAML file of a whole grid", group="options for methods, models and rows"
    )
    recipe: str | None = option(None, "recipe of sft or dpo that every cell trains with")
    policies: list[str] | None = option(None, "methods; 'all' (default) for all of them")
    modes: list[Literal["native", "budget"]] | None = option(
        None, "published rule, or a budget (default: both)"
    )
    tasks: list[str] | None = option(None, "tasks of the file (default: all of them)")
    seeds: list[int] | None = option(None, "seeds (default: 0 1 2)")
    keep_ratio: float | None = option(None, "share of tokens in budget cells (default 0.5)")
    model_name_or_path: str | None = option(None, "model folder or hub name")
    train_file: str | None = option(None, "rows that every cell trains on")
    validation_file: str | None = option(None, "rows that values are measured against")


def read_grid(
    options: CompareOptions, words: Sequence[str], variables: Mapping[str, str] | None = None
) -> Grid:
    """The grid of a command line.

    Args:
        options: as ``alphatoken-lab compare`` reads them.
        words: that are options of the trainer, for every cell.
        variables: values of ``$NAME`` in the file; others are those of the environment.

    Raises:
        ConfigError: neither a file nor a recipe, unknown keys, methods or tasks.
    """
    from alphatoken_lab.runner.grid import Grid

    content = _content(options, variables or {})
    require_allowed(content, _KEYS, "the grid")
    own = {name: getattr(options, name) for name in ("policies", "modes", "seeds", "keep_ratio")}
    content |= {name: value for name, value in own.items() if value not in (None, [])}
    tasks = _mapping(content, "tasks")
    require_allowed(dict.fromkeys(options.tasks or ()), set(tasks), "--tasks")
    trainer = _trainer_options(words)
    return Grid(
        tasks=tuple(
            _task(name, entry, content, options, trainer)
            for name, entry in tasks.items()
            if name in (options.tasks or tasks)
        ),
        methods=_methods(content),
        seeds=tuple(content.get("seeds", (0, 1, 2))),
        modes=tuple(content.get("modes", ("native", "budget"))),
        keep_ratio=_ratio(content.get("keep_ratio", 0.5)),
        references=tuple(
            _reference(name, entry, content, options, trainer)
            for name, entry in _mapping(content, "references").items()
        ),
        about=str(content.get("about", "")),
        tune=_mapping(content, "tune"),
        keep=tuple(content.get("keep") or ()),
    )


def expand_variables(value: Any, place: str, variables: Mapping[str, str] | None = None) -> Any:
    """Variables in every text: of ``variables``, else of the environment.

    Raises:
        ConfigError: one that is not set; ``place`` is the file's.
    """
    values = {**os.environ, **(variables or {})}

    def variable(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in values:
            raise ConfigError("an environment variable is not set", got=f"${name} in {place}")
        return values[name]

    if isinstance(value, str):
        return _VARIABLE.sub(variable, value)
    if isinstance(value, Mapping):
        return {key: expand_variables(part, place, variables) for key, part in value.items()}
    if isinstance(value, list):
        return [expand_variables(part, place, variables) for part in value]
    return value


# --- the file -----------------------------------------------------------------------------------


def _content(options: CompareOptions, variables: Mapping[str, str]) -> dict[str, Any]:
    if (options.config is None) == (options.recipe is None):
        raise ConfigError(
            "a grid can come from one place only",
            got="both --config and --recipe" if options.config else "neither",
            remedy="--config GRID.yaml, or --recipe NAME of sft or dpo",
        )
    if options.recipe is not None:
        recipe = find_recipe(options.recipe)
        task = {"command": recipe.command or "sft", "options": dict(recipe.options)}
        return {"about": recipe.about, "tasks": {recipe.name: task}}
    name = str(options.config)
    content: dict[str, Any] = expand_variables(_extended(name, ()), name, variables)
    return content


def _extended(name: str, above: Sequence[str]) -> dict[str, Any]:
    """Content of a grid's file, with that of the grid that it extends."""
    if not Path(name).expanduser().is_file() and not is_packaged(name):
        raise ConfigError("the grid's file does not exist", got=name)
    recipe = find_recipe(name)
    if recipe.command not in (None, "compare"):
        raise ConfigError(
            "this is a recipe of one run, no grid",
            got=f"{recipe.path.name} is for `alphatoken {recipe.command}`",
            remedy=f"--recipe {name}",
        )
    own = dict(recipe.options)
    if recipe.about:
        own["about"] = recipe.about
    base = own.pop("extends", None)
    if base is None:
        return own
    if base in (name, *above):
        raise ConfigError("a grid extends itself", got=" -> ".join([*above, name, str(base)]))
    below = _extended(str(base), (*above, name))
    methods = {**_mapping(below, "methods"), **_mapping(own, "methods")}
    return {**below, **own, "methods": methods}


def _mapping(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = content.get(name) or {}
    if not isinstance(part, Mapping) or not all(isinstance(key, str) for key in part):
        raise ConfigError(f"{name} of the grid is a mapping by name", got=repr(part)[:100])
    return dict(part)


def _trainer_options(words: Sequence[str]) -> dict[str, Any]:
    """``--max_steps 40`` as {max_steps: 40}; values are read as YAML."""
    import yaml

    options: dict[str, Any] = {}
    waiting: str | None = None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            options[name] = yaml.safe_load(value) if equals else True
            waiting = None if equals else name
        elif waiting is None:
            raise ConfigError("an argument belongs to no option", got=word)
        else:
            options[waiting], waiting = yaml.safe_load(word), None
    return options


def _ratio(value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError("keep_ratio must lie in (0, 1]", got=repr(value))
    return float(value)


# --- parts --------------------------------------------------------------------------------------


def _task(
    name: str,
    entry: Any,
    content: Mapping[str, Any],
    options: CompareOptions,
    trainer: Mapping[str, Any],
) -> Task:
    from alphatoken_lab.runner.grid import REFERENCES, Task
    from alphatoken_lab.runner.methods import known_methods

    if name == REFERENCES or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError("a task's name is a folder's, and not 'references'", got=name)
    if not isinstance(entry, Mapping):
        raise ConfigError("a task is a mapping", got=f"{name}: {entry!r}")
    require_allowed(entry, _TASK_KEYS, f"the task {name}")
    files = {
        n: getattr(options, n) for n in ("model_name_or_path", "train_file", "validation_file")
    }
    own = {**_base(entry, content), **_mapping(entry, "options"), **_set(files)}
    if options.train_file is not None:
        own["dataset_name"] = None
    own |= trainer
    if not own.get("model_name_or_path"):
        raise ConfigError("no model is named", got=name, remedy="model_name_or_path")
    policies = entry.get("policies")
    if policies is not None:
        names = {*known_methods(), *_mapping(content, "methods")}
        require_allowed(dict.fromkeys(policies), names, "a task's policies")
    every = {**_mapping(content, "measures"), **_mapping(entry, "measures")}
    every |= options.set_measures()
    return Task(
        name,
        str(entry.get("command", "sft")),
        own,
        read_measures(every, "measures"),
        entry.get("tuned_on"),
        None if policies is None else tuple(policies),
    )


def _reference(
    name: str,
    entry: Any,
    content: Mapping[str, Any],
    options: CompareOptions,
    trainer: Mapping[str, Any],
) -> Task:
    from alphatoken_lab.runner.grid import Task

    if not isinstance(entry, Mapping):
        raise ConfigError("a reference must be a mapping", got=f"{name}: {entry!r}")
    require_allowed(entry, {"command", "recipe", "options"}, f"the reference {name}")
    own = {**_base(entry, content), **_ON_ALL, **_mapping(entry, "options"), **trainer}
    if options.model_name_or_path is not None and "@" not in str(own["model_name_or_path"]):
        own["model_name_or_path"] = options.model_name_or_path
    return Task(name, str(entry.get("command", "sft")), own)


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _base(entry: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a task's recipe, and over them those of every cell, the model among them.

    Raises:
        ConfigError: there is no such recipe, or it is of the other command.
    """
    model = content.get("model_name_or_path")
    shared = {**_mapping(content, "options"), **_set({"model_name_or_path": model})}
    if entry.get("recipe") is None:
        return shared
    recipe, command = find_recipe(str(entry["recipe"])), str(entry.get("command", "sft"))
    if recipe.command not in (None, command):
        raise ConfigError(
            "a recipe is of another command than the cell",
            got=f"{recipe.name} is for `alphatoken {recipe.command}`, the cell says {command}",
            remedy=f"command: {recipe.command}",
        )
    return {**recipe.options, **shared}


def _methods(content: Mapping[str, Any]) -> tuple[Method, ...]:
    """Those that are asked for, in the order of the tables; variants after them."""
    from alphatoken_lab.runner.methods import custom_method, known_methods

    own = {n: custom_method(n, entry) for n, entry in _mapping(content, "methods").items()}
    every = {**known_methods(), **own}
    wanted = list(content.get("policies") or ["all"])
    names = list(every) if wanted == ["all"] else wanted
    for name in names:
        if name not in every and ":" in name:  # one's own, module:Class
            every[name] = custom_method(name, {"policy": name, "modes": ["native", "budget"]})
        elif name not in every:
            raise ConfigError(
                "there is no such method", got=name,
                remedy=close_to(name, list(every)) or f"one of {', '.join(every)}",
            )  # fmt: skip
    return tuple(every[name] for name in dict.fromkeys(names))
