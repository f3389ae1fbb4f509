"""One name for one thing in every command; help that is there at once, with a sentence each."""

from __future__ import annotations

import re
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from alphatoken.cli.diagnose_options import DiagnoseOptions
from alphatoken.cli.fisher import FisherOptions
from alphatoken.cli.options import default_of, flag_of
from alphatoken.cli.training import help_text
from alphatoken.cli.training_options import RowArguments, RunArguments
from alphatoken.corpus.options import ScoreOptions
from alphatoken.errors import ConfigError
from alphatoken.train.fields import AlphaFields, within_of
from alphatoken.train.policies import find_policy
from alphatoken_lab.commands.compare import CompareOptions
from alphatoken_lab.commands.evaluate import EvaluateOptions
from alphatoken_lab.commands.merge import MergeOptions
from alphatoken_lab.commands.paper import PaperOptions
from alphatoken_lab.methods.preference import PreferencePolicy
from tests.both_programs import main
from tests.options_page import arguments, every_method, page

KINDS = [
    ScoreOptions, FisherOptions, DiagnoseOptions, CompareOptions, MergeOptions,
    RowArguments, RunArguments, AlphaFields,
]  # fmt: skip


def flags(kind: Any) -> set[str]:
    return {flag_of(one) for one in fields(kind)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_option_has_a_sentence(kind: Any) -> None:
    silent = [one.name for one in fields(kind) if len(one.metadata["help"].split()) < 3]
    assert not [name for name in silent if name != "cell"]  # compare's own processes


def test_every_field_is_documented_and_stands_on_the_page() -> None:
    written = page()
    for one in fields(AlphaFields):
        assert all((one.metadata["help"], within_of(one))), one.name
        assert f"| `{one.name}` |" in written


def _outside(within: str) -> list[float]:
    """Numbers just outside of a range in words: "above 0, to 1", "from 2", "0 to 1"."""
    found = []
    if one := re.search(r"(above|from) (\d+)", within):
        found.append(float(one[2]) - (0 if one[1] == "above" else 1))
    if one := re.search(r"(below|\bto) (\d+)", within):
        found.append(float(one[2]) + (0 if one[1] == "below" else 0.5))
    if re.match(r"\d+ to", within):
        found.append(float(within[0]) - 0.5)
    return found


def test_ranges_of_methods_are_those_that_they_hold_to() -> None:
    tried = 0
    for _, kind in every_method():
        made, fixed = (
            (find_policy("confpo"), {"loss": "simpo"}) if kind is PreferencePolicy else (kind, {})
        )
        for one in arguments(kind):
            for value in _outside(one.within):
                given = int(value) if isinstance(one.default, int) else value
                with pytest.raises(ConfigError, match=one.name.removeprefix("warmup_")):
                    made(**{**fixed, one.name: given})
                tried += 1
    assert tried > 40


@pytest.mark.slow
@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_every_option_of_the_trainers_has_one_too(command: str) -> None:
    from alphatoken.cli.arguments import _parser
    from alphatoken.cli.training import trainer_of

    actions = _parser(command, trainer_of(command)[0])._actions
    assert len(actions) > 200
    assert not [action.dest for action in actions if not (action.help or "").strip()]


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("docs/**/*.ipynb")]
OF_COMMAND = {
    "score": ScoreOptions, "fisher": FisherOptions,
    "compare": CompareOptions, "merge": MergeOptions, "evaluate": EvaluateOptions,
}  # fmt: skip


def printed_flags(text: str) -> list[tuple[str, str]]:
    """Command and flag of each line for the shell on a page."""
    lines = re.sub(r"\\+(\\n\",)?\s+", " ", text)  # joined where they go on
    said = re.findall(r"alphatoken(?:-lab|\.cli)? ([a-z]+)\b([^`#|\n]*)", lines)
    return [
        (c, f.replace("-", "_")) for c, rest in said for f in re.findall(r"--([a-z][\w-]*)", rest)
    ]


def test_lines_on_pages_name_options_as_they_are_called_now() -> None:
    found = [(p.name, *one) for p in PAGES for one in printed_flags(p.read_text("utf-8"))]
    assert len(found) > 100
    assert ("quickstart.md", "score", "train_limit") in found
    for name, command, flag in found:
        if name not in ("CHANGELOG.md", "log.md") and (command, flag) != ("sft", "debug"):
            known = flags(OF_COMMAND[command]) | {"help"} if command in OF_COMMAND else {flag}
            assert {flag, flag.removeprefix("no_")} & known, (name, command, flag)


def test_what_commands_share_has_one_name() -> None:
    shared = {"model_name_or_path", "train_file", "validation_file", "score_layers", "traceback",
              "per_device_train_batch_size", "train_limit"}  # fmt: skip
    assert shared <= flags(ScoreOptions)
    assert shared <= flags(DiagnoseOptions)
    assert shared - {"validation_file"} <= flags(FisherOptions)
    ours = flags(RowArguments) | flags(RunArguments) | flags(AlphaFields)
    ours |= {"model_name_or_path", "per_device_train_batch_size"}  # of TRL
    assert shared <= ours
    columns = {"prompt_column", "response_column", "messages_column"}
    for known in (flags(ScoreOptions), flags(DiagnoseOptions), ours):
        assert columns <= known
    for kind in (ScoreOptions, CompareOptions, AlphaFields):
        assert "keep_ratio" in flags(kind)


def test_the_names_that_differ_are_those_of_the_table() -> None:
    """On the page of the training commands; each is an option where it is said, none is missing."""
    page = (ROOT / "docs/training-cli.md").read_text(encoding="utf-8")
    head, _, *rows = page[page.index("| what | `sft`, `dpo` |") :].partition("\n\n")[0].splitlines()
    training = flags(RowArguments) | flags(RunArguments) | flags(AlphaFields) | {"config"}
    columns = [training, flags(DiagnoseOptions), flags(FisherOptions), flags(CompareOptions)]
    assert head.count("|") == len(columns) + 2
    assert len(rows) == 5
    said: list[set[str]] = [set() for _ in columns]
    for row in rows:
        for cell, names in zip(row.split("|")[2:-1], said, strict=True):
            names |= set(re.findall(r"`(\w+)`", cell))
    same = {"fisher_file", "fisher_cache", "fisher_batch_size", "retention_batch_size",
            "retention_rows"}  # fmt: skip
    for names, known in zip(said, columns, strict=True):
        assert names <= known
        assert {n for n in known if n.startswith(("retention_", "fisher_"))} <= names | same


EVERYWHERE = [*KINDS, EvaluateOptions, PaperOptions]
OTHER = {
    "fisher_samples": "diagnose: left out, what its budget allows",
    "keep_ratio": "compare: left out, the recipe's",
    "max_new_tokens": "evaluate: left out, each task's own",
    "model_name_or_path": "compare: may come from the grid's file",
    "output_dir": "the lab's commands have a folder of their own",
    "train_file": "trainers, compare and paper: may come from a recipe",
}
"""Flags whose type or default differs between commands, and why."""


def test_a_flag_is_of_one_type_and_has_one_default() -> None:
    """Trainers' fields are texts whose choices are checked later: transformers' parser asks so."""
    found: dict[str, set[tuple[str, str]]] = {}
    choices: dict[str, set[frozenset[str]]] = {}
    for kind in EVERYWHERE:
        hints = typing.get_type_hints(kind)
        for one in fields(kind):
            choice = typing.get_origin(hints[one.name]) is typing.Literal
            if choice:
                choices.setdefault(flag_of(one), set()).add(
                    frozenset(typing.get_args(hints[one.name]))
                )
            shown = "str" if choice else str(hints[one.name])
            shown = shown.removeprefix("<class '").removesuffix("'>")
            found.setdefault(flag_of(one), set()).add((shown, repr(default_of(one))))
    assert {name for name, ways in found.items() if len(ways) > 1} == set(OTHER)
    assert {name for name, ways in choices.items() if len(ways) > 1} == set()
    assert choices["on_bad_rows"] == choices["on_empty"] == {frozenset({"error", "skip"})}


def test_help_shows_three_examples_that_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out.replace("\\\n", " ")
    examples = [line.split() for line in said.splitlines() if line.startswith("    alphatoken ")]
    assert [words[1] for words in examples] == ["score", "sft", "diagnose"]
    training = flags(RowArguments) | flags(RunArguments) | flags(AlphaFields)
    training |= {"config", "model_name_or_path"}
    known = [flags(ScoreOptions), training, flags(DiagnoseOptions)]
    for words, names in zip(examples, known, strict=True):
        assert {word[2:] for word in words if word.startswith("--")} <= names


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_the_help_is_ours(command: str) -> None:
    """That nothing large is imported for it is tested in ``test_import.py``."""
    said = help_text(command)
    for name in (*flags(AlphaFields), *flags(RowArguments)):
        assert f"--{name}" in said
    assert "--weight_decay" not in said
