"""``alphatoken show``: tokens as the trainers get them, what is printed, and every bad input."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from alphatoken.cli import main
from alphatoken.cli.arguments import read_arguments
from alphatoken.cli.show import read
from alphatoken.cli.show_run import TrainedTokens, read_tokens
from alphatoken.cli.training import build_trainer, trainer_of
from tests.integration import tiny_training as tiny
from tests.property.test_own_weights import TEMPLATES
from tests.rows import jsonl

CHAT = {
    "messages": [
        {"role": "user", "content": "1+1=?"},
        {"role": "assistant", "content": "3."},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": "it is 2."},
    ]
}
PROMPT = {"prompt": "1+1=?", "completion": " 2."}
TOKENS = {"input_ids": [9, 15, 27, 31, 2], "labels": [-100, -100, 27, 31, 2]}
PAIR = {"prompt": "1+1=?", "chosen": " it is 2.", "rejected": " no 3 it is."}


def weighed(*weights: float | None) -> dict[str, Any]:
    """The chat with weights on its answers."""
    messages = [dict(message) for message in CHAT["messages"]]
    for message, weight in zip(messages[1::2], weights, strict=True):
        message |= {} if weight is None else {"weight": weight}
    return {"messages": messages}


def marked(*learned: bool) -> dict[str, Any]:
    """The chat with marks on its first answers."""
    messages = [dict(message) for message in CHAT["messages"]]
    for message, own in zip(messages[1::2], learned, strict=False):
        message["train"] = own
    return {"messages": messages}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a tiny model, with its tokenizer."""
    tiny.saved(tmp_path, 4)
    return tmp_path


def with_template(folder: Path, name: str) -> None:
    made = tiny.tokenizer()
    made.chat_template = TEMPLATES[name]
    made.save_pretrained(folder / "model")


def written(folder: Path, *rows: dict[str, Any]) -> str:
    return str(jsonl(folder / "shown.jsonl", rows))


def show(folder: Path, *words: str) -> int:
    return main(["show", *words, "--model_name_or_path", str(folder / "model")])


# --- against the data sets that trainers get ------------------------------------------------------


def trainer_for(folder: Path, command: str, words: list[str]) -> Any:
    """The trainer that the command would run, with its data sets."""
    here = ["--output_dir", str(folder / "out"), "--report_to", "none", "--use_cpu", "true"]
    configuration, kind = trainer_of(command)
    arguments = read_arguments(command, [*words, *here, "--bf16", "false"], configuration)
    return build_trainer(arguments, kind)[0]


def printed_command(text: str) -> list[str]:
    """The words of the command that ``show`` ends with."""
    (line,) = [line for line in text.splitlines() if line.startswith("next: alphatoken ")]
    return shlex.split(line)[2:]


FORMS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "chat": ([CHAT, CHAT], []),
    "last turn": ([CHAT], ["--turns", "last"]),
    "prompt and completion": ([PROMPT], []),
    "all of it": ([PROMPT], ["--completion_only_loss", "false"]),
    "all but marked": ([marked(False), marked(True)], ["--completion_only_loss", "false"]),
    "text": ([{"text": "1+1=2."}], []),
    "ShareGPT": (
        [{"conversations": [{"from": "human", "value": "1+1=?"}, {"from": "gpt", "value": "2."}]}],
        [],
    ),
    "weights of turns": ([weighed(0.5, 2.0), weighed(None, 0.0), CHAT], []),
    "weight of a row": ([{**PROMPT, "weight": 0.25}, PROMPT], []),
    "negative": ([{**PROMPT, "weight": -0.25}], []),
    "tokens": ([{**TOKENS, "loss_weights": [0, 0, 0.5, 0, 2]}, TOKENS], []),
    "cut": ([weighed(0.5, 2.0), CHAT], ["--max_length", "12"]),
    "cut at the start": (
        [weighed(0.5, 2.0), CHAT],
        ["--max_length", "12", "--truncation_mode", "keep_end"],
    ),
}


def shown_and_trained(
    folder: Path, rows: list[Any], options: list[str], capfd: pytest.CaptureFixture[str]
) -> tuple[list[TrainedTokens], Any]:
    """What is shown of these rows, and the trainer that the printed command makes."""
    words = [written(folder, *rows), *options, "--model_name_or_path", str(folder / "model")]
    request = read(words)
    assert request is not None
    shown, _ = read_tokens(request)
    assert main(["show", *words]) == 0
    command = printed_command(capfd.readouterr().out)
    assert command[command.index("--policy") + 1] in ("standard", "weights"), "of every token"
    return shown, trainer_for(folder, command[0], command[1:])


@pytest.mark.parametrize("template", [None, *TEMPLATES])
@pytest.mark.parametrize("form", FORMS)
def test_tokens_are_those_that_sft_trains_on(
    folder: Path, form: str, template: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    """Tokens and weights of every row, against the rows of the trainer of the printed command.

    Proves: what ``show`` marks (exact), against labels and weights in the trainer's data set.
    """
    rows, options = FORMS[form]
    if template is not None:
        with_template(folder, template)
    shown, trainer = shown_and_trained(folder, rows, options, capfd)
    assert len(shown) == len(rows) == len(trainer.train_dataset)
    for own, row in zip(shown, trainer.train_dataset, strict=True):
        assert own.ids == row["input_ids"]
        weights = row.get("loss_weights") or [1.0] * len(own.ids)
        labels = row["labels"] if "labels" in row else row["input_ids"]
        pairs = zip(labels, weights, strict=True)
        expected = [None if label == -100 else weight for label, weight in pairs]
        assert own.weights == [None, *expected[1:]]
        assert own.trained


PAIRS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "texts": ([PAIR, PAIR], []),
    "weights": ([{**PAIR, "weight": 0.5, "rejected_weight": 2.0}, PAIR], []),
    "cut": ([{**PAIR, "chosen_weight": 0.5}, PAIR], ["--max_length", "10"]),
    "cut at the start": (
        [{**PAIR, "chosen_weight": 0.5}],
        ["--max_length", "10", "--truncation_mode", "keep_end"],
    ),
    "limits": ([PAIR], ["--max_response_length", "4"]),
    "both limits": (
        [PAIR],
        ["--max_response_length", "5", "--max_prompt_length", "4", "--long_prompts", "cut"],
    ),
}


@pytest.mark.parametrize("form", PAIRS)
def test_tokens_are_those_that_dpo_trains_on(
    folder: Path, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same of pairs, against the trainer's batches.

    Proves: what ``show`` marks of pairs (exact), against the trainer's collator.
    """
    shown, trainer = shown_and_trained(folder, *PAIRS[form], capfd)
    weighs = trainer.row_weights != "refused"
    collate = trainer.weights_collator()[0] if weighs else trainer.data_collator
    sides = iter(shown)
    for row in trainer.train_dataset:
        batch = collate([row])
        for line, side in enumerate(("chosen", "rejected")):
            own, real = next(sides), batch["attention_mask"][line] == 1
            assert own.side == side
            assert own.ids == batch["input_ids"][line][real].tolist()
            marks = (batch["completion_mask"][line][real] != 0).tolist()
            laid = [1.0] * len(marks)
            if weighs:
                laid = batch["alphatoken_row_weights"][line][real].tolist()
            expected = [w if mark else None for w, mark in zip(laid, marks, strict=True)]
            assert own.weights == [None, *expected[1:]]
            # A token is a character here; a line break and an end token are added.
            assert len(own.ids) + own.cut == len(PAIR["prompt"] + PAIR[side]) + 2
    assert next(sides, None) is None


# --- what is printed ------------------------------------------------------------------------------


def test_what_is_printed(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each row with marks, its counts, and a summary of the whole file."""
    file = written(folder, weighed(0.5, 1.0), {"prompt": "a", "response": ""}, CHAT)
    assert show(folder, file, "--rows", "1", "--max_length", "20") == 0
    out, notes = capfd.readouterr()
    assert "shown.jsonl: chat = messages (2 rows)" in notes
    assert out.splitlines() == [
        "row 1 (shown.jsonl, line 1)",
        "1+1=?<unk>⟦3.</s>⟧×0.5sure?<unk>⟦it is⟧",
        "trained 8 of 20 tokens (40 %), sum of weights 6.5; 4 tokens cut by --max_length 20",
        "",
        "all 2 rows: trained 16 of 40 tokens (40 %), sum of weights 14.5",
        "weights of 1 row: 0.5 to 1; 1 brings none, which counts as 1",
        "without a trained token: 0 rows",
        "cut: 2 rows by --max_length 20, 8 tokens",
        "1 row left out: the response is empty (shown.jsonl, line 2)",
        "",
        f"next: alphatoken sft --train_file {file} --max_length 20 --model_name_or_path "
        f"{folder / 'model'} --policy weights --validation_rows 0",
    ]


@pytest.mark.parametrize("bad", [False, True], ids=["without a response", "unreadable"])
def test_the_next_command_leaves_out_what_would_stop_it(
    bad: bool, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And no more: a row without a response is left out of training as it is."""
    spoilt = {"prompt": "a"} if bad else {"prompt": "a", "response": ""}
    file = written(folder, CHAT, spoilt, CHAT)
    assert show(folder, file, "--rows", "1") == 0
    command = capfd.readouterr().out.splitlines()[-1].removeprefix("next: ")
    assert ("--on_bad_rows skip" in command) == bad
    words = ["--output_dir", str(tmp_path / "out"), "--use_cpu", "--bf16", "false", "--max_steps"]
    assert main([*shlex.split(command)[1:], *words, "1", "--report_to", "none"]) == 0


def test_tokens_that_limits_of_a_pair_take_are_counted(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = written(folder, PAIR, PAIR)
    limits = ["--max_response_length", "5", "--max_prompt_length", "4", "--long_prompts", "cut"]
    assert show(folder, file, *limits) == 0
    out = capfd.readouterr().out
    said = "--max_length 1024, --max_prompt_length 4, --max_response_length 5"
    # Of the prompt and its line break 2 tokens on both sides; of the responses 5 and 8.
    assert f"cut: 2 pairs by {said}, 34 tokens" in out.splitlines()
    assert f"; 7 tokens cut by {said}" in out


def test_colours_are_for_terminals(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(folder, {"prompt": "1+1=?", "completion": " 2.", "weight": 0.5})
    assert show(folder, file, "--color", "always") == 0
    out = capfd.readouterr().out
    assert "\x1b[2m1+1=?<unk>\x1b[0m\x1b[33m 2.</s>\x1b[0m\x1b[2m×0.5\x1b[0m\n" in out
    assert "⟦" not in out
    assert show(folder, file) == 0
    assert "\x1b" not in capfd.readouterr().out


def test_rows_by_number(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert show(folder, str(folder / "rows.jsonl"), "--row", "3", "2", "--quiet") == 0
    out, notes = capfd.readouterr()
    assert [line for line in out.splitlines() if line.startswith("row ")] == [
        "row 3 (rows.jsonl, line 3)",
        "row 2 (rows.jsonl, line 2)",
    ]
    assert "note:" not in notes


def test_a_named_policy_reads_rows_as_its_run_does(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A weight that the policy refuses is a row left out, and 0 a turn without labels."""
    file = written(folder, weighed(0.0, 1.0), weighed(0.5, 1.0))
    assert show(folder, file, "--policy", "all") == 0
    out = capfd.readouterr().out
    assert "3.</s>sure?" in out
    assert "1 row left out" in out
    assert "--policy all" in out
    assert "--policy weights" not in out


def test_tokens_without_weights_are_for_the_trainers_in_python(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert show(folder, written(folder, TOKENS)) == 0
    assert "next: AlphaSFTTrainer in Python" in capfd.readouterr().out


def test_help_names_options_of_rows(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "--help"]) == 0
    text = capfd.readouterr().out
    for name in ("--rows", "--row", "--dpo", "--max_length", "--turns", "--chat_template"):
        assert name in text
    assert len(text.splitlines()) < 90


# --- bad input ------------------------------------------------------------------------------------


def broken(folder: Path, name: str) -> list[str]:
    file = written(folder, PROMPT)
    if name == "empty":
        Path(file).write_text("")
    elif name == "unknown form":
        Path(file).write_text(json.dumps({"foo": 1}) + "\n" + json.dumps({"foo": 2}) + "\n")
    elif name == "no tokenizer":
        for path in (folder / "model").glob("token*"):
            path.unlink()
    words = {"no file": [], "unknown row": [file, "--row", "7"], "missing": [f"{file}x"]}
    words |= {"no such option": [file, "--max_lenght", "3"], "twice": [file, "--train_file", file]}
    return words.get(name, [file])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "shown.jsonl"),
        ("unknown form", "no prompt field"),
        ("no tokenizer", "tokenizer"),
        ("no file", "training rows must come from one place"),
        ("missing", "train_file does not exist"),
        ("unknown row", "there is no such row to show"),
        ("no such option", "max_length"),
    ],
)
def test_bad_input_is_one_line(
    folder: Path, name: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert show(folder, *broken(folder, name)) == 2
    out, error = capfd.readouterr()
    (line,) = [line for line in error.splitlines() if line.startswith("alphatoken: ")]
    assert message in line
    assert "next:" not in out


def test_no_model(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["show", written(folder, PROMPT)]) == 2
    assert "no model is named" in capfd.readouterr().err
