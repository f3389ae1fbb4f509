"""Rows given from Python are read as the command line reads them, and compared before any work."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset

from alphatoken import AlphaTokenWarning, ConfigError, InputError
from alphatoken.data import encode_row, row_of
from alphatoken.errors import DataError
from alphatoken.train import (
    AlphaConfig,
    AlphaDPOConfig,
    AlphaSFTConfig,
    AlphaSFTTrainer,
    AlphaTrainer,
)
from alphatoken.train.given_rows import pairs_in_trl_form
from alphatoken.train.leaks import leaking_rows, without_leaks
from tests.integration import tiny_training as tiny

SUMS, HELD = tiny.sums(24), tiny.sums(10, seed=5)
CHAT = (
    "{% for m in messages %}{{ m['role'] }}? {{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}assistant? {% endif %}"
)


def sft(folder: Path, train: Any, validation: Any, *, template: str = "", **more: Any) -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template or None
    more |= {"train_dataset": train, "validation_dataset": validation}
    return tiny.sft(folder, processing_class=tokenizer, **more)


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def named(rows: list[dict[str, str]], prompt: str, response: str) -> Dataset:
    return Dataset.from_list([{prompt: r["prompt"], response: r["completion"]} for r in rows])


def same(one: Any, other: Any, *columns: str) -> bool:
    """Whether two data sets hold the same tokens; pytest would take minutes to show how not."""
    names = columns or ("input_ids", "labels")
    found = [[[list(row[n]) for n in names] for row in rows] for rows in (one, other)]
    return bool(found[0] == found[1])


# --- columns and lists ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns", [("question", "answer"), ("instruction", "output"), ("prompt", "response")]
)
def test_columns_of_the_command_line_are_read_in_python(
    tmp_path: Path, columns: tuple[str, str]
) -> None:
    ended = [[{**row, "prompt": row["prompt"] + "\n"} for row in rows] for rows in (SUMS, HELD)]
    expected = sft(tmp_path, *map(Dataset.from_list, ended))  # plain text: a line end after prompts
    found = sft(tmp_path, named(SUMS, *columns), named(HELD, *columns))
    assert same(found.train_dataset, expected.train_dataset)
    assert same(found.rows.validation, expected.rows.validation)


def test_validation_rows_of_another_form_are_labelled_as_training_rows(tmp_path: Path) -> None:
    """Training rows come with labels of ours, and TRL would label the others' prompts too."""
    trainer = sft(tmp_path, named(SUMS, "question", "answer"), HELD, retention="none")
    for row in trainer.rows.validation:
        ids, labels = list(row["input_ids"]), trainer.labels_of(row).tolist()
        assert labels[0] == -100
        kept = [i for i, label in enumerate(labels) if label != -100]
        assert kept == list(range(kept[0], len(ids)))


def test_with_a_template_they_become_chats_as_on_the_command_line(tmp_path: Path) -> None:
    plain = sft(tmp_path, named(SUMS, "question", "answer"), named(HELD, "question", "answer"))
    chat = sft(tmp_path, named(SUMS, "question", "answer"), HELD, template=CHAT)
    text = tiny.tokenizer().decode(chat.train_dataset[0]["input_ids"])
    assert text.startswith("user?")
    assert "assistant?" in text
    assert "user?" not in tiny.tokenizer().decode(plain.train_dataset[0]["input_ids"])
    # Rows in a form of TRL's stay as they are, with a template too.
    kept = sft(tmp_path, SUMS, HELD, template=CHAT).train_dataset[0]["input_ids"]
    assert "user?" not in tiny.tokenizer().decode(kept)


def labelled(trainer: Any) -> set[str]:
    """What the trainer learns of each row, as text."""
    found = set()
    for row in trainer.train_dataset:
        ids = [token for token in row["labels"] if token != -100]
        found.add(trainer.processing_class.decode(ids).strip())
    return found


ASKED = [{"instruction": "add", "input": r["prompt"], "output": r["completion"]} for r in SUMS]


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"text": "the whole filled template"}, "not read: text"),
        ({"weight": 0.0, "loss_weights": [0.0]}, "not read: weight, loss_weights"),
        ({"system": "brief"}, "system = system"),
    ],
)
def test_forms_of_the_command_line_beside_other_columns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: dict[str, Any], line: str
) -> None:
    """The row is read as ``read_rows`` reads it, and the line says so."""
    logging.getLogger("alphatoken.data").propagate = True
    with caplog.at_level("INFO", logger="alphatoken.data"):
        found = sft(tmp_path, [{**row, **more} for row in ASKED], HELD)
    assert "prompt = instruction + input" in caplog.text
    assert line in caplog.text
    row, tokenizer = row_of({**ASKED[0], **more}, 0, "here"), tiny.tokenizer()
    assert list(found.train_dataset[0]["input_ids"]) == encode_row(row, tokenizer)[0]


def chats(**last: Any) -> list[dict[str, Any]]:
    return [
        {"messages": [_said("user", r["prompt"]),
                      {**_said("assistant", "wrong"), "weight": None, **last},
                      _said("user", "sure?"),
                      {**_said("assistant", r["completion"]), "weight": 1}]}
        for r in SUMS
    ]  # fmt: skip


def test_marked_turns_and_a_prompt_beside_messages_are_read_as_on_the_command_line(
    tmp_path: Path,
) -> None:
    right = {row["completion"].strip() for row in SUMS}
    marked = labelled(sft(tmp_path, chats(weight=0), HELD, template=CHAT))
    assert marked  # some are cut by max_length
    assert all(any(whole.startswith(found) for whole in right) for found in marked)
    beside = [{"prompt": r["prompt"], "messages": [_said("user", r["prompt"]),
               _said("assistant", r["completion"])]} for r in SUMS]  # fmt: skip
    assert labelled(sft(tmp_path, beside, HELD, template=CHAT)) == right
    pairs = tiny.preference_rows(4).map(lambda row: {"system": "brief"})
    assert pairs_in_trl_form(pairs, "training", lambda: False)[0]["prompt"].startswith("brief\n")


def test_rows_with_nulls_are_read_row_by_row(tmp_path: Path) -> None:
    names = ("prompt", "completion", "question", "answer")
    union = [
        dict.fromkeys(names) | ({"question": r["prompt"], "answer": r["completion"]}
                                if i % 2 else r)
        for i, r in enumerate(SUMS)
    ]  # fmt: skip
    expected = sft(tmp_path, named(SUMS, "question", "answer"), HELD)
    assert same(sft(tmp_path, union, HELD).train_dataset, expected.train_dataset)


def test_records_of_other_columns_than_the_first_are_read(tmp_path: Path) -> None:
    """``Dataset.from_list`` alone would lose what the first record has not."""
    rows = [{"question": r["prompt"], "answer": r["completion"]} for r in SUMS]
    rows[1] = {**rows[1], "system": "brief"}
    rows[2] = {"instruction": SUMS[2]["prompt"], "output": SUMS[2]["completion"]}
    found = sft(tmp_path, rows, HELD).train_dataset
    for i, row in enumerate(rows[:3]):
        assert (
            list(found[i]["input_ids"]) == encode_row(row_of(row, i, "here"), tiny.tokenizer())[0]
        )


def thinking(field: str) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": "2", field: "one more"}
    return [{"messages": [_said("user", "1+1"), answer]} for _ in range(8)]


NO_ROWS = {
    "half of a character": ([*SUMS[:12], {"prompt": "1+\ud83d", "completion": "2"}], DataError,
                            r"half of a character.*training row 12"),
    "half of a character in a text": (["ab cd", "a \ud83d"], DataError,
                                      r"half of a character.*training row 1.*character 2"),
    "several kinds": ([*SUMS[:12], {"prompt": [_said("user", "1")], "completion": "2"}], DataError,
                      "values of several kinds"),
    "roles": ([{"messages": [_said("User", "1+1"), _said("Assistant", "2")]}], DataError,
              r"unknown role.*training row 0: 'User'.*assistant"),
    "nulls": ([*named(SUMS[:12], "question", "answer"), {"question": None, "answer": "2"}],
              DataError, "training row 12"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_ROWS)
def test_records_that_cannot_be_read_are_named(tmp_path: Path, kind: str) -> None:
    rows, error, said = NO_ROWS[kind]
    with pytest.raises(error, match=said):
        sft(tmp_path, rows, HELD, template=CHAT)


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_that_the_template_leaves_out_are_no_rows_of_a_trainer(
    tmp_path: Path, field: str
) -> None:
    with pytest.raises(InputError, match=r"thoughts of a training row would be lost.*row 0"):
        sft(tmp_path, thinking(field), HELD, template=CHAT)
    shows = CHAT.replace("{{ m['content']", "{{ m['reasoning_content'] or '' }}{{ m['content']")
    assert shows != CHAT
    found = sft(tmp_path, thinking(field), HELD, template=shows)
    assert "one more" in tiny.tokenizer().decode(found.train_dataset[0]["input_ids"])


@pytest.mark.filterwarnings("ignore:validation rows label 100%")  # texts beside prompts are
def test_lists_of_records_and_of_texts_are_data_sets(tmp_path: Path) -> None:
    expected = sft(tmp_path, Dataset.from_list(SUMS), Dataset.from_list(HELD))
    lists = sft(tmp_path, SUMS, tuple(HELD))
    assert same(lists.train_dataset, expected.train_dataset)
    assert same(lists.rows.validation, expected.rows.validation)
    texts = ["ab cd ef", "gh ij kl mn", "op qr", "st uv", "wx yz", "a b c", "d e f", "g h"]
    found = sft(tmp_path, SUMS, texts).rows.validation
    assert same(found, sft(tmp_path, SUMS, [{"text": t} for t in texts]).rows.validation)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "validation data set is no set of rows. Got: list of nothing.*load_dataset"),
        ("rows.jsonl", "no set of rows. Got: str: 'rows.jsonl'.*load_dataset"),
        ({"prompt": ["a"], "completion": ["b"]}, "no set of rows. Got: dict"),
        ([["a", "b"]], "no set of rows. Got: list of list"),
        ([{"title": "a", "body": "b"}], "validation data set has none of the columns"),
        ([{"prompt": "a", "completion": " "}], "1 of 1 validation rows cannot be trained on"),
    ],
)
def test_what_is_no_set_of_rows_is_refused_by_name(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sft(tmp_path, SUMS, rows)


def test_a_prompt_of_pairs_under_another_name_is_no_common_beginning(tmp_path: Path) -> None:
    """TRL would drop the column, and take what the responses begin with for the prompt."""
    pairs = tiny.preference_rows(16)
    asked = pairs.rename_column("prompt", "question")

    def trained(rows: Any) -> Any:
        held = tiny.preference_rows(10, seed=4)
        more = {"ref_model": tiny.model(), "validation_dataset": held}
        return tiny.dpo(tmp_path, train_dataset=rows, **more).train_dataset

    expected = trained(pairs.map(lambda row: {"prompt": row["prompt"] + "\n"}))
    for rows in (asked, list(asked)):
        assert same(trained(rows), expected, "prompt_ids", "chosen_ids", "rejected_ids")


def test_texts_are_no_rows_of_the_plain_trainer(tmp_path: Path) -> None:
    args = AlphaConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(InputError, match="not tokenised. Got: str.*encode_rows"):
        AlphaTrainer(
            model=tiny.model(), args=args, train_dataset=["abc"], validation_dataset=["def"]
        )


# --- leaks ----------------------------------------------------------------------------------------


def test_training_rows_that_repeat_validation_rows_are_counted(tmp_path: Path) -> None:
    leaked = [SUMS[3], {**SUMS[7], "completion": " another answer."}, *HELD]
    with pytest.warns(
        AlphaTokenWarning, match=r"2 of 24 training rows.*\(row 3, 7\).*without_leaks"
    ):
        sft(tmp_path, SUMS, leaked)
    train = Dataset.from_list(SUMS)
    left = without_leaks(train, leaked)
    assert len(left) == 22
    with warnings.catch_warnings():
        warnings.simplefilter("error", AlphaTokenWarning)
        sft(tmp_path, left, leaked)


@pytest.mark.parametrize(
    "form",
    [
        lambda row: {"messages": [_said("user", row["prompt"]), _said("gpt", row["completion"])]},
        lambda row: {"text": row["prompt"] + row["completion"]},
        lambda row: {
            "prompt": [_said("user", row["prompt"])],
            "completion": [_said("assistant", row["completion"])],
        },
        lambda row: {"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no."},
        lambda row: {"input_ids": [ord(c) for c in row["prompt"] + row["completion"]]},
    ],
    ids=["messages", "text", "parts", "pairs", "ids"],
)
def test_leaks_are_seen_in_every_form_of_row(form: Callable[[dict[str, str]], Any]) -> None:
    rows = [form(row) for row in SUMS]
    assert leaking_rows(rows, [rows[2], *(form(row) for row in HELD)]) == [2]


# --- what else is refused or chosen before any work -----------------------------------------------


def test_bf16_is_chosen_only_where_the_device_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("about machines without a GPU")
    from alphatoken.train import given

    for kind in (AlphaSFTConfig, AlphaDPOConfig):
        assert kind(str(tmp_path)).bf16 is False
        assert kind(str(tmp_path), use_cpu=True).bf16 is False
        with pytest.raises(ValueError, match="bf16"):  # asked for: transformers' own refusal
            kind(str(tmp_path), bf16=True)
        monkeypatch.setattr(given, "is_torch_bf16_gpu_available", lambda: True)
        assert kind(str(tmp_path), use_cpu=True).bf16 is True  # TRL's default stands
        monkeypatch.undo()


def test_a_length_beyond_the_model_is_refused_before_a_fisher_is_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fitted(*_: Any, **__: Any) -> None:
        raise AssertionError("a Fisher was fitted")

    monkeypatch.setattr("alphatoken.train.run_rows.fitted_fisher", fitted)
    with pytest.raises(ConfigError, match="max_length is more than the model allows. Got: 4096"):
        sft(tmp_path, SUMS, HELD, max_length=4096)
    with pytest.raises(AssertionError, match="a Fisher was fitted"):
        sft(tmp_path, SUMS, HELD)


# --- rows that cannot be trained on -------------------------------------------------------------

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: "
    "{% if m['content'] %}{{ m['content'] }}{% endif %}"
    "{% for c in m['tool_calls'] or [] %}{{ c['function']['name'] }}{% endfor %}?"
    "{% endfor %}"
)


def called(number: int) -> dict[str, Any]:
    """A conversation whose answer is a call of a tool."""
    asked = {"role": "user", "content": f"{number} plus 1", "tool_calls": None}
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    return {"asked": asked, "answer": answer}


@pytest.mark.parametrize("form", ["prompt and completion", "messages", "pairs"])
def test_a_call_of_a_tool_is_a_response(tmp_path: Path, form: str) -> None:
    rows, written = [called(i) for i in range(8)], tiny.tokenizer()
    written.chat_template = TEMPLATE
    more = {"policy": "random", "export_values": False, "max_steps": 1, "retention": "none",
            "validation_dataset": None}  # fmt: skip
    if form == "pairs":
        said = {"role": "assistant", "content": "3", "tool_calls": None}
        dataset = [
            {"prompt": [r["asked"]], "chosen": [r["answer"]], "rejected": [said]} for r in rows
        ]
        more |= {"train_dataset": dataset, "peft_config": tiny.lora()}
        trainer = tiny.dpo(tmp_path, processing_class=written, **more)
    else:
        dataset = [{"messages": [r["asked"], r["answer"]]} for r in rows]
        if form != "messages":
            dataset = [{"prompt": [r["asked"]], "completion": [r["answer"]]} for r in rows]
        trainer = tiny.sft(tmp_path, train_dataset=dataset, processing_class=written, **more)
    assert len(trainer.train_dataset) == 8
    trainer.train()


def test_rows_that_cannot_be_trained_on_are_left_out_or_stop(tmp_path: Path) -> None:
    rows = tiny.sums(8)
    rows[3] = {**rows[3], "completion": " "}

    def made(**more: Any) -> AlphaSFTTrainer:
        more |= {"policy": "random", "retention": "none", "validation_dataset": None}
        return cast("AlphaSFTTrainer", tiny.sft(tmp_path, train_dataset=rows, **more))

    with pytest.warns(AlphaTokenWarning, match=r"1 of 8 training rows .*empty: 1 \(row 3\)"):
        assert len(made().train_dataset) == 7
    with pytest.raises(InputError, match=r"1 of 8 training rows .*on_empty=skip"):
        made(on_empty="error")
    rows[:] = [{**row, "completion": ""} for row in rows]
    with pytest.raises(InputError, match=r"8 of 8 training rows .*Remedy: mend them\."):
        made()


def test_pairs_that_cannot_be_trained_on_are_left_out(tmp_path: Path) -> None:
    rows = tiny.preference_rows(8).to_list()
    rows[2] = {**rows[2], "rejected": rows[2]["chosen"]}
    more = {"policy": "random", "retention": "none", "validation_dataset": None}
    with pytest.warns(AlphaTokenWarning, match=r"1 of 8 .*chosen and rejected are equal"):
        trainer = tiny.dpo(tmp_path, train_dataset=rows, peft_config=tiny.lora(), **more)
    assert len(trainer.train_dataset) == 7
