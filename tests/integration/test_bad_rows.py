"""Rows that cannot be read or written as tokens, and empty ones: one dialect in all commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from alphatoken.data import EncodeOptions, Row, Turn, encode_prompt, encode_row
from alphatoken.errors import DataError
from alphatoken.model.loading import find_limits, find_parts
from tests.both_programs import main
from tests.integration import tiny_training as tiny
from tests.rows import jsonl

NEW = "<step>"
STRICT = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{{ m.role + ' ' + m.content + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


# --- four kinds of bad row ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer has a strict template, and a token that the embedding lacks."""
    folder = tmp_path_factory.mktemp("model")
    tiny.model().save_pretrained(folder)
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = STRICT
    tokenizer.add_tokens([NEW])
    tokenizer.save_pretrained(folder)
    return folder


def chat(prompt: str, answer: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": prompt}, {"role": "assistant", "content": answer}]


BAD = {
    "template": (chat("be kind", "yes.", "system"), "the chat template refuses the conversation"),
    "token": (chat(f"1{NEW}2", "3."), "a token has no row in the model's embedding"),
    "half a character": (chat("1+\ud83d", "3."), "half of a character"),
}


def test_each_turn_that_is_left_out_of_a_row_is_counted_and_named_once(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In what is valued and in what trains; a row of empty answers alone counts as a row."""
    turns = [*chat("1+1=", ""), *chat("2+2=", " "), *chat("3+3=", "6."), *chat("4+4=", "8.")]
    turns[-1]["train"] = False
    rows = [[*turns, {"role": "user", "content": "5+5="}], chat("1+1=", "2."), chat("6+6=", "")]
    rows += [chat(f"{n}-{n}=", "0.") for n in range(2, 52)]
    file = jsonl(tmp_path / "rows.jsonl", [{"messages": row} for row in rows])
    told = (
        "2 turns left out: the answer is empty (rows.jsonl, line 1, turn 2, rows.jsonl, line 1, "
        "turn 4); 1 turn left out: marked as not to be learned (rows.jsonl, line 1, turn 8); 1 "
        "turn left out: no answer follows (rows.jsonl, line 1, turn 9); 1 row left out: the "
        "response is empty (rows.jsonl, line 3)"
    )
    own = ["--model_name_or_path", str(model), "--train_file", str(file), "--output_dir"]
    score = ["score", *own, str(tmp_path / "a"), "--query", "2+2=4.", "--no_report"]
    sft = ["sft", *own, str(tmp_path / "b"), "--use_cpu", "--bf16", "false", "--report_to", "none"]
    for words in (score, [*sft, "--policy", "all", "--no_export_values", "--max_steps", "1"]):
        assert main(words) == 0, capsys.readouterr().err
        said = capsys.readouterr().err
        assert said.count(told) == said.count("turns left out: the answer is empty") == 1, said


def files(folder: Path, bad: Any, *more: Any, pairs: bool = False) -> tuple[str, str]:
    """Ten good rows, a bad one in the fourth line and more at the end; and validation rows."""
    rows = [chat(f"{n}+{n}=", f"{2 * n}.") for n in range(10)]
    rows = [*rows[:3], bad, *rows[3:], *more]
    validation = [chat(f"{n}-{n}=", "0.") for n in range(4)]

    def record(m: Any) -> Any:
        if isinstance(m, str):
            return m
        pair = {"prompt": m[:1], "chosen": m[1:], "rejected": [m[1] | {"content": "no."}]}
        return pair if pairs else {"messages": m}

    paths = (jsonl(folder / f"{name}.jsonl", map(record, some))
             for name, some in (("rows", rows), ("held", validation)))  # fmt: skip
    return str(next(paths)), str(next(paths))


def words_of(command: str, model: Path, rows: str, validation: str, out: Path) -> list[str]:
    words = [command, "--model_name_or_path", str(model), "--train_file", rows]
    training = [
        "--validation_file", validation, "--output_dir", str(out), "--max_steps", "1",
        "--per_device_train_batch_size", "2", "--use_cpu", "--retention", "none", "--report_to",
        "none", "--policy", "random", "--bf16", "False", "--disable_tqdm", "True",
    ]  # fmt: skip
    more = {
        "score": [*training[:4], "--no_report", "--quiet"],
        "fisher": ["--output_file", str(out), "--samples", "2", "--max_new_tokens", "2", "--quiet"],
    }.get(command, training)
    return words + more


@pytest.fixture
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where weights are loaded."""
    from transformers import PreTrainedModel

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("command", ["score", "fisher", "sft", "dpo"])
def test_a_bad_row_is_named_before_the_model_is_loaded(
    command: str, kind: str, model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    bad, said = BAD[kind]
    rows, validation = files(tmp_path, bad, pairs=command == "dpo")
    assert main(words_of(command, model, rows, validation, tmp_path / "out")) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert said in error
    assert "rows.jsonl, line 4" in error
    if kind == "token":
        assert repr(NEW) in error
        assert str(model) in error


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_a_fisher_names_the_first_bad_row_of_the_file(
    seed: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, validation = files(tmp_path, BAD["template"][0], BAD["token"][0])
    words = words_of("fisher", model, rows, validation, tmp_path / "out")
    assert main([*words, "--seed", seed]) == 2
    assert "rows.jsonl, line 4" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["score", "fisher", "sft", "dpo"])
def test_bad_rows_are_passed_over_where_that_is_asked(
    command: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = (BAD[kind][0] for kind in ("template", "half a character"))
    bad, pairs = BAD["token"][0], command == "dpo"
    rows, validation = files(tmp_path, bad, *others, "{broken", pairs=pairs)
    words = words_of(command, model, rows, validation, out := tmp_path / "out")
    assert main([*words, "--on_bad_rows", "skip"]) == 0
    if command == "score":
        lines = (out / "bad_rows.jsonl").read_text().splitlines()
        places = [json.loads(line)["place"].split()[-1] for line in lines]
        assert places == ["4", "12", "13", "14"]
    elif command != "fisher":
        said = capsys.readouterr().err
        assert "1 row left out: broken JSON line" in said
        assert "1 row left out: the chat template refuses the conversation" in said


# --- parts ----------------------------------------------------------------------------------------


def test_a_token_is_known_where_the_embedding_has_a_row(model: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([NEW])
    limits = find_limits(find_parts(model))
    assert (limits.tokens, limits.positions) == (len(tokenizer) - 1, 128)
    row = Row(0, "here", (Turn("user", f"1{NEW}"), Turn("assistant", "2.")))
    for made in (encode_row, encode_prompt):
        with pytest.raises(DataError, match="no row in the model's embedding"):
            made(row, tokenizer, EncodeOptions(vocabulary=limits.tokens))
        made(row, tokenizer, EncodeOptions(vocabulary=len(tokenizer)))


def test_rows_that_are_not_measured_are_counted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Empty ones, and those that the length cuts: that of the model where none is given."""
    long = chat("1+1=", "2" * 600), chat("1" * 600, "2")
    rows, _ = files(tmp_path, chat("1" * 40, ""), *long)
    words = ["evaluate", str(model), "--target_file", rows]
    assert main([*words, "--output_dir", str(tmp_path / "out")]) == 0
    said = "note: rows.jsonl: 2 of 13 have no response within the length and are not measured; "
    assert said + "1 sequences are cut at the length" in capsys.readouterr().err
    assert main([*words, "--max_length", "100000", "--output_dir", str(tmp_path / "two")]) == 2
    assert "max_length is more than the model allows" in capsys.readouterr().err


def test_columns_are_named_and_left_aside_where_rows_are_measured(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{"ask": "1+1=", "say": "2.", "functions": "add"}] * 2
    rows = jsonl(tmp_path / "rows.jsonl", records)
    words = ["evaluate", str(model), "--target_file", str(rows)]
    words += ["--output_dir", str(tmp_path / "out")]
    remedies = {
        "--prompt_column": "ask", "--response_column": "say", "--unread_columns": "functions",
    }  # fmt: skip
    for remedy, name in remedies.items():
        assert main(words) == 2
        assert remedy in capsys.readouterr().err
        words += [remedy, name]
    assert main(words) == 0
    assert "prompt = ask, response = say" in capsys.readouterr().err


def test_folders_of_rows_are_read_by_all(model: Path, tmp_path: Path) -> None:
    rows, validation = files(tmp_path, chat("9+1=", "10."))
    many = tmp_path / "many"
    many.mkdir()
    lines = Path(rows).read_text().splitlines(keepends=True)
    (many / "a.jsonl").write_text("".join(lines[:6]))
    (many / "b.jsonl").write_text("".join(lines[6:]))
    for command in ("score", "fisher", "sft"):
        words = words_of(command, model, str(many), validation, tmp_path / command)
        assert main(words) == 0, command
