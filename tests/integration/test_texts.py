"""From texts to tokens: filled templates, control tokens, thoughts, and one tokenisation."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jinja2 import UndefinedError

from alphatoken.data import (
    EncodeOptions,
    Fields,
    Row,
    Survey,
    Turn,
    encode_prompt,
    encode_row,
    encode_rows,
    read_rows,
    row_of,
)
from alphatoken.data.encode import encode_example
from alphatoken.data.messages import THOUGHTS
from alphatoken.data.source import find_source
from alphatoken.errors import DataError, InputError
from alphatoken.score.job import Corpus
from alphatoken.train import AlphaDPOTrainer
from tests.integration import tiny_training as tiny
from tests.integration.test_data import CHATML, byte_tokenizer, chat, labelled_text, reader
from tests.integration.tokenizer_kinds import KINDS, kind_of_tokenizer
from tests.property.test_own_weights import TEMPLATES as MARKED
from tests.rows import jsonl

Record = dict[str, Any]


def trls(prompt: str, response: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Ids and labels of TRL's ``SFTTrainer``: the tokens of prompt and completion as one text."""
    end = "" if response.endswith(tokenizer.eos_token) else tokenizer.eos_token
    before, ids = (tokenizer(text)["input_ids"] for text in (prompt, prompt + response + end))
    parts = (i for i, pair in enumerate(zip(before, ids, strict=False)) if pair[0] != pair[1])
    start = next(parts, min(len(before), len(ids)))
    return ids, [-100] * start + ids[start:]


def noted(
    row: Row, tokenizer: Any, how: EncodeOptions | None = None
) -> tuple[list[int], list[int], list[str]]:
    """Ids and labels of a row, and the notes on it."""
    example = encode_example(row, tokenizer, how)
    return example.input_ids, example.labels, [*example.notes]


def pair(prompt: str, chosen: str, rejected: str) -> Record:
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


# --- one tokenisation of prompt and response ------------------------------------------------------

ASKED = [("Name a bird.", "A wren."), ("2 + 2?", " 4"), ("", "Yes no"), ("Say\n", "\n  bye.\n"),
         ("x  y", "def f(x):\n    return  x\n"), ("\u00e9", "\U0001f44b \u00f1"),
         ("The sun", "e\u0301 \u2603 \u2603zz"), ("Say ", "A </s>")]  # fmt: skip


PAIRS = [pair(p, r, "No." + "</s>" * r.endswith("</s>")) for p, r in ASKED if p]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_without_a_template_are_trls(kind: str, tmp_path: Path) -> None:
    """None before a response that the text as a whole does not have."""
    tokenizer = kind_of_tokenizer(kind)
    due = []
    for prompt, response in ASKED:
        filled = response.endswith("</s>")
        due.append(trls(prompt + "\n" * (bool(prompt) and not filled), response, tokenizer))
        assert encode_row(chat(prompt, response), tokenizer) == due[-1], (prompt, response)
    rows = [{"prompt": prompt, "response": response} for prompt, response in ASKED]
    trained = reader("sft", tokenizer, jsonl(tmp_path / "sft.jsonl", rows))
    records = trained.dataset(trained.training_rows())
    assert [(row["input_ids"], row["labels"]) for row in records] == due


@pytest.mark.parametrize("kind", ["sentencepiece, legacy", "bytes, over spaces"])
def test_a_pair_without_a_template_has_the_tokens_of_a_row(kind: str, tmp_path: Path) -> None:
    """TRL tokenises pairs: what it makes of them is what ``encode_row`` makes of each side."""
    tokenizer = kind_of_tokenizer(kind)
    rows = [*PAIRS, pair("<s>Say", "Bye", "No.")]
    read = reader("dpo", tokenizer, jsonl(tmp_path / "dpo.jsonl", rows))
    records = read.dataset(items := read.training_rows())
    for record, item in zip(records, items, strict=True):
        for side in ("chosen", "rejected"):
            row = Row(0, "", (*item.prompt, *getattr(item, side)))
            assert trls(record["prompt"], record[side], tokenizer) == encode_row(row, tokenizer)


@pytest.mark.parametrize(
    "kind",
    [
        one if one == "sentencepiece, legacy" else pytest.param(one, marks=pytest.mark.slow)
        for one in KINDS
    ],
)
def test_tokens_are_those_of_trls_own_trainers(kind: str, tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    tokenizer = kind_of_tokenizer(kind)
    config = LlamaConfig(**{**tiny.SIZES, "num_hidden_layers": 1, "vocab_size": 500})
    model, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
    how: Record = {"output_dir": str(tmp_path), "report_to": "none", "use_cpu": True}
    texts = [(p, r) for p, r in ASKED if p]
    lines = [
        {"prompt": f"{p}\n" * (not r.endswith("</s>")) or p, "completion": r} for p, r in texts
    ]
    sft = SFTTrainer(
        model, args=SFTConfig(**how), train_dataset=Dataset.from_list(lines),
        processing_class=tokenizer,
    )  # fmt: skip
    due = [encode_row(chat(prompt, response), tokenizer) for prompt, response in texts]
    assert [(row["input_ids"], row["labels"]) for row in sft.train_dataset] == due
    read = reader("dpo", tokenizer, jsonl(tmp_path / "dpo.jsonl", PAIRS))
    dpo = DPOTrainer(
        model, ref_model=reference, args=DPOConfig(**how), processing_class=tokenizer,
        train_dataset=read.dataset(read.training_rows()),
    )  # fmt: skip
    chosen = [(r["prompt_ids"] + r["chosen_ids"], r["chosen_ids"]) for r in dpo.train_dataset]
    assert [ids for ids, _ in chosen] == [ids for ids, _ in due]


def test_a_token_that_the_tokenizer_adds_is_not_there_twice() -> None:
    tokenizer = kind_of_tokenizer("bytes", around="<s> $A </s>")
    ids, labels = encode_row(chat("Say", "bye"), tokenizer)
    assert tokenizer.decode(ids) == "<s>Say\nbye</s>"
    assert tokenizer.decode([label for label in labels if label != -100]) == "bye</s>"
    ids, _ = encode_row(chat("<s>Say ", "bye</s>"), tokenizer)
    assert tokenizer.decode(ids) == "<s>Say bye</s>"
    assert tokenizer.decode(encode_prompt(chat("Say", "bye"), tokenizer)) == "<s>Say\n"
    assert tokenizer.decode(encode_prompt(chat("", "bye"), tokenizer)) == "<s>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("limit", [None, 12])
def test_no_tokenizer_loses_a_response(kind: str, limit: int | None) -> None:
    """Whatever a tokenizer does to a text (case, accents, spaces, unknown signs) is no loss."""
    tokenizer = kind_of_tokenizer(kind, CHATML)
    rows = [chat(prompt, response) for prompt, response in ASKED[:-1] if prompt]
    several = [chat(*(text for two in ASKED[:2] for text in two))]
    how = EncodeOptions(max_length=limit, on_empty="skip")
    examples, report = encode_rows([*rows, *several], tokenizer, how)
    assert report.examples + report.skipped_empty == len(rows) + 1
    assert limit is not None or len(examples) == len(rows) + 1


# --- texts that hold the template's own markers ---------------------------------------------------

USER, HEAD = "<|im_start|>user\nName a bird.<|im_end|>\n", "<|im_start|>assistant\n"
TAKEN = "texts hold the template's own markers: taken as they are"
FILLED = {
    "both": (USER + HEAD, "A wren.<|im_end|>"),
    "the prompt": (USER + HEAD, "A wren."),
    "an open thought": (f"{USER}{HEAD}<think>\n", "Small.\n</think>\n\nA wren.<|im_end|>"),
    "no white space": ((USER + HEAD).replace("\n", ""), "A wren.<|im_end|>"),
    "the head in the response": (USER, HEAD + "A wren.<|im_end|>"),
    "an earlier turn": (f"{USER}{HEAD}A wren.<|im_end|>\n{USER}{HEAD}", "An owl.<|im_end|>"),
    "the beginning of the answer": (f"{USER}{HEAD}A", " wren.<|im_end|>"),
    "the end alone": ("### Question: bird?\n### Answer:", " A wren.</s>"),
    "white space behind the end": ("### Question: bird?\n### Answer:", " A wren.</s>\n"),
    "the start": ("<s>Name a bird.", " A wren."),
}


@pytest.mark.parametrize("template", [CHATML, None])
@pytest.mark.parametrize("case", FILLED)
def test_a_filled_template_is_taken_as_it_is(case: str, template: str | None) -> None:
    prompt, response = FILLED[case]
    response = response.replace("<|im_end|>", "</s>") if template is None else response
    tokenizer = byte_tokenizer(template, start=True)
    end = "" if response.rstrip().endswith("</s>") else "</s>"
    said = (response.rstrip() if not end else response) + end
    for how in (EncodeOptions(), EncodeOptions(chat_template=False)):
        ids, labels, notes = noted(chat(prompt, response), tokenizer, how)
        assert tokenizer.decode(ids) == "<s>" + prompt.removeprefix("<s>") + said
        assert tokenizer.decode([label for label in labels if label != -100]) == said
        assert [note for note in notes if "taken as they are" in note], notes
    before = tokenizer.decode(encode_prompt(chat(prompt, response), tokenizer))
    assert before == "<s>" + prompt.removeprefix("<s>")


TEXTUAL = {  # of our own writing; their markers are no control tokens
    "brackets": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{{ m.content }} [/INST]{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
    "names": "A chat. {% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} "
    "{% else %}ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}",
}


@pytest.mark.parametrize("name", TEXTUAL)
def test_markers_may_be_plain_text(name: str) -> None:
    tokenizer = byte_tokenizer(TEXTUAL[name])
    messages = [{"role": "user", "content": "Name a bird."}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids, _ = encode_row(chat(prompt, " A wren."), tokenizer)
    assert tokenizer.decode(ids) == f"{prompt} A wren.</s>"
    about = chat("What follows [INST] here ASSISTANT:", "A wren.")
    assert tokenizer.decode(encode_row(about, tokenizer)[0]).count("What follows") == 1
    assert TAKEN not in noted(about, tokenizer)[2]


@pytest.mark.parametrize(
    ("prompt", "response"),
    [
        ("What does <|im_end|> mean?", "It ends a turn."),
        ("<|im_end|> is what?", "An end."),
        ("Say it.", "<|im_end|> is the end of a turn."),
        ("What is <|im_start|>", "A start."),
    ],
)
def test_a_control_token_in_a_question_is_one_and_is_said(prompt: str, response: str) -> None:
    tokenizer = byte_tokenizer(CHATML)
    ids, _, notes = noted(chat(prompt, response), tokenizer)
    whole = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{response}<|im_end|>\n"
    assert tokenizer.decode(ids) == whole
    token = "<|im_start|>" if "start" in prompt else "<|im_end|>"
    assert notes == [f"a text holds the control token {token}, which is read as one"]


def test_messages_are_put_into_the_template_whatever_they_hold(tmp_path: Path) -> None:
    """As TRL does; what they hold is said."""
    messages = [{"role": "user", "content": USER}, {"role": "assistant", "content": "A<|im_end|>"}]
    row = row_of({"messages": messages}, 0, "here")
    ids, _, notes = noted(row, tokenizer := byte_tokenizer(CHATML))
    assert tokenizer.decode(ids).startswith("<|im_start|>user\n<|im_start|>user\n")
    assert [note.split()[6].rstrip(",") for note in notes] == ["<|im_end|>", "<|im_start|>"]


def test_plain_texts_have_one_end_token() -> None:
    tokenizer = byte_tokenizer(CHATML, start=True)
    for text in ("Once.</s>", "Once.</s> \n", "<s>Once."):
        ids, labels, notes = noted(Row(0, "x", (Turn("assistant", text),)), tokenizer)
        assert tokenizer.decode(ids) == "<s>Once.</s>"
        assert labels[1:] == ids[1:]
        assert notes == [TAKEN]
    assert noted(Row(0, "x", (Turn("assistant", "Once."),)), tokenizer)[2] == []
    for end in ("<|im_end|>", "</s>\n"):  # alone it is no response
        with pytest.raises(DataError, match="empty response"):
            encode_rows([chat(USER + HEAD, end)], tokenizer)


@pytest.mark.parametrize("name", ["system", "system_prompt", "system_message"])
def test_a_system_text_beside_a_filled_template_is_refused(name: str) -> None:
    record = {name: "Be brief.", "prompt": USER + HEAD, "response": "A wren."}
    tokenizer = byte_tokenizer(CHATML)
    with pytest.raises(DataError, match="here: 'Be brief.' beside") as error:
        encode_row(row_of(record, 0, "here"), tokenizer)
    aside = error.value.remedy.partition("--unread_columns ")[2].split()[0].split(",")
    row = row_of(record, 0, "here", Fields(unread=tuple(aside)))
    assert tokenizer.decode(encode_row(row, tokenizer)[0]) == f"{USER}{HEAD}A wren.</s>"


MIXED = [{"prompt": USER + HEAD, "response": "A wren.<|im_end|>"},
         {"prompt": "Name a bird.", "response": "A wren."},
         {"prompt": "Is <|im_end|> a word?", "response": "No."}]  # fmt: skip


def test_the_line_about_a_file_counts_rows_taken_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each row of a mixed file by itself, in the corpus, in training rows and in a list."""
    tokenizer, path = byte_tokenizer(CHATML), jsonl(tmp_path / "a.jsonl", MIXED)
    said = (f"in 1 of 3 rows {TAKEN}; in 1 of 3 rows a text holds the control token <|im_end|>, "
            "which is read as one")  # fmt: skip
    logging.getLogger("alphatoken.data").propagate = True
    with caplog.at_level(logging.INFO, logger="alphatoken.data"):
        survey = Corpus(find_source(path), Fields(), tokenizer).survey()
        reader("sft", tokenizer, jsonl(tmp_path / "sft.jsonl", MIXED)).training_rows()
        encode_rows(read_rows(path), tokenizer)
    lines = [(one.levelname, one.getMessage()) for one in caplog.records]
    form = "prompt = prompt, response = response"
    assert json.dumps(asdict(survey.encoded))  # as a summary holds it
    assert lines == [
        ("WARNING", f"a.jsonl: {form}; {said}"),
        ("WARNING", f"sft.jsonl: {form}; {said}"),
        ("INFO", f"a.jsonl: {form}"),
        ("WARNING", f"rows from a.jsonl, line 1: {said}"),
    ]


def test_pairs_are_taken_as_they_are_all_or_none(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHATML, start=True)
    filled = pair("<s>" + USER + HEAD, "A wren.</s>", "A cat.</s>\n")
    read = reader("dpo", tokenizer, jsonl(tmp_path / "dpo.jsonl", [filled]))
    assert list(read.dataset(read.training_rows())) == [pair(USER + HEAD, "A wren.", "A cat.")]
    plain = pair("Name a bird.", "A wren.", "A cat.")
    with pytest.raises(InputError, match="line 1 does, .* line 2 does not.*--no_chat_template"):
        reader("dpo", tokenizer, jsonl(tmp_path / "dpo.jsonl", [filled, plain])).training_rows()
    file = jsonl(tmp_path / "dpo.jsonl", [filled, plain])
    assert len(reader("dpo", tokenizer, file, "--no_chat_template").training_rows()) == 2
    one = pair("Name a bird.", "A wren.</s>", "A cat.")
    with pytest.raises(DataError, match=r"line 1: 'A wren.</s>' and 'A cat.'.*both, or on neither"):
        reader("dpo", tokenizer, jsonl(tmp_path / "dpo.jsonl", [one])).training_rows()


def test_a_filled_template_repeats_the_messages_that_it_is_made_of(tmp_path: Path) -> None:
    """Texts that differ are one row to the model where their tokens are the same."""
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.eos_token = "<|im_end|>"
    held = [{"prompt": "Name a bird.", "response": "A wren."}, {"prompt": "", "response": "A wren"}]
    rows = [
        {"text": USER + HEAD + "A wren.<|im_end|>"},
        {"prompt": USER + HEAD, "response": "Owl."},
    ]
    rows += [{"prompt": "Name a tree.", "response": "A wren."}, {"prompt": "", "response": "Owl."}]
    corpus = Corpus(find_source(jsonl(tmp_path / "rows.jsonl", rows)), Fields(), tokenizer)
    keys = corpus.keys_of([row_of(record, n, "held") for n, record in enumerate(held)])
    for by, left in (("prompt", [2, 3]), ("conversation", [1, 2, 3])):
        one = replace(corpus, validation=keys, leak_key=by)
        assert [example.row.index for example in one.examples()] == left
        assert one.survey().counts["removed_same_as_validation"] == 4 - len(left)


@pytest.mark.slow
def test_what_trls_templates_write_is_taken_as_it_is_and_learned_whole() -> None:
    """Those of fifty families that TRL ships; those of images write no text, and are refused."""
    folder = Path(str(find_spec("trl").origin)).parent / "chat_templates"  # type: ignore[union-attr]
    row, texts = chat("Name a bird.", "A wren,\n  or an owl."), 0
    for path in sorted(folder.glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        names = re.findall(
            r"<[|\uff5c][^<>\s]+[|\uff5c]>|<(?:start|end)_of_turn>|<turn\|>", template
        )
        tokenizer = byte_tokenizer(template)
        own = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *dict.fromkeys(names)]}
        tokenizer.add_special_tokens(own)
        messages = [{"role": turn.role, "content": turn.text} for turn in row.turns]
        whole = ""
        with suppress(UndefinedError):  # raised where only parts of a content are read
            whole = tokenizer.apply_chat_template(messages, tokenize=False)
        if "A wren" not in whole:
            with pytest.raises(DataError, match="response would be lost|refuses the conversation"):
                encode_row(row, tokenizer)
            continue
        learned = "".join(labelled_text(tokenizer, row))
        assert "A wren,\n  or an owl." in learned, path.name
        texts += 1
        at = whole.index("A wren")
        forms = [(whole[:at], whole[at:]), (whole[:at], "A wren.")]
        if whole.rstrip() != whole[:at] + row.response:  # else nothing ends an answer
            forms.append(("Name a bird.", whole[at:]))
        for prompt, response in forms:
            ids, _, notes = noted(chat(prompt, response), tokenizer)
            assert TAKEN in notes, (path.name, prompt, response)
            assert tokenizer.decode(ids).startswith((prompt + response).rstrip()), path.name
    assert texts > 40


# --- the text of a response is in what is learned -------------------------------------------------

CUT = (
    "{% for m in messages %}{% set c = m.content %}{% if m.role == 'assistant' %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}<|im_start|>{{ m.role }}\n{{ c }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nOPEN{% endif %}"
)
TEMPLATES = {  # of our own writing, of the kinds that reasoning models have
    "cuts": CUT.replace("OPEN", ""),
    "cuts and opens": CUT.replace("OPEN", "<think>\n"),
    "thinks": CHATML.replace(
        "{{ m.content }}",
        "{% set c = m.content %}{% if m.role == 'assistant' %}{% set t = m.reasoning_content or '' "
        "%}{% if not t and '</think>' in c %}{% set t = c.split('</think>')[0].split('<think>')[-1]"
        " %}{% set c = c.split('</think>')[-1] %}{% endif %}<think>\n{{ t.strip('\n') }}\n"
        "</think>\n\n{{ c.lstrip('\n') }}{% else %}{{ c }}{% endif %}",
    ).replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"),
    "tags alone": CHATML.replace("{{ m.content }}", "{{ m.content }}{# </think> #}"),
    "drops": CHATML,
    "takes the first line": CHATML.replace("m.content", "m.content.split('\n')[0]"),
    "last turn only": CHATML.replace(
        "{{ m.content }}",
        "{% set parts = m.content.split('</think>') %}"
        "{% if loop.last %}{{ m.content }}{% else %}{{ parts[-1] }}{% endif %}",
    ),
    "in parts": CHATML.replace(
        "{{ m.content }}", "{% for p in m.content %}{{ p.text or '' }}{% endfor %}"
    ),
}
THOUGHT, ANSWER = "Ten times three,\nand seven times three.", "51"
INSIDE = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
ROWS = {
    "inside": chat("17 times 3?", INSIDE),
    "apart": Row(0, "x", (Turn("user", "17 times 3?"), Turn("assistant", ANSWER, THOUGHT))),
    "none": chat("17 times 3?", ANSWER),
    "two lines": chat("17 times 3?", "It is\n51."),
    "two turns": chat("17 times 3?", INSIDE, "9 times 9?", INSIDE.replace("51", "81")),
}
LEARNED = {
    ("cuts", "none"): f"{ANSWER}<|im_end|>",
    ("cuts", "two lines"): "It is\n51.<|im_end|>",
    ("cuts and opens", "none"): f"{ANSWER}<|im_end|>",
    ("cuts and opens", "two lines"): "It is\n51.<|im_end|>",
    ("thinks", "inside"): f"{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>",
    ("thinks", "apart"): f"{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>",
    ("tags alone", "apart"): f"{INSIDE}<|im_end|>",
    ("drops", "inside"): f"{INSIDE}<|im_end|>",
    ("takes the first line", "none"): f"{ANSWER}<|im_end|>",
    ("last turn only", "inside"): f"{INSIDE}<|im_end|>",
}
LOST = [
    ("cuts", "inside"), ("cuts", "apart"), ("cuts", "two turns"), ("cuts and opens", "inside"),
    ("cuts and opens", "apart"), ("drops", "apart"), ("takes the first line", "inside"),
    ("takes the first line", "two lines"), ("last turn only", "two turns"), ("in parts", "none"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "row"), LEARNED)
def test_what_is_learned_holds_the_response(template: str, row: str) -> None:
    learned = labelled_text(byte_tokenizer(TEMPLATES[template]), ROWS[row])
    assert learned == [LEARNED[template, row]]


def _apply(way: str, row: Row, how: EncodeOptions) -> tuple[Row, EncodeOptions]:
    """A row and options as a printed remedy has them."""
    if "<think>" in way:
        texts = (f"<think>{t.thought}</think>{t.text}" if t.thought else t.text for t in row.turns)
        row = chat(*texts)
    if "--no_chat_template" in way:
        how = replace(how, chat_template=False)
    if "--turns last" in way:
        how = replace(how, turns="last")
    if "--unread_columns" in way:
        assert way.split("--unread_columns ")[1].rstrip(").").split(",") == [*THOUGHTS]
        row = replace(row, turns=tuple(replace(turn, thought="") for turn in row.turns))
    if "template's markers" in way:
        row = chat(USER + HEAD, f"{row.turns[-1].text}<|im_end|>")
    return row, how


@pytest.mark.parametrize(("template", "row"), LOST)
def test_what_would_be_lost_is_refused_and_each_remedy_works(template: str, row: str) -> None:
    tokenizer, how = byte_tokenizer(TEMPLATES[template]), EncodeOptions()
    with pytest.raises(DataError, match="line 1, turn 2|x, turn 2") as caught:
        encode_row(ROWS[row], tokenizer, how)
    thought = template != "takes the first line" and row not in ("none", "two lines")
    span = "no consistent assistant span" in caught.value.what
    assert span or ("thoughts" if thought else "text of a response") in caught.value.what
    ways = re.split(r"(?:, or |, )(?=label|leave|write|give|have)", caught.value.remedy)
    assert "--on_bad_rows skip" in ways.pop()
    assert ways
    for way in ways:
        changed, options = _apply(way, ROWS[row], how)
        encode_row(changed, tokenizer, options)
    how = replace(how, on_bad_rows="skip")
    assert encode_rows([ROWS[row]], tokenizer, how)[1].skipped_bad == 1


@pytest.mark.parametrize(
    ("texts", "condition"),
    [
        (("x", "x"), "m.role == 'user'"),
        (("x", "x", "a", "x y"), "m.role == 'user' or m.content != 'x'"),
    ],
    ids=["in the question", "in the next answer"],
)
def test_a_response_is_not_found_elsewhere(texts: tuple[str, ...], condition: str) -> None:
    drops = CHATML.replace(
        "{{ m.content }}", f"{{% if {condition} %}}{{{{ m.content }}}}{{% endif %}}"
    )
    lost = "turn 2: 'x' is not in what would be learned, '<|im_end|>'"
    with pytest.raises(DataError, match=re.escape(lost)):
        encode_row(chat(*texts), byte_tokenizer(drops))


def test_a_token_over_the_end_of_a_response_is_learned() -> None:
    bars = "{% for m in messages %}{{ m.role }}: {{ m.content }}|\n{% endfor %}"
    bars += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer = byte_tokenizer(bars, merges=[("s", "|"), ("s|", "\u010a")])
    assert labelled_text(tokenizer, chat("a", "yes", "b", "yes")) == ["yes|\n", "yes|\n"]


def test_a_template_that_opens_an_answer_otherwise_is_said() -> None:
    """As TRL reads it: what is learned begins where the written answer leaves the opened one."""
    tokenizer = byte_tokenizer(TEMPLATES["cuts and opens"])
    ids, labels, notes = noted(ROWS["none"], tokenizer)
    messages = [{"role": "user", "content": "17 times 3?"}]
    opened = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    start = next(i for i, label in enumerate(labels) if label != -100)
    assert ids[:start] == opened[:start]
    assert ids[start] != opened[start]
    assert notes[0].startswith("the template opens an answer otherwise than it writes one")


@pytest.mark.parametrize("template", [CHATML, "system\n" + CHATML, *MARKED.values()])
def test_an_answer_alone_is_written_by_the_template_where_it_is_a_message(template: str) -> None:
    """TRL hands messages to the template, however few; a text stays as it is."""
    tokenizer, said = byte_tokenizer(template), [{"role": "assistant", "content": "Hello."}]
    answer = row_of({"messages": said}, 0, "here")
    ids, labels = encode_row(answer, tokenizer)
    assert ids == tokenizer.apply_chat_template(said)["input_ids"]
    before = tokenizer.decode(ids[: next(i for i, label in enumerate(labels) if label >= 0)])
    assert before.endswith(("<|im_start|>assistant\n", "a="))
    assert "".join(labelled_text(tokenizer, answer)).startswith("Hello.<")
    text = "".join(labelled_text(tokenizer, row_of({"text": "Hello."}, 0, "here")))
    assert text == "Hello.</s>"
    bare = byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match=r"starts with the assistant.*--no_chat_template"):
        encode_row(answer, bare)
    with pytest.raises(DataError, match="marked as a bad one"):  # no class of a document
        row_of({"messages": said, "label": False}, 0, "here")


def test_text_that_is_not_learned_and_white_space_are_no_loss_and_are_said() -> None:
    tokenizer = byte_tokenizer(TEMPLATES["last turn only"])
    how = EncodeOptions(turns="last")
    assert noted(ROWS["two turns"], tokenizer, how)[2] == [
        "text of turns that are not learned is left out"
    ]
    trims = byte_tokenizer(CHATML.replace("m.content", "m.content | trim"))
    assert noted(chat("a", "  b"), trims)[2] == ["the template changes white space of a response"]
    assert noted(chat("a", "b\n"), trims)[2] == []


@pytest.mark.parametrize(
    "name", ["reasoning_content", "thinking", "reasoning", "thought", "thoughts"]
)
def test_a_thought_in_a_field_of_its_own_is_served_or_refused(name: str) -> None:
    record = {"question": "17 times 3?", name: THOUGHT, "answer": ANSWER}
    question = {"role": "user", "content": "17 times 3?"}
    survey, said = Survey("a.jsonl"), {"role": "assistant", "content": ANSWER, name: THOUGHT}
    row = row_of(record, 0, "here", survey=survey)
    assert str(survey) == f"a.jsonl: prompt = question, response = answer, thought = {name}"
    for one in (row, row_of({"messages": [question, said]}, 0, "here")):
        learned = labelled_text(byte_tokenizer(TEMPLATES["thinks"]), one)
        assert learned == [f"{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>"]
        for template in (CHATML, None):
            with pytest.raises(
                DataError, match="thoughts of a row would be lost.*--unread_columns"
            ):
                encode_row(one, byte_tokenizer(template))
    bare = row_of({"messages": [question, {**said, "content": None}]}, 0, "here")
    learned = labelled_text(byte_tokenizer(TEMPLATES["thinks"]), bare)
    assert learned == [f"{THOUGHT}\n</think>\n\n<|im_end|>"]
    aside = row_of(record, 0, "here", Fields(unread=(name,)))
    assert labelled_text(byte_tokenizer(CHATML), aside) == [f"{ANSWER}<|im_end|>"]
    twice = row_of({**record, "answer": INSIDE}, 0, "here")
    assert [turn.thought for turn in twice.turns] == ["", ""]
    with pytest.raises(DataError, match=f"'{name}' has no place"):
        row_of({"messages": [question, {**said, name: ""}], name: THOUGHT}, 0, "here")
    read_as_answer = row_of(record, 0, "here", Fields(response=name, unread=("answer",)))
    assert [(turn.text, turn.thought) for turn in read_as_answer.turns[1:]] == [(THOUGHT, "")]


@pytest.mark.parametrize(
    ("answer", "thought"),
    [
        ("The answer is 42.", "42"),
        ("420 is too much.", "42"),
        ("It is <b>42</b>.", "42"),
        ("42\n\nIs the answer.", ""),
        ("<think>\n42\n</think>\n\nThe answer.", ""),
        ("Well. [THINK]42[/THINK] The answer.", ""),
        ("<|begin_of_thought|> 42 <|end_of_thought|> The answer.", ""),
    ],
)
def test_a_thought_is_in_a_text_at_its_head_or_in_tags_only(answer: str, thought: str) -> None:
    row = row_of({"question": "2+2?", "thinking": " 42\n", "answer": answer}, 0, "here")
    assert row.turns[-1].thought.strip() == thought


def test_a_thought_beside_texts_is_no_row_of_a_trainer(tmp_path: Path) -> None:
    """TRL reads no such column, and writes texts without a template."""
    texts = {"prompt": "1+1=", "completion": "2"}
    with pytest.raises(InputError, match="row 0: column 'thinking'"):
        python_sft(tmp_path, [{**texts, "thinking": THOUGHT}] * 4, SPELLED)
    empty = python_sft(tmp_path, [{**texts, "thinking": ""}] * 4, SPELLED)
    assert len(empty.train_dataset) == 4


# --- rows given from Python -----------------------------------------------------------------------


def python_sft(folder: Path, rows: list[Record], template: str) -> Any:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template
    more: Record = {"policy": "random", "retention": "none", "validation_dataset": None}
    return tiny.sft(folder, train_dataset=rows, processing_class=tokenizer, **more)


SPELLED = CHATML.replace("<|im_start|>", "").replace("<|im_end|>", "</s>").replace("\n", " ")
SPLIT = SPELLED.replace("m.content", "m.content.split('=')[-1]")
MESSAGES = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "1+1=2"}]


def test_a_response_that_a_template_cuts_is_no_row_of_a_trainer(tmp_path: Path) -> None:
    rows = [{"messages": MESSAGES}] * 4
    with pytest.raises(InputError, match=r"training response would be lost.*row 0: '1\+1=2' of"):
        python_sft(tmp_path, rows, SPLIT)
    with pytest.raises(InputError, match=r"training response would be lost.*row 0: '1\+1=2' of"):
        python_sft(tmp_path, [{"prompt": MESSAGES[:1], "completion": MESSAGES[1:]}] * 4, SPLIT)
    writes = python_sft(tmp_path, rows, SPELLED)  # the remedies
    assert "1+1=2" in tiny.tokenizer().decode(writes.train_dataset[0]["input_ids"])
    texts = python_sft(tmp_path, [{"prompt": "user 1+1 ", "completion": "1+1=2</s>"}] * 4, SPLIT)
    assert "1+1=2" in tiny.tokenizer().decode(texts.train_dataset[0]["input_ids"])
    pairs = [{"prompt": MESSAGES[:1], "chosen": MESSAGES[1:],
              "rejected": [{"role": "assistant", "content": "3"}]}] * 4  # fmt: skip
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = SPLIT
    with pytest.raises(InputError, match=r"training response would be lost.*of 'chosen'"):
        tiny.made(AlphaDPOTrainer, tmp_path, model=tiny.model(), ref_model=tiny.model(),
                  train_dataset=pairs, processing_class=tokenizer, policy="random",
                  retention="none", export_values=False)  # fmt: skip


def test_the_line_about_rows_from_python_says_what_texts_hold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": "1+1=", "completion": "2</s>"}, {"prompt": "1 <unk> 1=", "completion": "2"},
            {"prompt": "1+1=", "completion": "2</s> "}]  # fmt: skip
    logging.getLogger("alphatoken.data").propagate = True
    with caplog.at_level("WARNING", logger="alphatoken.data"):
        python_sft(tmp_path, rows, SPELLED)
    assert [one.getMessage() for one in caplog.records] == [
        f"training rows: completion, prompt; in 2 of 3 rows {TAKEN}; in 1 of 3 rows a text holds "
        "the control token <unk>, which is read as one; in 1 of 3 rows a response ends with </s> "
        "and white space, and TRL puts another one behind it"
    ]
