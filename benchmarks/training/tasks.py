"""Three tasks made of real rows: what is trained on, validated on, held out, and drawn from.

The four parts of a task share no row. Rows longer than the task's limit are not cut: their prompts
serve as the Fisher's prompts, which need no response.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, list[int]]
"""SFT: input_ids, labels. Preference pair: prompt_ids, chosen_ids, rejected_ids."""

IGNORE = -100
STORY_LENGTH = 256


@dataclass(frozen=True)
class Sizes:
    """Rows of each part, and the longest row in tokens."""

    train: int
    pool: int
    held_out: int
    prompts: int
    length: int


SIZES = {
    "sft_code": Sizes(train=256, pool=128, held_out=96, prompts=64, length=256),
    "sft_math": Sizes(train=240, pool=128, held_out=96, prompts=64, length=288),
    "dpo": Sizes(train=176, pool=96, held_out=88, prompts=64, length=256),
}


@dataclass(frozen=True)
class Task:
    """One task, encoded.

    Attributes:
        name: sft_code, sft_math or dpo.
        train: rows that are trained on (clean).
        pool: rows that the validation batches are drawn from.
        held_out: rows of the target loss; from the data's own test file where it has one.
        prompts: prompts that the reference model answers for its Fisher.
        other: further rows of the same kind, of which a start model may learn.
    """

    name: str
    train: list[Row]
    pool: list[Row]
    held_out: list[Row]
    prompts: list[list[int]]
    other: list[Row]


@dataclass(frozen=True)
class Stories:
    """Text of the kind that the model was pre-trained on.

    Attributes:
        held_out: rows of the retention loss; every token counts.
        given: other rows, for ``retention="data"``.
    """

    held_out: list[Row]
    given: list[Row]


def data_folder() -> Path:
    """The folder that ALPHATOKEN_DATA names; it must exist."""
    name = os.environ.get("ALPHATOKEN_DATA")
    if not name or not Path(name).is_dir():
        raise SystemExit(f"set ALPHATOKEN_DATA to the folder with model and rows (it is {name!r})")
    return Path(name)


def model_folder() -> Path:
    """The pre-trained model and its tokenizer."""
    return data_folder() / "stories260K" / "transformers"


def read(name: str) -> list[dict[str, Any]]:
    """Rows of one file of the data folder."""
    with open(data_folder() / name, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Encoder:
    """Text to token ids: start token, prompt, response, end token; each tokenised by itself."""

    def __init__(self, tokenizer: Any) -> None:
        self.start, self.end = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._tokenizer = tokenizer

    def text(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt(self, text: str) -> list[int]:
        return [self.start, *self.text(text)]

    def response(self, text: str) -> list[int]:
        return [*self.text(text), self.end]

    def row(self, prompt: str, response: str) -> Row:
        before, after = self.prompt(prompt + "\n"), self.response(response)
        return {"input_ids": before + after, "labels": [IGNORE] * len(before) + after}


def size(row: Row) -> int:
    """Tokens of a row; of a pair, of its longer side."""
    if "input_ids" in row:
        return len(row["input_ids"])
    return len(row["prompt_ids"]) + max(len(row["chosen_ids"]), len(row["rejected_ids"]))


def load_task(name: str, tokenizer: Any) -> Task:
    """The task's parts; always the same ones."""
    make = {"sft_code": _code, "sft_math": _math, "dpo": _pairs}[name]
    return make(Encoder(tokenizer), SIZES[name])


def _code(encoder: Encoder, sizes: Sizes) -> Task:
    def prompt(row: dict[str, Any]) -> str:
        return row["instruction"] + ("\n" + row["input"] if row["input"] else "")

    raw = read("codealpaca/train.jsonl")
    return _sft("sft_code", raw, prompt, "output", encoder, sizes, test=None)


def _math(encoder: Encoder, sizes: Sizes) -> Task:
    raw, test = read("gsm8k/train.jsonl"), read("gsm8k/test.jsonl")
    return _sft("sft_math", raw, lambda row: row["question"], "answer", encoder, sizes, test=test)


def _sft(
    name: str,
    raw: list[dict[str, Any]],
    prompt: Callable[[dict[str, Any]], str],
    response: str,
    encoder: Encoder,
    sizes: Sizes,
    test: list[dict[str, Any]] | None,
) -> Task:
    raw = _shuffled(raw, name)
    encoded = [encoder.row(prompt(row), row[response]) for row in raw]
    fitting = [row for row in encoded if size(row) <= sizes.length]
    longer = [row for row in encoded if size(row) > sizes.length]
    train, pool, rest = _cut(fitting, sizes.train, sizes.pool)
    if test is None:
        (held_out, rest) = _cut(rest, sizes.held_out)
    else:
        rows = (encoder.row(prompt(row), row[response]) for row in _shuffled(test, name))
        held_out, _ = _cut([row for row in rows if size(row) <= sizes.length], sizes.held_out)
    asked, spare = _cut(longer, sizes.prompts)
    prompts = [prompt_ids(row)[: sizes.length // 2] for row in asked]
    return Task(name, train, pool, held_out, prompts, rest + [r for r in spare if size(r) <= 512])


def prompt_ids(row: Row) -> list[int]:
    """What comes before the response."""
    if "prompt_ids" in row:
        return row["prompt_ids"]
    return row["input_ids"][: sum(label == IGNORE for label in row["labels"])]


def _pairs(encoder: Encoder, sizes: Sizes) -> Task:
    fitting, longer = [], []
    for row in _shuffled(read("hh_rlhf/train.jsonl"), "dpo"):
        pair = next(_shortened(row, encoder, sizes.length), None)
        if pair is not None:
            fitting.append(pair)
        else:
            turns = re.findall(r"\n\nHuman:.*?(?=\n\nAssistant:)", row["chosen"], re.DOTALL)
            text = turns[-1].strip() + "\n\nAssistant:\n"
            longer.append(encoder.prompt(text)[: sizes.length // 2])
    train, pool, held_out, _ = _cut(fitting, sizes.train, sizes.pool, sizes.held_out)
    return Task("dpo", train, pool, held_out, longer[: sizes.prompts], _general(encoder))


def _shortened(row: dict[str, Any], encoder: Encoder, length: int) -> Iterator[Row]:
    """The pair with as many of its last turns as fit; nothing if the last exchange is too long."""
    cut = row["chosen"].rfind("\n\nAssistant:") + len("\n\nAssistant:")
    prompt, chosen = row["chosen"][:cut], row["chosen"][cut:].strip()
    rejected = row["rejected"][row["rejected"].rfind("\n\nAssistant:") + len("\n\nAssistant:") :]
    for begin in re.finditer("\n\nHuman:", prompt):
        pair = {
            "prompt_ids": encoder.prompt(prompt[begin.start() :].strip() + "\n"),
            "chosen_ids": encoder.response(chosen),
            "rejected_ids": encoder.response(rejected.strip()),
        }
        if size(pair) <= length:
            yield pair


def _general(encoder: Encoder) -> list[Row]:
    """General instructions in the dialogues' form: what the preference runs warm up on."""
    rows = []
    for row in read("dolly_hhrlhf/train.jsonl"):
        found = re.search(r"### Instruction:\n(.*?)\n+### Response:", row["prompt"], re.DOTALL)
        if found:
            prompt = f"Human: {found.group(1).strip()}\n\nAssistant:"
            rows.append(encoder.row(prompt, row["response"].strip()))
    return [row for row in rows if size(row) <= SIZES["dpo"].length]


def load_stories(tokenizer: Any) -> Stories:
    """Stories of full length, cut; the first are held out, and the others may be given."""
    encoder = Encoder(tokenizer)
    encoded = [
        encoder.prompt(row["text"])[:STORY_LENGTH] for row in read("tinystories/stories.jsonl")
    ]
    rows = [
        {"input_ids": ids, "labels": [IGNORE, *ids[1:]]}
        for ids in encoded
        if len(ids) == STORY_LENGTH
    ]
    held_out, given, _ = _cut(rows, 64, 128)
    return Stories(held_out, given)


def _shuffled(rows: list[Any], name: str) -> list[Any]:
    rows = list(rows)
    random.Random(f"split of {name}").shuffle(rows)
    return rows


def _cut(rows: list[Any], *counts: int) -> list[list[Any]]:
    """Consecutive parts of the given sizes, then the rest."""
    if len(rows) < sum(counts):
        raise SystemExit(f"{len(rows)} rows are too few for parts of {counts}")
    parts, at = [], 0
    for count in counts:
        parts.append(rows[at : at + count])
        at += count
    return [*parts, rows[at:]]


def with_noise(rows: list[Row], share: float, vocabulary: int, seed: int) -> list[Row]:
    """Rows with ``share`` of each response's tokens replaced by random ones.

    Replaced tokens are wrong where they are predicted and where they are read. Both sides of a
    pair are treated alike. ``seed`` decides which tokens and by what; ids 0 to 2 (unknown, start,
    end) are never put in.
    """
    if share == 0:
        return rows
    generator = random.Random(f"noise {seed}")
    return [_spoil(row, share, vocabulary, generator) for row in rows]


def _spoil(row: Row, share: float, vocabulary: int, generator: random.Random) -> Row:
    if "input_ids" not in row:
        return {
            key: ids if key == "prompt_ids" else _replace(ids, share, vocabulary, generator)
            for key, ids in row.items()
        }
    first = len(prompt_ids(row))
    response = _replace(row["input_ids"][first:], share, vocabulary, generator)
    return {
        "input_ids": row["input_ids"][:first] + response,
        "labels": [IGNORE] * first + response,
    }


def _replace(ids: list[int], share: float, vocabulary: int, generator: random.Random) -> list[int]:
    ids = list(ids)
    for place in generator.sample(range(len(ids)), round(share * len(ids))):
        ids[place] = generator.randrange(3, vocabulary)
    return ids
