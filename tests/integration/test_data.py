"""Rows, tokens, labels, pools and padding; and every kind of bad input with its one message."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from alphatoken.cli.arguments import read_arguments
from alphatoken.cli.training_rows import RowReader
from alphatoken.data import (
    EncodeOptions,
    Example,
    Fields,
    Row,
    Turn,
    batches,
    collate,
    encode_prompt,
    encode_row,
    encode_rows,
    leak_keys,
    pair_of,
    read_rows,
    row_of,
    split_pools,
    token_texts,
)
from alphatoken.data.split import about_pools, none_left
from alphatoken.data.stdlib import code_rows, text_rows
from alphatoken.data.survey import Survey
from alphatoken.errors import ConfigError, DataError, InputError
from alphatoken.train import AlphaDPOConfig, AlphaSFTConfig
from tests.integration.small_world import make_tokenizer
from tests.rows import jsonl

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    template: str | None = None, *, start: bool = False, merges: Sequence[tuple[str, str]] = ()
) -> Any:
    """One token a byte (so that characters span tokens), but for merges; ChatML's two markers."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    words = {piece: number for number, piece in enumerate([*special, *alphabet])}
    words |= {one + other: len(words) + i for i, (one, other) in enumerate(merges)}
    core = Tokenizer(models.BPE(words, list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    core.decoder = decoders.ByteLevel()
    if start:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[2:],
    )
    tokenizer.chat_template = template
    return tokenizer


def chat(*texts: str) -> Row:
    """User and assistant by turns."""
    roles = ("user", "assistant")
    return Row(0, "x.jsonl, line 1", tuple(Turn(roles[i % 2], t) for i, t in enumerate(texts)))


def labelled_text(tokenizer: Any, row: Row, options: EncodeOptions | None = None) -> list[str]:
    """Text of every run of labels."""
    ids, labels = encode_row(row, tokenizer, options)
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    runs: list[list[int]] = [[]]
    for label in labels:
        if label == -100:
            runs.append([])
        else:
            runs[-1].append(label)
    return [tokenizer.decode(run) for run in runs if run]


def reader(command: str, tokenizer: Any, file: Path, *more: str) -> RowReader:
    """Reads the training rows of a command."""
    words = ["--train_file", str(file), "--use_cpu", "--bf16", "false", "--output_dir", "out"]
    config = {"sft": AlphaSFTConfig, "dpo": AlphaDPOConfig}[command]
    return RowReader(read_arguments(command, [*words, *more], config), tokenizer)


# --- reading --------------------------------------------------------------------------------------


def test_field_names_limit_and_blank_lines(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "t.jsonl", [{"text": "a", "code": "b"}, {"text": "c", "code": "d"}])
    path.write_text("\n" + path.read_text().replace("\n", "\n\n"))
    rows = read_rows(path, fields=Fields(prompt="text", response="code"))
    assert [(r.index, r.prompt, r.response) for r in rows] == [(0, "a", "b"), (1, "c", "d")]
    assert rows[1].place == "t.jsonl, line 4"
    assert len(read_rows(path, fields=Fields(prompt="text", response="code"), limit=1)) == 1
    plain = read_rows(path, fields=Fields(response="text"))
    assert [(r.prompt, r.response) for r in plain] == [("", "a"), ("", "c")]
    prompts = read_rows(path, fields=Fields(prompt="text", prompt_only=True))
    assert [(r.prompt, r.response) for r in prompts] == [("a", ""), ("c", "")]
    chat_of_one = {"messages": [{"role": "user", "content": "hi"}]}
    mixed = jsonl(tmp_path / "mixed.jsonl", [chat_of_one, {"prompt": "q", "response": "r"}])
    prompts = read_rows(mixed, fields=Fields(prompt_only=True))
    assert [(r.prompt, r.response) for r in prompts] == [("hi", ""), ("q", "r")]
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert read_rows(path)[0].prompt == "p"


GOOD = '{"prompt": "p", "response": "r"}\n'
PAIR = {"prompt": "p", "chosen": "a", "rejected": "b"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]\n" + GOOD, r"not an object.*t\.jsonl, line 1"),
        (GOOD + '{"prompt": "p", "resp\n', r"broken.*t\.jsonl, line 2, column 17.*--on_bad"),
        (GOOD + "[1, 2]\n", r"not an object.*t\.jsonl, line 2"),
        ('[{"prompt": "a", ', "broken JSON file"),
        (f"[{GOOD}, 3]", "not an object.*item 2: 3"),
        (GOOD.encode() + b'{"prompt": "\xff"}\n', r"not UTF-8.*line 2: byte 0xff at column 13"),
        ("", r"no rows.*t\.jsonl"),
        ("\n  \n", r"no rows"),
        ('{"prompt": "p"}\n', r"no response field.*t\.jsonl, line 1 has 'prompt'"),
        (json.dumps(PAIR), r"no response field.*'chosen'.*--response_column"),
        ('{"title": "p"}\n', r"no prompt field.*'title'.*--prompt_column"),
        ('{"prompt": 3, "response": "r"}\n', r"'prompt' is neither text.*line 1: int"),
        ('{"messages": []}\n', r"not a list of messages"),
        (
            '{"messages": [{"role": "user", "content": "u"}]}\n',
            r"no assistant turn.*line 1.*on_bad_rows",
        ),
        ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n', r"not text"),
    ],
)
def test_bad_jsonl_names_file_and_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        read_rows(path)


def test_other_bad_files(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "u.parquet")
    with pytest.raises(DataError, match=r"no prompt field.*u\.parquet, row 1"):
        read_rows(tmp_path / "u.parquet")
    with pytest.raises(DataError, match="no field 'x'"):
        read_rows(jsonl(tmp_path / "v.jsonl", [{"prompt": "p"}]), fields=Fields("prompt", "x"))


# --- tokens and labels ----------------------------------------------------------------------------


def test_plain_format_is_as_stated() -> None:
    tokenizer = byte_tokenizer(start=True)
    ids, _ = encode_row(chat("ab", "cd", "ef", "gh"), tokenizer)
    assert tokenizer.decode(ids) == "<s>ab\ncd</s>ef\ngh</s>"
    assert labelled_text(tokenizer, chat("ab", "cd", "ef", "gh")) == ["cd</s>", "gh</s>"]
    last = EncodeOptions(turns="last")
    assert labelled_text(tokenizer, chat("ab", "cd", "ef", "gh"), last) == ["gh</s>"]
    assert labelled_text(byte_tokenizer(), chat("", "cd")) == ["cd</s>"]


def test_chat_template_labels_exactly_the_assistant_turns() -> None:
    tokenizer = byte_tokenizer(CHATML)
    row = chat("hi 👋", "yes\n", "and שלום?", "no 👩\u200d🔬 ")
    assert labelled_text(tokenizer, row) == ["yes\n<|im_end|>", "no 👩\u200d🔬 <|im_end|>"]
    assert labelled_text(tokenizer, row, EncodeOptions(turns="last")) == [
        "no 👩\u200d🔬 <|im_end|>"
    ]
    plain = EncodeOptions(chat_template=False)
    assert labelled_text(tokenizer, row, plain)[0] == "yes\n</s>"
    trailing = Row(0, "x", (*row.turns, Turn("user", "ignored")))
    assert encode_row(trailing, tokenizer) == encode_row(row, tokenizer)


def test_the_last_turn_is_no_earlier_one_where_it_is_not_to_be_learned() -> None:
    said = chat("a", "b", "c", "d").turns
    row = Row(0, "x", (*said[:-1], replace(said[-1], learned=False)))
    for tokenizer in (byte_tokenizer(), byte_tokenizer(CHATML)):
        assert len(labelled_text(tokenizer, row)) == 1
        assert labelled_text(tokenizer, row, EncodeOptions(turns="last")) == []


def test_generation_marks_are_used_where_a_template_has_them() -> None:
    marked = CHATML.replace("<|im_end|>\n", "<|im_end|>{{ '\\n' }}").replace(
        "{{ m.content }}<|im_end|>",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}<|im_end|>{% endif %}",
    )
    row = chat("q", "first", "r", "second")
    for template in (CHATML, marked):
        tokenizer = byte_tokenizer(template)
        assert labelled_text(tokenizer, row) == ["first<|im_end|>", "second<|im_end|>"]
        last = EncodeOptions(turns="last")
        assert labelled_text(tokenizer, row, last) == ["second<|im_end|>"]
    assert encode_row(row, byte_tokenizer(marked)) == encode_row(row, byte_tokenizer(CHATML))


def test_template_that_rewrites_history_is_refused_and_the_last_turn_still_works() -> None:
    """As reasoning models do: text is added to the last assistant turn only."""
    thinking = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.last %}THINK{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = byte_tokenizer(thinking)
    with pytest.raises(
        DataError, match=r"no consistent assistant span.*line 1, turn 2.*--turns last"
    ):
        encode_row(chat("a", "b", "c", "d"), tokenizer)
    last = EncodeOptions(turns="last")
    assert labelled_text(tokenizer, chat("a", "b", "c", "d"), last) == ["THINKd<|im_end|>"]


def test_template_errors_name_the_row() -> None:
    strict = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}x"
    row = Row(7, "x.jsonl, line 8", (Turn("system", "s"), Turn("assistant", "a")))
    with pytest.raises(DataError, match=r"refuses the conversation.*line 8.*user first"):
        encode_row(row, byte_tokenizer(strict))


def test_prompt_of_a_row_is_what_comes_before_the_first_response() -> None:
    tokenizer = byte_tokenizer(CHATML)
    ids, _ = encode_row(chat("q", "a", "r", "b"), tokenizer)
    prompt = encode_prompt(chat("q", "a", "r", "b"), tokenizer)
    assert ids[: len(prompt)] == prompt
    assert tokenizer.decode(prompt) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    plain = encode_prompt(chat("q", "a"), byte_tokenizer(start=True))
    assert byte_tokenizer().decode(plain) == "<s>q\n"
    with pytest.raises(DataError, match="empty prompt"):
        encode_prompt(chat("", "a"), byte_tokenizer())


@pytest.mark.parametrize("template", [None, CHATML])
def test_empty_response_is_an_error_or_counted(template: str | None) -> None:
    tokenizer = byte_tokenizer(template, start=True)
    rows = [chat("q", "a"), chat("q", " \n")]
    with pytest.raises(DataError, match=r"empty response.*x\.jsonl, line 1"):
        encode_rows(rows, tokenizer)
    examples, report = encode_rows(rows, tokenizer, EncodeOptions(on_empty="skip"))
    assert (len(examples), report.examples, report.skipped_empty) == (1, 1, 1)
    assert report.first_skipped == ["x.jsonl, line 1: the response is empty"]
    assert report.skipped_cut == 0


def test_a_response_beyond_the_length_is_no_empty_one() -> None:
    """Of both an empty one is found too where the prompt alone is too long."""
    survey, rows = Survey("rows"), [chat("q" * 9, "a"), chat("q" * 9, "")]
    how = EncodeOptions(max_length=5, on_empty="skip")
    _, report = encode_rows(rows, byte_tokenizer(start=True), how, survey)
    assert (report.skipped_empty, report.skipped_cut) == (2, 1)
    assert [*survey.left] == ["no response within the length", "the response is empty"]


def test_long_rows_are_cut_and_counted() -> None:
    tokenizer = byte_tokenizer(start=True)
    rows = [chat("12", "345678"), chat("1", "2")]
    examples, report = encode_rows(rows, tokenizer, EncodeOptions(max_length=6))
    assert tokenizer.decode(examples[0].input_ids) == "<s>12\n34"
    assert (report.truncated_rows, report.truncated_tokens, examples[0].tokens_cut) == (1, 5, 5)
    assert report.response_tokens == 2 + 2
    with pytest.raises(DataError, match="leaves no room.*beyond the limit of 4"):
        encode_rows(rows, tokenizer, EncodeOptions(max_length=4))


def test_a_lone_first_token_is_no_response() -> None:
    """Nothing predicts index 0, so a row of one token has nothing to value."""
    assert Example(chat("", "a"), [7], [7]).response_tokens == 0
    assert Example(chat("", "a"), [7, 8], [7, 8]).response_tokens == 1


def test_unknown_options_are_refused() -> None:
    for bad in ({"on_empty": "drop"}, {"turns": "first"}, {"max_length": 1}):
        with pytest.raises(ConfigError):
            EncodeOptions(**bad)


def test_token_texts_join_to_the_text_and_mark_broken_characters() -> None:
    tokenizer = byte_tokenizer()
    text = "a 👋 é\nשלום"
    pieces = token_texts(tokenizer, tokenizer(text)["input_ids"])
    broken = [index for index, piece in enumerate(pieces) if piece == "\u27e8\u2026\u27e9"]
    assert broken[:3] == [2, 3, 4]
    assert "".join(piece for i, piece in enumerate(pieces) if i not in broken) == text
    cut = tokenizer("👋")["input_ids"][:2] + tokenizer("ab")["input_ids"]
    assert len(token_texts(tokenizer, cut)) == 4
    words = make_tokenizer()
    ids = words("the cat sees a ball")["input_ids"]
    assert token_texts(words, ids) == [
        "<start>", " the", " cat", " sees", " a", " ball",
    ]  # fmt: skip


# --- pools ----------------------------------------------------------------------------------------


def pair(index: int, prompt: str, response: str) -> Row:
    return Row(index, f"line {index + 1}", (Turn("user", prompt), Turn("assistant", response)))


@pytest.mark.parametrize(
    ("turns", "same"),
    [
        ([("user", "Ask"), ("assistant", " A  b ")], True),
        ([("system", "ask"), ("assistant", "a b")], False),
        ([("user", "ask"), ("user", "a b")], False),
        ([("user", "ask"), ("assistant", "a b", "first")], False),
        ([("user", "ask"), ("assistant", "a"), ("assistant", "b")], False),
        ([("user", "ask a b")], False),
    ],
)
def test_conversations_are_the_same_by_roles_thoughts_and_texts(
    turns: list[tuple[str, ...]], same: bool
) -> None:
    """A row that says the same in other roles, or after another thought, is no leak."""
    first = Row(0, "", (Turn("user", "ask"), Turn("assistant", "a b")))
    other = Row(1, "", tuple(Turn(*turn) for turn in turns))
    by = "conversation"
    assert (leak_keys(first, by) == leak_keys(other, by)) == same
    pools = split_pools([other, pair(2, "kept", "z")], validation=[first], leak_key=by)
    assert pools.counts["removed_same_as_validation"] == int(same)
    thought = Row(0, "", (Turn("user", "ask"), Turn("assistant", "a b", "Think  so")))
    again = Row(1, "", (Turn("user", "ask"), Turn("assistant", "a b", "think so")))
    assert leak_keys(thought, by) == leak_keys(again, by) != leak_keys(first, by)


def test_leaks_are_found_after_normalising_and_removed() -> None:
    data = [
        pair(0, "What is  2+2?", "four"),
        pair(1, "other", "x"),
        pair(2, "Ｏｔｈｅｒ one", "y"),
        pair(3, "", "Same text"),
        pair(4, "", "different"),
        pair(5, "kept", "z"),
        pair(6, "kept", "z"),
    ]
    validation = [pair(0, "what is 2+2?\n", "4"), pair(1, "", "same  TEXT"), pair(2, "", "third")]
    fisher = [pair(0, "other ONE", "q"), pair(1, "WHAT is 2+2?", "q")]
    pools = split_pools(data, validation=validation, fisher=fisher)
    assert [row.index for row in pools.train] == [1, 4, 5, 6]
    assert pools.counts["removed_same_as_validation"] == 2
    assert pools.counts["removed_same_as_fisher"] == 1
    assert pools.counts["fisher_removed_same_as_validation"] == 1
    assert about_pools(pools.counts, places=pools.places) == [
        "2 training rows repeat a validation row or prompt and were removed (lines 1, 4).",
        "1 training row repeats a retention row or a prompt of the Fisher and was removed "
        "(line 3).",
        "1 retention row repeats a validation row or prompt and was removed (line 2).",
    ]
    fisher_keys = {key for row in fisher for key in leak_keys(row)}
    assert split_pools(data, validation=validation, fisher_keys=fisher_keys).train == pools.train
    # Rows may share their prompt where wholes are compared: prompts of the Fisher too.
    wholes = {"validation": validation, "fisher": fisher, "leak_key": "conversation"}
    assert [row.index for row in split_pools(data, **wholes).fisher] == [0, 1]


def test_pools_that_cannot_be_made() -> None:
    data = [pair(i, f"p{i}", "r") for i in range(4)]
    with pytest.raises(ConfigError, match="4 of 4"):
        split_pools(data, validation_rows=4)
    with pytest.raises(ConfigError, match="two sources"):
        split_pools(data, validation=data, validation_rows=2)
    said = "left: each repeats a held-out row. Got: .*Remedy: other training rows, or other held"
    with pytest.raises(DataError, match=said):
        split_pools(data, validation=data)
    asked = [pair(i, f"p{i}", "r" if i else "another") for i in range(4)]
    said = "each repeats a held-out row or its prompt.*1 share the prompt alone: .*--leak_key conv"
    with pytest.raises(DataError, match=said):
        split_pools(data, validation=asked)
    with pytest.raises(DataError, match="--response_column"):
        raise none_left({"rows": 16, "without_response": 16, "train": 0})
    with pytest.raises(DataError, match="a larger --max_length"):
        raise none_left({"rows": 16, "without_response": 16, "train": 0}, cut=True)


# --- padding --------------------------------------------------------------------------------------


def test_padding_is_seen_by_nothing() -> None:
    examples, _ = encode_rows([chat("abc", "d"), chat("a", "bcdefg")], byte_tokenizer())
    batch = collate(examples)
    for row, example in enumerate(examples):
        length = len(example.input_ids)
        assert batch["input_ids"][row, :length].tolist() == example.input_ids
        assert batch["labels"][row, :length].tolist() == example.labels
        assert batch["attention_mask"][row].tolist()[:length] == [1] * length
        assert int(batch["attention_mask"][row].sum()) == length
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    assert [b["input_ids"].shape[0] for b in batches(examples * 5, 4)] == [4, 4, 2]
    with pytest.raises(InputError, match="at least one"):
        collate([])


# --- real rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [code_rows, text_rows])
def test_real_rows_encode_and_come_back(library_decoder: Path, draw: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(library_decoder)
    options = EncodeOptions(max_length=512, on_empty="skip")
    examples, report = encode_rows(draw(60), tokenizer, options)
    assert report.examples + report.skipped_empty == 60
    assert report.examples > 30
    for example in examples:
        assert example.input_ids[0] == tokenizer.bos_token_id
        assert len(example.input_ids) == len(example.labels) <= 512
        if not example.tokens_cut:
            kept = [label for label in example.labels if label != -100]
            assert kept[-1] == tokenizer.eos_token_id
            assert tokenizer.decode(kept[:-1]).strip() == example.row.response.strip()


# --- the page of data formats ---------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs/data-formats.md").read_text(encoding="utf-8")


def page_examples(section: str) -> list[list[dict[str, Any]]]:
    """The records of each JSON block in a section of docs/data-formats.md."""
    text = PAGE.split(f"\n## {section}\n")[1].partition("\n## ")[0]
    blocks = re.findall(r"```json\n(.*?)```", text, re.S)
    return [[json.loads(line) for line in block.splitlines()] for block in blocks]


def test_records_in_a_block_of_the_page_are_one_row_in_several_forms() -> None:
    lengths = []
    for records in page_examples("Rows for supervised fine-tuning"):
        forms = [row_of(record, 0, "here").turns for record in records]
        contents = {tuple((t.role, t.text, t.learned) for t in turns) for turns in forms}
        assert len(contents) == 1, records
        unlearned = [text for _, text, learned in contents.pop() if not learned]
        assert unlearned == (["48."] if "48." in str(records) else [])
        lengths.append(len(forms[0]))
    assert lengths == [2, 2, 2, 3, 5, 4, 1]


def test_pairs_of_the_page_are_one_pair_in_three_forms() -> None:
    (records,) = page_examples("Preference pairs")
    forms = [pair_of(record, 0, "here") for record in records]
    texts = {
        tuple(turn.text for turn in (*pair.prompt, *pair.chosen, *pair.rejected)) for pair in forms
    }
    assert texts == {("What is 6 times 7?", "6 * 7 = 42.", "6 * 7 = 48.")}
    assert len(forms) == 3


def test_the_page_names_every_field_that_is_read() -> None:
    from alphatoken.data import messages, pairs

    fields = (
        messages.PROMPTS, messages.RESPONSES, messages.CHATS, pairs.CHOSEN, pairs.REJECTED,
        messages.ADDED, messages.SYSTEMS, messages.THOUGHTS, messages._TRAINED, messages._MASKED,
        messages._WEIGHTS, messages._USED, messages._RIGHT, messages._WRONG, messages._REWARDS,
        messages.ROLES,
    )  # fmt: skip
    for name in chain(*fields):
        assert f"`{name}`" in PAGE or f'"{name}"' in PAGE or f"the {name}" in PAGE, name
