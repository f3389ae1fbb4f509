"""Rows of the published grid: real ones, cut to parts that share no row, written as JSONL.

    SFT    mathematics questions and answers; target: its own test file; retention: stories
    mixed  half of those rows, and as many of Python; target and retention as before
    DPO    dialogues with a preferred reply (harmlessness); warm-up on general instructions

Only rows that fit the model whole are taken, so that nothing is cut; dialogues keep as many of
their last turns as fit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.training import tasks
from benchmarks.training.tasks import Encoder, read, size

LENGTH = 288
SIZES = {"train": 240, "validation": 128}
MIXED = 120
PAIRS = {"train": 160, "validation": 64, "target": 88, "fisher": 40}
TARGET, FISHER, STORIES, STORY = 96, 64, 64, 256


def write_rows(folder: Path, tokenizer: Any) -> None:
    """All files of the grid, anew."""
    folder.mkdir(parents=True, exist_ok=True)
    encoder = Encoder(tokenizer)
    _mathematics(folder, encoder)
    _dialogues(folder, encoder)
    texts = [row["text"] for row in read("tinystories/stories.jsonl")]
    long = [text for text in texts if len(encoder.prompt(text)) >= STORY]
    _write(folder / "stories.jsonl", [{"text": text} for text in long[:STORIES]])


def _mathematics(folder: Path, encoder: Encoder) -> None:
    def rows(name: str) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        """Those that fit, and the others."""
        found = [{"prompt": r["question"], "response": r["answer"]} for r in read(name)]
        found = tasks._shuffled(found, "sft_math")
        fit = [size(encoder.row(r["prompt"], r["response"])) <= LENGTH for r in found]
        return [r for r, f in zip(found, fit, strict=True) if f], [
            r for r, f in zip(found, fit, strict=True) if not f
        ]

    fitting, longer = rows("gsm8k/train.jsonl")
    parts = tasks._cut(fitting, *SIZES.values())
    for name, part in zip(SIZES, parts, strict=False):
        _write(folder / f"math-{name}.jsonl", part)
    code = [{"prompt": r["text"], "response": r["code"]} for r in read("mbpp/train.jsonl")]
    code = [r for r in code if size(encoder.row(r["prompt"], r["response"])) <= LENGTH]
    mixed = parts[0][:MIXED] + tasks._cut(tasks._shuffled(code, "sft_mixed"), MIXED)[0]
    _write(folder / "mixed-train.jsonl", mixed)
    short = [r for r in longer if len(encoder.prompt(r["prompt"])) < LENGTH // 2 + 32]
    _write(folder / "math-fisher.jsonl", tasks._cut(short, FISHER)[0])
    _write(folder / "math-target.jsonl", rows("gsm8k/test.jsonl")[0][:TARGET])


def _dialogues(folder: Path, encoder: Encoder) -> None:
    rows = tasks._shuffled(read("hh_rlhf/train.jsonl"), "dpo")
    pairs = [pair for row in rows if (pair := _shortened(row, encoder)) is not None]
    parts = tasks._cut(pairs, *PAIRS.values())
    for name, part in zip(PAIRS, parts, strict=False):
        _write(folder / f"pairs-{name}.jsonl", part)
    general = [
        {"prompt": f"Human: {r['instruction']}\n\nAssistant:", "response": r["response"]}
        for r in _general()
    ]
    fit = [r for r in general if size(encoder.row(r["prompt"], r["response"])) <= LENGTH]
    chosen = [{"prompt": p["prompt"], "response": p["chosen"]} for p in parts[0]]
    _write(folder / "warm-up.jsonl", [*fit, *chosen])


def _shortened(row: dict[str, str], encoder: Encoder) -> dict[str, str] | None:
    """The pair with as many of its last turns as fit; None if its last exchange is too long."""
    prompt, chosen = _split(row["chosen"])
    _, rejected = _split(row["rejected"])
    for begin in re.finditer("\n\nHuman:", prompt):
        text = prompt[begin.start() :].strip()
        longest = max(len(encoder.response(chosen)), len(encoder.response(rejected)))
        if len(encoder.prompt(text + "\n")) + longest <= LENGTH:
            return {"prompt": text, "chosen": chosen, "rejected": rejected}
    return None


def _split(text: str) -> tuple[str, str]:
    at = text.rfind("\n\nAssistant:") + len("\n\nAssistant:")
    return text[:at], text[at:].strip()


def _general() -> Iterable[dict[str, str]]:
    for row in read("dolly_hhrlhf/train.jsonl"):
        _, _, rest = row["prompt"].partition("### Instruction:\n")
        instruction, found, _ = rest.partition("### Response:")
        if found and instruction.strip():
            yield {"instruction": instruction.strip(), "response": row["response"].strip()}


def _write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
