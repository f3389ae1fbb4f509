"""Every command that a page or a help text prints is read as printed, and runs as printed.

It runs in a folder of small rows and a small model, under the names that it is printed with. README
and the quick start are run as a whole by ``test_examples.py``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import alphatoken.cli
import alphatoken_lab.commands
from alphatoken.cli.arguments import read_arguments
from alphatoken.cli.diagnose_options import read_request
from alphatoken.cli.program import spelled
from alphatoken.cli.training import trainer_of
from alphatoken.data import Pair
from alphatoken.data.stdlib import code_pairs, code_rows
from alphatoken.errors import ConfigError
from alphatoken.race.arms import read_arms
from alphatoken_lab.commands import compare, paper
from alphatoken_lab.runner.grid import all_cells
from alphatoken_lab.runner.grid_file import read_grid
from tests.lab.forked_cells import forked_cells
from tests.places import nightly
from tests.rows import jsonl

ROOT = Path(__file__).parents[2]
PROGRAMS: dict[str, Callable[..., int]] = {
    "alphatoken": alphatoken.cli.main,
    "alphatoken-lab": alphatoken_lab.commands.main,
}
COMMANDS = {
    "alphatoken": ("show", "score", "fisher", "sft", "dpo", "race", "diagnose"),
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
        for fragment in _FRAGMENT.findall(_BLOCK.sub("", text)):
            yield Printed(place, " ".join(fragment.split()), whole=False)


def said(program: str, words: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        PROGRAMS[program](words)
    return out.getvalue()


def in_help() -> Iterator[Printed]:
    """Those of the help texts, without what they call usage."""
    for program, commands in COMMANDS.items():
        for words in ([], *([command] for command in commands)):
            text = re.sub(r"usage:.*?(\n\n|\Z)", "", said(program, [*words, "--help"]), flags=re.S)
            for line in text.replace("\\\n", " ").splitlines():
                if re.match(rf" +({'|'.join(PROGRAMS)}) ", line):
                    place = " ".join([program, *words, "--help"])
                    yield Printed(place, " ".join(line.split()), whole=True)


# --- a folder to run them in ----------------------------------------------------------------------

_MODELS = ("model_name_or_path", "before", "after", "reference")
_ROWS = (
    "train_file",
    "validation_file",
    "choosing_file",
    "target_file",
    "retention_file",
    "retention_set",
)


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
        pairs, draw = bool({"dpo", "--dpo"} & {*words}), 0
        if words[1] == "show" and not words[2].startswith("-"):
            self._rows(words[2], 0, pairs="pairs" in words[2])
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
                page = (ROOT / "docs/own.md").read_text(encoding="utf-8")
                (lines,) = re.findall(r"## A policy.*?```python\n(.*?)```", page, re.S)
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
        # Functions of the standard library that a small step reads in a moment.
        if pairs:
            count, drawn = 120, [r for r in map(_pair_record, code_pairs(900)) if len(str(r)) < 520]
            records = drawn[draw * count : (draw + 1) * count]
        else:
            rows = [r for r in code_rows(900) if len(r.prompt) + len(r.response) < 260]
            rows = rows[72 * bool(draw) + 20 * (draw - 1) * bool(draw) :][:count]
            own = {"weight": 0.5} if "weighted" in name else {}
            records = [{prompt: row.prompt, response: row.response, **own} for row in rows]
        assert len(records) == count
        jsonl(path, records)


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


# --- which of them run here -----------------------------------------------------------------------

NOT_RUN = {
    "accelerate launch --config_file my.yaml": "a layout of several GPUs, on a model of the hub",
    "alphatoken score ... ": "abridged: Ray over 32 GPUs",
    "alphatoken-lab evaluate runs/": "tasks of the hub, containers, a judge's endpoint",
    "alphatoken-lab paper ablation_rq3": "hours, on GPUs or on SmolLM2",
    "alphatoken-lab paper tab:": "hours on SmolLM2",
    "curl ": "the network",
    "python -m benchmarks": "hours, and larger sets of rows",
    "srun ": "a SLURM cluster",
    "torchrun --nproc-per-node 8": "abridged: eight GPUs",
}
"""Beginnings of commands that are printed and not run, and why."""

ELSEWHERE = ("README.md", "docs/quickstart.md")
"""Pages whose blocks ``test_examples.py`` runs, one after the other."""

SMALL = ["--budget", "0.1s", "--oracle_tokens", "8", "--fisher_samples", "8"]
"""Sizes after the words of ``diagnose``, whose own take minutes each."""
SHORT = ["--max_steps", "3", "--looks", "1", "2"]
"""Steps after the words of ``race``: a short run has no look of its own."""


@cache
def printed() -> list[Printed]:
    return list(dict.fromkeys([*on_pages(), *in_help()]))


def ours(one: Printed) -> tuple[str, str, list[str]] | None:
    """Program, command and its words; None of what is not one of our programs, or abridged."""
    words = one.words
    if words[0] not in PROGRAMS or words[1:2] == ["--help"] or "..." in words:
        return None
    return words[0], words[1], spelled(words[2:])


# --- read -----------------------------------------------------------------------------------------


def test_there_are_commands_and_each_is_one_of_its_program() -> None:
    whole = [one for one in printed() if one.whole]
    assert len(whole) > 50
    assert {one.place for one in whole} >= {"README.md", "docs/compare.md", "alphatoken --help"}
    for one in printed():
        words = one.words
        if words[0] in PROGRAMS and words[1] not in ("--help", "COMMAND"):
            assert words[1] in COMMANDS[words[0]], one
    for start in NOT_RUN:
        assert any(one.text.startswith(start) for one in whole), f"nothing is printed as {start!r}"


def test_targets_of_make_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w -]+):(?!=)", makefile, re.M))
    existing = {name for line in targets for name in line.split()}
    printed_targets = {
        word
        for one in printed()
        if one.words[0] == "make"
        for word in one.words[1:]
        if "=" not in word
    }
    assert {"demo", "test"} <= printed_targets
    assert printed_targets <= existing


def read(program: str, command: str, words: list[str]) -> None:
    """Read the words as the command does, before it loads anything."""
    if command in ("sft", "dpo"):
        read_arguments(command, words, trainer_of(command)[0])
    elif command == "race":
        kind = "dpo" if "--dpo" in words else "sft"
        read_arms(read_arguments(kind, words, trainer_of(kind)[0], race=True).race.arms)
    elif command == "diagnose":
        _ = read_request(*words)[0].scorer_config()
    elif command == "compare":
        all_cells(read_grid(*compare.parse(words)))
    elif command == "paper":
        paper.parse(words)
    elif command == "policies":
        assert PROGRAMS[program]([command, *words]) == 0
    else:
        room = "alphatoken.cli" if program == "alphatoken" else "alphatoken_lab.commands"
        options = import_module(f"{room}.{command}").read(words)
        _ = getattr(options, "config", None), getattr(options, "how", None)


def test_each_line_is_read_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the options of today, which do not contradict each other."""
    lines = {tuple(one.words): one for one in printed() if one.whole and "--help" not in one.words}
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # which the program does
    box = Sandbox(tmp_path, tmp_path)
    read_here = {words: one for words, one in lines.items() if ours(one) is not None}
    assert len(read_here) > 40
    for one in read_here.values():
        box.write_own(one.words)
        program, command, words = ours(one) or ("", "", [])
        try:
            read(program, command, words)
        except ConfigError as error:
            raise AssertionError(f"{one.place}: {one.text}") from error


def test_fragments_name_options_that_there_are() -> None:
    """Those in sentences, which leave words out."""
    looked = 0
    for one in printed():
        if one.whole or (command_line := ours(one)) is None:
            continue
        program, command, words = command_line
        named = {word[2:].split("=")[0] for word in words if word[:2] == "--"}
        if named - {"help", "list"}:
            whole = "--help" if command in ("show", "fisher") or "lab" in program else "--help_all"
            help_of = [command, "all" if words[:1] == ["all"] else words[0], whole]
            text = said(program, help_of if command == "diagnose" else [command, whole])
            for name in named:
                assert re.search(rf"--(no_)?{name}\b", text), (one.place, one.text, name)
            looked += 1
    assert looked > 6


# --- run ------------------------------------------------------------------------------------------


def to_run() -> list[Any]:
    """Lines that can run here, each once, by their places."""
    lines: dict[str, str] = {}
    for one in printed():
        elsewhere = one.place in ELSEWHERE or one.words[0] == "make"
        if one.whole and not elsewhere and not one.text.startswith(tuple(NOT_RUN)):
            lines.setdefault(one.text.partition(" # ")[0], one.place)
    late = [text for text in lines if "less" in text]  # as long as a third of the others together
    for long in ("alphatoken diagnose all", "alphatoken-lab compare"):
        late += [text for text in lines if text.startswith(long)][1:]
    return [
        pytest.param(text, id=f"{place}: {text[:60]}", marks=nightly if text in late else ())
        for text, place in lines.items()
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # grids are many processes
@pytest.mark.filterwarnings("ignore")  # those of a user's session: libraries' own
@pytest.mark.parametrize("text", to_run())
def test_a_line_runs_as_printed(
    text: str, library_decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = Printed("", text, whole=True).words
    Sandbox(tmp_path, library_decoder).prepare(words)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    if words[1] == "diagnose" and find_spec("sklearn") is None:
        pytest.skip("scikit-learn is not installed")
    if words[0] in PROGRAMS:
        with forked_cells():
            own = {"diagnose": SMALL, "race": SHORT}.get(words[1], [])
            assert PROGRAMS[words[0]]([*words[1:], *own]) == 0
    else:
        assert _in_a_shell(words) == 0


def _in_a_shell(words: Sequence[str]) -> int:
    """Where this Python's programs come first, as after ``activate``."""
    environment = bin_of_python(os.environ, sys.executable)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "lab")])
    return subprocess.run(words, env=environment, check=False).returncode
