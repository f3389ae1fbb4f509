"""Rows of the published grid: real ones, cut to parts that share no row, written as JSONL.

    SFT    mathematics questions and answers; target: its own test file; retention: stories
    mixed  half of those rows, and as many of Python; target and retention as before
    DPO    dialogues with a preferred reply (harmlessness); warm-up on general instructions

Only rows that fit the model whole are taken, so that nothing is cut; dialogues keep as many of
their last turns as fit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from alphatoken.support.storage import write_jsonl
from benchmarks.data import cut, read

LENGTH = 288
SIZES = {"train": 240, "validation": 128}
MIXED = 120
PAIRS = {"train": 160, "validation": 64, "target": 88, "fisher": 40}
TARGET, FISHER, STORIES, STORY = 96, 64, 64, 256


class Encoder:
    """Tokens of text: start token, prompt, response, end token; each tokenised by itself."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        """Tokens of a text, with its start or end token."""
        return 1 + len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def size(self, prompt: str, response: str) -> int:
        """Tokens of a row."""
        return self.count(prompt + "\n") + self.count(response)


def write_rows(folder: Path, tokenizer: Any) -> None:
    """All files of the grid, anew."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(tokenizer)
    _mathematics(folder, encoder)
    _dialogues(folder, encoder)
    texts = [row["text"] for row in read("tinystories/stories.jsonl")]
    long = [text for text in texts if encoder.count(text) >= STORY]
    write_jsonl(folder / "stories.jsonl", [{"text": text} for text in long[:STORIES]])


def _mathematics(folder: Path, encoder: Encoder) -> None:
    def rows(name: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        """Those that fit, and the others."""
        found = [{"prompt": r["question"], "response": r["answer"]} for r in read(name)]
        found = _shuffled(found, "sft_math")
        fit = [encoder.size(r["prompt"], r["response"]) <= LENGTH for r in found]
        return [r for r, f in zip(found, fit, strict=True) if f], [
            r for r, f in zip(found, fit, strict=True) if not f
        ]

    fitting, longer = rows("gsm8k/train.jsonl")
    parts = cut(fitting, **SIZES)
    for name, part in parts.items():
        write_jsonl(folder / f"math-{name}.jsonl", part)
    code = [{"prompt": r["text"], "response": r["code"]} for r in read("mbpp/train.jsonl")]
    code = [r for r in code if encoder.size(r["prompt"], r["response"]) <= LENGTH]
    mixed = parts["train"][:MIXED] + _shuffled(code, "sft_mixed")[:MIXED]
    write_jsonl(folder / "mixed-train.jsonl", mixed)
    short = [r for r in longer if encoder.count(r["prompt"]) < LENGTH // 2 + 32]
    write_jsonl(folder / "math-fisher.jsonl", short[:FISHER])
    write_jsonl(folder / "math-target.jsonl", rows("gsm8k/test.jsonl")[0][:TARGET])


def _dialogues(folder: Path, encoder: Encoder) -> None:
    rows = _shuffled(read("hh_rlhf/train.jsonl"), "dpo")
    pairs = [pair for row in rows if (pair := _shortened(row, encoder)) is not None]
    parts = cut(pairs, **PAIRS)
    for name, part in parts.items():
        write_jsonl(folder / f"pairs-{name}.jsonl", part)
    general = [
        {"prompt": f"Human: {r['instruction']}\n\nAssistant:", "response": r["response"]}
        for r in _general()
    ]
    fit = [r for r in general if encoder.size(r["prompt"], r["response"]) <= LENGTH]
    chosen = [{"prompt": p["prompt"], "response": p["chosen"]} for p in parts["train"]]
    write_jsonl(folder / "warm-up.jsonl", [*fit, *chosen])


def _shortened(row: dict[str, str], encoder: Encoder) -> dict[str, str] | None:
    """The pair with as many of its last turns as fit; None if its last exchange is too long."""
    prompt, chosen = _split(row["chosen"])
    _, rejected = _split(row["rejected"])
    for begin in re.finditer("\n\nHuman:", prompt):
        text = prompt[begin.start() :].strip()
        longest = max(encoder.count(chosen), encoder.count(rejected))
        if encoder.count(text + "\n") + longest <= LENGTH:
            return {"prompt": text, "chosen": chosen, "rejected": rejected}
    return None


def _shuffled(rows: list[Any], name: str) -> list[Any]:
    rows = list(rows)
    random.Random(f"split of {name}").shuffle(rows)
    return rows


def _split(text: str) -> tuple[str, str]:
    at = text.rfind("\n\nAssistant:") + len("\n\nAssistant:")
    return text[:at], text[at:].strip()


def _general() -> Iterable[dict[str, str]]:
    for row in read("dolly_hhrlhf/train.jsonl"):
        _, _, rest = row["prompt"].partition("### Instruction:\n")
        instruction, found, _ = rest.partition("### Response:")
        if found and instruction.strip():
            yield {"instruction": instruction.strip(), "response": row["response"].strip()}
