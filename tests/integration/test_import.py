"""Importing the package is light: no model library, no warning, nothing from the outer rim."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

EVERYTHING = "import alphatoken; [getattr(alphatoken, name) for name in alphatoken.__all__]"
"""The facade is lazy: its modules come with the first use of their names."""


def loaded_after(statement: str) -> set[str]:
    """Modules in a fresh interpreter after ``statement``; warnings are errors."""
    code = f"{statement}\nimport sys; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_loads_no_model_library_nor_the_outer_rim() -> None:
    outer = ("oracle", "diagnose", "cli", "model.transformers", "model.dispatch",
             "direction.optimizers", "direction.preconditioner")  # fmt: skip
    heavy = {"transformers", "peft", "trl", "pyarrow", "matplotlib"}
    heavy |= {f"alphatoken.{name}" for name in outer}
    assert not heavy & loaded_after(EVERYTHING)


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom alphatoken.cli import main\n"
        "for words in ('--help', '--version', 'score --help', 'fisher --help', 'sft --help',\n"
        "              'dpo --help', 'diagnose --help'):\n"
        "    try: status = main(words.split())\n"
        "    except SystemExit as done: status = done.code\n"
        "    assert status == 0, words\n"
        "from alphatoken_lab.commands import main as lab\n"
        "for words in ('--help', 'compare --help', 'evaluate --help',\n"
        "              'merge --help', 'paper --help'):\n"
        "    try: status = lab(words.split())\n"
        "    except SystemExit as done: status = done.code\n"
        "    assert not status, words\n"
        "import alphatoken.demo.__main__\n"  # it says what it does before all of this is loaded
        "heavy = {'torch', 'numpy', 'jaxtyping', 'transformers', 'trl', 'datasets', 'matplotlib'}\n"
        "heavy &= set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.partition("How far can I trust")[0].splitlines()
    assert any(line.startswith("alphatoken ") for line in lines)
    assert max(map(len, lines)) <= 100


def test_a_missing_file_is_said_before_anything_heavy_is_loaded() -> None:
    """Of the commands that train, whose libraries take seconds to load."""
    code = (
        "import sys\nfrom alphatoken.cli import main\n"
        "words = ['--model_name_or_path', 'M', '--train_file', 'no.jsonl']\n"
        "for command in ('sft', 'dpo', 'race'):\n"
        "    assert main([command, *words]) == 2, command\n"
        "heavy = {'transformers', 'trl', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("train_file does not exist. Got: no.jsonl") == 3


def test_every_name_of_the_facade_is_there_in_every_way() -> None:
    import alphatoken

    homes = [name for names in alphatoken._HOMES.values() for name in names]
    assert sorted([*homes, "__version__"]) == sorted(alphatoken.__all__)
    assert len(homes) == len(set(homes))
    assert set(alphatoken.__all__) <= set(dir(alphatoken))
    for module, names in alphatoken._HOMES.items():
        home = importlib.import_module(f"alphatoken.{module}")
        assert all(getattr(alphatoken, name) is getattr(home, name) for name in names)
    room: dict[str, object] = {}
    exec("from alphatoken import *", room)
    assert set(alphatoken.__all__) <= set(room)


def test_what_type_checkers_read_is_what_is_loaded() -> None:
    import alphatoken

    tree = ast.parse(Path(alphatoken.__file__).read_text(encoding="utf-8"))
    named = {
        node.module.removeprefix("alphatoken."): tuple(alias.name for alias in node.names)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("alphatoken.")
    }
    assert named == alphatoken._HOMES


def test_a_name_that_is_not_offered_is_an_attribute_error() -> None:
    import alphatoken

    with pytest.raises(AttributeError, match="no attribute 'Scorrer'"):
        _ = alphatoken.Scorrer
    assert not hasattr(alphatoken, "Direction"), "internal names stay in their modules"
