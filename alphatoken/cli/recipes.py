"""Recipes: options in a YAML file, packaged ones by name; and ``alphatoken recipes``.

Beside options, a recipe may hold what belongs to no option: ``about`` (one line), ``command``
("sft" or "dpo"), ``model_shape`` (keyword arguments of transformers' ``AutoConfig.for_model``) and
``expected_rows`` (rows of its training set), from which ``--dry-run`` plans where neither model nor
data can be reached; and ``env``, TRL's, environment variables to set.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alphatoken.cli.options import CommandParser
from alphatoken.errors import ConfigError

__all__ = [
    "Recipe",
    "accelerate_config",
    "close_to",
    "find_recipe",
    "is_packaged",
    "joined",
    "packaged_file",
    "packaged_recipes",
    "recipes_of",
    "run",
]

_FOLDER = Path(str(files("alphatoken"))) / "recipes"
_LAYOUTS = _FOLDER / "accelerate"
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Recipe:
    """One recipe file, read.

    Attributes:
        name: file name without its suffix.
        path: of the file.
        options: what sets options.
        command: that it is for, or None for either.
        about: one line.
        model_shape: arguments of ``AutoConfig.for_model``, ``model_type`` included.
        expected_rows: rows of the training set before anything is held out.
        env: environment variables to set.
    """

    name: str
    path: Path
    options: dict[str, Any]
    command: str | None = None
    about: str = ""
    model_shape: dict[str, Any] | None = None
    expected_rows: int | None = None
    env: dict[str, str] = field(default_factory=dict)


def run(words: Sequence[str]) -> int:
    """Print the packaged recipes, one a line; the exit status."""
    parser = CommandParser("recipes", description="List the packaged recipes of sft and dpo.")
    parser.add_argument("--traceback", action="store_true", help="of an error")
    parser.parse_args(list(words))
    recipes = list(packaged_recipes())
    width = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        print(f"{recipe.name:<{width}}  {recipe.command}  {recipe.about}")
    print(f"\nfiles: {_FOLDER}\nuse: alphatoken {recipes[0].command} --config {recipes[0].name}")
    return 0


def packaged_recipes() -> Iterator[Recipe]:
    """All recipes of one run that come with the package, by name; its grids are left out."""
    for path in sorted(_FOLDER.glob("*.yaml")):
        recipe = _read(path)
        if recipe.command != "compare":
            yield recipe


def is_packaged(name: str) -> bool:
    """Whether a recipe or grid of this name comes with the package."""
    packaged = _FOLDER / f"{name}.yaml"
    return packaged.parent == _FOLDER and packaged.is_file()


def find_recipe(name: str) -> Recipe:
    """A recipe by its file, or a packaged one by its name.

    Raises:
        ConfigError: there is none, or the file is not a recipe.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return _read(path)
    if is_packaged(name):
        return _read(_FOLDER / f"{name}.yaml")
    known = [p.stem for p in _FOLDER.glob("*.yaml")]
    raise ConfigError(
        "there is no such recipe",
        got=name,
        remedy=close_to(name, known) or "give a file, or a name that `alphatoken recipes` lists",
    )


def recipes_of(words: Sequence[str]) -> list[Recipe]:
    """What the ``--config`` options among the words of a command line name, in their order.

    Raises:
        ConfigError: as of :func:`find_recipe`, or an option without its value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append", default=[])
    try:
        names = parser.parse_known_args(list(words))[0].config
    except argparse.ArgumentError as error:
        raise ConfigError(f"the command line cannot be read: {error}") from None
    return [find_recipe(name) for name in names]


def joined(first: Recipe, second: Recipe) -> Recipe:
    """One recipe of two, where the second says something, it says so for both."""
    own = {one.name: getattr(second, one.name) for one in fields(Recipe)}
    said = {name: value for name, value in own.items() if value and name not in ("name", "path")}
    return replace(
        first,
        **{
            **said,
            "name": f"{first.name}, {second.name}",
            "options": {**first.options, **second.options},
            "env": {**first.env, **second.env},
        },
    )


def packaged_file(name: str) -> str | None:
    """The path of a chat template that comes with TRL, by its file name; None if there is none."""
    if os.path.basename(name) != name or Path(name).exists():
        return None
    found = _trl() / "chat_templates" / name
    return str(found) if found.is_file() else None


def _trl() -> Path:
    """TRL's folder, without importing it."""
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def accelerate_config(name: str) -> tuple[Path, dict[str, Any]]:
    """File and content of a layout: a path, one of ours, or one of TRL's.

    Raises:
        ConfigError: there is none.
    """
    theirs = _trl() / "accelerate_configs"
    candidates = [Path(name).expanduser(), _LAYOUTS / f"{name}.yaml", theirs / f"{name}.yaml"]
    for path in candidates:
        if path.is_file():
            return path, _mapping(path)
    known = sorted({p.stem for folder in (_LAYOUTS, theirs) for p in folder.glob("*.yaml")})
    raise ConfigError(
        "there is no such accelerate_config",
        got=name,
        remedy=f"give a file, or one of {', '.join(known)}; or 'none' for one process",
    )


def close_to(word: str, known: list[str]) -> str:
    """A question whether one of ``known`` was meant, or nothing."""
    found = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(found)}?" if found else ""


def _mapping(path: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(
            "the YAML file cannot be read",
            got=f"{path}: {' '.join(str(error).split())[:200]}",
            remedy="mend the file",
        ) from None
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise ConfigError(
            "the YAML file holds no options",
            got=f"{path}: {type(content).__name__}",
            remedy="write one `option: value` a line",
        )
    return dict(content)


def _read(path: Path) -> Recipe:
    content = _mapping(path)
    aside = {name: content.pop(name, None) for name in _ASIDE}
    for name, kind in _ASIDE.items():
        if aside[name] is not None and not isinstance(aside[name], kind):
            raise ConfigError(
                f"{name} of the recipe is not of its kind",
                got=f"{path.name}: {name} is {type(aside[name]).__name__}, not {kind.__name__}",
            )
    return Recipe(
        name=path.stem if path.suffix in _SUFFIXES else path.name,
        path=path,
        options=content,
        command=aside["command"],
        about=aside["about"] or "",
        model_shape=aside["model_shape"],
        expected_rows=aside["expected_rows"],
        env={key: str(value) for key, value in (aside["env"] or {}).items()},
    )


_ASIDE: dict[str, type] = {
    "command": str,
    "about": str,
    "model_shape": dict,
    "expected_rows": int,
    "env": dict,
}
