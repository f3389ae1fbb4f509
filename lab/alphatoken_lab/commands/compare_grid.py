"""Grid of ``alphatoken-lab compare``: its file, overridden by the command line.

The file is YAML. ``$NAME`` and ``${NAME}`` in any text are environment variables.

    about: one line
    model_name_or_path: PATH
    policies: [standard, alphatoken]    # all of them, if left out
    modes: [native, budget]
    seeds: [0, 1, 2]
    keep_ratio: 0.5
    options: {...}                      # of the trainer, for every cell
    measures: {...}                     # see alphatoken_lab.compare.grid.Measures
    tasks:
      NAME: {command: sft, options: {...}, measures: {...}, policies: [...], tuned_on: NAME}
    references: {NAME: {command: sft, options: {...}}, ...}
    methods: {NAME: {policy: top, objective: adaptation}, ...}
    tune: {learning_rate: [1.0e-4, 3.0e-4, 1.0e-3]}     # one option, and what every method tries
    keep: [alphatoken]                  # methods whose models of the first seed stay
    extends: FILE_OR_NAME               # another grid, whose keys hold where this one says nothing

``recipe: NAME`` in a task or a reference takes the options of a recipe of sft or dpo, over which go
those of the grid. A grid that extends another adds to its methods by name; every other key that it
has itself is its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from alphatoken.errors import ConfigError
from alphatoken.support.options import option

if TYPE_CHECKING:
    from alphatoken_lab.compare.grid import Grid, TaskSpec
    from alphatoken_lab.compare.measures import Measures
    from alphatoken_lab.compare.methods import Method

__all__ = ["CellOptions", "GridOptions", "expanded", "grid_content", "read_grid", "require_known"]

_KEYS = {
    "about", "model_name_or_path", "policies", "modes", "seeds", "keep_ratio", "options",
    "measures", "tasks", "references", "methods", "tune", "keep",
}  # fmt: skip
_TASK_KEYS = {"command", "recipe", "options", "measures", "policies", "tuned_on"}
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)\}")


@dataclass(kw_only=True)
class _What:
    """Options for models and methods."""

    config: str | None = option(None, "YAML file of a whole grid")
    recipe: str | None = option(None, "recipe of sft or dpo that every cell trains with")
    policies: list[str] | None = option(None, "methods; 'all' (default) for all of them")
    modes: list[Literal["native", "budget"]] | None = option(
        None, "published rule, or a budget (default: both)"
    )
    tasks: list[str] | None = option(None, "tasks of the file (default: all of them)")
    seeds: list[int] | None = option(None, "seeds (default: 0 1 2)")
    keep_ratio: float | None = option(None, "share of tokens in budget cells (default 0.5)")


@dataclass(kw_only=True)
class _Rows:
    """Model and rows, instead of the file's."""

    model_name_or_path: str | None = option(None, "model folder or hub name")
    train_file: str | None = option(None, "rows that every cell trains on")
    validation_file: str | None = option(None, "rows that values are measured against")
    target_file: str | None = option(None, "held-out rows: the target loss")
    retention_file: str | None = option(None, "rows that must not be forgotten")
    evaluate: list[str] | None = option(None, "lm-eval tasks as target (name:metric)")
    evaluate_retention: list[str] | None = option(None, "lm-eval tasks as retention")
    task_path: str | None = option(None, "YAML files of local lm-eval tasks")


@dataclass(kw_only=True)
class GridOptions(_What, _Rows):
    """Options of a grid that the command line may set."""


@dataclass(kw_only=True)
class CellOptions:
    """Options for running the cells."""

    processes: int = option(1, "number of cells at a time, or in the queue at a time")
    devices: str | None = option(None, "indices of the GPUs for cells: 0,1,2,3")
    devices_per_cell: int = option(
        1, "number of GPUs of one cell; its global batch stays", at_least=1, metavar="GPUS"
    )
    launcher: Literal["local", "slurm", "submitit-local"] = option(
        "local", "this machine, or a queue by submitit"
    )
    queue: str | None = option(None, "submitit's parameters: slurm_partition=gpu,timeout_min=600")


def read_grid(options: GridOptions, more: Sequence[str]) -> Grid:
    """The grid of a command line.

    Args:
        options: as ``alphatoken-lab compare`` reads them.
        more: words that are options of the trainer, for every cell.

    Raises:
        ConfigError: neither a file nor a recipe, unknown keys, methods or tasks.
    """
    from alphatoken_lab.compare.grid import Grid

    content = _content(options)
    require_known(content, _KEYS, "the grid")
    extra = _trainer_options(more)
    named = _mapping(content, "tasks")
    for name in options.tasks or ():
        require_known({name: None}, set(named), "--tasks")
    tasks = tuple(
        _task(name, given, content, options, extra)
        for name, given in named.items()
        if name in (options.tasks or named)
    )
    return Grid(
        tasks=tasks,
        methods=_methods(content, options.policies),
        seeds=tuple(options.seeds or content.get("seeds", (0, 1, 2))),
        modes=tuple(options.modes or content.get("modes", ("native", "budget"))),
        keep_ratio=_ratio(
            content.get("keep_ratio", 0.5) if options.keep_ratio is None else options.keep_ratio
        ),
        references=_references(content, options, extra),
        about=str(content.get("about", "")),
        tune=_mapping(content, "tune"),
        keep=tuple(content.get("keep") or ()),
    )


def _ratio(value: Any) -> float:
    if not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ConfigError("keep_ratio must lie in (0, 1]", got=repr(value))
    return float(value)


def _content(options: GridOptions) -> dict[str, Any]:
    """Content of the file, or of a recipe as the only task."""
    from alphatoken.cli.recipes import find_recipe

    if (options.config is None) == (options.recipe is None):
        raise ConfigError(
            "a grid can come from one place only",
            got="both --config and --recipe" if options.config else "neither",
            remedy="--config GRID.yaml, or --recipe NAME of sft or dpo",
        )
    if options.recipe is not None:
        recipe = find_recipe(options.recipe)
        command = recipe.command or "sft"
        return {
            "about": recipe.about,
            "tasks": {recipe.name: {"command": command, "options": dict(recipe.options)}},
        }
    found, about = grid_content(str(options.config))
    return {"about": about, **expanded(found, str(options.config))}


def grid_content(name: str) -> tuple[dict[str, Any], str]:
    """Content of a grid's file, with that of the grid that it extends; and its one line.

    Args:
        name: of a file, or of a packaged grid.

    Raises:
        ConfigError: there is none, it is a recipe of one run, or it extends itself.
    """
    return _extended(name, ())


def _extended(name: str, above: Sequence[str]) -> tuple[dict[str, Any], str]:
    from alphatoken.cli.recipes import find_recipe, is_packaged

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
    base = own.pop("extends", None)
    if base is None:
        return own, recipe.about
    if base in (name, *above):
        raise ConfigError("a grid extends itself", got=" -> ".join([*above, name, str(base)]))
    below, about = _extended(str(base), (*above, name))
    methods = {**_mapping(below, "methods"), **_mapping(own, "methods")}
    return {**below, **own, "methods": methods}, recipe.about or about


def expanded(value: Any, place: str) -> Any:
    """Environment variables in every text.

    Raises:
        ConfigError: one that is not set; ``place`` is the file's.
    """
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: _variable(match[1] or match[2], place), value)
    if isinstance(value, Mapping):
        return {key: expanded(one, place) for key, one in value.items()}
    return [expanded(one, place) for one in value] if isinstance(value, list) else value


def _variable(name: str, place: str) -> str:
    found = os.environ.get(name)
    if found is None:
        raise ConfigError("an environment variable is not set", got=f"${name} in {place}")
    return found


def require_known(given: Mapping[str, Any], known: set[str], place: str) -> None:
    """Refuse keys that mean nothing.

    Raises:
        ConfigError: the first of them, and what was meant.
    """
    from alphatoken.cli.recipes import close_to

    for name in given:
        if name not in known:
            remedy = close_to(str(name), sorted(known)) or f"one of {', '.join(sorted(known))}"
            raise ConfigError(f"{place} has an unknown key", got=str(name), remedy=remedy)


def _mapping(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = content.get(name) or {}
    if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
        raise ConfigError(f"{name} of the grid is a mapping by name", got=repr(found)[:100])
    return dict(found)


def _trainer_options(words: Sequence[str]) -> dict[str, Any]:
    """``--max_steps 40`` as {max_steps: 40}; values are read as YAML."""
    import yaml

    found: dict[str, Any] = {}
    waiting: str | None = None
    for word in words:
        if word.startswith("--"):
            name, given, value = word[2:].partition("=")
            waiting = name.replace("-", "_")
            found[waiting] = yaml.safe_load(value) if given else True
            waiting = None if given else waiting
        elif waiting is None:
            raise ConfigError("an argument belongs to no option", got=word)
        else:
            found[waiting], waiting = yaml.safe_load(word), None
    return found


# --- parts --------------------------------------------------------------------------------------


def _task(
    name: str,
    given: Any,
    content: Mapping[str, Any],
    options: GridOptions,
    extra: Mapping[str, Any],
) -> TaskSpec:
    from alphatoken_lab.compare.grid import TaskSpec

    if name == "references" or not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError("a task's name is a folder's, and not 'references'", got=name)
    if not isinstance(given, Mapping):
        raise ConfigError("a task is a mapping", got=f"{name}: {given!r}")
    require_known(given, _TASK_KEYS, f"the task {name}")
    own = {
        **_of_recipe(given), **_base(content), **_mapping(given, "options"),
        **_files(options), **extra,
    }  # fmt: skip
    if not own.get("model_name_or_path"):
        raise ConfigError("no model is named", got=name, remedy="model_name_or_path")
    measures = {**_mapping(content, "measures"), **_mapping(given, "measures")}
    return TaskSpec(
        name,
        str(given.get("command", "sft")),
        own,
        _measures(measures, options),
        given.get("tuned_on"),
        _policies_of(given, content),
    )


def _of_recipe(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the recipe that a task or a reference names.

    Raises:
        ConfigError: there is none, or it is of the other command.
    """
    from alphatoken.cli.recipes import find_recipe

    if given.get("recipe") is None:
        return {}
    recipe, command = find_recipe(str(given["recipe"])), str(given.get("command", "sft"))
    if recipe.command not in (None, command):
        raise ConfigError(
            "a recipe is of another command than the cell",
            got=f"{recipe.name} is for `alphatoken {recipe.command}`, the cell says {command}",
            remedy=f"command: {recipe.command}",
        )
    return dict(recipe.options)


def _policies_of(given: Mapping[str, Any], content: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Methods of one task, each known to the grid."""
    from alphatoken_lab.compare.methods import known_methods

    names = given.get("policies")
    if names is None:
        return None
    require_known(
        dict.fromkeys(names), {*known_methods(), *_mapping(content, "methods")}, "a task's policies"
    )
    return tuple(names)


def _base(content: Mapping[str, Any]) -> dict[str, Any]:
    """Options of every cell, the model among them."""
    model = content.get("model_name_or_path")
    named = {} if model is None else {"model_name_or_path": model}
    return {**_mapping(content, "options"), **named}


def _files(options: GridOptions) -> dict[str, Any]:
    """Files that the command line names instead."""
    given = {
        "model_name_or_path": options.model_name_or_path,
        "train_file": options.train_file,
        "validation_file": options.validation_file,
    }
    found: dict[str, Any] = {k: value for k, value in given.items() if value is not None}
    if "train_file" in found:
        found["dataset_name"] = None
    return found


def _measures(given: Mapping[str, Any], options: GridOptions) -> Measures:
    from alphatoken_lab.compare.measures import Measures

    require_known(given, {one.name for one in fields(Measures)}, "measures")
    said = {
        "target_file": options.target_file,
        "retention_file": options.retention_file,
        "target_tasks": options.evaluate,
        "retention_tasks": options.evaluate_retention,
        "task_path": options.task_path,
    }
    return Measures(**{**given, **{name: one for name, one in said.items() if one is not None}})


def _methods(content: Mapping[str, Any], asked: Sequence[str] | None) -> tuple[Method, ...]:
    """Those that are asked for, in the order of the tables; variants after them."""
    from alphatoken.cli.recipes import close_to
    from alphatoken_lab.compare.methods import custom_method, known_methods

    known = known_methods()
    own = {n: custom_method(n, given) for n, given in _mapping(content, "methods").items()}
    every = {**known, **own}
    wanted = list(asked or content.get("policies") or ["all"])
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


def _references(
    content: Mapping[str, Any], options: GridOptions, extra: Mapping[str, Any]
) -> tuple[Any, ...]:
    from alphatoken_lab.compare.grid import ON_ALL, Reference

    found = []
    for name, given in _mapping(content, "references").items():
        if not isinstance(given, Mapping):
            raise ConfigError("a reference must be a mapping", got=f"{name}: {given!r}")
        require_known(given, {"command", "recipe", "options"}, f"the reference {name}")
        own = {
            **_of_recipe(given), **_base(content), **ON_ALL,
            **_mapping(given, "options"), **extra,
        }  # fmt: skip
        if options.model_name_or_path is not None and "@" not in str(own["model_name_or_path"]):
            own["model_name_or_path"] = options.model_name_or_path
        found.append(Reference(name, str(given.get("command", "sft")), own))
    return tuple(found)
