"""Rows given from Python: TRL's forms, of which nothing is lost; compared before any work."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from torch.utils.data import TensorDataset

from alphatoken import AlphaTokenWarning, InputError
from alphatoken.data import encode_row, pair_of, row_of
from alphatoken.data.messages import is_answer, is_prompt
from alphatoken.train import (
    AlphaConfig,
    AlphaDPOConfig,
    AlphaDPOTrainer,
    AlphaSFTConfig,
    AlphaSFTTrainer,
    AlphaTrainer,
)
from alphatoken.train.leaks import leaking_rows
from alphatoken.train.python_rows import read_pairs, read_rows
from tests.integration import tiny_training as tiny

SUMS, HELD = tiny.sums(24), tiny.sums(10, seed=5)
READ = {"dataset_text_field": "text", "remove_unused_columns": True, "process_index": 0,
        "on_empty": "error"}  # fmt: skip
GIVEN = {"args": SimpleNamespace(**READ)}
"""What reading asks of a trainer's arguments."""
CHAT = (
    "{% for m in messages %}{{ m['role'] }}? {{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}assistant? {% endif %}"
)


def sft(folder: Path, train: Any, validation: Any, *, template: str = "", **more: Any) -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template or None
    more |= {"train_dataset": train, "validation_dataset": validation}
    return tiny.sft(folder, processing_class=tokenizer, **more)


@pytest.fixture
def data_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Warnings about rows that were read."""
    logging.getLogger("alphatoken.data").propagate = True
    with caplog.at_level("WARNING", logger="alphatoken.data"):
        yield caplog


def _said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def same(one: Any, other: Any, *columns: str) -> bool:
    """Whether two data sets hold the same tokens; pytest would take minutes to show how not."""
    names = columns or ("input_ids", "labels")
    found = [[[list(row[n]) for n in names] for row in rows] for rows in (one, other)]
    return bool(found[0] == found[1])


# --- columns and lists ----------------------------------------------------------------------------


CHATS = [
    {"messages": [_said("user", r["prompt"]), _said("assistant", r["completion"])]} for r in SUMS
]
MARKED = [_said("user", "1+1"), {**_said("assistant", "3"), "weight": 0}, _said("user", "sure?"),
          {**_said("assistant", "2"), "weight": 1}]  # fmt: skip

ANSWER = _said("assistant", "2")
PARTS = [{"role": "user", "content": [{"type": "text", "text": "1+1", "weight": 0.5}]}]
IMAGE = [{"role": "user", "content": [{"type": "image", "text": None}]}]


def with_more(**more: Any) -> dict[str, Any]:
    """A chat whose answer says more than its text."""
    return {"messages": [_said("user", "1+1"), {**ANSWER, **more}]}


LOST = {
    "a column that changes the row": ([{**r, "system": "brief"} for r in SUMS], "column 'system'"),
    "a null": ([*SUMS[:12], {"prompt": "1+1", "completion": None}], "row 12: 'completion' is null"),
    "another prompt beside a chat": ([{**r, "prompt": "1+1"} for r in CHATS], "column 'prompt'"),
    "a filled template": ([{"text": "all", "question": "1+1", "answer": "2"}], "column 'answer'"),
    "a marked turn": ([*CHATS[:3], {"messages": MARKED}], "row 3: a turn that is marked.*'weight'"),
    "another mark": ([*CHATS[:3], with_more(loss_scale=0.0)], "row 3.*'loss_scale' is 0.0"),
    "a part of a weight": ([{"messages": [*PARTS, ANSWER]}], "row 0.*'weight' is 0.5"),
    "a picture": ([with_more(images=["a.png"])], "row 0: 'images' of a message, which the chat"),
    "a call that is not written": ([with_more(tool_calls=[{"a": "b"}])], "'tool_calls' of a mess"),
    "a part that is no text": ([{"messages": [*IMAGE, ANSWER]}], "a content that is no text"),
    "a question that is null": (
        [{"messages": [{"role": "user", "content": None}, ANSWER]}],
        "message of the user without content",
    ),
    "a brief without content": (
        [{"messages": [{"role": "system"}, *CHATS[0]["messages"]]}],
        "message of the system without content",
    ),
    "a list of texts": (
        [{"prompt": "1+1", "completion": ["2"]}],
        "neither text nor a list of mess",
    ),
    "another conversation": (
        [{"prompt": [_said("user", "1+1")], "completion": [_said("user", "2+2"), ANSWER]}],
        "begins with another turn than the assistant's",
    ),
    "tools": ([{**CHATS[0], "tools": [{"name": "add"}]}], "'tools', which the chat template does"),
    "tools beside texts": ([{**SUMS[0], "tools": [{"name": "add"}]}], "column 'tools', which"),
    "words for the template": (
        [{**CHATS[0], "chat_template_kwargs": {"brief": True}}],
        "'chat_template_kwargs', which the chat template does not write",
    ),
    "roles": ([{"messages": [_said("User", "1+1"), _said("Assistant", "2")]}], "roles Assistant"),
}


@pytest.mark.parametrize("kind", LOST)
def test_rows_of_which_trl_would_lose_something_are_refused(tmp_path: Path, kind: str) -> None:
    rows, said = LOST[kind]
    with pytest.raises(InputError, match=f"otherwise than it is meant.*{said}.*encode_row"):
        sft(tmp_path, rows, HELD, template=CHAT)


AGAINST = {
    "label": ({"label": False}, "response of the row is marked as a bad one"),
    "weight": ({"weight": 0.0}, "one that is not to be learned"),
    "own weight": ({"weight": 0.5}, "has a weight of its own"),
    "reward": ({"reward": -1.0}, "marked as a bad one"),
}


@pytest.mark.parametrize("kind", AGAINST)
@pytest.mark.parametrize("family", ["sft", "dpo"])
def test_rows_that_speak_against_themselves_are_refused(family: str, kind: str) -> None:
    more, said = AGAINST[kind]
    pair = {"prompt": "1+1", "chosen": "2", "rejected": "3"}
    row, read = (SUMS[0], read_rows) if family == "sft" else (pair, read_pairs)
    with pytest.raises(InputError, match=rf"{said}. Got: row 1: .*dataset.filter"):
        read([row, {**row, **more}], "training", GIVEN)
    found = read([row, {**row, **dict.fromkeys(more, 1)}], "training", GIVEN)
    assert found.to_list()[0] == {**row, **dict.fromkeys(more)}
    # A collator of the caller's own may read the column.
    read([row, {**row, **more}], "training", {**GIVEN, "data_collator": list})


def test_pairs_that_contradict_their_order_are_refused() -> None:
    """By their scores, or by a mark on the better one; the worse one may be marked as a bad one."""
    bad = [{**_said("assistant", "3"), "is_correct": False}]
    scored = {"prompt": "1+1", "chosen": "2", "rejected": "3", "score_rejected": 2}
    for right, wrong, cause in (
        (
            {"chosen": [ANSWER], "rejected": bad},
            {"chosen": bad, "rejected": bad},
            "turn that is marked.*'is_correct' is False",
        ),
        (
            {**scored, "score_chosen": 2},
            {**scored, "score_chosen": 1},
            "'score_chosen' is 1, 'score_rejected' is 2",
        ),
    ):
        rows = [{"prompt": TURNS[:1], **one} for one in (right, wrong)]
        assert len(read_pairs(rows[:1], "training", GIVEN)) == 1
        with pytest.raises(InputError, match=cause):
            read_pairs(rows, "training", GIVEN)


def test_the_tokens_of_such_rows_are_taken(tmp_path: Path) -> None:
    """As the message says: those of ``encode_row``."""
    rows = [{"question": r["prompt"], "answer": r["completion"], "system": "be"} for r in SUMS]
    read = [encode_row(row_of(row, i, ""), tiny.tokenizer()) for i, row in enumerate(rows)]
    found = sft(tmp_path, [{"input_ids": ids, "labels": labels} for ids, labels in read], HELD)
    assert (
        list(found.train_dataset[0]["input_ids"])
        == read[0][0][: len(found.train_dataset[0]["input_ids"])]
    )


def test_validation_rows_of_another_form_are_labelled_as_training_rows(tmp_path: Path) -> None:
    """Training rows come with labels of their own; TRL would label the others' prompts too."""
    rows = [{"question": r["prompt"], "answer": r["completion"]} for r in SUMS]
    read = [encode_row(row_of(row, i, ""), tiny.tokenizer()) for i, row in enumerate(rows)]
    own = [{"input_ids": ids, "labels": labels} for ids, labels in read]
    trainer = sft(tmp_path, own, HELD, retention="none")
    for row in trainer.rows.validation:
        ids, labels = list(row["input_ids"]), trainer.labels_of(row).tolist()
        assert labels[0] == -100
        kept = [i for i, label in enumerate(labels) if label != -100]
        assert kept == list(range(kept[0], len(ids)))


def test_columns_that_nothing_reads_are_named(
    tmp_path: Path, data_log: pytest.LogCaptureFixture
) -> None:
    sft(tmp_path, [{**row, "loss_weights": [1.0]} for row in SUMS], HELD)
    assert "training rows: completion, prompt; not read: loss_weights" in data_log.text


@pytest.mark.parametrize("form", [list, Dataset.from_list])
def test_fields_of_messages_that_no_template_writes_are_named(
    form: Any, tmp_path: Path, data_log: pytest.LogCaptureFixture
) -> None:
    rows = [with_more(name="ada", train=True) for _ in range(8)]
    sft(tmp_path, form(rows), None, template=CHAT, policy="random")
    assert "training rows: messages; not read: messages.name, messages.train" in data_log.text
    data_log.clear()
    shows = CHAT.replace("{{ m['content']", "{{ m['name'] or '' }}{{ m['content']")
    found = sft(tmp_path, form(rows), None, template=shows, policy="random")
    assert "training rows: messages; not read: messages.train" in data_log.text
    assert "ada2" in tiny.tokenizer().decode(found.train_dataset[0]["input_ids"])


TEXT_PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "+1"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "2", "cache_control": None}]},
]


@pytest.mark.parametrize("form", ["list", "mixed", "Dataset", "stream"])
def test_contents_of_text_parts_are_texts(form: str, tmp_path: Path) -> None:
    """Most templates would write the list itself, or raise; Arrow takes no mixture of both."""
    rows, plain = [{"messages": TEXT_PARTS}] * 4, [with_more() for _ in range(4)]
    expected = sft(tmp_path, plain, None, template=CHAT, policy="random").train_dataset
    if form == "mixed":
        rows[1::2] = plain[1::2]
    given: Any = rows if form in ("list", "mixed") else Dataset.from_list(rows)
    given = given.to_iterable_dataset() if form == "stream" else given
    found = sft(tmp_path, given, None, template=CHAT, policy="random").train_dataset
    assert same(list(found), expected)


def test_columns_that_the_template_knows_are_served(tmp_path: Path) -> None:
    more = {"tools": [{"name": "add"}], "chat_template_kwargs": {"brief": True}}
    knows = "{% for t in tools or [] %}{{ t['name'] }}{% endfor %}{% if brief %}be {% endif %}"
    rows = [{**row, **more} for row in CHATS]
    found = sft(tmp_path, rows, None, template=knows + CHAT, policy="random").train_dataset
    assert tiny.tokenizer().decode(found[0]["input_ids"]).startswith("addbe user?")


def test_turns_that_the_template_leaves_out_are_noted(
    tmp_path: Path, data_log: pytest.LogCaptureFixture
) -> None:
    skips = CHAT.replace("{% for m in messages %}", "{% for m in messages[1:] %}")
    system = [{"messages": [_said("system", "be brief"), *row["messages"]]} for row in CHATS]
    early = [{"prompt": [_said("user", "2+2"), *TURNS[:1]], "completion": [ANSWER]}]
    for rows in (system, early):
        sft(tmp_path, rows, None, template=skips, policy="random")
    said = "rows text of turns that are not learned is left out"
    assert [m for m in data_log.messages if m.startswith("training")] == [
        f"training rows: messages; in 24 of 24 {said}",
        f"training rows: completion, prompt; in 1 of 1 {said}",
    ]


@pytest.mark.parametrize("role", ["tool", "narrator"])
def test_trl_learns_all_of_a_response_whatever_its_roles(
    role: str, tmp_path: Path, data_log: pytest.LogCaptureFixture
) -> None:
    """Of a completion no text may be lost; of a chat the assistant's turns are the responses."""
    more, drops = (
        _said(role, "345"),
        CHAT.replace("in messages", f"in messages if m.role != '{role}'"),
    )
    pair = [{"prompt": [_said("user", "1+1")], "completion": [ANSWER, more]}]
    row = sft(tmp_path, pair, None, template=CHAT, policy="random").train_dataset[0]
    learned = [token for token in row["labels"] if token != -100]
    assert f"2{role}? 345" in tiny.tokenizer().decode(learned)
    with pytest.raises(InputError, match="text of a training response would be lost.*'345'"):
        sft(tmp_path, pair, None, template=drops, policy="random")
    chat = [{"messages": [_said("user", "1+1"), more, ANSWER]}]
    sft(tmp_path, chat, None, template=drops, policy="random")
    assert "in 1 of 1 rows text of turns that are not learned is left out" in data_log.text


def test_the_common_beginning_of_a_pair_is_no_response(
    tmp_path: Path, data_log: pytest.LogCaptureFixture
) -> None:
    """What a template drops of it is noted, as of a prompt in a column of its own."""
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT.replace("in messages", "in messages if m.role != 'system'")
    head = [_said("system", "be brief"), _said("user", "1+1")]
    longer = [_said("assistant", "3"), _said("user", "sure"), ANSWER]
    sides = {"chosen": [*head, ANSWER], "rejected": [*head, *longer]}
    more = {"processing_class": tokenizer, "ref_model": tiny.model(), "policy": "random"}
    tiny.dpo(tmp_path, train_dataset=[sides], **more)
    assert "in 1 of 1 rows a response has turns of the user" in data_log.text
    assert "in 1 of 1 rows text of turns that are not learned is left out" in data_log.text


@pytest.mark.parametrize(
    ("message", "answer", "prompt"),
    [
        ({"role": "assistant"}, True, False),
        ({"role": None, "from": "gpt"}, True, False),
        ({"from": "human"}, False, True),
        ({"role": "developer"}, False, True),
        ({"role": "tool"}, False, False),
        ({"role": "narrator"}, False, False),
        ({}, False, False),
    ],
)
def test_roles_have_one_reader(message: dict[str, Any], answer: bool, prompt: bool) -> None:
    """A role that nobody knows is neither the assistant's nor one that a response begins after."""
    assert (is_answer(message), is_prompt(message)) == (answer, prompt)


@pytest.mark.parametrize("kind", ["a marked turn", "tokens"])
def test_late_rows_of_a_stream_are_checked_as_they_are_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alphatoken.train.python_rows._FIRST_ROWS", 4)
    tokens = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "loss_mask": [0, 1, 1]}
    rows = [tokens] * 5 + [{**tokens, "loss_mask": [0, 0, 1]}]
    if kind == "a marked turn":
        rows = [*CHATS[:5], {"messages": [*MARKED]}]
    stream = Dataset.from_list(rows).to_iterable_dataset()
    given = {"args": SimpleNamespace(**READ, completion_only_loss=None)}
    found = read_rows(stream, "training", given)
    assert len(list(found.take(4))) == 4  # it reads one row ahead
    with pytest.raises(InputError, match="row 5: "):
        list(found)


def test_rows_of_several_forms_are_refused() -> None:
    rows = [SUMS[0], {"prompt": [_said("user", "1+1")], "completion": [ANSWER]}]
    with pytest.raises(InputError, match="several forms. Got: 'prompt' holds list and str; 'comp"):
        read_rows(rows, "training", GIVEN)
    other = [with_more(), with_more(name=["a"]), with_more(name="b")]
    with pytest.raises(InputError, match="several forms. Got: .*list"):
        read_rows(other, "training", GIVEN)


def thinking(field: str) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": "2", field: "one more"}
    return [{"messages": [_said("user", "1+1"), answer]} for _ in range(8)]


@pytest.mark.parametrize("field", ["reasoning_content", "thinking"])
def test_thoughts_that_the_template_leaves_out_are_no_rows_of_a_trainer(
    tmp_path: Path, field: str
) -> None:
    with pytest.raises(InputError, match="row 0: a thought, which the chat template does not"):
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
        ([], "validation data set is no set of rows. Got: list:.*load_dataset"),
        ("rows.jsonl", "no set of rows. Got: str: 'rows.jsonl'.*load_dataset"),
        ({"prompt": ["a"], "completion": ["b"]}, "no set of rows. Got: dict"),
        ([["a", "b"]], "no set of rows. Got: list"),
        (TensorDataset(torch.zeros(4, 3)), "row of a data set has no columns. Got: row 0 of a Ten"),
        ([{"title": "a", "body": "b"}], "validation data set has none of the columns"),
        ([{"prompt": "a", "completion": " "}], "1 of 1 validation rows cannot be trained on"),
    ],
)
def test_what_is_no_set_of_rows_is_refused_by_name(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        sft(tmp_path, SUMS, rows)


def test_a_prompt_of_pairs_under_another_name_is_no_common_beginning(tmp_path: Path) -> None:
    """TRL would drop the column, and take what the responses begin with for the prompt."""
    asked = tiny.preference_rows(16).rename_column("prompt", "question")
    with pytest.raises(InputError, match="otherwise than it is meant.*column 'question'"):
        tiny.dpo(tmp_path, train_dataset=asked, ref_model=tiny.model())


TURNS = [_said("user", "1+1"), ANSWER, _said("user", "and 3?")]
PROMPTS = {"a text": "and 3?", "a message": TURNS[-1:], "all messages": TURNS}


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("form", ["list", "Dataset", "stream"])
def test_a_prompt_beside_whole_conversations_is_read_once(
    kind: str, form: str, tmp_path: Path
) -> None:
    """TRL writes it twice, or ends in a bare error; the command reads it once, as these rows."""
    said = {"chosen": [_said("assistant", "5")], "rejected": [_said("assistant", "6")]}
    rows = [{"prompt": PROMPTS[kind], **{k: TURNS + one for k, one in said.items()}}] * 4
    given: Any = rows if form == "list" else Dataset.from_list(rows)
    given = given.to_iterable_dataset() if form == "stream" else given
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = CHAT
    own = {"processing_class": tokenizer, "policy": "random", "validation_dataset": None,
           "retention": "none", "ref_model": tiny.model()}  # fmt: skip
    found = tiny.dpo(tmp_path, train_dataset=given, **own).train_dataset
    clean = tiny.dpo(tmp_path, train_dataset=[{"prompt": TURNS, **said}] * 4, **own).train_dataset
    assert same(list(found), clean, "prompt_ids", "chosen_ids", "rejected_ids")
    text = tokenizer.decode(clean[0]["prompt_ids"])
    assert text == "user? 1+1assistant? 2user? and 3?assistant? "
    assert pair_of(rows[0], 0, "here").row == pair_of({"prompt": TURNS, **said}, 0, "here").row


@pytest.mark.parametrize("repeated", [False, True])
def test_a_system_text_before_the_prompt_is_read_once(repeated: bool) -> None:
    """Also where both conversations begin with it."""
    prompt = [_said("system", "be brief"), TURNS[0]]
    head = prompt if repeated else prompt[1:]
    pair = {k: [*head, _said("assistant", k)] for k in ("chosen", "rejected")}
    found = pair_of({"prompt": prompt, **pair}, 0, "here")
    assert [turn.role for turn in found.prompt] == ["system", "user"]
    assert [[turn.text for turn in side] for side in (found.chosen, found.rejected)] == [
        ["chosen"], ["rejected"],
    ]  # fmt: skip


def test_two_conversations_that_agree_keep_their_responses() -> None:
    """The last turn of the shorter one is a response, so that the pair is refused as what it is."""
    for more in ([], TURNS[2:3]):
        found = pair_of({"chosen": TURNS[:2], "rejected": [*TURNS[:2], *more]}, 0, "here")
        assert [turn.text for turn in found.prompt] == [TURNS[0]["content"]]
        assert [len(side) for side in (found.chosen, found.rejected)] == [1, 1 + len(more)]


def test_a_text_beside_messages_is_a_message() -> None:
    clean = {"prompt": TURNS[:1], "completion": [ANSWER]}
    for own in ({"prompt": "1+1"}, {"completion": "2"}, {"completion": TURNS[:2]}):
        assert read_rows([{**clean, **own}], "training", GIVEN).to_list() == [clean]
    pair = {"prompt": "1+1", "chosen": {"from": "gpt", "value": "2"}, "rejected": "3"}
    said = {"chosen": [ANSWER], "rejected": [_said("assistant", "3")]}
    found = read_pairs([pair], "training", GIVEN).to_list()
    assert found == [{"prompt": TURNS[:1], **said}]


ROLES = {
    "ShareGPT": ("conversations", "from", "value", "human", "gpt"),
    "roles in conversations": ("conversations", "role", "content", "user", "model"),
    "ShareGPT in messages": ("messages", "from", "value", "human", "bot"),
    "messages": ("messages", "role", "content", "user", "model"),
}


@pytest.mark.parametrize(
    ("kind", "form"),
    [*((kind, "Dataset") for kind in ROLES), ("ShareGPT", "list"), ("ShareGPT", "stream")],
)
def test_roles_are_those_of_the_commands(kind: str, form: str, tmp_path: Path) -> None:
    """TRL would write the names as they are, or end in a bare error."""
    column, role, content, user, assistant = ROLES[kind]
    said = [{role: user, content: "1+1"}, {role: assistant, content: "2"}]
    rows, own = [{column: said}] * 4, {"template": CHAT, "policy": "random"}
    given: Any = rows if form == "list" else Dataset.from_list(rows)
    given = given.to_iterable_dataset() if form == "stream" else given
    found = sft(tmp_path, given, None, **own).train_dataset
    expected = sft(tmp_path, [with_more()] * 4, None, **own).train_dataset
    assert same(list(found), expected)
    asked = {"messages": [_said("developer", "1"), *TURNS[:2]]}
    roles = [one["role"] for one in read_rows([asked], "training", GIVEN).to_list()[0]["messages"]]
    assert roles == ["system", "user", "assistant"]


def test_another_prompt_beside_whole_conversations_is_refused() -> None:
    pair = {k: [*TURNS, _said("assistant", k)] for k in ("chosen", "rejected")}
    rows = [{"prompt": "and 3?", **pair}, {"prompt": "2+2", **pair}]
    with pytest.raises(InputError, match="prompt is not that of the two conv.*Got: row 1: '2[+]2'"):
        read_pairs(rows, "training", GIVEN)


def test_a_response_of_several_turns_is_learned_whole_and_that_is_said(
    data_log: pytest.LogCaptureFixture,
) -> None:
    pair = {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": [_said("assistant", "3")]}
    read_pairs([pair, {**pair, "chosen": TURNS[1:2]}], "training", GIVEN)
    read_rows([{"prompt": TURNS[:1], "completion": TURNS[1:]}], "training", GIVEN)
    whole = {k: [TURNS[0], _said("assistant", k)] for k in ("chosen", "rejected")}
    read_pairs([whole], "training", GIVEN)  # the user's turn is their prompt
    said = "a response has turns of the user, which are learned with it"
    assert data_log.messages == [
        f"training rows: chosen, prompt, rejected; in 1 of 2 rows {said}",
        f"training rows: completion, prompt; in 1 of 1 rows {said}",
    ]


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
        AlphaTokenWarning, match=r"2 of 24 training rows.*\(row 3, 7\).*leaking_rows"
    ):
        sft(tmp_path, SUMS, leaked)
    left = [row for i, row in enumerate(SUMS) if i not in leaking_rows(SUMS, leaked)]
    assert len(left) == 22
    with warnings.catch_warnings():
        warnings.simplefilter("error", AlphaTokenWarning)
        sft(tmp_path, left, leaked, validation_mode="pool")


@pytest.mark.parametrize("several", [False, True])
def test_training_rows_that_repeat_evaluation_rows_are_counted(
    several: bool, tmp_path: Path
) -> None:
    """Also where several sets are evaluated, of which each has a name."""
    sets = {"old": HELD, "new": [{**SUMS[7], "completion": " another answer."}, *HELD]}
    made = {name: Dataset.from_list([dict(row) for row in own]) for name, own in sets.items()}
    one = "a row of the evaluation set 'new'" if several else "an evaluation row"
    said = rf"1 of 24 training rows repeat {one} or its prompt \(row 7\)"
    with pytest.warns(AlphaTokenWarning, match=said):
        sft(tmp_path, SUMS, HELD, eval_dataset=made if several else made["new"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", AlphaTokenWarning)
        sft(tmp_path, SUMS, HELD, eval_dataset=made["old"], validation_mode="pool")


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
    from alphatoken.train import mixin

    for kind in (AlphaSFTConfig, AlphaDPOConfig):
        assert kind(str(tmp_path)).bf16 is False
        assert kind(str(tmp_path), use_cpu=True).bf16 is False
        with pytest.raises(ValueError, match="bf16"):  # asked for: transformers' own refusal
            kind(str(tmp_path), bf16=True)
        monkeypatch.setattr(mixin, "is_torch_bf16_gpu_available", lambda: True)
        assert kind(str(tmp_path), use_cpu=True).bf16 is True  # TRL's default stands
        monkeypatch.undo()


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


@pytest.mark.parametrize("form", ["messages", "pairs"])
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
        trainer = tiny.sft(tmp_path, train_dataset=dataset, processing_class=written, **more)
    assert len(trainer.train_dataset) == 8
    trainer.train()


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_evaluation_rows_may_be_a_list(kind: str, several: bool, tmp_path: Path) -> None:
    """As the training rows may; TRL itself asks for a data set."""
    rows: Any = tiny.sums(4, seed=7) if kind == "sft" else [*tiny.preference_rows(4, seed=7)]
    trainer = AlphaSFTTrainer if kind == "sft" else AlphaDPOTrainer
    more: dict[str, Any] = {}
    if kind == "dpo":
        more = {"train_dataset": [*tiny.preference_rows(8)], "ref_model": tiny.model()}

    def evaluated(name: str, given: Any) -> dict[str, float]:
        own = {"mine": given} if several else given
        made = tiny.made(
            trainer, tmp_path / name, policy="standard", eval_dataset=own, max_steps=1, **more
        )
        made.train()
        return {n: v for n, v in made.evaluate().items() if n.endswith("loss")}

    found = evaluated("list", rows)
    assert found == evaluated("data set", Dataset.from_list(rows))
    assert found


def chat(answer: str) -> dict[str, Any]:
    return {"messages": [_said("user", "a"), _said("assistant", answer)]}


def sharegpt(answer: str) -> dict[str, Any]:
    said = ("human", "a"), ("gpt", answer)
    return {"conversations": [{"from": role, "value": text} for role, text in said]}


PAIR = {"prompt": "a", "chosen": "yes", "rejected": "no"}
SIDES = {"chosen": [ANSWER], "rejected": [_said("assistant", "3")]}
UNUSABLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a completion": ({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "\n"}, ""),
    "no answer": (chat("b"), {"messages": [_said("user", "a")]}, ""),
    "an empty answer": (chat("b"), chat(""), ""),
    "ShareGPT": (sharegpt("b"), sharegpt(""), ""),
    "a text": ({"text": "b"}, {"text": ""}, ""),
    "no labels": (
        {"input_ids": [1, 2], "labels": [-100, 2]},
        {"input_ids": [1, 2], "labels": [-100, -100]},
        "",
    ),
    "one side": (PAIR, {**PAIR, "rejected": "  "}, ""),
    "two sides": (PAIR, {**PAIR, "chosen": "", "rejected": ""}, ""),
    "a pair of one text": (PAIR, {**PAIR, "chosen": "no"}, "are equal"),
    "a pair of one message": (SIDES, {**SIDES, "rejected": [ANSWER]}, "are equal"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_row_that_teaches_nothing_is_named(kind: str) -> None:
    """Beside one that can be trained on, which is left as it is."""
    usable, bad, cause = UNUSABLE[kind]
    read = read_pairs if "chosen" in usable else read_rows
    with pytest.raises(InputError, match=rf"1 of 2 mine rows.*{cause or 'is empty'} \(row 1\)"):
        read([usable, bad], "mine", GIVEN)
    fine = Dataset.from_list([usable])
    assert len(read(fine, "mine", GIVEN)) == 1
    if kind == "an empty answer":  # nothing of it has to be written anew
        assert read(fine, "mine", GIVEN) is fine


def test_columns_that_are_not_there_are_named() -> None:
    for read, rows, cause in (
        (read_rows, [{"question": "a"}], "none of the columns.*question"),
        (read_pairs, [{"prompt": "a", "chosen": "b"}], "no column 'rejected'"),
    ):
        with pytest.raises(InputError, match=cause):
            read(Dataset.from_list(rows), "training", GIVEN)
    with pytest.raises(InputError, match="no rows"):
        read_rows(Dataset.from_dict({"text": []}), "training", GIVEN)


def test_rows_that_cannot_be_trained_on_are_left_out_or_stop(tmp_path: Path) -> None:
    rows = tiny.sums(8)
    rows[3] = {**rows[3], "completion": " "}

    def made(**more: Any) -> AlphaSFTTrainer:
        more |= {"policy": "random", "retention": "none", "validation_dataset": None}
        return cast("AlphaSFTTrainer", tiny.sft(tmp_path, train_dataset=rows, **more))

    with pytest.warns(AlphaTokenWarning, match=r"1 of 8 training rows left out: .*empty \(row 3\)"):
        assert len(made().train_dataset) == 7
    with pytest.raises(InputError, match=r"1 of 8 training rows .*on_empty=skip"):
        made(on_empty="error")
    rows[:] = [{**row, "completion": ""} for row in rows]
    with pytest.raises(InputError, match=r"8 of 8 training rows .*Remedy: mend them\."):
        made()
