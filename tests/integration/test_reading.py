"""What people bring: every column is read, or named as not read, or refused with a way on."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alphatoken.data import (
    EncodeOptions,
    Fields,
    Survey,
    encode_rows,
    leak_keys,
    pair_of,
    read_records,
    read_rows,
    row_of,
    split_pools,
)
from alphatoken.data.source import find_source
from alphatoken.errors import AlphaTokenError, ColumnsError, DataError
from alphatoken.score.job import Corpus, draw_rows
from alphatoken.score.queries import query_rows
from tests.integration.test_data import CHATML, byte_tokenizer, labelled_text, reader
from tests.rows import jsonl

ASKED = {"instruction": "Name it.", "input": "a red fruit", "output": "cherry"}
SAID = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Good day."}]

ABOUT = ("title", "url", "source", "author", "date", "time", "timestamp", "created", "license",
         "category", "domain", "topic", "subject", "language", "meta", "metadata")  # fmt: skip


# --- columns --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "roles", "prompt", "response"),
    [
        (ASKED, "user assistant", "Name it.\na red fruit", "cherry"),
        ({"prompt": "p", "response": "r"}, "user assistant", "p", "r"),
        ({"instruction": "i", "input": "", "output": "o"}, "user assistant", "i", "o"),
        ({"messages": [{"role": "system", "content": [{"type": "text", "text": "s"}]}, *SAID]},
         "system user assistant", "s\nHi.", "Good day."),
        ({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"},
                            {"from": "human", "value": "h2"}, {"from": "gpt", "value": "g2"}]},
         "user assistant user assistant", "h", "g2"),
        ({"question": "Who?", "context": "Ada wrote it.", "answer": "Ada"},
         "user assistant", "Who?\nAda wrote it.", "Ada"),
        ({"system": "Be brief.", **ASKED}, "system user assistant",
         "Be brief.\nName it.\na red fruit", "cherry"),
        ({"system_prompt": "Be brief.", "messages": SAID}, "system user assistant",
         "Be brief.\nHi.", "Good day."),
        ({"prompt": SAID[:1], "completion": SAID[1:]}, "user assistant", "Hi.", "Good day."),
        ({"prompt": "Hi.", "completion": SAID[1:]}, "user assistant", "Hi.", "Good day."),
        ({"prompt": None, "question": "Who?", "response": None, "answer": "Ada", "text": None,
          "messages": None}, "user assistant", "Who?", "Ada"),
        ({**ASKED, "prompt": "### Name it.\na red fruit\n### cherry"}, "user assistant",
         "Name it.\na red fruit", "cherry"),
        ({"prompt": "Is cherry red?", "question": "Why?", "answer": "red"}, "user assistant",
         "Is cherry red?", "red"),
        ({"prompt": None, "messages": None, "text": "A document."}, "assistant", "", "A document."),
        ({"text": "A document.", "url": "a b", "id": "x-1", "label": 3}, "assistant", "",
         "A document."),
        ({"text": "A story.", **dict.fromkeys(ABOUT, "of two words")}, "assistant", "", "A story."),
        # A filled template, answer included, whatever white space is around it; or what is asked.
        ({"prompt": "### Who? ### Ada", "question": " Who?\n", "answer": "Ada\n"},
         "user assistant", " Who?\n", "Ada\n"),
        ({"prompt": "Answer briefly. Who?", "question": " Who?\n", "answer": "Ada\n"},
         "user assistant", "Answer briefly. Who?", "Ada\n"),
        ({"prompt": "Hi.", "completion": SAID}, "user assistant", "Hi.", "Good day."),
        ({"prompt": SAID[:1], "completion": SAID}, "user assistant", "Hi.", "Good day."),
        ({"messages": [{"role": "developer", "content": "Be brief.", "tool_calls": None},
                       {"role": None, "content": None, "from": "gpt", "value": "Yes."}]},
         "system assistant", "Be brief.", "Yes."),
    ],
)  # fmt: skip
def test_columns_with_a_plain_meaning_are_served(
    record: dict[str, Any], roles: str, prompt: str, response: str
) -> None:
    row = row_of(record, 0, "here")
    assert " ".join(turn.role for turn in row.turns) == roles
    assert row.prompt == prompt
    assert row.turns[-1].text == response


@pytest.mark.parametrize(
    ("record", "message", "way_on"),
    [
        ({**ASKED, "functions": [{"name": "f"}]}, "'functions' has no place",
         {"unread": ("functions",)}),
        ({"messages": SAID, "context": "More."}, "'context' has no place",
         {"unread": ("context",)}),
        ({"text": "A story.", "system": "Be brief."}, "other texts",
         {"response": "text", "unread": ("system",)}),
        ({"system": "One.", "messages": [{"role": "system", "content": "Two."}, *SAID]},
         "two system texts", {"unread": ("system",)}),
        ({"text": "Write it.", "code": "x = 1 + 1"}, "'text' and other texts",
         {"prompt": "text", "response": "code"}),
        ({"text": "Write it.", "answer": "x"}, "'text' and other texts", {"response": "text"}),
        ({"question": "Who?", "answer": None}, "no response.*null counts as absent",
         {"prompt_only": True}),
        ({**ASKED, "history": [["Where?", "Here."]]}, "'history' has no place",
         {"unread": ("history",)}),
        ({**ASKED, "input": 3}, "'input' is not text", {"unread": ("input",)}),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused_and_the_remedy_works(
    record: dict[str, Any], message: str, way_on: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match=message):
        row_of(record, 0, "here")
    assert row_of(record, 0, "here", Fields(**way_on)).turns


@pytest.mark.parametrize(
    "name",
    [
        "input", "context", "system", "system_prompt", "system_message", "tools", "documents",
        "chat_template_kwargs", "history", "functions", "function_call", "tool_calls", "image",
        "images", "audio", "audios", "video", "videos",
    ],
)  # fmt: skip
def test_no_column_that_changes_the_conversation_is_lost_beside_a_plain_text(name: str) -> None:
    row_of({"text": "A story.", name: []}, 0, "here")
    with pytest.raises(DataError, match=name):
        row_of({"text": "A story.", name: [{"a": "b c"}]}, 0, "here")


def test_named_columns_may_be_absent_from_held_out_rows() -> None:
    fields = Fields("text", "code", optional=True)
    assert row_of({"text": "a", "code": "b"}, 0, "here", fields).response == "b"
    assert row_of({"prompt": "a", "response": "b"}, 0, "here", fields).response == "b"
    with pytest.raises(DataError, match="no field 'text'"):
        row_of({"prompt": "a", "response": "b"}, 0, "here", Fields("text", "code"))
    with pytest.raises(DataError, match="field 'code' of the row is null.*--on_bad_rows skip"):
        row_of({"text": "a", "code": None}, 0, "here", Fields("text", "code"))
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match="field 'good' of the row is null"):
        pair_of({**pair, "good": None}, 0, "here", Fields(chosen="good"))
    assert pair_of(pair, 0, "here", Fields(chosen="good", optional=True)).chosen[0].text == "b"


@pytest.mark.parametrize(
    ("record", "fields", "said"),
    [
        ({"messages": [{}]}, {"messages": "mesages"},
         "did you mean 'messages'? The column is named by --messages_column (Fields(messages=..."),
        ({"ask": "a", "answer": "b"}, {"prompt": "asks", "response": "answer"},
         "did you mean 'ask'? The column is named by --prompt_column"),
        ({"ask": "a", "reply": "b"}, {"prompt": "ask", "response": "replies"},
         "did you mean 'reply'? The column is named by --response_column"),
        ({"reply": "b"}, {"response": "replies"}, "named by --response_column"),
        ({"reply": "b"}, {"response": "xyz"}, "Remedy: The column is named by --response_column"),
        ({"prompt": "a", "good": "b", "bad": "c"}, {"chosen": "god", "rejected": "bad"},
         "did you mean 'good'? The column is named by --chosen_column"),
        ({"prompt": "a", "good": "b", "bad": "c"}, {"chosen": "good", "rejected": "bads"},
         "did you mean 'bad'? The column is named by --rejected_column"),
    ],
)  # fmt: skip
def test_a_named_column_that_is_not_there_is_said_with_its_option(
    record: dict[str, Any], fields: dict[str, str], said: str
) -> None:
    read = pair_of if "chosen" in fields else row_of
    with pytest.raises(DataError) as caught:
        read(record, 0, "here", Fields(**fields))
    assert said in str(caught.value)


def test_a_pair_reads_its_prompt_as_a_row_does() -> None:
    pair = {"chosen": "cherry", "rejected": "plum"}
    question = {k: v for k, v in ASKED.items() if k != "output"}
    record = {"system": "Be brief.", **question}
    row = row_of({**record, "output": "cherry"}, 0, "here")
    assert pair_of({**record, **pair}, 0, "here").row == row
    whole = {k: [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": v}]
             for k, v in pair.items()}  # fmt: skip
    pair_of_chats = pair_of({"system": "Be brief.", "prompt": "Who?", **whole}, 0, "here")
    assert [turn.role for turn in pair_of_chats.prompt] == ["system", "user"]
    with pytest.raises(DataError, match="not that of the two.*--unread_columns question "):
        pair_of({"question": "Another?", **whole}, 0, "here")
    assert pair_of({"question": "Another?", **whole}, 0, "here", Fields(unread=("question",)))
    with pytest.raises(DataError, match="'tools' has no place"):
        pair_of({**record, **pair, "tools": [{}]}, 0, "here")
    assert pair_of({**record, **pair, "tools": [{}]}, 0, "here", Fields(unread=("tools",)))
    with pytest.raises(DataError, match="no rejected response.*null counts as absent"):
        pair_of({**record, "chosen": "cherry", "rejected": None}, 0, "here")
    marked = [{"role": "assistant", "content": "cherry", "weight": 0}]
    with pytest.raises(DataError, match="not to be trained on"):
        pair_of({"prompt": "Who?", "chosen": marked, "rejected": "plum"}, 0, "here")


def test_one_line_says_what_was_read_and_what_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{**ASKED, "id": 1, "loss_weights": [1.0]}] * 3
    logging.getLogger("alphatoken.data").propagate = True
    with caplog.at_level(logging.INFO, logger="alphatoken.data"):
        read_rows(jsonl(tmp_path / "a.jsonl", rows))
        read_rows(jsonl(tmp_path / "b.jsonl", [ASKED, {"text": "Once.", "source": "x"}]))
        read_rows(jsonl(tmp_path / "c.jsonl", [{"prompt": "Say: yes", "response": "yes"}]))
        tools = {**ASKED, "tools": [{}], "id": 1}
        read_rows(jsonl(tmp_path / "d.jsonl", [tools]), fields=Fields(unread=("tools",)))
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "a.jsonl: prompt = instruction + input, response = output; not read: id, "
         "loss_weights"),
        ("WARNING", "b.jsonl: prompt = instruction + input, response = output (1 row); plain text "
         "= text (1 row); not read: source"),
        ("WARNING", "c.jsonl: prompt = prompt, response = response; in 1 of 1 rows the prompt ends "
         "with the response"),
        ("WARNING", "d.jsonl: prompt = instruction + input, response = output; not read: tools, "
         "id"),
    ]  # fmt: skip


def test_the_line_is_of_all_rows_and_counts_forms_beyond_four() -> None:
    """A column without a name, such as pandas' index in a table, is named as such."""
    survey = Survey("a.jsonl")
    for number, prompt in enumerate(("prompt", "instruction", "question", "query", "query")):
        answer = "response" if number < 4 else "output"
        record = {prompt: "Who?", answer: "Ada", **({"id": 0} if number == 0 else {"": "0"})}
        row_of(record, number, "here", survey=survey)
    assert str(survey).startswith("a.jsonl: prompt = prompt, response = response (1 row); ")
    assert str(survey).endswith("; 1 more forms; not read: id, the unnamed column")


def test_a_prompt_that_ends_with_its_response_is_seen_through_white_space() -> None:
    survey = Survey("a.jsonl")
    row_of({"prompt": "Say: yes \n", "response": " yes"}, 0, "here", survey=survey)
    row_of({"prompt": "Say: yes", "response": " "}, 1, "here", survey=survey)
    assert "in 1 of 2 rows the prompt ends with the response" in str(survey)


# --- verdicts on a row ----------------------------------------------------------------------------


AGAINST: dict[str, list[tuple[str, Any]]] = {
    "response of the row is marked as a bad one": [
        ("label", False), ("kto_tag", False), ("desirable", False), ("is_correct", False),
        ("reward", -1), ("score", -0.25), ("advantage", -2.0),
    ],
    "row is marked as one that is not to be learned": [
        ("weight", 0), ("weight", 0.0), ("loss_weight", 0), ("loss_weights", [0.0, 0.0]),
        ("train", False), ("trainable", 0), ("mask", True), ("rejected", True), ("keep", False),
        ("verdict", "drop"), ("bad", 1), ("discard", 1), ("rejected", 1), ("ignore", 1),
        ("masked", 1), ("trained", False), ("verdict", "DROP"), ("train", "no"), ("keep", "No"),
        ("row_weight", 0), ("exclude", "yes"), ("useForTraining", False), ("no_train", True),
    ],
    "row has a weight of its own": [("weight", 0.5), ("sample_weight", 2), ("loss_scale", 0.25),
                                    ("loss_weights", [0.0, 1.0]), ("row_weight", 0.5),
                                    ("sampleWeight", 2), ("Weight", 3), ("loss_multiplier", 0.1),
                                    ("token_weights", [0.0, 1.0])],
    "row has a mask whose meaning is not certain": [("mask", [0, 1])],
}  # fmt: skip


@pytest.mark.parametrize(
    ("said", "name", "value"), [(said, *one) for said, some in AGAINST.items() for one in some]
)
def test_a_row_that_speaks_against_itself_is_refused_or_left_out(
    tmp_path: Path, said: str, name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    record = {**ASKED, name: value}
    with pytest.raises(DataError, match=rf"{said}.*'{name}' is .*--on_bad_rows skip"):
        row_of(record, 0, "here")
    # All cells of a table are texts.
    for cell in {str(value), value if isinstance(value, str) else json.dumps(value)}:
        with pytest.raises(DataError, match=said):
            row_of({**ASKED, name: cell}, 0, "here")
    assert row_of(record, 0, "here", Fields(unread=(name,))).response == "cherry"
    assert row_of(record, 0, "here", Fields(prompt_only=True)).prompt  # no response is read of it
    logging.getLogger("alphatoken.data").propagate = True
    path = jsonl(tmp_path / "a.jsonl", [ASKED, record, ASKED])
    with caplog.at_level(logging.WARNING, logger="alphatoken.data"):
        assert [row.index for row in read_rows(path, on_bad_rows="skip")] == [0, 2]
        how = EncodeOptions(on_bad_rows="skip")
        survey = Corpus(find_source(path), Fields(), byte_tokenizer(), how).survey()
    assert (survey.counts["train"], survey.counts["bad_rows"]) == (2, 1)
    for line in caplog.messages:
        assert re.search(rf"1 row left out: the {said} \(a\.jsonl, line 2\)", line)


@pytest.mark.parametrize(
    ("name", "value"),
    [("label", True), ("label", 1), ("label", "bad"), ("weight", 1), ("weight", 1.0),
     ("weight", float("nan")), ("weight", "72 kg"), ("loss_weights", [1.0, 1]), ("reward", 0.2),
     ("train", "train"), ("loss", 0.7), ("mask", "User"), ("mask", False), ("keep", True),
     ("verdict", "keep"), ("loss", 0.0), ("weight", "1.0"), ("label", "True"), ("label", "no"),
     ("mask", "[x]"), ("reward", "0.2"), ("bad", 0), ("wrong", 2), ("body_weight", 72),
     ("train_loss", 2.5), ("training_step", 100), ("pretrained", False), ("keep", "north"),
     ("no_train", False), ("row_weight", 1), ("multiplier", 3), ("trained", "yes"), ("mask", 1)],
)  # fmt: skip
def test_what_speaks_not_against_a_row_is_named_only(name: str, value: Any) -> None:
    survey = Survey("a.jsonl")
    row_of({**ASKED, name: value}, 0, "here", survey=survey)
    assert str(survey).endswith(f"response = output; not read: {name}")


@pytest.mark.parametrize(("name", "value"), [("label", 0), ("reward", 0.0), ("score", 0)])
def test_a_zero_that_may_be_a_verdict_is_counted(name: str, value: Any) -> None:
    survey = Survey("a.jsonl")
    for own in (value, 1):
        row_of({**ASKED, name: own}, 0, "here", survey=survey)
    said = f"in 1 of 2 rows {name} is {value}, and the row counts as the others do"
    assert str(survey).endswith(f"not read: {name}; {said}")


def test_the_class_of_a_plain_text_is_no_verdict() -> None:
    survey = Survey("a.jsonl")
    row_of({"text": "A story.", "label": False}, 0, "here", survey=survey)
    assert "in 1 of 1 rows label is False, and the row counts as the others do" in str(survey)
    with pytest.raises(DataError, match="not to be learned"):
        row_of({"text": "A story.", "weight": 0}, 0, "here")


PAIR = {"prompt": "Name it.", "chosen": "cherry", "rejected": "plum"}


@pytest.mark.parametrize(
    ("more", "aside"),
    [
        ({"score_chosen": 2.0, "score_rejected": 8.0}, "score_chosen"),
        ({"chosen_score": -1, "rejected_score": 0}, "chosen_score"),
        ({"chosen-rating": 1, "rejected-rating": 5}, "chosen-rating"),
        ({"reward_chosen": 0.1, "reward_rejected": 0.2}, "reward_chosen"),
        ({"margin": -0.5}, "margin"),
        ({"Score_Chosen": 1, "Score_Rejected": 2}, "Score_Chosen"),
        ({"helpfulness_chosen": 1, "helpfulness_rejected": 2}, "helpfulness_chosen"),
        ({"score_diff": -2}, "score_diff"),
        ({"label": False}, "label"),
        ({"weight": 0}, "weight"),
        ({"weight": 0.5}, "weight"),
    ],
)
def test_a_pair_that_speaks_against_its_order_is_refused(more: dict[str, Any], aside: str) -> None:
    for own in (more, {name: str(value) for name, value in more.items()}):
        with pytest.raises(DataError, match=rf"'{aside}' is .*--unread_columns {aside} "):
            pair_of({**PAIR, **own}, 0, "here")
    assert pair_of({**PAIR, **more}, 0, "here", Fields(unread=(aside,))).chosen[0].text == "cherry"


def test_a_rank_is_no_score_and_a_rejected_response_may_be_marked_as_a_bad_one() -> None:
    survey = Survey("a.jsonl")
    said = {k: [{"role": "assistant", "content": PAIR[k], "is_correct": k == "chosen"}]
            for k in ("chosen", "rejected")}  # fmt: skip
    pair_of({**PAIR, **said, "chosen_rank": 1, "rejected_rank": 2}, 0, "here", survey=survey)
    assert "not read: chosen.is_correct, rejected.is_correct, chosen_rank" in str(survey)
    with pytest.raises(DataError, match="marked as a bad one. Got: here: 'is_correct'"):
        pair_of({**PAIR, "chosen": said["rejected"]}, 0, "here")
    with pytest.raises(DataError, match="marked as not to be trained on"):
        pair_of({**PAIR, "rejected": [{**said["rejected"][0], "train": False}]}, 0, "here")


def test_scores_that_agree_with_a_pair_are_named_and_equal_ones_counted() -> None:
    survey = Survey("a.jsonl")
    for scores in ((8.0, 2.0), (3.0, 3.0), (8, None)):
        own = {"score_chosen": scores[0], "score_rejected": scores[1], "chosen_logps": -9.0,
               "rejected_logps": -3.0}  # fmt: skip
        pair_of({**PAIR, **own}, 0, "here", survey=survey)
    assert "not read: score_chosen, score_rejected, chosen_logps, rejected_logps; " in str(survey)
    assert str(survey).endswith("in 1 of 3 rows both responses have the same score")


# --- turns ----------------------------------------------------------------------------------------


def test_a_response_of_several_turns_is_learned_whole_and_that_is_said() -> None:
    """As TRL does: there are no labels in a pair."""
    survey, longer = Survey("a.jsonl"), [SAID[1], *SAID]
    for chosen in (longer, SAID[1:]):
        pair_of({"prompt": SAID[:1], "chosen": chosen, "rejected": [{**SAID[1], "content": "No."}]},
                0, "here", survey=survey)  # fmt: skip
    said = "in 1 of 2 rows a response has turns of the user, which are learned with it"
    assert str(survey).endswith(said)


@pytest.mark.parametrize(
    ("record", "refusal"),
    [
        ({"input_ids": [1, 2], "labels": [1, 2]}, "the row is tokenised.*trainers take input_ids"),
        ({"prompt": "Who?", "completion": SAID}, "another turn than the assistant's.*user"),
        ({"messages": [{**SAID[1], "function_call": {"name": "f"}}]}, "tool calls"),
        ({"messages": [{**SAID[1], "tool_calls": [{"name": "f"}]}]}, "tool calls"),
        ({"messages": [{**SAID[1], "thinking": "\ud800"}]}, "half of a character"),
        ({"messages": [*SAID, {"role": "tool", "content": "a"}]}, "unknown role"),
    ],
)
def test_what_no_row_can_hold_is_refused(record: dict[str, Any], refusal: str) -> None:
    with pytest.raises(DataError, match=refusal):
        row_of(record, 0, "here")


MARKS = [
    ("weight", 0, 1), ("weight", False, True), ("train", False, True), ("loss", 0.0, 1.0),
    ("trainable", 0, True), ("training", False, 1), ("loss_scale", 0.0, 1.0),
    ("loss_weight", 0, 1), ("loss_mask", 0, 1), ("step_loss_mask", 0, 1), ("mask", True, False),
    ("masked", 1, 0),
]  # fmt: skip
"""Names of marks of a turn; what leaves it out, and what does not."""


@pytest.mark.parametrize(("mark", "out", "within"), MARKS)
@pytest.mark.parametrize("template", [None, CHATML])
def test_turns_marked_as_untrained_have_no_labels(
    mark: str, out: Any, within: Any, template: str | None
) -> None:
    marked: dict[str, Any] = {**SAID[1], "content": "Wrong.", mark: out}
    record = {"messages": [SAID[0], marked, *SAID]}
    tokenizer, survey = byte_tokenizer(template), Survey("a.jsonl")
    end = "<|im_end|>" if template else "</s>"
    row = row_of(record, 0, "here", survey=survey)
    assert labelled_text(tokenizer, row) == [f"Good day.{end}"]
    assert str(survey) == "a.jsonl: chat = messages"  # which is read, and no column that is not
    marked[mark] = within
    both = [f"Wrong.{end}", f"Good day.{end}"]
    assert labelled_text(tokenizer, row_of(record, 0, "here")) == both
    marked[mark] = 0.5
    with pytest.raises(DataError, match=rf"(in part|not certain).*{mark!r} is 0.5.*'train' with"):
        row_of(record, 0, "here")
    aside = row_of(record, 0, "here", Fields(unread=(mark,)), survey)
    assert labelled_text(tokenizer, aside) == both
    assert f"not read: messages.{mark}" in str(survey)


BESIDE: dict[str | None, list[tuple[str, Any]]] = {
    "mark whose meaning is not certain": [
        ("mask", 1),  # which trains in one library, and hides in others
        ("no_loss", True), ("lossMultiplier", 0), ("learnable", False), ("supervise", False),
        ("ignored", True), ("unmasked", True),
        ("train_detail", [{"begin_offset": 0, "train": False}]),
    ],
    "in part": [("loss_mask", [0, 1, 1]), ("train", "false")],
    "marked as a bad one": [("label", False), ("reward", -0.5), ("bad", 1)],
    "has no place": [
        ("images", ["a.png"]), ("image_url", "a.png"), ("context", "She bought it."),
        ("documents", [{"text": "a"}]), ("attachments", ["a.pdf"]), ("image_urls", ["a.png"]),
        ("img", "a.png"), ("video_path", "a.mp4"), ("document", "a"), ("tool_results", [4]),
    ],
    None: [
        ("ignored", "words"), ("name", "Ada"), ("id", 7), ("tool_calls", []), ("images", []),
        ("constraint", "short"), ("label", True), ("weight", None),
    ],
}  # fmt: skip
"""What is said of fields of a message; None of those that are named only."""


@pytest.mark.parametrize(
    ("said", "field", "value"), [(said, *one) for said, some in BESIDE.items() for one in some]
)
def test_what_a_message_says_beside_its_text_is_refused_or_named(
    said: str | None, field: str, value: Any
) -> None:
    survey, record = Survey("a.jsonl"), {"messages": [SAID[0], {**SAID[1], field: value}]}
    if said is not None:
        with pytest.raises(DataError, match=rf"{said}.*--unread_columns {field} "):
            row_of(record, 0, "here")
    row = row_of(record, 0, "here", Fields(unread=(field,) if said else ()), survey)
    assert row.turns[1].learned
    named = "" if value is None else f"; not read: messages.{field}"
    assert str(survey) == f"a.jsonl: chat = messages{named}"


def test_a_users_turn_that_is_marked_as_learned_is_counted() -> None:
    survey = Survey("a.jsonl")
    for weight in (1, 0):
        question = {**SAID[0], "weight": weight}
        row_of({"messages": [question, {**SAID[1], "weight": 1}]}, 0, "here", survey=survey)
    said = "in 1 of 2 rows a turn of the user or the system is marked as learned, and is not"
    assert str(survey) == f"a.jsonl: chat = messages; {said}"


def part(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


@pytest.mark.parametrize(
    ("parts", "learned"),
    [
        ([part("Good "), part("day.")], True),
        ([part("Good ", weight=1), part("day.")], True),
        ([part("Good ", weight=0), part("day.", weight=0.0)], False),
        ([{"type": "output_text", "text": "Good day."}], True),
        ([part("Good ", image_url=None), {"text": "day."}], True),
        ([part("Good ", weight=0), part("day.", weight=1)], "trained in part"),
        ([part("Good ", weight=0.5), part("day.")], "in part.*'weight' is 0.5"),
        ([part("Good day.", image_url="a.png")], "'image_url' has no place"),
        ([{"type": "image", "text": "Good day."}], "content of a message is not text"),
        (["Good ", "day."], "content of a message is not text"),
    ],
)
def test_parts_of_a_content_are_read_as_messages_are(parts: Any, learned: bool | str) -> None:
    record = {"messages": [SAID[0], {"role": "assistant", "content": parts}]}
    if isinstance(learned, str):
        with pytest.raises(DataError, match=learned):
            row_of(record, 0, "here")
        return
    turn = row_of(record, 0, "here").turns[1]
    assert (turn.text, turn.learned) == ("Good day.", learned)


@pytest.mark.parametrize("role", ["user", "human", "system"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"value": None}, {"content": []}])
def test_a_message_without_content_is_no_empty_turn(role: str, content: dict[str, Any]) -> None:
    """But of an answer, which may be calls or thoughts alone, and of a text that is empty."""
    asked = [{"role": role, **content, "name": "Ada"}, *SAID]
    known = "user" if role == "human" else role
    with pytest.raises(DataError, match=f"message of the {known} has no content.*here has 'role'"):
        row_of({"messages": asked}, 0, "here")
    with pytest.raises(DataError, match=f"message of the {known} has no content"):
        row_of({"prompt": asked, "response": "Good day."}, 0, "here")
    empty = row_of({"messages": [{"role": role, "content": ""}, *SAID]}, 0, "here")
    assert empty.turns[0].text == ""
    row = row_of({"messages": [*SAID, SAID[0], {"role": "gpt", **content}]}, 0, "here")
    assert row.turns[3].text == ""


def test_what_a_part_says_beside_its_text_is_named() -> None:
    survey = Survey("a.jsonl")
    content = [part("Good day.", cache_control={"type": "ephemeral"})]
    row_of({"prompt": "Hi.", "completion": [{**SAID[1], "content": content, "name": "Ada"}]},
           0, "here", survey=survey)  # fmt: skip
    assert "not read: completion.content.cache_control, completion.name" in str(survey)


# --- files ----------------------------------------------------------------------------------------

TWO = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d"}]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
@pytest.mark.parametrize("indent", [None, 1])
def test_a_list_is_read_whatever_the_file_is_called(
    tmp_path: Path, suffix: str, indent: int | None
) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_text(json.dumps(TWO, indent=indent))
    assert [record for _, record in read_records(path)] == TWO
    assert find_source(path).rows == 2
    path.write_text(json.dumps(TWO[0], indent=indent))
    assert [record for _, record in read_records(path)] == TWO[:1]


TWICE = {
    "line": (
        '{"prompt": "c", "response": "d", "response": "e"},',
        "rows.jsonl, line 2: 'response'",
    ),
    "message": (
        '{"messages": [{"role": "user", "content": "c", "content": "d"}]}',
        "rows.jsonl, line 2: 'content'",
    ),
}


@pytest.mark.parametrize("kind", TWICE)
def test_a_key_that_stands_twice_is_a_bad_row(kind: str, tmp_path: Path) -> None:
    """Python would keep the last of its values, without a word."""
    (first, other), (twice, said) = map(json.dumps, TWO), TWICE[kind]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([first, twice, other]))
    with pytest.raises(DataError, match=f"a key stands twice in one object. Got: {said}.*skip"):
        read_rows(path)
    assert [row.prompt for row in read_rows(path, on_bad_rows="skip")] == ["a", "c"]
    path = tmp_path / "rows.json"
    path.write_text(f"[{first}, {twice.rstrip(',')}, {other}]")
    with pytest.raises(DataError, match=rf"twice.*rows.json, item 2: {said.split(': ')[1]}"):
        read_rows(path)
    path.write_text(twice.rstrip(",").replace(", ", ",\n "))
    with pytest.raises(DataError, match=r"twice.*rows.json, item 1: "):
        read_rows(path)
    with pytest.raises(DataError, match="twice in one object. Got: query 2: "):
        query_rows([first, twice.rstrip(",")], Fields())


def test_two_columns_of_one_name_are_refused_in_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = [pa.array([text]) for text in "abc"]
    names = ["prompt", "response", "response"]
    pq.write_table(pa.Table.from_arrays(columns, names=names), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"two columns.*rows.parquet: 'response'"):
        read_rows(tmp_path / "rows.parquet")


def test_the_first_bad_row_of_the_file_is_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"frage": str(i), "response": "x"} for i in range(40)])
    with pytest.raises(DataError, match=r"line 1 has 'frage'"):
        draw_rows(Corpus(find_source(path), Fields(), None), 4, seed=3)


def test_no_row_is_passed_over_for_a_choice_about_its_file(tmp_path: Path) -> None:
    rows = [{"text": "Which planet?", "summary": text} for text in ("Mars", "It is Mars.", "Mars")]
    path = jsonl(tmp_path / "a.jsonl", rows)
    how = EncodeOptions(on_bad_rows="skip")
    with pytest.raises(ColumnsError, match=r"line 2 has 'text', 'summary'"):
        Corpus(find_source(path), Fields(), byte_tokenizer(), how).survey()
    with pytest.raises(ColumnsError, match=r"line 2 has 'text', 'summary'"):
        read_rows(path, on_bad_rows="skip")
    with pytest.raises(ColumnsError, match=r"line 2 has 'text', 'summary'"):
        reader("sft", byte_tokenizer(), path, "--validation_rows", "1").training_rows()


def test_rows_without_a_turn_to_be_learned_are_left_out_as_such(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("alphatoken.data").propagate = True
    marked = {"messages": [SAID[0], {**SAID[1], "train": False}]}
    path = jsonl(tmp_path / "a.jsonl", [marked, {"messages": SAID}])
    alone = jsonl(tmp_path / "b.jsonl", [marked])
    how, said = EncodeOptions(on_empty="skip"), "no turn is to be learned by its marks"

    def trained(file: Path, *words: str) -> list[Any]:
        return reader("sft", byte_tokenizer(CHATML), file, *words).training_rows()

    def survey(file: Path, how: EncodeOptions) -> None:
        Corpus(find_source(file), Fields(), byte_tokenizer(CHATML), how).survey()

    with caplog.at_level(logging.WARNING, logger="alphatoken.data"):
        survey(path, how)
        assert len(trained(path, "--on_empty", "skip")) == 1
    assert [f"1 row left out: {said} (a.jsonl, line 1)" in m for m in caplog.messages] == [1, 1]
    stops = (lambda: survey(path, EncodeOptions()), lambda: trained(path, "--on_empty", "error"))
    for refused in stops:
        with pytest.raises(AlphaTokenError, match=f"{said}.*line 1.*--on_empty skip"):
            refused()
    for refused in (lambda: survey(alone, how), lambda: trained(alone)):
        with pytest.raises(AlphaTokenError, match="no training row is left.*--unread_columns with"):
            refused()


# --- rows that share their prompt -----------------------------------------------------------------


def test_rows_of_one_prompt_are_compared_as_wholes(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "a.jsonl",
        [{"prompt": "A verse.", "response": f"line {i // 2}"} for i in range(12)],
    )
    rows = read_rows(path)
    with pytest.raises(DataError, match="--leak_key conversation"):
        split_pools(rows, validation_rows=2)
    pools = split_pools(rows, validation_rows=2, leak_key="conversation")
    assert not {row.response for row in pools.train} & {row.response for row in pools.validation}
    assert pools.counts["removed_same_as_validation"] == 2
    corpus = Corpus(find_source(path), Fields(), byte_tokenizer())
    keys = frozenset(key for row in pools.validation for key in leak_keys(row))
    drawn = frozenset(row.index for row in pools.validation)
    with pytest.raises(DataError, match="--leak_key conversation"):
        replace(corpus, drawn=drawn, validation=keys).survey()
    whole = replace(corpus, drawn=drawn, validation=keys, leak_key="conversation")
    assert whole.survey().counts["train"] == len(pools.train) == 8


# --- ``score`` and ``sft`` make the same tokens and labels of a row -------------------------------

TURNS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "\nb", "weight": 0},
    {"role": "user", "content": "b"},
    {"role": "assistant", "content": "\n\na"},
]
ROWS = [
    {"prompt": "ab", "response": "\nba"},
    {"prompt": "a\n", "response": "\n"},
    {"system": "b", "instruction": "a", "input": "b\n", "output": "\nab"},
    {"question": "b", "answer": "\na"},
    {"prompt": TURNS[:1], "completion": [{"role": "assistant", "content": "\nab"}]},
    {"messages": TURNS},
    {"text": "ab\n\nba"},
]
MARKED = CHATML.replace("<|im_end|>\n", "<|im_end|>{{ '\\n' }}").replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}",
)


MERGES = [("Ċ", "Ċ"), ("a", "b"), ("b", "Ċ"), ("bĊ", "ĊĊ"), ("ĊĊ", "a"), ("Ċ", "b")]
"""They reach over the border of prompt and response."""


@pytest.mark.parametrize("turns", ["all", "last"])
@pytest.mark.parametrize("template", [None, CHATML, MARKED], ids=["plain", "chat", "generation"])
def test_score_and_sft_make_the_same_tokens_and_labels(
    tmp_path: Path, template: str | None, turns: str
) -> None:
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    tokenizer = byte_tokenizer(template, merges=MERGES)
    how = EncodeOptions(turns=turns, on_empty="skip")
    scored, report = encode_rows(read_rows(file), tokenizer, how)
    sft = reader("sft", tokenizer, file, "--turns", turns)
    trained = sft.dataset(sft.training_rows())
    assert [row["input_ids"] for row in trained] == [one.input_ids for one in scored]
    assert [row["labels"] for row in trained] == [one.labels for one in scored]
    assert report.skipped_empty == len(ROWS) - len(trained)
