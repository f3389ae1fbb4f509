"""``alphatoken diagnose data``: against ``score``, stopped and resumed, bad rows, spoilt chats."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trl import SFTConfig

from alphatoken.cli import main
from alphatoken.cli.arguments import read_arguments
from alphatoken.cli.diagnose_options import DiagnoseOptions
from alphatoken.cli.diagnose_run import TRAINERS_LENGTH
from alphatoken.demo.word_problems import chats, with_foreign_answers, with_wrong_words
from alphatoken.diagnose import data
from alphatoken.diagnose.data import EPOCHS, JUDGED, TRAIN_BATCH, TRUSTED
from alphatoken.diagnose.diagnosis import Diagnosis
from alphatoken.score.run import score_rows
from alphatoken.score.values import ScoredExample, read_values
from alphatoken.train import AlphaSFTConfig
from tests.integration.browser import opened
from tests.integration.small_world import exchanges, flags, saved_model, write_rows
from tests.rows import jsonl

WALK = {"walk_steps": 3, "walk_learning_rate": 1e-3}


class World:
    """A saved tiny model, 40 rows to judge and 16 that are trusted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        saved_model(folder / "model")
        rows = exchanges(56, seed=7)
        jsonl(folder / "train.jsonl", rows[:40])
        jsonl(folder / "validation.jsonl", rows[40:])

    def words(self, command: Sequence[str], out: Path, **changed: object) -> list[str]:
        options = {
            "model": self.folder / "model",
            "train": self.folder / "train.jsonl",
            "validation": self.folder / "validation.jsonl",
            "out": out,
            "batch_size": 4,
            **WALK,
        } | changed
        return [*command, *flags(options)]

    def diagnose(self, out: Path, *more: str, **changed: object) -> int:
        return main([*self.words(["diagnose", "data"], out, **changed), "--quiet", *more])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("rows"))


def records(out: Path, group: str) -> list[dict[str, Any]]:
    found = Diagnosis.load(out / "data").figure("data-value").data.records()
    return [one for one in found if one["rows"] == group]


def values(folder: Path) -> list[ScoredExample]:
    return list(read_values(folder))


# --- against score --------------------------------------------------------------------------------


def test_values_are_those_of_score_on_the_rows_that_were_walked_on(
    world: World, tmp_path: Path
) -> None:
    """To the bit, with the losses beside them; of rows to judge and of the reference."""
    assert world.diagnose(tmp_path / "out") == 0
    lines = (world.folder / "validation.jsonl").read_text().splitlines()
    reference = [int(one["row"]) for one in records(tmp_path / "out", TRUSTED)]
    assert len(reference) == 8
    walked = jsonl(tmp_path / "walk.jsonl", [lines[i] for i in range(16) if i not in reference])
    others = jsonl(tmp_path / "others.jsonl", [lines[i] for i in reference])
    for name, file in (("values", world.folder / "train.jsonl"), ("reference", others)):
        words = world.words(["score"], tmp_path / name, train=file, validation=walked)
        assert main([*words, "--estimator", "walk", "--quiet", "--no_report"]) == 0
        ours = values(tmp_path / "out" / "data" / name)
        theirs = values(tmp_path / name / "values")
        assert len(ours) == len(theirs) > 0
        for one, other in zip(ours, theirs, strict=True):
            assert one.ids == other.ids
            assert one.values.keys() == other.values.keys() >= {"total", "loss"}
            for key in one.values:
                assert np.array_equal(one.values[key], other.values[key]), key
            assert np.array_equal(one.kept, other.kept)
    # A record is the mean of its part of the file.
    for one, record in zip(
        values(tmp_path / "out" / "data" / "values"), records(tmp_path / "out", JUDGED), strict=True
    ):
        assert (record["row"], record["place"]) == (one.row, one.place)
        own = np.asarray(one.values["total"], float)[one.response]
        assert record["value"] == pytest.approx(own.mean(), rel=1e-12)


def test_what_is_said_and_shown(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert world.diagnose(tmp_path / "out") == 0
    said = capsys.readouterr().out
    found = Diagnosis.load(tmp_path / "out" / "data")
    assert f"  {found.conclusion}\n" in said
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Do my rows look like the rows that I trust?" in page
    assert "Rows of highest mean loss, and of lowest" in page
    assert found.settings["walk_steps"] == 3
    settings = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]
    assert (settings["estimator"], settings["walk_steps"]) == ("walk", 3)


def test_a_race_has_every_option_of_the_next_command() -> None:
    """And there is no command for an adapter, at which no trainer begins."""
    own = {"model_name_or_path": "M", "train_file": "R", "output_dir": "O"}
    of_rows = {"prompt_column": "p", "response_column": "r", "messages_column": "m"}
    of_rows |= {"unread_columns": "a,b", "on_empty": "error", "leak_key": "conversation"}
    of_rows |= {"turns": "last", "max_length": 32, "chat_template": False}
    of_rows |= {"on_bad_rows": "skip", "trust_remote_code": True, "validation_file": "T"}
    of_rows |= {"train_limit": 40}
    said = shlex.split(DiagnoseOptions(**own, **of_rows).words)
    assert {word.removeprefix("--").removeprefix("no_") for word in said if word[:2] == "--"} == (
        of_rows.keys() | own.keys() - {"output_dir"}
    )
    cpu = ["--output_dir", "O", "--use_cpu", "--bf16", "false"]
    read = read_arguments("sft", [*said, *cpu], AlphaSFTConfig, race=True)
    assert (read.training.max_length, read.data.chat_template) == (32, False)
    assert DiagnoseOptions(**own, adapter="A").words == ""


def test_the_next_command_names_model_and_rows_as_they_were_named(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what decides how rows are read; on the console and on the page."""
    rows = [{"q": one["prompt"], "a": "add add add add add"} for one in exchanges(24, seed=9)]
    file = jsonl(tmp_path / "other rows.jsonl", rows)
    columns = {"prompt_column": "q", "response_column": "a"}
    columns |= {"walk_learning_rate": "0.03"}
    assert world.diagnose(tmp_path / "out", train=file, **columns) == 0
    words = ["--model_name_or_path", str(world.folder / "model"), "--train_file", str(file)]
    words += ["--validation_file", str(world.folder / "validation.jsonl")]
    words += ["--prompt_column", "q", "--response_column", "a"]
    # The trainers' length is above the model's limit, and their walk another one than was taken.
    words += ["--max_length", "96", "--walk_steps", "3", "--walk_learning_rate", "0.03"]
    # 24 rows in batches of 8 are over before the first look of a race.
    said = capsys.readouterr().out
    # One answer for all prompts: some rows gain less by theirs than every trusted row.
    (arm,) = re.findall(" (without-odd-rows:without_rows=[0-9,]+) ", said)
    own = ["--per_device_train_batch_size", "2", "--arms", "walk-80", "validation-mix", arm]
    own += ["--output_dir", str(tmp_path / "out-race")]
    command = f"alphatoken race --config recommended {shlex.join([*words, *own])}"
    assert "Your rows differ from the trusted ones" in said
    assert f"  next: {command}\n  it takes 1 to 2 minutes at the speed of this walk\n" in said
    page = (tmp_path / "out" / "report.html").read_text()
    assert 'Next (1 to 2 minutes here):</p><code class="command">alphatoken race --config' in page
    assert Diagnosis.load(tmp_path / "out" / "data").next_command == command


@pytest.mark.slow
def test_the_race_that_is_printed_runs(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its arms, batches and choosing rows, and the options of the walk that was taken."""
    rows = [{**one, "response": "add add add add add"} for one in exchanges(8, seed=9)]
    rows += exchanges(16, seed=10)
    file = jsonl(tmp_path / "other.jsonl", rows)
    assert world.diagnose(tmp_path / "out", train=file, walk_learning_rate="0.03") == 0
    command = Diagnosis.load(tmp_path / "out" / "data").next_command
    capsys.readouterr()
    (left,) = re.findall(r" without-odd-rows:without_rows=([0-9,]+) --output_dir ", command)
    machine = ["--use_cpu", "--bf16", "false", "--report_to", "none", "--stop_after_looks"]
    assert main([*shlex.split(command.removeprefix("alphatoken ")), *machine]) == 0
    said = capsys.readouterr().err
    arms = "all, walk-80, validation-mix, without-odd-rows"
    assert f"race of 4 arms ({arms}): looks at step 20 of 36" in said
    assert f"without-odd-rows: on {23 - left.count(',')} of 24 training rows" in said
    assert (tmp_path / "out-race" / "race.html").exists()


@pytest.mark.slow
@pytest.mark.pictures
def test_the_page_in_a_browser(world: World, tmp_path: Path) -> None:
    """Rows are text on one scale; nothing is fetched; a narrow screen scrolls downwards alone."""
    assert world.diagnose(tmp_path / "out") == 0
    with opened(tmp_path / "out" / "report.html", tmp_path / "profile", 1280) as browser:
        widths = browser.evaluate("[...document.images].map(image => image.naturalWidth)")
        assert len(widths) == 2
        assert min(widths) > 100
        written = json.loads(browser.evaluate("document.getElementById('page-data').textContent"))
        for one in written["lists"]:
            rows = f"[...document.querySelectorAll('#{one['anchor']} .example')]"
            assert browser.evaluate(f"{rows}.map(e => e.ariaLabel)") == [
                example["place"] for example in one["examples"]
            ]
            tokens = [
                token
                for example in one["examples"]
                for token, valued in zip(example["tokens"], example["response"], strict=True)
                if valued == "1"
            ]
            shown = f"{rows}.flatMap(e => [...e.querySelectorAll('.tok')].map(t => t.textContent))"
            assert browser.evaluate(shown) == tokens
        full = format(written["lists"][0]["full"], "g")
        ends = browser.evaluate("document.querySelector('.scale').textContent")
        assert f"\u2212{full} or less" in ends
        assert f"+{full} or more" in ends
        assert "nats" in ends
        browser.evaluate("document.querySelector('.tok').click()")
        told = browser.evaluate("[...document.querySelectorAll('#tip td')].map(d => d.textContent)")
        assert told[:3:2] == ["value", "rank"]
        assert told[4:7:2] == ["before", "after the walk"]
        browser.needs_no_sideways_scroll(420, 1280)
        browser.begins_with("#data-highest-mean-loss .tok", ".scale", '[href="#data-next"]')
        below = "document.querySelector('#data-next + .command').textContent"
        assert browser.evaluate(below).startswith("alphatoken race ")


# --- stopped and resumed --------------------------------------------------------------------------


def test_a_stopped_diagnosis_keeps_its_parts_and_ends_in_the_same_bits(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(data, "_PART", 8)
    assert world.diagnose(tmp_path / "whole") == 0
    parts, real = 0, score_rows

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal parts
        parts += 1
        if parts == 3:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(data, "score_rows", interrupted)
    out = tmp_path / "out"
    assert world.diagnose(out) == 130
    assert "--resume" in capsys.readouterr().err
    kept = {path: path.stat().st_mtime_ns for path in sorted(out.rglob("part-*.parquet"))}
    assert len(kept) == 2
    monkeypatch.setattr(data, "score_rows", real)
    # Another walk is another run, and without --resume an earlier one is in the way.
    assert world.diagnose(out) == 2
    assert world.diagnose(out, "--resume", walk_steps=4) == 2
    assert "walk_steps: 3 then, 4 now" in capsys.readouterr().err
    assert world.diagnose(out, "--resume") == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    whole = tmp_path / "whole" / "data"
    for path in sorted(whole.rglob("*.*")):
        if path.name != "diagnosis.json":
            assert (out / "data" / path.relative_to(whole)).read_bytes() == path.read_bytes()
    # What comes next is beside each folder, and its time is that of the machine.
    one, other = (replace(Diagnosis.load(at), next_time="") for at in (whole, out / "data"))
    moved = one.next_command.replace(f"{tmp_path / 'whole'}-", f"{out}-")
    assert replace(one, next_command=moved) == other
    # A part of other rows is noticed.
    first, second, *_ = sorted((out / "data" / "values").glob("part-*.parquet"))
    first.write_bytes(second.read_bytes())
    (out / "data" / "diagnosis.json").unlink()
    assert world.diagnose(out, "--resume") == 2
    assert "does not hold the rows that are judged" in capsys.readouterr().err


# --- rows that are not as they should be ----------------------------------------------------------


def test_rows_that_cannot_serve_are_one_line(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    few = write_rows(tmp_path / "few.jsonl", 7, seed=3)
    silent = jsonl(tmp_path / "silent.jsonl", [{"prompt": "add : 7 and 7", "response": ""}] * 9)
    for changed, cause in (
        ({"train": empty}, "empty.jsonl"),
        ({"validation": empty}, "empty.jsonl"),
        ({"validation": few}, "too few trusted rows"),
        ({"train": few}, "too few rows to judge"),
        ({"train": silent}, "no training row is left"),
        ({"validation": silent}, "no validation row is left"),
        ({"train": world.folder / "validation.jsonl"}, "_file are the same file. Got"),
        ({"max_length": 3}, "no training row is left"),
        ({"validation": None, "validation_rows": 9}, "needs rows that are trusted"),
        ({"validation": None}, "there are no validation rows"),
        ({"walk_steps": 0}, "walk_steps"),
    ):
        assert world.diagnose(tmp_path / "out", **changed) == 2, changed
        error = capsys.readouterr().err
        assert cause in error
        assert error.count("\n") == 1


def test_what_was_left_out_is_said(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that are trusted too, rows without a response, rows that are cut, rows not drawn."""
    lines = [(world.folder / name).read_text() for name in ("train.jsonl", "validation.jsonl")]
    mixed = tmp_path / "mixed.jsonl"
    silent = json.dumps({"prompt": "add : 77 and 77", "response": ""})
    mixed.write_text("".join([*lines, silent, "\n", lines[0].splitlines()[4], "\n"]))
    words = world.words(["diagnose", "data"], tmp_path / "out", train=mixed, max_length=12)
    assert main([*words, "--train_rows", "30", "--validation_rows", "12"]) == 0
    said = capsys.readouterr().err
    removed = "12 training rows repeat a validation row or prompt and were removed (mixed.jsonl, l"
    assert removed in said
    assert "12 of 16 validation rows were drawn" in said
    assert "of 45 training rows were drawn" in said or "30 of" in said
    assert "longer than --max_length allows" in said
    assert "--retention_set" not in said
    assert main([*world.words(["diagnose", "data"], tmp_path / "whole", train=mixed)]) == 0
    copy = "note: 1 training row repeats another one and is left out (mixed.jsonl, line 58)."
    assert copy in capsys.readouterr().err


def test_of_all_diagnoses_it_is_left_out_without_trusted_rows(
    world: World,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which a note says before, and the page; the others run."""
    from alphatoken.cli import diagnose_options, diagnose_run
    from alphatoken.diagnose import find

    two = (find("data"), find("heatmap"))
    for module in (diagnose_options, diagnose_run):
        monkeypatch.setattr(module, "DIAGNOSTICS", two)
    words = flags({
        "model": world.folder / "model", "train": world.folder / "train.jsonl",
        "validation_rows": 6, "out": tmp_path / "out", "tokens": 40, "batch_size": 4,
    })  # fmt: skip
    assert main(["diagnose", "all", *words, "--quiet"]) == 0
    assert "note: data will not run without --validation_file" in capsys.readouterr().err
    assert Diagnosis.finished(tmp_path / "out" / "heatmap")
    assert not Diagnosis.finished(tmp_path / "out" / "data")
    assert "needs rows that are trusted" in (tmp_path / "out" / "report.html").read_text()


# --- spoilt chats ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.timeout(1800)
def test_spoilt_chats_stand_at_one_end_and_are_told_from_trusted_ones(
    smollm2: Path, tmp_path: Path
) -> None:
    """44 chats: 30 clean, 11 with 30 % wrong words, 3 with another row's answer; 32 trusted."""
    rows = chats(76, seed=1)
    clean, words, foreign, trusted = rows[:30], rows[30:41], rows[41:44], rows[44:]
    mixed = [*clean, *with_wrong_words(words), *with_foreign_answers(foreign)]
    options = flags({
        "model": smollm2, "train": jsonl(tmp_path / "mixed.jsonl", mixed), "batch_size": 4,
        "validation": jsonl(tmp_path / "trusted.jsonl", trusted), "out": tmp_path / "out",
    })  # fmt: skip
    assert main(["diagnose", "data", *options, "--quiet"]) == 0
    found = Diagnosis.load(tmp_path / "out" / "data")
    assert found.conclusion.startswith("Your rows differ from the trusted ones (p = ")
    own = records(tmp_path / "out", JUDGED)
    # The rows with wrong words are the lowest. Answers to other questions of one kind are harder to
    # tell: by their values two of three are among the next, by their losses all three.
    order = sorted(own, key=lambda one: one["value"])
    assert {one["row"] for one in order[:11]} == set(range(30, 41))
    assert len({one["row"] for one in order[:14]} & {41, 42, 43}) >= 2
    by_loss = sorted(own, key=lambda one: -one["loss"])
    assert {one["row"] for one in by_loss[:14]} == set(range(30, 44))
    # Without the spoilt rows nothing differs.
    alike = {JUDGED: own[:30], TRUSTED: records(tmp_path / "out", TRUSTED)}
    tests = {name: data.compare(alike, name, seed=0) for name in data.MEASURES}
    assert data.together(tests) > data.LEVEL


def test_the_printed_race_counts_steps_by_the_defaults_of_trl(tmp_path: Path) -> None:
    config = SFTConfig(output_dir=str(tmp_path), bf16=False)
    assert config.per_device_train_batch_size == TRAIN_BATCH
    assert config.num_train_epochs == EPOCHS
    assert config.gradient_accumulation_steps == 1
    assert config.max_length == TRAINERS_LENGTH
