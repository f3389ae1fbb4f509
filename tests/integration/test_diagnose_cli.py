"""``alphatoken diagnose``: names and help, arguments and every bad one."""

from __future__ import annotations

import html
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pytest

from alphatoken.cli import main
from alphatoken.cli.diagnose_options import (
    ALL,
    DiagnoseOptions,
    build_parser,
    overview,
    read_request,
)
from alphatoken.cli.diagnose_run import prepare, retention_files
from alphatoken.cli.program import read_options, spelled
from alphatoken.data import Fields
from alphatoken.diagnose import DIAGNOSTICS, Entry, find
from alphatoken.diagnose.diagnosis import Diagnosis
from alphatoken.diagnose.subject import Subject
from alphatoken.errors import ConfigError
from alphatoken.support.options import option
from alphatoken.support.resume import weights_digest
from tests.integration import small_world, tiny_training
from tests.integration.small_world import flags, saved_model, write_rows
from tests.places import nightly

# PyTorch's own forward-mode rules are scripted when the first of them is used.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")

NAMES = tuple(entry.name for entry in DIAGNOSTICS)
PATIENCE = 550


# --- names and help -------------------------------------------------------------------------------


def test_help_names_every_question(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--help", "-h"):
        assert main(["diagnose", flag]) == 0
        said = capsys.readouterr()
        assert (said.out.strip(), said.err) == (overview(), "")
    for entry in DIAGNOSTICS:
        assert entry.name in said.out
        assert entry.question in said.out


@pytest.mark.parametrize("entry", DIAGNOSTICS, ids=lambda entry: entry.name)
def test_help_of_one_begins_with_its_question(
    entry: Entry, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", entry.name, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{entry.question}\n")
    writes, usage = text.index(f"{entry.name}/diagnosis.json"), text.index("usage:")
    own = text.index(f"options of {entry.name}") if fields(entry.load().Options) else len(text)
    assert 0 < writes < usage < own
    assert all(one.name in text[own:] for one in fields(entry.load().Options))


def test_help_offers_nothing_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A verdict takes trusted rows of their own file, and walk values alone."""
    for name, offered in (("data", False), ("estimators", True)):
        with pytest.raises(SystemExit):
            main(["diagnose", name, "--help"])
        text = capsys.readouterr().out
        assert ("FILE | --validation_rows N" in text) == offered
        for flag in ("--value ", "--budget TIME", "--retention_set"):
            assert (f"\n  {flag}" in text) == offered, flag


# --- options --------------------------------------------------------------------------------------


NEEDED = (
    "--model_name_or_path", "m", "--train_file", "t", "--validation_file", "v", "--output_dir", "o",
)  # fmt: skip


@dataclass(frozen=True)
class Own:
    """A diagnostic's options: one that only it has, and one that all share."""

    draws: int = option(7, "how many")
    layers: str = option("own", "which")


def test_a_flag_that_all_share_gets_the_name_before_it() -> None:
    """And what is not said is the diagnostic's own default."""
    parser = build_parser("coverage", Own)

    def own(*words: str) -> dict[str, Any]:
        found = vars(parser.parse_args([*NEEDED, *words]))
        return {k.removeprefix("own_"): v for k, v in found.items() if k.startswith("own_")}

    assert own("--layers", "2") == {}
    assert own("--coverage_layers", "2", "--draws", "9") == {"layers": "2", "draws": 9}


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is told.

    The first line is the title of the group.
    """

    needed: int = option(help="in %", at_least=1)
    learning_rate: float = option(0.1, "how fast")
    sizes: tuple[int, ...] = option((1, 2), "several")
    rates: tuple[float, ...] = option((), "several")
    most: int | None = option(None, "or none")
    words: list[str] = option([], "several", metavar="WORD")
    choice: Literal["a", "b"] = option("a", "one of two")
    this: str | None = option(None, either="pair", required=True)
    that: bool = option(False, either="pair")
    kept: bool = option(True, "as it is")


def test_a_dataclass_is_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = read_options("told", Told, ["--needed", "2", "--words", "x", "y", "--this", "t"])
    assert found == Told(needed=2, words=["x", "y"], this="t")
    words = "--needed 1 --that --learning-rate 1e-3 --no-kept --sizes 4,5 --rates 0.5 --most 3"
    found = read_options("told", Told, spelled(words.split()))
    assert found == Told(
        needed=1, that=True, learning_rate=1e-3, kept=False, sizes=(4, 5), rates=(0.5,), most=3
    )
    found = read_options("told", Told, ["--needed", "1", "--that", "--sizes", "none", "--kept"])
    assert (found.sizes, found.most, found.kept) == ((), None, True)
    for words, said in (
        (["--that"], "required: --needed"),
        (["--needed", "0", "--that"], "must be at least 1: 0"),
        (["--needed", "x", "--that"], "is not a whole number"),
        (["--needed", "1"], "one of the arguments --this --that is required"),
        (["--needed", "1", "--that", "--this", "t"], "not allowed with"),
        (["--needed", "1", "--that", "--choice", "c"], "invalid choice"),
    ):
        with pytest.raises(ConfigError, match=f"{said}.*Remedy: alphatoken told --help"):
            read_options("told", Told, words)
    with pytest.raises(SystemExit):
        read_options("told", Told, ["--help"], description="First.")
    text = capsys.readouterr().out
    assert text.startswith("First.\n\noptions:\n")
    assert "\nwhat is told:\n" in text
    assert "Switch --kept off." in text
    assert "one of two (default a)" in text


def test_dashes_are_underscores_and_no_other_name_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["diagnose", "coverage", *NEEDED[:4], "--overwrite-output"]) == 2
    assert "required: --output_dir" in capsys.readouterr().err
    assert main(["fisher", "--model_name_or_path=m", "--data=d", "--output_file=/no/f"]) == 2
    assert "there is no such option. Got: --data." in capsys.readouterr().err


def test_options_of_one_are_not_read_for_another() -> None:
    _, own = read_request("coverage", *NEEDED, "--clusters", "5")
    assert own["coverage"].clusters == 5
    _, every = read_request(ALL, *NEEDED)
    assert every == {name: find(name).load().Options() for name in NAMES}


def test_retention_files_have_names_and_fields(tmp_path: Path) -> None:
    files = retention_files(
        ["stories.jsonl", "a=b/c=d.jsonl,prompt=text,response=code", "y/train.jsonl,messages=chat",
         "z=w,response=text"]
    )  # fmt: skip
    assert {name: path for name, (path, _) in files.items()} == {
        "stories": "stories.jsonl", "a": "b/c=d.jsonl", "train": "y/train.jsonl", "z": "w",
    }  # fmt: skip
    assert files["a"][1] == Fields("text", "code")
    assert files["train"][1].messages == "chat"
    for texts in (["a.jsonl,prompt"], ["a.jsonl,nope=x"], ["a=1.jsonl", "x/a.jsonl"]):
        with pytest.raises(ConfigError, match="retention"):
            retention_files(texts)
    # A file that is there is read as it is, whatever its name looks like.
    path = tmp_path / "a=b,prompt=c.jsonl"
    path.touch()
    ((name, _),) = retention_files([str(path)]).values()
    assert name == str(path)


# --- runs -----------------------------------------------------------------------------------------


class World(small_world.World):
    """A saved tiny model and data files."""

    def words(self, name: str, out: Path, *more: object, **changed: object) -> list[str]:
        """The command line on the small files; keyword arguments replace options."""
        options: dict[str, object] = {
            "model": self / "model",
            "train": self / "train.jsonl",
            "validation": self / "validation.jsonl",
            "out": out,
            "batch_size": 4,
            "tokens": 80,
            "oracle_tokens": 8,
            "fisher_samples": 8,
            "tuning_steps": 4,
        } | changed
        return ["diagnose", name, *flags(options), "--quiet", *map(str, more)]

    def run(self, name: str, out: Path, *more: object, **changed: object) -> int:
        return main(self.words(name, out, *more, **changed))

    @property
    def retention(self) -> list[str]:
        return [w for i in range(2) for w in ("--retention_set", str(self / f"held{i}.jsonl"))]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("world"))


def make_world(folder: Path) -> World:
    """Two models and rows, in a folder."""
    saved_model(folder / "model")
    saved_model(folder / "other", seed=1)
    write_rows(folder / "train.jsonl", 24, seed=7)
    write_rows(folder / "validation.jsonl", 8, seed=2)
    for number in range(2):
        write_rows(folder / f"held{number}.jsonl", 10, seed=3 + number)
    return World(folder)


@pytest.mark.slow
def test_one_diagnosis_is_written_and_said(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    digest = weights_digest(AutoModelForCausalLM.from_pretrained(world / "model"))
    assert world.run("coverage", tmp_path / "out", "--draws", 20) == 0
    out = capsys.readouterr()
    found = Diagnosis.load(tmp_path / "out" / "coverage")
    assert f"  {found.conclusion}\n" in out.out
    assert f"report: {tmp_path / 'out' / 'report.html'}" in out.out
    assert found.question in out.out
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["diagnostics"]["coverage"]["options"]["draws"] == 20
    assert run["diagnostics"]["coverage"]["seconds"] > 0
    assert run["settings"]["model_sha256"] == digest
    page = (tmp_path / "out" / "report.html").read_text()
    assert found.question in page
    assert "alphatoken diagnose coverage " in page
    assert "--draws 20" in page
    # Once more: refused; with other settings: refused; the same: kept as it is, and added to.
    first = (tmp_path / "out" / "coverage" / "diagnosis.json").stat().st_mtime_ns
    assert world.run("coverage", tmp_path / "out", "--draws", 20) == 2
    assert "earlier run" in capsys.readouterr().err
    assert world.run("coverage", tmp_path / "out", "--resume", "--draws", 21) == 2
    assert "coverage.draws: 20 then, 21 now" in capsys.readouterr().err
    assert world.run("coverage", tmp_path / "out", "--resume", "--draws", 20, tokens=70) == 2
    assert "tokens: 80 then, 70 now" in capsys.readouterr().err
    assert world.run("coverage", tmp_path / "out", "--resume", "--draws", 20) == 0
    assert "finished earlier" in capsys.readouterr().out
    assert (tmp_path / "out" / "coverage" / "diagnosis.json").stat().st_mtime_ns == first
    (tmp_path / "out" / "mine.txt").touch()
    assert world.run("coverage", tmp_path / "out", "--overwrite_output", "--draws", 21) == 0
    assert (tmp_path / "out" / "mine.txt").exists()
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["diagnostics"]["coverage"]["options"]["draws"] == 21


def test_rows_are_kept_apart_and_counted(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the page; those that are left out on the console too, unless it is to be quiet."""
    silent = json.dumps({"prompt": "1+1=", "response": ""}) + "\n"
    lines = [(world / name).read_text() for name in ("train.jsonl", "held0.jsonl")]
    held = (world / "validation.jsonl").read_text()
    (tmp_path / "mixed.jsonl").write_text("".join([*lines, held, silent]))
    words = world.words(
        "heatmap", tmp_path / "out", *world.retention[:2],
        train=tmp_path / "mixed.jsonl", retention_rows=6, tokens=20,
    )  # fmt: skip
    said = "note: 1 training row left out: no token to learn."
    assert main([word for word in words if word != "--quiet"]) == 0
    assert said in capsys.readouterr().err
    assert main([*words, "--overwrite_output"]) == 0
    assert said not in capsys.readouterr().err
    settings = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert settings["validation rows"] == 8
    assert settings["retention rows, held0"] == 6
    assert settings["training rows"] == 24 + 10 - 6
    assert "8 training rows repeat a validation row or prompt and were removed (" in page
    assert "6 training rows repeat a retention row or a prompt of the Fisher" in page
    assert "6 of 10 retention rows of held0 were drawn" in page


@pytest.mark.slow
@nightly
def test_without_retention_rows_fisher_says_so_and_the_others_run(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``all`` on what is there: those that need such rows give their reason; exit status 0."""
    assert world.run(ALL, tmp_path / "out", "--budget", "0.001s") == 0
    said = capsys.readouterr()
    assert "note: fisher, drift will not run without --retention_set" in said.err
    done = {name for name in NAMES if Diagnosis.finished(tmp_path / "out" / name)}
    assert "fisher" not in done
    for name in set(NAMES) - done:
        assert re.search(f"{name} could not run: .*--retention_set", said.err)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Could not run: " in page
    assert "--retention_set FILE" in page


@pytest.mark.parametrize(
    ("name", "changed", "more", "said"),
    [
        ("nope", {}, (), "there is no such diagnostic"),
        ("--output_dir", {}, (), "the name of a diagnostic comes first"),
        ("coverage", {}, ("--nope",), "there is no such option. Got: --nope"),
        ("coverage", {}, ("--clusters", "x"), "a whole number"),
        ("coverage", {}, ("--clusters", "0"), "clusters"),
        ("coverage", {"model": None}, (), "required: --model_name_or_path"),
        ("coverage", {"train": "nope.jsonl"}, (), "there is no training file"),
        ("coverage", {"validation": "nope.jsonl"}, (), "there is no validation file"),
        ("coverage", {"validation": None}, (), "there are no validation rows"),
        ("coverage", {"fisher": "nope.st"}, (), "there is no Fisher file"),
        ("coverage", {"retention_set": "nope.jsonl"}, (), "there is no retention (nope) file"),
        ("coverage", {"retention_set": "x.jsonl,nope=1"}, (), "--retention_set cannot be read"),
        ("fisher", {}, (), "needs held-out retention rows"),
        ("drift", {}, (), "needs held-out retention rows"),
        ("coverage", {"ratio": "0"}, (), "ratio"),
        ("coverage", {"layers": "x"}, (), "layers cannot be read"),
        ("coverage", {"window": "x"}, (), "--window"),
        ("coverage", {"tokens": "0"}, (), "must be at least 1"),
        ("coverage", {}, ("--resume", "--overwrite_output"), "not allowed with"),
        ("all", {}, ("--clusters", "5"), "there is no such option. Got: --clusters"),
        *(
            ("coverage", {"budget": budget}, (), "the budget is not a time")
            for budget in ("soon", "0", "90", "1d", "5 x", "m")
        ),
    ],
)
def test_bad_arguments_are_one_line_before_any_model(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    changed: dict[str, object],
    more: Sequence[str],
    said: str,
) -> None:
    # There is no such model: whoever loads it first says so.
    changed = {"model": str(tmp_path / "no model")} | changed
    assert world.run(name, tmp_path / "out", *more, **changed) == 2
    error = capsys.readouterr().err
    assert error.startswith("alphatoken: ")
    assert error.count("\n") == 1
    assert said in error
    assert "no model" not in error


def test_a_folder_that_cannot_be_written_is_refused_first(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "foreign" / "coverage").mkdir(parents=True)
    (tmp_path / "trained").mkdir()
    (tmp_path / "trained" / "alphatoken-run.json").write_text("{}")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text("{}")
    missing = str(tmp_path / "no model")  # whoever loads it first says so
    for folder, more, cause in (
        ("file/out", (), "the output folder cannot be written"),
        ("foreign", (), "holds something else"),
        ("trained", (), "holds a training run"),
        ("old", (), "holds an earlier run"),
        ("old", ("--resume",), "the earlier run cannot be read"),
    ):
        changed = {} if more else {"model": missing}
        assert world.run("coverage", tmp_path / folder, *more, **changed) == 2
        error = capsys.readouterr().err
        assert cause in error
        assert error.count("\n") == 1


@pytest.mark.slow
def test_what_was_scored_is_diagnosed_in_the_same_folder(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the words of ``score``: its estimator and parameters; its own files stay as they are."""
    common = flags({
        "model": world / "model", "train": world / "train.jsonl", "out": tmp_path / "values",
        "validation": world / "validation.jsonl", "batch_size": 4, "estimator": "label",
        "parameters": "all",
    })  # fmt: skip
    assert main(["score", *common, "--quiet", "--no_report"]) == 0
    files = {p: p.read_bytes() for p in (tmp_path / "values").rglob("*") if p.is_file()}
    place = tmp_path / "values" / "diagnosis"
    assert main(["diagnose", "heatmap", *common, "--tokens", "80"]) == 0
    assert f"the diagnoses go to {place}" in capsys.readouterr().err
    assert Diagnosis.finished(place / "heatmap")
    assert json.loads((place / "run.json").read_text())["settings"]["parameters"] == "all"
    assert {p: p.read_bytes() for p in files} == files
    # And what `score` would write over there is refused.
    words = [str(place) if word == str(tmp_path / "values") else word for word in common]
    capsys.readouterr()
    assert main(["score", *words, "--overwrite_output"]) == 2
    assert "results of another command" in capsys.readouterr().err
    assert (place / "report.html").is_file()


def test_bad_models_and_rows_are_one_line(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_training.model(layers=2, vocab_size=120).save_pretrained(tmp_path / "small")
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"prompt": "add : 77 and 77", "response": ""}\n')
    capsys.readouterr()  # transformers' progress
    for changed, said in (
        ({"model": str(tmp_path / "nope")}, "no such model folder"),
        ({"reference": str(tmp_path / "nope")}, "no such model folder"),
        ({"reference": str(tmp_path / "small")}, "--reference is another kind of model"),
        ({"beside": f"other={tmp_path / 'nope'}"}, "no such model folder"),
        ({"beside": f"other={tmp_path / 'small'}"}, "--beside other is another kind of model"),
        ({"beside": str(tmp_path / "small")}, "--beside cannot be read"),
        ({"train": str(empty)}, "no training row is left"),
        ({"validation": str(empty)}, "no validation row is left"),
        ({"retention_set": str(empty)}, "no retention (empty) row is left"),
        ({"fisher": str(empty)}, "cannot be read"),
        ({"validation": str(world / "train.jsonl")}, "_file are the same file. Got"),
    ):
        assert world.run("coverage", tmp_path / "out", **changed) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1
        assert not (tmp_path / "out" / "run.json").exists()


@pytest.mark.slow
def test_models_beside_the_one_before_are_laid_out_with_it(world: World, tmp_path: Path) -> None:
    words = [*world.retention, "--probes", "8", "--beside", f"other={world / 'model'}"]
    assert world.run("drift", tmp_path / "out", *words, beside=f"same={world / 'model'}") == 0
    found = Diagnosis.load(tmp_path / "out" / "drift")
    assert {r["model"] for r in found.table("drift-sets").records()} == {"same", "other"}
    assert all(r["relative_shift"] == 0.0 for r in found.table("drift-sets").records())
    assert "Before: the model given." in found.notes
    settings = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]
    assert settings["beside_sha256, same"] == settings["model_sha256"]


def test_prompts_of_a_fisher_are_rows_that_nothing_else_uses(world: World, tmp_path: Path) -> None:
    words = world.words("fisher", tmp_path, *world.retention)[2:]

    def pools(*more: str) -> tuple[Subject, set[str], set[str]]:
        subject, *_ = prepare(read_request("fisher", *words, *more)[0])
        held, trained = (
            {row.row.prompt for row in rows} for rows in (subject.prompts, subject.train)
        )
        return subject, held, trained

    subject, held, trained = pools("--fisher_prompts", "5")
    assert len(held) == len(subject.prompts) == 5
    assert not held & trained
    assert not pools("--fisher_prompts", "0")[1]
    whole = len(pools("--fisher_prompts", "0")[2])
    by_default = len(pools()[1])
    assert by_default == (whole // 5 if whole >= 40 else 0)
    with pytest.raises(ConfigError, match="Fisher prompts cannot be drawn") as caught:
        pools("--fisher_prompts", str(whole))
    remedy = str(caught.value.remedy)
    assert "--fisher_prompts N for fewer" in remedy
    for word in re.findall(r"--\w+", remedy):
        assert word[2:] in {one.name for one in fields(DiagnoseOptions)}


def test_a_row_with_the_tokens_of_a_held_out_row_is_removed(world: World, tmp_path: Path) -> None:
    held = json.loads((world / "validation.jsonl").read_text().splitlines()[0])
    document = {"text": f"{held['prompt']}\n{held['response']}"}
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text((world / "train.jsonl").read_text() + json.dumps(document) + "\n")
    words = [*world.words("heatmap", tmp_path / "out", train=mixed)[2:], "--no_chat_template"]
    subject, _, notes = prepare(read_request("heatmap", *words)[0])
    assert all(row.row.prompt for row in subject.train)
    assert "1 training row repeats a held-out row or its prompt and was removed (" in str(notes)


# --- budgets --------------------------------------------------------------------------------------


def test_sizes_that_are_given_are_told_from_defaults() -> None:
    options, _ = read_request(ALL, *NEEDED, "--tokens", "70")
    assert options.seconds == 600
    assert options.fixed == {"tokens"}
    words = [*NEEDED, "--validation_rows", "9", "--clusters", "5", "--budget", "none"]
    options, _ = read_request("coverage", *words)
    assert options.seconds is None
    assert options.fixed == {"objective_rows"}
    # Drawn from the training rows they must be said: no wish that a budget would have to keep.
    drawn = [word for word in words if word not in ("--validation_file", "v")]
    options, _ = read_request("coverage", *drawn)
    assert options.fixed == frozenset()


# --- interruption ---------------------------------------------------------------------------------


def finished(out: Path) -> list[str]:
    return [name for name in NAMES if Diagnosis.finished(out / name)]


@pytest.mark.slow
def test_all_killed_in_the_middle_is_resumed(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And of almost no budget the least is read all the same, which a note says."""
    out = tmp_path / "out"
    words = world.words(ALL, out, *world.retention, "--budget", "0.001s", tokens=None)
    process = subprocess.Popen(
        [sys.executable, "-m", "alphatoken.cli", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    end = time.monotonic() + PATIENCE
    try:
        while len(finished(out)) < 2 and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    kept = {name: (out / name / "diagnosis.json").stat().st_mtime_ns for name in finished(out)}
    assert 2 <= len(kept) < len(NAMES)
    assert (out / "report.html").exists()
    # What a killed process can leave: half a diagnosis.
    half = out / next(name for name in NAMES if name not in kept)
    half.mkdir(exist_ok=True)
    (half / "half.csv").touch()
    assert main([*words, "--resume"]) == 0
    said = capsys.readouterr().out
    assert finished(out) == list(NAMES)
    for name, when in kept.items():
        assert (out / name / "diagnosis.json").stat().st_mtime_ns == when
        assert f"{name} (finished earlier)" in said
    assert not (half / "half.csv").exists()
    page = html.unescape((out / "report.html").read_text())
    assert all(entry.question in page for entry in DIAGNOSTICS)
    assert "Not run yet." not in page
    assert "Could not run" not in page
    heatmap = Diagnosis.load(out / "heatmap")
    assert heatmap.settings["tokens"] < 96
    assert (heatmap.settings["budget"], heatmap.settings["rounds"]) == ("0.001s", 1)
    assert re.fullmatch(
        r"Read \d+ of \d+ tokens.* in 1 round \(stopped by the budget of 0\.001s\)\.",
        heatmap.notes[0],
    )


def test_interrupt_says_how_to_go_on(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(find("heatmap").load(), "diagnose", interrupted)
    assert world.run("heatmap", tmp_path / "out") == 130
    error = capsys.readouterr().err
    assert "diagnoses are finished and kept" in error
    assert "--resume" in error


@pytest.mark.parametrize(("name", "status"), [("coverage", 2), (ALL, 2), ("heatmap", 0)])
def test_scikit_learn_is_asked_for_before_work_and_where_it_is_needed(
    name: str, status: int, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert world.run(name, tmp_path / "out") == status
    assert ("needs scikit-learn" in capsys.readouterr().err) == (status == 2)
    assert (tmp_path / "out").exists() == (status == 0)
