"""Rows of one length for the small decoder: text of its own kind, and of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

LENGTH, ROWS, VALIDATION = 150, 6, 16


def rows_of(folder: Path, kind: str) -> list[str]:
    """Text rows: stories, or question and answer."""
    name, keys = {
        "near": ("tinystories/stories.jsonl", ("text",)),
        "far": ("gsm8k/train.jsonl", ("question", "answer")),
    }[kind]
    with open(folder / name, encoding="utf-8") as file:
        return ["\n".join(json.loads(line)[k] for k in keys) for line in file]


def batch_of(tokenizer: Any, texts: list[str], count: int) -> dict[str, torch.Tensor]:
    """The first ``count`` texts long enough, cut to one length; every token is a response token."""
    found = (tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"] for text in texts)
    ids = torch.tensor([i for i in found if len(i) == LENGTH][:count])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
