"""Every command that a page or a help text prints is read as printed, and runs as printed.

It runs in a folder of small rows and a small model, under the names that it is printed with. README
and the quick start are run as a whole by ``test_examples.py``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from alphatoken.cli.options import spelled
from alphatoken.errors import ConfigError
from tests.lab.forked_cells import forked_cells
from tests.places import nightly
from tests.printed_commands import (
    COMMANDS,
    PROGRAMS,
    ROOT,
    Printed,
    Sandbox,
    bin_of_python,
    in_help,
    on_pages,
)

NOT_RUN = {
    "accelerate launch --config_file my.yaml": "a layout of several GPUs, on a model of the hub",
    "alphatoken score ... ": "abridged: Ray over 32 GPUs",
    "alphatoken diagnose all --model_name_or_path $": "larger sets of rows; a record of what ran",
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


def said(program: str, words: list[str]) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        PROGRAMS[program](words)
    return out.getvalue()


@cache
def printed() -> list[Printed]:
    return list(dict.fromkeys([*on_pages(), *in_help(said)]))


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
    known = {name for line in targets for name in line.split()}
    asked = {
        word
        for one in printed()
        if one.words[0] == "make"
        for word in one.words[1:]
        if "=" not in word
    }
    assert {"demo", "test"} <= asked
    assert asked <= known


def read(program: str, command: str, words: list[str]) -> None:
    """Read the words as the command does, before it loads anything."""
    if command in ("sft", "dpo"):
        from alphatoken.cli.arguments import read_arguments
        from alphatoken.cli.training import trainer_of

        read_arguments(command, words, trainer_of(command)[0])
    elif command == "diagnose":
        from alphatoken.cli.diagnose_options import read_request

        _ = read_request(*words).shared.scorer_config()
    elif command == "compare":
        from alphatoken_lab.commands.compare import parse
        from alphatoken_lab.runner.grid import all_cells
        from alphatoken_lab.runner.grid_file import read_grid

        all_cells(read_grid(*parse(words)))
    elif command == "merge":
        from alphatoken_lab.commands.merge import read as read_merge

        read_merge(words)
    elif command == "paper":
        from alphatoken_lab.commands.paper import parse as parse_paper

        parse_paper(words)
    elif command == "policies":
        assert PROGRAMS[program]([command, *words]) == 0
    else:
        from importlib import import_module

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
        found = None if one.whole else ours(one)
        named = {} if found is None else {w[2:].split("=")[0] for w in found[2] if w[:2] == "--"}
        if found is not None and named - {"help", "list"}:
            program, command, words = found
            help_of = [command, "all" if words[:1] == ["all"] else words[0], "--help"]
            text = said(program, help_of if command == "diagnose" else [command, "--help"])
            for name in named:
                assert re.search(rf"--(no_)?{name}\b", text), (one.place, one.text, name)
            looked += 1
    assert looked > 12


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
            assert PROGRAMS[words[0]](words[1:] + SMALL * (words[1] == "diagnose")) == 0
    else:
        assert _in_a_shell(words) == 0


def _in_a_shell(words: Sequence[str]) -> int:
    """Where this Python's programs come first, as after ``activate``."""
    environment = bin_of_python(os.environ, sys.executable)
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "lab")])
    return subprocess.run(words, env=environment, check=False).returncode
