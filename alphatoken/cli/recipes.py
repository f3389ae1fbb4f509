"""Recipes: named sets of option values in YAML files, packaged ones by name.

Beside options, a recipe may say ``about`` (one line for the help) and ``command`` ("sft", "dpo" or
"race").
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alphatoken.errors import ConfigError

_FOLDER = Path(str(files("alphatoken"))) / "recipes"
_LAYOUTS = _FOLDER / "accelerate"


@dataclass(frozen=True)
class Recipe:
    """One recipe file, read.

    Attributes:
        name: file name without its suffix.
        path: of the file.
        options: what sets options.
        command: that it is for, or None for either.
        about: one line.
    """

    name: str
    path: Path
    options: dict[str, Any]
    command: str | None = None
    about: str = ""


def packaged_recipes() -> Iterator[Recipe]:
    """All recipes of one run that come with the package, by name; its grids are left out."""
    for path in sorted(_FOLDER.glob("*.yaml")):
        recipe = _read(path)
        if recipe.command != "compare":
            yield recipe


def is_packaged(name: str) -> bool:
    """True if a recipe or grid of this name comes with the package."""
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
    names = [p.stem for p in _FOLDER.glob("*.yaml")]
    raise ConfigError(
        "there is no such recipe",
        got=name,
        remedy=close_to(name, names) or "give a file, or a name that --help lists",
    )


def recipes_of(words: Sequence[str]) -> list[Recipe]:
    """Names that the ``--config`` options of a command line give, in their order.

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


def packaged_file(name: str) -> str | None:
    """The path of a chat template that comes with TRL, by its file name; None if there is none."""
    if os.path.basename(name) != name or Path(name).exists():
        return None
    spec = find_spec("trl")  # does not import it
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "chat_templates" / name
    return str(path) if path.is_file() else None


def accelerate_config(name: str) -> tuple[Path, dict[str, Any]]:
    """File and content of a layout of several processes: a path, or a packaged one.

    Raises:
        ConfigError: there is none.
    """
    for path in (Path(name).expanduser(), _LAYOUTS / f"{name}.yaml"):
        if path.is_file():
            return path, _mapping(path)
    names = sorted(path.stem for path in _LAYOUTS.glob("*.yaml"))
    raise ConfigError(
        "there is no such accelerate_config",
        got=name,
        remedy=f"give a file, or one of {', '.join(names)}; or 'none' for one process",
    )


def close_to(word: str, names: list[str]) -> str:
    """A question whether one of ``names`` was meant, or nothing.

    >>> close_to("--seeed", ["--seed", "--speed", "--keep_ratio"])
    'did you mean --seed or --speed?'
    >>> close_to("--validation_fil", ["--validation_file", "--validation_rows"])
    'did you mean --validation_file?'
    """
    matches = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    alike = [difflib.SequenceMatcher(a=word, b=name).ratio() for name in matches]
    # Names that begin alike are no guess beside one that is a letter away.
    near = [name for name, own in zip(matches, alike, strict=True) if own > alike[0] - 0.1]
    return f"did you mean {' or '.join(near)}?" if near else ""


def _mapping(path: Path) -> dict[str, Any]:
    import yaml

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
    command, about = content.pop("command", None), str(content.pop("about", None) or "")
    return Recipe(path.stem, path, content, command, about)
