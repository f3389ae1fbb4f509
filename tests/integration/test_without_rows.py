"""``--without_rows``: training rows that are left out by their numbers, and what is refused."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from safetensors.torch import load_file

from alphatoken.cli import main
from alphatoken.cli.arguments import read_arguments
from alphatoken.cli.training_rows import check_rows
from alphatoken.data.named_rows import as_typed, read_numbers
from alphatoken.errors import ConfigError, InputError
from alphatoken.train.sft import AlphaSFTConfig
from tests.integration import tiny_training as tiny
from tests.integration.race_world import declared
from tests.integration.test_cli_train import load, pairs, prompts, rows
from tests.rows import jsonl

ALL = ("--validation_rows", "0", "--fisher_prompts", "0", "--policy", "standard")
"""Every row is trained on."""


def lines_of(places: list[str]) -> list[int]:
    return [int(place.split()[-1]) for place in places]


def left(tmp_path: Path, file: Path, numbers: str, *more: str) -> list[str]:
    """Places of the training rows."""
    words = ("--train_file", str(file), "--without_rows", numbers, *ALL, *more)
    return list(load("sft", tmp_path, *words, small=False).train_places)


# --- which rows are left out ----------------------------------------------------------------------


def test_the_rows_of_these_lines_are_not_trained_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Empty lines count as lines; a broken one that is named is not read."""
    said = rows(8)
    file = jsonl(tmp_path / "chats.jsonl", [*said[:2], "", "{broken", *said[2:]])
    assert lines_of(left(tmp_path, file, "4,6-7,10")) == [1, 2, 5, 8, 9]
    assert (
        "chats.jsonl: prompt = prompt, response = response; 4 rows left out: named by "
        "--without_rows (chats.jsonl, lines 4, 6, 7, ...)"
    ) in caplog.text
    caplog.clear()
    assert lines_of(left(tmp_path, file, " 4 , 10")) == [1, 2, 5, 6, 7, 8, 9]
    assert "2 rows left out: named by --without_rows (chats.jsonl, lines 4, 10)" in caplog.text


def test_pairs_are_left_out_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = jsonl(tmp_path / "pairs.jsonl", [*pairs(4), "{broken"])
    words = ("--train_file", str(file), "--without_rows", "2,5", *ALL)
    data = load("dpo", tmp_path, *words, small=False)
    assert [row["chosen"] for row in data.train_dataset] == ["good 0", "good 2", "good 3"]
    assert "2 rows left out: named by --without_rows (pairs.jsonl, lines 2, 5)" in caplog.text


def written(kind: str, folder: Path, records: list[dict[str, Any]]) -> Path:
    file = folder / f"rows.{kind}"
    if kind == "csv":
        with file.open("w", newline="") as opened:
            table = csv.DictWriter(opened, list(records[0]))
            table.writeheader()
            table.writerows(records)
    elif kind == "json":
        file.write_text(json.dumps(records))
    elif kind == "parquet":
        Dataset.from_list(records).to_parquet(file)
    else:
        file.write_bytes(gzip.compress("".join(f"{json.dumps(r)}\n" for r in records).encode()))
    return file


@pytest.mark.parametrize(
    ("kind", "numbers", "those"),
    [
        ("csv", "2,5", "rows.csv, lines 2, 5"),  # the header is line 1, and row 2 has two lines
        ("json", "1,3", "rows.json, item 1, rows.json, item 3"),
        ("parquet", "1,3", "rows.parquet, row 1, rows.parquet, row 3"),
        ("jsonl.gz", "1,3", "rows.jsonl.gz, lines 1, 3"),
    ],
)
def test_numbers_are_those_that_messages_name(
    kind: str, numbers: str, those: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In each kind of file; also where it lies alone in its folder."""
    records = rows(5)
    records[1]["response"] = "say\nmore"
    folder = tmp_path / "rows"
    folder.mkdir()
    file = written(kind, folder, records)
    for named in (file, folder):
        caplog.clear()
        words = ("--train_file", str(named), "--without_rows", numbers, *ALL)
        data = load("sft", tmp_path, *words, small=False)
        assert prompts(data.train_dataset) == ["ask 1\n", "ask 3\n", "ask 4\n"]
        assert f"2 rows left out: named by --without_rows ({those})" in caplog.text


def test_a_bad_item_of_a_list_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([*rows(2), "no object", *rows(2, 2)]))
    assert lines_of(left(tmp_path, file, "3")) == [1, 2, 4, 5]


def test_the_limit_counts_rows_of_the_file(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", rows(8))
    assert lines_of(left(tmp_path, file, "2", "--train_limit", "4")) == [1, 3, 4]


def test_other_rows_are_never_left_out(tmp_path: Path) -> None:
    """Those of validation, retention, the Fisher and evaluation keep the lines of these numbers."""
    words = ["--train_file", str(jsonl(tmp_path / "train.jsonl", rows(8))), "--without_rows", "1-3"]
    words += ["--eval_strategy", "steps", "--eval_steps", "5", "--objective", "both"]
    names = {"validation_file": "validation", "retention_data": "retention", "eval_data": "eval"}
    for start, name in enumerate(names, start=1):
        words += [f"--{name}", str(jsonl(tmp_path / f"{name}.jsonl", rows(4, 20 * start)))]
    data = load("sft", tmp_path, *words, "--retention", "data", small=False)
    assert prompts(data.train_dataset) == [f"ask {i}\n" for i in range(3, 8)]
    for start, name in enumerate(names.values(), start=1):
        found = prompts(getattr(data, f"{name}_dataset"))
        assert found == [f"ask {i}\n" for i in range(20 * start, 20 * start + 4)]
    fisher = ["--fisher_data", str(jsonl(tmp_path / "fisher.jsonl", rows(4, 80)))]
    fisher += ["--objective", "both", *words[words.index("--validation_file") :][:2]]
    data = load("sft", tmp_path, *words[:4], *fisher, small=False)
    assert len(data.fisher_dataset) == 4


# --- how the numbers are written ------------------------------------------------------------------


@pytest.mark.parametrize(
    "said", ["4,13,15-16", [4, 13, "15-16"], [4, "13,15 - 16"], ["4", 13, 15, 16]]
)
def test_a_recipe_says_them_as_text_or_as_a_list(said: Any, tmp_path: Path) -> None:
    file = str(jsonl(tmp_path / "rows.jsonl", rows(17)))
    recipe = tmp_path / "own.yaml"
    recipe.write_text(yaml.safe_dump({"train_file": file, "without_rows": said}))
    data = load("sft", tmp_path, "--config", str(recipe), *ALL, small=False)
    assert lines_of(data.train_places) == [n for n in range(1, 18) if n not in (4, 13, 15, 16)]
    # The command line goes before it, also with none.
    more = ("--config", str(recipe), "--without_rows")
    assert len(load("sft", tmp_path, *more, "2", *ALL, small=False).train_places) == 16
    assert len(load("sft", tmp_path, *more, "null", *ALL, small=False).train_places) == 17


def test_one_number_and_none(tmp_path: Path) -> None:
    assert as_typed(4) == "4"
    assert as_typed([]) is as_typed(None) is None
    assert read_numbers("7-7,3") == (range(7, 8), range(3, 4))
    # A range that no file has is not written out.
    file = jsonl(tmp_path / "rows.jsonl", rows(3))
    with pytest.raises(InputError, match="--without_rows: 4, 5, 6, 7, ..."):
        left(tmp_path, file, "2-999999999999999999")


@pytest.mark.parametrize(
    "said",
    ["four", "4;5", "4-", "-4", "18-15", "4,,5", "4,", "", "4.5", "1-2-3", "٤", 4.5, True, [True],
     [None], [[4]], {"line": 4}, "9" * 5000],
)  # fmt: skip
def test_words_that_are_no_numbers_are_refused(said: Any) -> None:
    typed = as_typed(said)
    assert typed is not None
    with pytest.raises(ConfigError, match="no number of a row.*--without_rows 4,13,15-18"):
        read_numbers(typed)


def test_they_are_refused_before_any_row_is_read(tmp_path: Path) -> None:
    file = str(jsonl(tmp_path / "rows.jsonl", ["{broken"]))
    words = ["--use_cpu", "--bf16", "false", "--train_file", file, "--without_rows", "four"]
    with pytest.raises(ConfigError, match="no range of them. Got: 'four' in --without_rows"):
        check_rows(read_arguments("sft", words, AlphaSFTConfig))


@pytest.mark.parametrize(
    ("numbers", "more", "said"),
    [
        ("0", (), "--without_rows: 0; the rows are rows.jsonl, line 1 to rows.jsonl, line 6"),
        ("2,7,9", (), "--without_rows: 7, 9; the rows"),
        ("3", (), "--without_rows: 3; the rows"),  # an empty line
        ("1-4", (), "--without_rows: 3; the rows"),
        ("2,5", ("--train_limit", "3"), "--without_rows: 5; the first 3 rows are rows.jsonl, line "
                                        "1 to rows.jsonl, line 4"),
        ("1,2,4-6", (), "every training row is left out.*--without_rows 1,2,4-6, of 5 rows"),
        ("1-2", ("--train_limit", "2"), "every.*--without_rows 1-2, of 2 rows"),
        ("2", ("--train_limit", "0"), "--without_rows: 2"),
    ],
)  # fmt: skip
def test_numbers_that_no_row_has_are_named_before_any_work(
    numbers: str, more: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """A broken line before them does not hide it."""
    said_rows = rows(4)
    file = jsonl(tmp_path / "rows.jsonl", ["{broken", said_rows[0], "", *said_rows[1:]])
    with pytest.raises(InputError, match=said):
        left(tmp_path, file, numbers, *more)


def test_a_line_within_a_cell_is_no_row(tmp_path: Path) -> None:
    records = rows(3)
    records[1]["response"] = "say\nmore"
    file = written("csv", tmp_path, records)
    for number in ("1", "4"):
        with pytest.raises(InputError, match=f"--without_rows: {number}; the rows are rows.csv"):
            left(tmp_path, file, number)


def test_a_number_names_a_row_of_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for name in ("a", "b"):
        jsonl(folder / f"{name}.jsonl", rows(3))
    with pytest.raises(ConfigError, match=r"one file. Got: --without_rows 2, files .*a\.jsonl, b"):
        left(tmp_path, folder, "2")
    base = ["--use_cpu", "--bf16", "false", "--without_rows", "2"]
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(yaml.safe_dump({"datasets": [{"path": "json"}]}))
    for words, source in (
        (["--dataset_name", "who/what"], "dataset_name"),
        (["--config", str(mixture)], "datasets"),
    ):
        with pytest.raises(
            ConfigError, match=rf"one file. Got: --without_rows 2, rows of {source}"
        ):
            check_rows(read_arguments("sft", [*base, *words], AlphaSFTConfig))


def test_numbers_of_a_recipe_are_of_its_own_file(tmp_path: Path) -> None:
    """Not of another one that the command line names in its place."""
    files = [str(jsonl(tmp_path / f"{name}.jsonl", rows(3))) for name in "ab"]
    recipe = tmp_path / "own.yaml"
    recipe.write_text(yaml.safe_dump({"train-file": files[0], "without-rows": [2]}))
    words = ("--config", str(recipe), *ALL)
    with pytest.raises(ConfigError, match=r"another file. Got: 2 of .*a.jsonl.*b.jsonl"):
        load("sft", tmp_path, *words, "--train_file", files[1], small=False)
    for more in (
        ("--train_file", str(tmp_path / "." / "a.jsonl")),
        ("--train_file", files[1], "--without_rows", "2"),
    ):
        data = load("sft", tmp_path, *words, *more, small=False)
        assert lines_of(data.train_places) == [1, 3]
    numbers = tmp_path / "numbers.yaml"  # of no file of its own
    numbers.write_text("without_rows: 1,2\n")
    more = ("--config", str(numbers), "--train_file", files[1], *ALL)
    assert lines_of(load("sft", tmp_path, *more, small=False).train_places) == [3]


@pytest.mark.parametrize("command", ["score", "fisher", "diagnose utility", "diagnose data"])
def test_commands_that_do_not_train_have_no_such_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command.split(), "--without_rows", "3"]) == 2
    assert "--without_rows" in capsys.readouterr().err


# --- real runs ------------------------------------------------------------------------------------


BROKEN = {"rows": 2, "pairs": 1}
"""The line of each file that cannot be read."""
NAMED = {name: f"{line},4,12-16" for name, line in BROKEN.items()}
"""Lines of the longer file that the shorter one lacks."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model, and two files of rows and of pairs: with lines too many, and without them."""
    tiny.saved(tmp_path, 4)
    for name, own in (("rows", tiny.sums(14)), ("pairs", list(tiny.preference_rows(14)))):
        lines: list[Any] = [*own[:5], "", *own[5:]]
        lines.insert(BROKEN[name] - 1, "{broken")
        jsonl(tmp_path / f"{name}.jsonl", lines)
        jsonl(tmp_path / f"few-{name}.jsonl", [*own[:2], *own[3:9]])
    return tmp_path


def words_of(folder: Path, file: str, out: str, *more: str) -> list[str]:
    return [
        "--model_name_or_path", str(folder / "model"), "--train_file", str(folder / file),
        "--output_dir", str(folder / out), "--max_steps", "2", "--learning_rate", "1e-2",
        "--per_device_train_batch_size", "2", "--use_cpu", "--bf16", "false", "--report_to", "none",
        "--disable_tqdm", "true", "--validation_rows", "2", "--validation_batch_size", "2",
        "--retention", "none", "--no_chat_template", *more,
    ]  # fmt: skip


def same_weights(*folders: Path) -> bool:
    one, two = (load_file(folder / "model.safetensors") for folder in folders)
    assert one.keys() == two.keys()
    return all(torch.equal(one[name], two[name]) for name in one)


TRAINED = {
    "sft": ("rows", ("--policy", "top", "--value", "walk", "--walk_steps", "2")),
    "dpo": ("pairs", ("--policy", "random")),
}


@pytest.mark.parametrize("command", TRAINED)
def test_a_run_is_that_of_a_file_without_these_lines(
    command: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit by bit, validation rows that are drawn among them; and with others it is not resumed."""
    name, more = TRAINED[command]
    more = (*more, "--save_steps", "1")
    named = words_of(folder, f"{name}.jsonl", "named", *more)
    assert main([command, *named, "--without_rows", NAMED[name]]) == 0, capsys.readouterr().err
    said = capsys.readouterr()
    lines = f"{name}.jsonl, lines {BROKEN[name]}, 4, 12, ..."
    assert f"7 rows left out: named by --without_rows ({lines})" in said.err
    losses = "next, to see which losses fell"
    assert losses not in said.out, "it would read the lines that were left out"
    cut = words_of(folder, f"few-{name}.jsonl", "cut", *more)
    assert main([command, *cut]) == 0, capsys.readouterr().err
    assert same_weights(folder / "named", folder / "cut")
    assert (losses in capsys.readouterr().out) == (command == "sft")
    assert main([command, *named, "--resume", "--without_rows", f"{BROKEN[name]},5,12-16"]) == 2
    assert "train_dataset" in capsys.readouterr().err.splitlines()[-1]
    again = f"16,4,{BROKEN[name]},12-15"
    assert main([command, *named, "--resume", "--without_rows", again]) == 0
    assert same_weights(folder / "named", folder / "cut")


def test_every_arm_of_a_race_is_without_them(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its losses are those of the race on a file without these lines; others do not go on."""
    race = ["--choosing_file", str(jsonl(folder / "choosing.jsonl", tiny.sums(8, seed=9)))]
    race += ["--looks", "2", "--stop_after_looks", "--arms", "half:policy=random,keep_ratio=0.5"]
    race += ["--max_steps", "3", "--save_strategy", "no"]
    named = words_of(folder, "rows.jsonl", "named", *race)
    assert main(["race", *named, "--without_rows", NAMED["rows"]]) == 0, capsys.readouterr().err
    assert main(["race", *words_of(folder, "few-rows.jsonl", "cut", *race)]) == 0
    one, two = (json.loads((folder / out / "race.json").read_text()) for out in ("named", "cut"))
    assert one["losses"] == two["losses"]
    assert {*one["losses"]["2"]} == {"all", "half"}
    then = capsys.readouterr().out
    assert f"--without_rows {NAMED['rows']}" in then
    assert main(["race", *named, "--resume", "--without_rows", "2,5,12-16"]) == 2
    assert "train_dataset" in capsys.readouterr().err.splitlines()[-1]


def test_an_arm_of_a_race_is_without_rows_that_others_train_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its losses are those of `all` on a file without these lines; it wins and goes on as alone."""
    broken, others = str(BROKEN["rows"]), "4,12-16"
    race = ["--choosing_file", str(jsonl(folder / "choosing.jsonl", tiny.sums(8, seed=9)))]
    race += ["--looks", "2", "--max_steps", "3", "--save_strategy", "no", "--validation_rows", "0"]
    named = words_of(folder, "rows.jsonl", "named", *race, "--without_rows", broken)
    with declared("rest"):
        assert main(["race", *named, "--arms", f"rest:without_rows={others}"]) == 0
    said = capsys.readouterr()
    assert "note: rest: on 8 of 14 training rows\n" in said.err
    cut = words_of(folder, "few-rows.jsonl", "cut", *race, "--arms", "half:policy=random")
    assert main(["race", *cut, "--stop_after_looks"]) == 0
    one, two = (json.loads((folder / out / "race.json").read_text()) for out in ("named", "cut"))
    assert one["losses"]["2"]["rest"] == two["losses"]["2"]["all"] != one["losses"]["2"]["all"]
    (command,) = re.findall("to train this way without a race: alphatoken (.*)", said.out)
    assert f" --without_rows {broken},{others} " in command
    assert " --max_steps 3 " in command
    assert main(shlex.split(command)) == 0
    assert same_weights(folder / "named", folder / "named-alone")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("rest:without_rows=4,99",), "the arm 'rest': 99; the rows are rows.jsonl, line 1 to"),
        (("rest:without_rows=1-99",), "the arm 'rest': 3, 17, 18, 19, ...; the rows are"),
        (("rest:without_rows=four",), "'four' in the arm 'rest'"),
        (("rest:without_rows=2", "--train_limit", "1"), "the arm 'rest': 2; the first 1 rows"),
        (("rest:without_rows=2", "--without_rows", "2"), "the arm 'rest' leaves out no row"),
        (("rest:without_rows=1,2,4-7", "--without_rows", "8-16"), "leaves out every row"),
    ],
)
def test_an_arm_without_rows_that_there_are_not(
    more: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any arm trains."""
    jsonl(folder / "rows.jsonl", [*tiny.sums(2), "", *tiny.sums(13)])
    race = ["--choosing_file", str(jsonl(folder / "choosing.jsonl", tiny.sums(8, seed=9)))]
    words = words_of(folder, "rows.jsonl", "refused", *race, "--validation_rows", "0")
    assert main(["race", *words, "--arms", *more]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    assert not (folder / "refused").exists()


@pytest.mark.parametrize("name", ["rows", "pairs"])
def test_show_shows_the_others(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the command that it ends with has the option; pairs are told by the first good row."""
    file = str(folder / f"{name}.jsonl")
    words = ["show", file, "--model_name_or_path", str(folder / "model"), "--rows", "99"]
    assert main([*words, "--without_rows", NAMED[name]]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out.splitlines()
    shown = dict.fromkeys(
        line.split("line ")[1].strip(")").split(",")[0] for line in out if line.startswith("row ")
    )
    assert [*map(int, shown)] == [3 - BROKEN[name], 3, 5, 6, 8, 9, 10, 11]
    items = "rows" if name == "rows" else "pairs"
    lines = f"{name}.jsonl, lines {BROKEN[name]}, 4, 12, ..."
    assert f"7 {items} left out: named by --without_rows ({lines})" in out
    command = shlex.split(out[-1].removeprefix("next: alphatoken "))
    assert command[0] == ("sft" if name == "rows" else "dpo")
    assert command[command.index("--without_rows") + 1] == NAMED[name]
    assert "--on_bad_rows" not in command
    assert main([*words, "--without_rows", "99"]) == 2
    assert "--without_rows: 99; the rows are" in capsys.readouterr().err
