"""Runs of few optimizer steps: what the commands say of them, and that what they advise works."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.both_programs import main
from tests.integration.tiny_training import saved

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("short"), 40)


@pytest.fixture
def call(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Call:
    """A command on the files of ``folder``, and what it said."""
    monkeypatch.chdir(folder)

    def run(*words: str, status: int = 0) -> Any:
        ended = main(list(words))
        said = capsys.readouterr()
        assert ended == status, said.err[-3000:]
        return said

    return run


def words_of(command: str, out: Path, *more: str) -> list[str]:
    pairs = ["--max_length", "64", "--beta", "0.1"] if command == "dpo" else []
    return [
        command, "--model_name_or_path", "model", "--train_file",
        "pairs.jsonl" if command == "dpo" else "rows.jsonl", "--output_dir", str(out),
        "--use_cpu", "--bf16", "false", "--report_to", "none", "--save_strategy", "no",
        "--per_device_train_batch_size", "4", "--num_train_epochs", "1", *pairs, *more,
    ]  # fmt: skip


ADVISED = re.compile(r"((?:--\w+ \d+ ?)+) \((\d+) steps\)")
SAID = "the whole run has"
ALONE = ("--policy", "standard", "--validation_rows", "0")

SHORT: dict[str, tuple[str, tuple[str, ...], str]] = {
    "accumulated": ("sft", ("--gradient_accumulation_steps", "4"), "3 optimizer steps, of 16 rows"),
    "pairs": ("dpo", (), "3 optimizer steps, of 4 rows each (12 training rows)"),
    "by max_steps": ("sft", ("--max_steps", "2"), "2 optimizer steps, of 4 rows each"),
    "one step": (
        "sft", ("--gradient_accumulation_steps", "32"), "1 optimizer step, of 40 rows each"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHORT)
def test_a_short_run_is_told_with_what_makes_it_longer(
    case: str, call: Call, tmp_path: Path
) -> None:
    """Each of the options makes it as long as is said, and nothing is said of that run.

    Proves: options for a longer run (exact), against runs with them.
    """
    command, more, said = SHORT[case]
    alone = ALONE if command == "sft" else ("--policy", "dpo", "--validation_rows", "0")
    words = words_of(command, tmp_path / "short", *alone, *more)
    (note,) = [line for line in call(*words).err.splitlines() if SAID in line]
    assert said in note
    advised = ADVISED.findall(note)
    assert advised
    for number, (options, steps) in enumerate(advised):
        out = tmp_path / str(number)
        longer = call(*words_of(command, out, *alone, *more), *shlex.split(options))
        assert f"{steps} steps trained" in longer.out
        assert SAID not in longer.err


@pytest.mark.filterwarnings("ignore:2 choosing rows")
@pytest.mark.parametrize("dpo", [False, True], ids=["sft", "dpo"])
def test_a_race_that_is_over_before_its_looks_is_refused_with_a_command(
    dpo: bool, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded; and the command that is printed does run.

    Proves: options for a longer race (exact), against the race with them.
    """
    command, pairs = ("dpo", ["--dpo"]) if dpo else ("sft", [])
    words = ["race", *pairs, *words_of(command, tmp_path / "race")[1:]]
    words += ["--gradient_accumulation_steps", "4", "--arms", "random", "--stop_after_looks"]
    words += ["--validation_rows", "4", "--choosing_rows", "2", "--keep_ratio", "0.5"]
    loading = import_module("alphatoken.train.trainer_arguments")
    with monkeypatch.context() as without:
        without.setattr(loading, "load_for_training", lambda *_, **__: pytest.fail("loaded"))
        refused = call(*words, status=2).err.splitlines()[-1]
    assert "the run is over before the last look" in refused
    assert f"--looks {1 if dpo else 3}" in refused
    (printed,) = re.findall("`(alphatoken race .*?)`", refused)
    assert shlex.split(printed)[1 : len(words) + 1] == words
    call(*shlex.split(printed)[1:])
    assert (tmp_path / "race" / "race.json").is_file()
