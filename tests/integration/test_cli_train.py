"""``alphatoken sft`` and ``dpo``: rows, refusals, real runs, interruption and resumption."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from alphatoken import fit_fisher
from alphatoken.cli import main
from alphatoken.cli.arguments import read_arguments
from alphatoken.cli.training import build_trainer
from alphatoken.cli.training_rows import load_run_data
from alphatoken.data import Turn, pair_of
from alphatoken.data.stdlib import write_files
from alphatoken.errors import ConfigError, DataError, InputError
from alphatoken.score import read_values
from alphatoken.support.storage import open_line
from alphatoken.train.dpo import AlphaDPOConfig, AlphaDPOTrainer
from alphatoken.train.manifest import RUN
from alphatoken.train.options import AlphaOptions
from alphatoken.train.records import REPORT
from alphatoken.train.sft import AlphaSFTConfig, AlphaSFTTrainer
from tests.integration.small_world import exchanges, make_tokenizer, saved_model
from tests.integration.test_data import CHATML, byte_tokenizer
from tests.places import nightly
from tests.rows import jsonl

WORDS = {"sft": "response", "dpo": "chosen"}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder and its tokenizer, in a folder."""
    return saved_model(tmp_path_factory.mktemp("tiny") / "model")


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"prompt": f"ask {i}", "response": f"say {i} {i}"} for i in range(start, start + count)]


def pairs(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": f"ask {i}", "chosen": f"good {i}", "rejected": f"bad bad {i}"}
        for i in range(start, start + count)
    ]


class Letters:
    """A tokenizer of one token a character, all that reading rows needs of one."""

    eos_token, eos_token_id = "\0", 0
    chat_template: str | None = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[Any]]:
        ids = list(text.encode())
        return {"input_ids": ids, "offset_mapping": [(i, i + 1) for i in range(len(ids))]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return bytes(ids).decode()

    def apply_chat_template(
        self, messages: Any, add_generation_prompt: bool = False, **_: Any
    ) -> str:
        said = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return said + "assistant: " * add_generation_prompt


def load(
    command: str, tmp_path: Path, *words: str, tokenizer: Any = None, small: bool = True
) -> SimpleNamespace:
    """Data sets by the trainer's arguments, and the notes."""
    kind = {"sft": AlphaSFTConfig, "dpo": AlphaDPOConfig}[command]
    drawn = ("--validation_rows", "2") if small else ()
    if "--retention" not in words:
        drawn += ("--retention", "diagonal", *(("--fisher_prompts", "2") if small else ()))
    arguments = read_arguments(
        command, ["--use_cpu", "--bf16", "false", "--output_dir", str(tmp_path / "out"),
                  *drawn, *words], kind,
    )  # fmt: skip
    datasets, notes = load_run_data(arguments, tokenizer or Letters())
    return SimpleNamespace(**datasets, notes=notes)


def before_labels(row: dict[str, list[int]]) -> list[int]:
    first = next(i for i, label in enumerate(row["labels"]) if label != -100)
    return row["input_ids"][:first]


def prompts(dataset: Any) -> list[str]:
    """What comes before the first label of each row."""
    return [bytes(before_labels(row)).decode() for row in dataset]


# --- rows of a run ------------------------------------------------------------------------------


def test_rows_are_held_out_and_counted(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "train.jsonl", [*rows(20), *rows(3)])  # three come twice
    data = load("sft", tmp_path, "--train_file", str(file))
    assert len(data.validation_dataset) == len(data.fisher_dataset) == 2
    held = {*prompts(data.validation_dataset), *prompts(data.fisher_dataset)}
    assert not held & set(prompts(data.train_dataset))
    said = " ".join(data.notes)
    assert "2 rows drawn for validation" in said
    assert "2 prompts drawn for the Fisher" in said
    again = sum(f"ask {i}\n" in held for i in range(3))  # copies of what was held out
    assert len(data.train_dataset) == 23 - 4 - again


def test_a_row_with_the_tokens_of_a_held_out_row_is_removed(tmp_path: Path) -> None:
    """Whatever its text: as a document it has no prompt that could be the same."""
    held, watched, fisher = rows(3, 100)
    whole = [{"text": f"{row['prompt']}\n{row['response']}"} for row in (held, watched, fisher)]
    train = [*rows(6), *whole]
    words = ["--train_file", str(jsonl(tmp_path / "train.jsonl", train))]
    words += ["--objective", "both"]
    words += ["--validation_file", str(jsonl(tmp_path / "held.jsonl", [held]))]
    for retention, name, row in (
        ("data", "retention_data", watched),
        ("diagonal", "fisher_data", fisher),
    ):
        own = ["--retention", retention, f"--{name}", str(jsonl(tmp_path / f"{name}.jsonl", [row]))]
        data = load("sft", tmp_path, *words, *own, small=False)
        assert len(data.train_dataset) == 7
        said = " ".join(data.notes)
        assert "1 training row repeats a validation row" in said
        assert "1 training row repeats a retention row or a prompt of the Fisher" in said


def test_a_pair_with_the_tokens_of_a_held_out_pair_is_removed(tmp_path: Path) -> None:
    """A filled template beside messages; both are tokens as ``dpo`` trains on them."""
    made = byte_tokenizer(CHATML)
    held = {"prompt": "Name a bird.", "chosen": "A wren.", "rejected": "A cat."}
    filled = "<|im_start|>user\nName a bird.<|im_end|>\n<|im_start|>assistant\n"
    train = [{**held, "prompt": filled, "chosen": "An owl."},
             {**held, "prompt": filled.replace("bird", "tree")}]  # fmt: skip
    words = ["--train_file", str(jsonl(tmp_path / "train.jsonl", train)), "--validation_file",
             str(jsonl(tmp_path / "held.jsonl", [held])), "--retention", "none"]  # fmt: skip
    data = load("dpo", tmp_path, *words, tokenizer=made, small=False)
    assert [row["prompt"] for row in data.train_dataset] == [train[1]["prompt"]]
    assert "1 training row repeats a validation row or prompt and was removed" in str(data.notes)


@pytest.mark.parametrize("base", ["laptop-sft", "laptop-lora", "metamath-gemma"])
def test_the_recommended_race_trains_on_every_row(base: str, tmp_path: Path) -> None:
    """Whatever the recipe below draws for a Fisher, which is not fitted here."""
    file = jsonl(
        tmp_path / "train.jsonl", [{"prompt": f"a{i}", "response": "b"} for i in range(90)]
    )
    clean = jsonl(tmp_path / "clean.jsonl", [{"prompt": "c", "response": "d"}])
    choosing = jsonl(tmp_path / "choosing.jsonl", [{"prompt": "e", "response": "f"}] * 2)
    words = [
        "--config", base, "--config", "recommended", "--train_file", str(file), "--use_cpu",
        "--bf16", "false", "--validation_file", str(clean), "--prompt_column", "prompt",
            "--no_chat_template",
    ]  # fmt: skip
    words += ["--choosing_file", str(choosing)]
    said = read_arguments("sft", words, AlphaSFTConfig, race=True)
    data, notes = load_run_data(said, Letters())
    assert len(data["train_dataset"]) == 90
    assert data["fisher_dataset"] is None
    assert not [note for note in notes if "drawn" in note]


def test_rows_that_a_policy_does_not_read_are_said_to_be_drawn(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "train.jsonl", rows(20))
    data = load("sft", tmp_path, "--train_file", str(file), "--policy", "standard")
    said = " ".join(data.notes)
    assert "this run reads none of them: --fisher_prompts 0 trains on them" in said
    assert "--validation_rows 0 trains on them" in said
    more = ("--fisher_prompts", "0", "--validation_rows", "0")
    whole = load("sft", tmp_path, "--train_file", str(file), "--policy", "standard", *more)
    assert len(whole.train_dataset) == 20


def test_a_run_that_reads_no_held_out_row_trains_on_fewer_rows_too(tmp_path: Path) -> None:
    """The number may be a recipe's, for policies that value tokens."""
    file = str(jsonl(tmp_path / "train.jsonl", rows(9)))
    words = ("--train_file", file, "--validation_rows", "9", "--fisher_prompts", "0")
    data = load("sft", tmp_path, *words, "--policy", "standard")
    assert len(data.train_dataset) == 9
    assert (
        "No row is held out, since this run reads none and 9 rows are too few to hold out 9."
        in data.notes
    )
    with pytest.raises(ConfigError, match="validation rows cannot be drawn"):
        load("sft", tmp_path, *words, "--policy", "top")


@pytest.mark.parametrize(
    ("name", "words", "cause"),
    [
        ("fisher_data", ("--retention", "none"), "wanted"),
        ("fisher_prompts", ("--retention", "none"), "wanted"),
        ("fisher_file", ("--objective", "adaptation"), "wanted"),
        ("fisher_data", ("--fisher_file", "FILE"), "fitted on it"),
        ("fisher_prompts", ("--fisher_file", "FILE"), "fitted on it"),
    ],
)
def test_a_fisher_that_would_go_unread_is_refused(
    name: str, words: tuple[str, str], cause: str, tmp_path: Path
) -> None:
    file = str(jsonl(tmp_path / "train.jsonl", rows(20)))
    own = (f"--{name}", "5" if name == "fisher_prompts" else file, "--validation_rows", "2")
    more = (file if word == "FILE" else word for word in words)
    with pytest.raises(ConfigError, match=f"{name} is given, and no Fisher is {cause}"):
        load("sft", tmp_path, "--train_file", file, *own, *more, small=False)


def test_retention_rows_that_would_go_unread_are_refused(tmp_path: Path) -> None:
    """What is typed; of a recipe, which serves several objectives, they give way."""
    file = str(jsonl(tmp_path / "train.jsonl", rows(20)))
    words = ("--train_file", file, "--validation_rows", "2")
    for more in ((), ("--retention", "data", "--objective", "adaptation")):
        with pytest.raises(ConfigError, match="retention_data is given, and no retention rows"):
            load("sft", tmp_path, *words, "--retention_data", file, *more, small=False)
    (tmp_path / "own.yaml").write_text(f"retention_data: {file}\n")
    words = ("--config", str(tmp_path / "own.yaml"), *words, "--use_cpu", "--bf16", "false")
    for more, left in (((), ("retention_data",)), (("--retention", "data"), ())):
        arguments = read_arguments("sft", [*words, *more], AlphaSFTConfig)
        assert arguments.unread == left
        assert (arguments.data.retention_data is None) == bool(left)


def test_prompts_of_a_recipe_give_way_where_no_fisher_is_wanted(tmp_path: Path) -> None:
    """A recipe serves several objectives; what is typed is refused, as above."""
    file = str(jsonl(tmp_path / "train.jsonl", rows(20)))
    (tmp_path / "own.yaml").write_text("fisher_prompts: 5\n")
    words = ["--config", str(tmp_path / "own.yaml"), "--train_file", file, "--use_cpu",
             "--bf16", "false", "--validation_rows", "2"]  # fmt: skip
    for more in ([], ["--retention", "none"]):
        arguments = read_arguments("sft", [*words, *more], AlphaSFTConfig)
        assert arguments.unread == ("fisher_prompts",)
        assert load_run_data(arguments, Letters())[0]["fisher_dataset"] is None


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_rows_that_repeat_validation_are_removed(command: str, tmp_path: Path) -> None:
    make = rows if command == "sft" else pairs
    train = jsonl(tmp_path / "train.jsonl", make(10))
    changed = {**make(1, 3)[0], WORDS[command]: "another answer"}
    held = jsonl(tmp_path / "held.jsonl", [*make(2, 50), changed])
    words = ("--train_file", str(train), "--validation_file", str(held), "--fisher_prompts", "0")
    data = load(command, tmp_path, *words, small=False)
    read = prompts if command == "sft" else lambda rows_: rows_["prompt"]
    assert "ask 3\n" not in read(data.train_dataset)
    assert len(data.train_dataset) == 9
    said = "1 training row repeats a validation row or prompt and was removed"
    assert f"{said} (train.jsonl, line 4)." in data.notes


def test_retention_rows_are_kept_out_of_training(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "train.jsonl", rows(10))
    kept = jsonl(tmp_path / "old.jsonl", rows(2, 9))
    data = load(
        "sft", tmp_path, "--train_file", str(train), "--retention_data", str(kept),
        "--retention", "data",
    )  # fmt: skip
    assert len(data.retention_dataset) == 2
    assert data.fisher_dataset is None
    assert "ask 9\n" not in prompts(data.train_dataset)


def test_controls_train_on_the_same_rows(tmp_path: Path) -> None:
    file = str(jsonl(tmp_path / "train.jsonl", rows(30)))
    top = load("sft", tmp_path, "--train_file", file)
    for policy in ("random", "all"):
        control = load("sft", tmp_path, "--train_file", file, "--policy", policy)
        assert prompts(control.train_dataset) == prompts(top.train_dataset)


@pytest.mark.parametrize("option", ["completion_only_loss", "assistant_only_loss"])
def test_plain_texts_have_no_answers_to_train_on_alone(option: str, tmp_path: Path) -> None:
    """All of a text would be learned without a word; an answer without a question is one."""
    texts = jsonl(tmp_path / "texts.jsonl", [{"text": f"once {n}"} for n in range(6)])
    said = [[{"role": "assistant", "content": f"hello {n}"}] for n in range(6)]
    chats = jsonl(tmp_path / "chats.jsonl", [{"messages": turns} for turns in said])
    words = ("--policy", "standard", "--validation_rows", "0", "--fisher_prompts", "0")
    assert load("sft", tmp_path, "--train_file", str(texts), *words).train_dataset
    own = (*words, f"--{option}", "true")
    assert load("sft", tmp_path, "--train_file", str(chats), *own).train_dataset
    with pytest.raises(DataError, match=f"no prompt, and {option} trains on answers alone"):
        load("sft", tmp_path, "--train_file", str(texts), *own)


def test_rows_that_max_length_cuts_are_counted(tmp_path: Path) -> None:
    """In each set of rows that the run reads; TRL cuts them without a word."""
    long = [{"prompt": f"long {i}", "response": "x" * 90} for i in range(4)]  # 98 tokens, one ends
    train = jsonl(tmp_path / "train.jsonl", [*rows(10), *long[:2]])
    held = jsonl(tmp_path / "held.jsonl", [*rows(4, 50), long[2]])
    evaluated = jsonl(tmp_path / "eval.jsonl", [*rows(2, 70), long[3]])
    words = (
        "--train_file", str(train), "--validation_file", str(held), "--eval_data", str(evaluated),
        "--eval_strategy", "steps", "--eval_steps", "5", "--retention", "none",
    )  # fmt: skip

    def said(*more: str) -> list[str]:
        notes = load("sft", tmp_path, *words, *more, small=False).notes
        return [note for note in notes if "longer than" in note]

    tokens = len("long 0\n" + "x" * 90 + "\0")
    assert said("--max_length", str(tokens)) == []
    cut = "longer than 60 tokens: {} tokens cut off at the {}."
    expected = [("2 of 12 training", 2), ("1 of 5 validation", 1), ("1 of 3 evaluation", 1)]

    def counted(packed: str | None = None, end: str = "end") -> list[str]:
        return [
            f"{rows} rows {packed if packed and n == 0 else cut.format(k * (tokens - 60), end)}"
            for n, (rows, k) in enumerate(expected)
        ]

    short = ("--max_length", "60")
    assert said(*short) == counted()
    assert said(*short, "--truncation_mode", "keep_end") == counted(end="start")
    packed = (*short, "--packing", "true", "--eval_packing", "false", "--packing_strategy")
    assert said(*packed, "bfd") == counted()
    parts = "longer than 60 tokens: packing_strategy bfd_split takes them in parts."
    assert said(*packed, "bfd_split") == counted(parts)


@pytest.mark.parametrize(
    ("option", "called"), [("choosing", "choosing {}"), ("retention", "retention {} of the race")]
)
def test_rows_that_a_race_looks_at_are_kept_out_of_all_others(
    option: str, called: str, tmp_path: Path
) -> None:
    """Of choosing rows and of retention rows the page says that no arm has seen them."""
    long = {"prompt": "long", "response": "x" * 90}
    files = {
        "train": rows(10), "validation": rows(4, 8), "choosing": rows(3, 40),
        "retention": rows(3, 50), "retention_data": rows(3, 60),
    }  # fmt: skip
    files[option] = [*rows(2), *rows(1, 10), *rows(1, 60), long]
    paths = {name: str(jsonl(tmp_path / f"{name}.jsonl", own)) for name, own in files.items()}

    def read() -> tuple[dict[str, Any], str]:
        words = [
            "--use_cpu", "--bf16", "false", "--max_length", "60", "--no_chat_template",
            "--retention", "data", "--policy", "top", "--keep_ratio", "0.5",
        ]  # fmt: skip
        words += ["--retention_data", paths["retention_data"]]
        for name in ("train", "validation", "choosing", "retention"):
            words += [f"--{name}_file", paths[name]]
        said = read_arguments("sft", words, AlphaSFTConfig, race=True)
        data, notes = load_run_data(said, Letters())
        return data, "\n".join(notes)

    data, said = read()
    one = called.format("row")
    assert prompts(data["train_dataset"]) == [f"ask {n}\n" for n in range(2, 8)]
    assert prompts(data["validation_dataset"]) == [f"ask {n}\n" for n in (8, 9, 11)]
    assert prompts(data["retention_dataset"]) == ["ask 61\n", "ask 62\n"]
    places = ("train.jsonl, lines 1, 2", "validation.jsonl, line 3")
    assert f"2 training rows repeat a {one} or its prompt and were removed ({places[0]})." in said
    assert f"1 validation row repeats a {one} or its prompt and was removed ({places[1]})" in said
    assert f"1 retention row repeats a {one} or its prompt and was removed (retention_data" in said
    assert f"1 of 5 {called.format('rows')} longer than 60 tokens: 36 tokens cut" in said
    paths["train"] = paths[option]
    with pytest.raises(ConfigError, match=f"--train_file and --{option}_file are the same file"):
        read()
    paths["train"] = str(shutil.copy(paths[option], tmp_path / "copied.jsonl"))
    with pytest.raises(DataError, match=f"all 5 repeat a {one}"):
        read()


@pytest.mark.parametrize("command", ["sft", "dpo"])
def test_rows_that_repeat_evaluation_rows_are_removed(command: str, tmp_path: Path) -> None:
    make = rows if command == "sft" else pairs
    train = jsonl(tmp_path / "train.jsonl", make(10))
    held = jsonl(tmp_path / "held.jsonl", make(2, 8))
    changed = {**make(1, 3)[0], WORDS[command]: "another answer"}
    evaluated = jsonl(tmp_path / "eval.jsonl", [*make(2, 50), changed, *make(2, 8)])
    words = [
        "--train_file", str(train), "--validation_file", str(held), "--fisher_prompts", "0",
        "--eval_data", str(evaluated), "--eval_strategy", "steps", "--eval_steps", "5",
    ]  # fmt: skip
    data = load(command, tmp_path, *words, small=False)
    assert data.train_places == [f"train.jsonl, line {n}" for n in (1, 2, 3, 5, 6, 7, 8)]
    assert len(data.train_dataset) == 7
    assert len(data.eval_dataset) == 5
    said = "1 training row repeats an evaluation row or its prompt and was removed"
    assert f"{said} (train.jsonl, line 4)." in data.notes
    (tmp_path / "linked.jsonl").symlink_to(evaluated)
    words[words.index("--train_file") + 1] = str(tmp_path / "linked.jsonl")
    with pytest.raises(ConfigError, match="--train_file and --eval_data are the same file"):
        load(command, tmp_path, *words, small=False)
    words[words.index("--train_file") + 1] = str(shutil.copy(evaluated, tmp_path / "copied.jsonl"))
    with pytest.raises(DataError, match="all 3 repeat an evaluation row"):
        load(command, tmp_path, *words, small=False)


def test_rows_of_tokens_are_compared_with_rows_of_texts(tmp_path: Path) -> None:
    """By their tokens: those of a prompt decode to the template's words around it.

    Of the rows that `alphatoken score --rows tokens` writes the first response token may have no
    label.
    """
    tokenizer = Letters()
    tokenizer.chat_template = "as above"
    texts = str(jsonl(tmp_path / "texts.jsonl", rows(10)))
    none = ("--validation_rows", "0", "--fisher_prompts", "0", "--policy", "weights")
    read = {"tokenizer": tokenizer, "small": False}
    weight = ("--on_bad_rows", "error", *none)
    made = load("sft", tmp_path, "--train_file", texts, *none[:-1], "standard", **read)
    tokens = [dict(row) for row in made.train_dataset]
    assert len(tokens) == 10
    first = len(before_labels(tokens[3]))
    tokens[3]["labels"] = [-100 if i == first else t for i, t in enumerate(tokens[3]["labels"])]
    for row in tokens:
        row["loss_weights"] = [float(label != -100) for label in row["labels"]]
    held = {
        "validation_file": [{**rows(1, 3)[0], "response": "another answer"}, *rows(1, 50)],
        "retention_data": [*rows(1, 4), *rows(1, 60)],
        "eval_data": [*rows(1, 5), *rows(1, 70)],
    }
    words = ["--train_file", str(jsonl(tmp_path / "tokens.jsonl", tokens))]
    words += ["--eval_strategy", "steps", "--eval_steps", "5", "--retention", "data"]
    for name, own in held.items():
        words += [f"--{name}", str(jsonl(tmp_path / f"{name}.jsonl", own))]
    data = load("sft", tmp_path, *words, *weight, **read)
    left = [f"tokens.jsonl, line {n}" for n in (1, 2, 3, 7, 8, 9, 10)]
    assert data.train_places == left
    assert [note for note in data.notes if "removed" in note] == [
        f"1 training row repeats {one} row or its prompt and was removed (tokens.jsonl, line {n})."
        for n, one in ((4, "a validation"), (5, "a retention"), (6, "an evaluation"))
    ]
    whole = load("sft", tmp_path, *words, *weight, "--leak_key", "conversation", **read)
    assert whole.train_places == [*left[:3], "tokens.jsonl, line 4", *left[3:]]


BROKEN: dict[str, tuple[list[dict[str, str]], list[str], tuple[str, ...]]] = {
    "sft": (
        [{"prompt": "p", "response": " "}, {"prompt": "x" * 200, "response": "long"}],
        ["--max_length", "100"],
        ("the response is empty", "longer than 99 tokens"),
    ),
    "dpo": (
        [
            {"prompt": "p", "chosen": "same", "rejected": "same"},
            {"prompt": "q", "chosen": "one", "rejected": ""},
            {"prompt": "y" * 80, "chosen": "one", "rejected": "two"},
        ],
        ["--max_prompt_length", "50"],
        ("chosen and rejected are equal", "a response is empty", "longer than 50 tokens"),
    ),
}


@pytest.mark.parametrize("command", BROKEN)
def test_bad_rows_are_dropped_before_anything_is_drawn(
    command: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, words, causes = BROKEN[command]
    made = rows(10) if command == "sft" else pairs(10)
    words = ["--train_file", str(jsonl(tmp_path / "train.jsonl", [*made, *broken])), *words]
    assert len(load(command, tmp_path, *words).train_dataset) == 6
    for line, cause in enumerate(causes, start=11):
        assert f"{cause} (train.jsonl, line {line})" in caplog.text
    with pytest.raises(InputError, match="cannot be trained on.*line 11"):
        load(command, tmp_path, *words, "--on_empty", "error")


def test_a_hub_that_is_not_reached_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the data set cannot be loaded"):
        load("sft", tmp_path, "--dataset_name", "no-such-owner/no-such-rows")


def test_rows_named_here_replace_the_recipes() -> None:
    words = ["--config", "magicoder-llama", "--use_cpu", "--train_file", "mine.jsonl"]
    arguments = read_arguments("sft", words, AlphaSFTConfig)
    assert (arguments.data.train_file, arguments.data.dataset_name) == ("mine.jsonl", None)
    both = read_arguments("sft", [*words, "--dataset_name", "a/b"], AlphaSFTConfig)
    assert both.data.dataset_name == "a/b"  # refused later, with both names
    none = read_arguments("sft", ["--use_cpu", "--retention_data", "null"], AlphaSFTConfig)
    assert none.data.retention_data is None


def test_a_data_set_of_the_hub_may_be_a_folder_of_its_form(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    Dataset.from_list(rows(8)).to_parquet(folder / "train.parquet")
    Dataset.from_list(rows(3, 100)).to_parquet(folder / "test.parquet")
    data = load(
        "sft", tmp_path, "--dataset_name", str(folder), "--validation_file",
        str(folder / "test.parquet"),
        "--fisher_prompts", "0", "--train_limit", "5", small=False,
    )  # fmt: skip
    assert len(data.train_dataset) == 5
    assert prompts(data.validation_dataset) == [f"ask {i}\n" for i in range(100, 103)]


def test_chats_are_written_by_the_template_or_as_text(tmp_path: Path) -> None:
    said = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    chat = {"messages": [{"role": role, "content": text} for role, text in said]}
    others = [{"prompt": f"q{i}", "response": "r"} for i in range(6)]
    file = str(jsonl(tmp_path / "chat.jsonl", [chat, *others]))
    words = ("--train_file", file, "--validation_file", file, "--leak_key", "conversation")
    tokenizer = Letters()

    def first(*more: str) -> tuple[str, str]:
        data = load("sft", tmp_path, *words, *more, tokenizer=tokenizer, small=False)
        row = data.validation_dataset[0]
        labelled = bytes(i for i, n in zip(row["input_ids"], row["labels"], strict=True) if n >= 0)
        return bytes(row["input_ids"]).decode(), labelled.decode()

    words = ("--train_file", str(jsonl(tmp_path / "other.jsonl", others)), *words[2:4],
             "--fisher_prompts", "0", *words[4:])  # fmt: skip
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    assert first() == ("a\nb\0c\nd\0", "b\0d\0")
    tokenizer.chat_template = "some"
    whole = "user: a\nassistant: b\nuser: c\nassistant: d\n"
    assert first("--no_chat_template") == ("a\nb\0c\nd\0", "b\0d\0")
    assert first() == (whole, "b\nd\n")
    assert first("--turns", "last") == (whole, "d\n")
    assert first("--completion_only_loss", "false") == (whole, whole)


def test_marked_turns_stay_out_of_the_loss_of_whole_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of the user too; ``--completion_only_loss false`` learns what no mark leaves out."""

    def chat(*turns: tuple[str, str, bool]) -> dict[str, Any]:
        messages = [{"role": r, "content": text, "train": yes} for r, text, yes in turns]
        return {"messages": messages}

    both = [("user", "c", True), ("assistant", "d", True)]
    first = chat(("user", "a", True), ("assistant", "b", False), *both)
    second = chat(("user", "e", False), ("assistant", "f", True))
    nothing = chat(("user", "g", False), ("assistant", "h", False))
    file = str(jsonl(tmp_path / "chat.jsonl", [first, second, nothing]))
    words = ["--train_file", file, "--validation_rows", "0", "--fisher_prompts", "0",
             "--policy", "standard"]  # fmt: skip

    def learned(*more: str) -> list[str]:
        data = load("sft", tmp_path, *words, *more, small=False)
        pairs = [zip(row["input_ids"], row["labels"], strict=True) for row in data.train_dataset]
        return [bytes(i if n >= 0 else ord("-") for i, n in row).decode() for row in pairs]

    assert learned() == ["------d\0", "--f\0"]
    assert "the user or the system is marked as learned, and is not" in caplog.text
    caplog.clear()
    assert learned("--completion_only_loss", "false") == ["a\n--c\nd\0", "--f\0"]
    assert "and is not" not in caplog.text
    assert "left out: no turn is to be learned by its marks (chat.jsonl, line 3)" in caplog.text
    with pytest.raises(ConfigError, match="turns: last, completion_only_loss: false"):
        learned("--completion_only_loss", "false", "--turns", "last")


# --- pairs ----------------------------------------------------------------------------------------


ASK, YES, NO = ([{"role": role, "content": text}] for role, text in (
    ("user", "ask"), ("assistant", "yes"), ("assistant", "no")
))  # fmt: skip


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "ask", "chosen": "yes", "rejected": "no"},
        {"instruction": "ask", "chosen_response": "yes", "rejected_response": "no"},
        {"prompt": ASK, "chosen": YES, "rejected": NO},
        {"conversations": [{"from": "human", "value": "ask"}],
         "chosen": {"from": "gpt", "value": "yes"}, "rejected": {"from": "gpt", "value": "no"}},
        {"prompt": "ask", "chosen": ASK + YES, "rejected": ASK + NO},
    ],
)  # fmt: skip
def test_pairs_are_written_in_many_ways(record: dict[str, Any]) -> None:
    pair = pair_of(record, 0, "here")
    turns = (Turn("user", "ask"),), (Turn("assistant", "yes"),), (Turn("assistant", "no"),)
    assert (pair.prompt, pair.chosen, pair.rejected) == turns


@pytest.mark.parametrize(
    ("record", "cause"),
    [
        ({"chosen": "the sky is blue", "rejected": "the sky is black"}, "no prompt"),
        ({"chosen": ASK + YES, "rejected": [{"role": "user", "content": "b"}, *NO]}, "here"),
        ({"chosen": 3, "rejected": 4}, "here"),
        ({"prompt": "a", "chosen": "b"}, "here"),
    ],
)
def test_what_is_no_pair_is_refused(record: dict[str, Any], cause: str) -> None:
    with pytest.raises(DataError, match=cause):
        pair_of(record, 0, "here")


# --- the Fisher's rows --------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "drawn"), [("sft", True), ("dpo", False)])
def test_the_fisher_is_fitted_on_held_out_prompts(
    command: str, drawn: bool, model: Path, tmp_path: Path
) -> None:
    """Of a file, or drawn from the training rows; by hand from the same prompts: the same bits."""
    make, kind, trainer = {
        "sft": (rows, AlphaSFTConfig, AlphaSFTTrainer),
        "dpo": (pairs, AlphaDPOConfig, AlphaDPOTrainer),
    }[command]
    train = jsonl(tmp_path / "train.jsonl", make(20))
    own = jsonl(tmp_path / "own.jsonl", make(3, 50))
    source = ["--fisher_prompts", "3"] if drawn else ["--fisher_data", str(own)]
    words = [
        "--model_name_or_path", str(model), "--train_file", str(train), "--no_chat_template",
        "--validation_rows", "4", "--validation_batch_size", "2", *source, "--use_cpu",
        "--retention", "diagonal",
        "--bf16", "false", "--output_dir", str(tmp_path / "out"), "--fisher_samples", "4",
        "--fisher_max_new_tokens", "5", "--disable_tqdm", "true", "--report_to", "none",
    ]  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(model)
    datasets, _ = load_run_data(read_arguments(command, words, kind), tokenizer)
    given = datasets["fisher_dataset"]
    found = given["prompt"] if command == "dpo" else [before_labels(row) for row in given]
    assert len(found) == 3
    own_ids = [tokenizer(f"ask {i}\n")["input_ids"] for i in range(50, 53)]
    prompts = [tokenizer(p)["input_ids"] if isinstance(p, str) else p for p in found]
    assert drawn != (sorted(prompts) == sorted(own_ids))
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = fit_fisher(reference, prompts, samples=4, max_new_tokens=5, progress=False)
    fitted = build_trainer(read_arguments(command, words, kind), trainer)[0].rows.fisher
    assert fitted.fisher.keys() == expected.fisher.keys()
    assert all(torch.equal(fitted.fisher[name], F) for name, F in expected.fisher.items())


# --- real runs ----------------------------------------------------------------------------------


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "alphatoken.cli", *map(str, words)]


def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
    }


@pytest.fixture
def in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """``alphatoken`` in this process, which has everything loaded, and what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))

    def call(*words: object, status: int = 0) -> Any:
        ended = main([str(word) for word in words])
        said = capsys.readouterr()
        assert ended == status, said.err[-3000:]
        return said

    return call


@pytest.fixture(scope="session")
def library(library_decoder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained decoder and rows of the standard library."""
    folder = tmp_path_factory.mktemp("library")
    (folder / "model").symlink_to(library_decoder)
    write_files(folder, train=120, held_out=20)
    return folder


def real(library: Path, out: Path, **changed: object) -> list[object]:
    """A short run on the trained model and real rows; keyword arguments replace options."""
    options: dict[str, object] = {
        "config": "laptop-sft",
        "model_name_or_path": library / "model",
        "train_file": library / "train.jsonl",
        "output_dir": out,
        "max_length": 96,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "validation_rows": 10,
        "validation_batch_size": 2,
        "fisher_samples": 2,
        **({} if "retention" in changed else {"fisher_prompts": 6}),
        "fisher_max_new_tokens": 8,
        "max_steps": 4,
        "save_steps": 2,
        "logging_steps": 1,
        "save_total_limit": "null",
        "retention": "diagonal",
        **changed,
    }
    return ["sft", *(word for name, value in options.items() for word in (f"--{name}", value))]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def differ(left: Path, right: Path) -> bool:
    a, b = weights(left), weights(right)
    return any(not torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # several processes of their own, perhaps on a busy machine
def test_an_interrupted_run_goes_on_to_the_same_weights(
    library: Path, tmp_path: Path, in_process: Callable[..., Any]
) -> None:
    """Only the run that is interrupted is a process of its own: its signal and its status are."""
    in_process(*real(library, tmp_path / "whole", max_steps=6))
    words = real(library, tmp_path / "parts", max_steps=6)
    process = subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(tmp_path), cwd=tmp_path,
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while not (tmp_path / "parts" / "checkpoint-2").exists() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said[-3000:]
    assert "the same command with --resume continues" in said
    assert not (tmp_path / "parts" / "model.safetensors").exists()

    assert "the output folder is not empty" in in_process(*words, status=2).err
    changed = real(library, tmp_path / "parts", max_steps=6, learning_rate=1.0)
    assert "learning_rate" in in_process(*changed, "--resume", status=2).err.splitlines()[-1]
    assert "6 steps trained" in in_process(*words, "--resume").out
    assert not differ(tmp_path / "parts", tmp_path / "whole")


def test_a_run_in_this_process(model: Path, tmp_path: Path, in_process: Callable[..., Any]) -> None:
    """Pairs are trained on by the paper's recipes, below."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "model").symlink_to(model)
    jsonl(tmp_path / "data" / "train.jsonl", rows(40))
    words = real(tmp_path / "data", tmp_path / "out", max_steps=2)
    said = in_process(*words, "--resume")  # it starts where there is nothing to resume
    assert "2 steps trained; model:" in said.out
    assert "10 rows drawn for validation and not trained on" in said.err
    opens, then = said.out.splitlines()[-2:]
    assert opens == open_line(tmp_path / "out" / REPORT)
    in_process(*shlex.split(then.removeprefix("next, to see which losses fell: alphatoken ")))
    (losses_fell,) = (tmp_path / "out" / "_alphatoken" / "losses" / "values").iterdir()
    first = next(read_values(losses_fell))
    ids = torch.tensor([first.ids])
    before, after = (
        AutoModelForCausalLM.from_pretrained(place)(ids).logits.log_softmax(-1)
        for place in (model, tmp_path / "out")
    )
    fell = (after - before)[0, :-1].gather(1, ids[0, 1:, None])[:, 0].detach().numpy()
    response = first.response[1:]
    assert first.values["total"][1:][response] == pytest.approx(fell[response], abs=1e-5)
    assert differ(tmp_path / "out", model)
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert len(losses) == 2
    assert min(losses) > 0
    shares = [e["alpha/kept_share"] for e in state["log_history"] if "alpha/kept_share" in e]
    assert shares == pytest.approx([1.0] * len(shares), abs=0.05)  # of the packaged recipe
    assert list((tmp_path / "fisher").glob("*.safetensors"))  # fitted once, beside the run
    table = list(read_values(tmp_path / "out" / "_alphatoken" / "values"))
    assert sum(one.visits.count for one in table if one.visits) == 8
    tokenizer = AutoTokenizer.from_pretrained(model)
    # Lines of the file, though some of its rows are drawn for validation.
    for one in table:
        line = int(re.fullmatch(r"train.jsonl, line (\d+) \(\d visits?\)", one.place)[1])  # type: ignore[index]
        word = str(line - 1) if str(line - 1) in tokenizer.get_vocab() else "<unknown>"
        assert f" {word} {word} <end>" in tokenizer.decode(one.ids)
    assert "values and report, which quote training rows: " in said.out
    page = (tmp_path / "out" / "_alphatoken" / "alphatoken-report.html").read_text()
    assert '<th scope="row">Model</th><td>model</td>' in page  # that the run began with
    last = '<th scope="row">Training loss of the last log</th>'
    assert f"{last}<td>{losses[-1]:.4g}</td>" in page
    card = (tmp_path / "out" / "README.md").read_text()
    assert "fine-tuned version of `model`" in card
    assert "None" not in card
    asked = AlphaOptions.held_out_steps
    assert json.loads((tmp_path / "out" / RUN).read_text())["options"]["held_out_steps"] == asked, (
        "not whether it is any"
    )
    parts = [*(tmp_path / "out").rglob("*.safetensors"), *(tmp_path / "out").rglob("*.parquet")]
    before = {path: path.read_bytes() for path in parts}
    again = in_process(*words, "--resume")
    assert "2 steps trained" in again.out
    assert "missing keys" not in again.err
    assert len(before) > 2
    assert all(path.read_bytes() == content for path, content in before.items())
    longer = [*words, "--max_steps", "3", "--resume"]  # than it was to be, on purpose
    refused = in_process(*longer, status=2).err
    assert "--allow_changed max_steps on the command line" in " ".join(refused.split())
    assert "3 steps trained" in in_process(*longer, "--allow_changed", "max_steps").out


def test_a_run_of_pairs_ends_with_the_line_that_tries_the_model(
    model: Path, tmp_path: Path, in_process: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = jsonl(tmp_path / "pairs.jsonl", pairs(60))
    said = in_process(
        "dpo", "--model_name_or_path", model, "--train_file", file, "--output_dir", "it's out",
        "--use_cpu", "--bf16", "false", "--report_to", "none", "--max_steps", "1", "--policy",
        "all", "--no_export_values", "--save_strategy", "no",
    )  # fmt: skip
    page, then = said.out.splitlines()[-2:]
    assert page == "no page of values: export_values is off"
    *python, code = shlex.split(then.removeprefix("next, to try the model: "))
    assert python == [sys.executable, "-c"]
    exec(code, {})
    assert capsys.readouterr().out.startswith("Hello")


def test_an_interruption_before_the_first_checkpoint_says_that_there_is_none(
    model: Path, tmp_path: Path, in_process: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(AlphaSFTTrainer, "train", interrupted)
    file = jsonl(tmp_path / "train.jsonl", rows(20))
    words = [
        "sft", "--model_name_or_path", model, "--train_file", file, "--output_dir", "out",
        "--use_cpu", "--bf16", "false", "--report_to", "none", "--validation_rows", "4",
    ]  # fmt: skip
    said = in_process(*words, status=130).err
    assert (
        "0 steps done; the same command with --resume starts again, because no checkpoint" in said
    )


def test_a_template_of_trl_has_a_bare_name_on_the_command_line_too() -> None:
    words = ["--model_name_or_path", "m", "--output_dir", "o", "--chat_template_path"]
    given = read_arguments("sft", [*words, "llama3_training.jinja"], AlphaSFTConfig)
    assert Path(given.training.chat_template_path).is_file()
    given = read_arguments("sft", [*words, "no.jinja"], AlphaSFTConfig)
    assert given.training.chat_template_path == "no.jinja"


@pytest.mark.slow
@pytest.mark.timeout(1800)  # several processes of their own, perhaps on a busy machine
def test_adapters_retention_rows_and_evaluation(
    library: Path, tmp_path: Path, in_process: Callable[..., Any]
) -> None:
    """laptop-lora, with retention rows of plain text, and TRL's own evaluation."""
    words = real(
        library, tmp_path / "out", config="laptop-lora", max_steps=2, retention="data",
        retention_data=library / "retention.jsonl", retention_batch_size=2,
        eval_strategy="steps", eval_steps=2, eval_data=library / "test.jsonl",
        per_device_eval_batch_size=16,
    )  # fmt: skip
    assert "2 steps trained" in in_process(*words).out
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)  # several processes of their own, perhaps on a busy machine
def test_two_processes_are_launched(library: Path, tmp_path: Path) -> None:
    words = real(library, tmp_path / "out", max_steps=1, retention="none")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
         *command(*words)[1:]],
        capture_output=True, text=True, env=environment(tmp_path), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 step trained") == 1  # the first process speaks
    assert done.stderr.count("rows drawn for validation") == 1
    results = tmp_path / "out" / "_alphatoken"
    found = list(read_values(results / "values"))
    rows = {row for one in found if one.visits for row in one.visits.rows}
    assert len(rows) == 8, "one step of two processes, two micro-batches, two rows each"
    assert all(one.visits.count == 1 for one in found if one.visits)


# --- the paper's recipes, on tiny models of their families --------------------------------------

_MARKS = ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>",
          "<end_of_turn>", "<|im_start|>", "<|im_end|>")  # fmt: skip
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_WIDTHS = {"hidden_size": 64, "intermediate_size": 96, **_HEADS}
_EYES = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"model_type": "llama", "num_hidden_layers": 4, **_WIDTHS}),
    "gemma": (
        "Gemma3ForConditionalGeneration",
        {
            "model_type": "gemma3",
            "text_config": {
                **_WIDTHS, "num_hidden_layers": 7, "query_pre_attn_scalar": 16,
                "sliding_window": 32,
            },
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
                "vision_use_head": False,
            },
            "mm_tokens_per_image": 4,
        },
    ),
    "qwen": (
        "Qwen3_5ForConditionalGeneration",
        {
            "model_type": "qwen3_5",
            "tie_word_embeddings": False,
            "text_config": {
                **_WIDTHS, "num_hidden_layers": 4, "linear_num_value_heads": 4,
                "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            },
            "vision_config": {**_EYES, "depth": 2, "out_hidden_size": 64, "patch_size": 4},
        },
    ),
}  # fmt: skip
"""The three architectures of the paper's models, as small as they go."""


def tiny(family: str, folder: Path) -> Path:
    import transformers

    kind, shape = FAMILIES[family]
    shape = json.loads(json.dumps(shape))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None  # pre-trained tokenizers have none
    tokenizer.add_special_tokens({"additional_special_tokens": list(_MARKS)})
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos")}
    ids["pad_token_id"] = tokenizer.pad_token_id
    shape.get("text_config", shape).update(vocab_size=len(tokenizer), **ids)
    config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    torch.manual_seed(0)
    getattr(transformers, kind)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)  # several processes of their own, perhaps on a busy machine
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=nightly if i else ()) for i, name in enumerate(FAMILIES)]
)
def test_the_papers_recipes_run(
    family: str, tmp_path: Path, in_process: Callable[..., Any]
) -> None:
    """Magicoder SFT; the warm-up on chats of two turns; DPO from what the warm-up saved."""
    said = [(row["prompt"], row["response"]) for row in exchanges(40, seed=0)]
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in said]
    jsonl(tmp_path / "rows.jsonl", [{"problem": a, "solution": b} for a, b in said])
    jsonl(tmp_path / "chats.jsonl", [
        {"prompt": "unused", "messages": [*a, *b]}
        for a, b in zip(turns[::2], turns[1::2], strict=True)
    ])  # fmt: skip
    jsonl(tmp_path / "pairs.jsonl", [
        {"instruction": a, "chosen_response": b, "rejected_response": f"{b} {b}"} for a, b in said
    ])  # fmt: skip
    model = tiny(family, tmp_path / "model")
    small = [
        "--accelerate_config", "none", "--use_cpu", "--bf16", "false", "--max_steps", "2",
        "--max_length", "96", "--per_device_train_batch_size", "4",
        "--gradient_accumulation_steps", "2", "--save_strategy", "no",
    ]  # fmt: skip
    valued = ["--validation_rows", "8", "--validation_batch_size", "8", "--fisher_prompts", "4",
              "--fisher_samples", "4", "--fisher_max_new_tokens", "4"]  # fmt: skip
    runs = [
        ["sft", "--config", f"magicoder-{family}", "--model_name_or_path", str(model),
         "--train_file", "rows.jsonl", "--output_dir", "code", *small, *valued],
        ["sft", "--config", f"ultrachat-{family}", "--model_name_or_path", str(model),
         "--train_file", "chats.jsonl", "--output_dir", "warm", *small],
        ["dpo", "--config", f"ultrafeedback-{family}", "--model_name_or_path", "warm",
         "--train_file", "pairs.jsonl", "--output_dir", "preferred", *small, *valued],
    ]  # fmt: skip
    for words in runs:
        assert "2 steps trained" in in_process(*words).out
    assert differ(tmp_path / "code", model)
    assert differ(tmp_path / "preferred", tmp_path / "warm")
    before, after = weights(model), weights(tmp_path / "code")
    vision = [name for name in before if "vision" in name or "visual" in name]
    assert (family == "llama") == (not vision)
    assert all(torch.equal(before[name], after[name]) for name in vision)
