"""Commands that pages and help texts print, and a folder in which each can run as printed."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import alphatoken.cli
import alphatoken_lab.commands
from alphatoken.data import Pair, Row
from alphatoken.data.stdlib import code_pairs, code_rows
from tests.rows import jsonl

ROOT = Path(__file__).parents[1]
PROGRAMS: dict[str, Callable[..., int]] = {
    "alphatoken": alphatoken.cli.main,
    "alphatoken-lab": alphatoken_lab.commands.main,
}
COMMANDS = {
    "alphatoken": ("score", "fisher", "sft", "dpo", "diagnose"),
    "alphatoken-lab": tuple(alphatoken_lab.commands.COMMANDS),
}


@dataclass(frozen=True)
class Printed:
    """One command.

    Attributes:
        place: the page, or the command whose ``--help`` prints it.
        text: on one line.
        whole: True of a line of its own; False of a fragment in a sentence.
    """

    place: str
    text: str
    whole: bool

    @property
    def words(self) -> list[str]:
        """As the shell hands them over."""
        return shlex.split(self.text, comments=True)


# --- what is printed ------------------------------------------------------------------------------


def prose(path: Path) -> str:
    """A page's text; of a notebook that of its cells in Markdown."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


_BLOCK = re.compile(r"^ *```([^`\n]*)\n(.*?)^ *```", re.M | re.S)
_FRAGMENT = re.compile(r"`((?:alphatoken|alphatoken-lab|make|python -m) [^`]+)`")
_STARTS = ("alphatoken ", "alphatoken-lab ", "make ", "torchrun ", "accelerate ", "srun ", "curl ")


def on_pages() -> Iterator[Printed]:
    """Those of README, CONTRIBUTING, the pages and the tutorials."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("docs/**/*.ipynb")]
    for path in sorted(pages):
        if path.stem in ("CHANGELOG", "claims", "files", "log", "options"):
            continue
        place, text = str(path.relative_to(ROOT)), prose(path)
        for kind, block in _BLOCK.findall(text):
            for line in block.replace("\\\n", " ").splitlines() if not kind else ():
                if line.startswith((*_STARTS, "python -m ")):
                    yield Printed(place, " ".join(line.split()), whole=True)
        for found in _FRAGMENT.findall(_BLOCK.sub("", text)):
            yield Printed(place, " ".join(found.split()), whole=False)


def in_help(said: Callable[[str, list[str]], str]) -> Iterator[Printed]:
    """Those of the help texts, without what they call usage.

    Args:
        said: what a program prints for some words.
    """
    for program, commands in COMMANDS.items():
        for words in ([], *([command] for command in commands)):
            text = re.sub(r"usage:.*?(\n\n|\Z)", "", said(program, [*words, "--help"]), flags=re.S)
            for line in text.replace("\\\n", " ").splitlines():
                if re.match(rf" +({'|'.join(PROGRAMS)}) ", line):
                    place = " ".join([program, *words, "--help"])
                    yield Printed(place, " ".join(line.split()), whole=True)


# --- a folder to run them in ----------------------------------------------------------------------

_MODELS = ("model_name_or_path", "before", "after", "reference")
_ROWS = ("train_file", "validation_file", "target_file", "retention_file", "retention_set")


class Sandbox:
    """A folder that has what a command names, under the names that it is printed with.

    Args:
        folder: empty.
        model: of a small decoder, which stands for every model.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model
        self._link(folder / "HuggingFaceTB/SmolLM2-135M-Instruct")

    def prepare(self, words: list[str]) -> None:
        """Write what the options of ``words`` name; no file is of the rows of another."""
        self.write_own(words)
        if (self._folder / "RECIPE").exists():
            self._rows("rows.jsonl", 0, pairs=False)
        pairs, draw = "dpo" in words, 0
        for name, value in pairwise(words):
            option, path = name.removeprefix("--"), self._folder / value
            if option in _MODELS:
                self._link(path)
            elif option == "adapter":
                _write_adapter(self._model, path)
            elif option in _ROWS:
                self._rows(value, draw, pairs)
                draw += 1

    def write_own(self, words: list[str]) -> None:
        """Write what is a user's own and read with the options: a recipe, a policy."""
        for name, value in pairwise(words):
            if name == "--config" and value.isupper():
                recipe = (ROOT / "alphatoken/recipes/laptop-sft.yaml").read_text(encoding="utf-8")
                (self._folder / value).write_text(f"{recipe}\ntrain_file: rows.jsonl\n")
            elif name == "--policy" and value.startswith("my_policy:"):
                page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
                (lines,) = re.findall(r"## Your own policy.*?```python\n(.*?)```", page, re.S)
                (self._folder / "my_policy.py").write_text(lines)

    def _link(self, place: Path) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.symlink_to(self._model.resolve())

    def _rows(self, value: str, draw: int, pairs: bool) -> None:
        """Rows, enough for what a recipe holds out of a file to train on."""
        value = value.partition("=")[2] if "=" in value.partition(",")[0] else value
        name, *columns = value.split(",")
        prompt, response = [c.partition("=")[2] for c in columns] or ["prompt", "response"]
        path, count = self._folder / name, 72 if draw == 0 else 20
        if name.endswith("/"):
            path = path / "part-0.jsonl"
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if pairs:
            count, drawn = 120, short_pairs()
            records = [_pair_record(pair) for pair in drawn[draw * count : (draw + 1) * count]]
        else:
            rows = short_rows()[72 * bool(draw) + 20 * (draw - 1) * bool(draw) :][:count]
            records = [{prompt: row.prompt, response: row.response} for row in rows]
        assert len(records) == count
        jsonl(path, records)


@cache
def short_rows() -> list[Row]:
    """Functions of the standard library that a small step reads in a moment."""
    return [row for row in code_rows(900) if len(row.prompt) + len(row.response) < 260]


@cache
def short_pairs() -> list[Pair]:
    """Pairs of them, likewise."""
    return [pair for pair in code_pairs(900) if len(str(_pair_record(pair))) < 520]


def _pair_record(pair: Pair) -> dict[str, str]:
    sides: Mapping[str, Any] = {
        "prompt": pair.prompt, "chosen": pair.chosen, "rejected": pair.rejected,
    }  # fmt: skip
    return {name: turns[0].text for name, turns in sides.items()}


def _write_adapter(model: Path, path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, r=2)
    base = AutoModelForCausalLM.from_pretrained(model)
    get_peft_model(base, config).save_pretrained(path)


def bin_of_python(environment: Mapping[str, str], python: str) -> dict[str, str]:
    """The environment with the programs of this Python first, as after ``activate``."""
    return {**environment, "PATH": f"{Path(python).parent}{os.pathsep}{environment['PATH']}"}
