"""Subjects of diagnostics: the real tiny model, real rows, settings that are quick."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from alphatoken.data import EncodeOptions, Example, Fields, Row, encode_rows, read_rows
from alphatoken.fidelity.subject import Subject

__all__ = ["RETENTION", "data_folder", "examples", "model", "model_folder", "subject", "tokenizer"]

# Files under the folder of real data: what to read, and under which names.
_PLAIN = Fields(response="text")
_CODE = Fields(prompt="text", response="code")
_FILES: dict[str, tuple[str, Fields | None]] = {
    "gsm8k": ("gsm8k/train.jsonl", None),
    "tinystories": ("tinystories/stories.jsonl", _PLAIN),
    "dolly": ("dolly_hhrlhf/train.jsonl", None),
    "mbpp": ("mbpp/train.jsonl", _CODE),
    "codealpaca": ("codealpaca/train.jsonl", None),
}
KINDS = {"far": "gsm8k", "near": "tinystories"}
RETENTION = ("tinystories", "dolly", "mbpp", "codealpaca")


def data_folder() -> Path:
    """Real model and rows. ALPHATOKEN_DATA unset: skip; set but absent: failure."""
    name = os.environ.get("ALPHATOKEN_DATA")
    if not name:
        pytest.skip("ALPHATOKEN_DATA is not set: no real model and rows to run on")
    folder = Path(name)
    if not folder.is_dir():
        pytest.fail(f"ALPHATOKEN_DATA is set to {name!r}, and there is no such folder")
    return folder


def model_folder() -> Path:
    """stories260K: 5 layers, width 64, 512 tokens, trained on TinyStories."""
    return data_folder() / "stories260K" / "transformers"


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder())


def model() -> nn.Module:
    """A fresh copy, float32, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    found: nn.Module = AutoModelForCausalLM.from_pretrained(model_folder())
    return found.eval()


@cache
def rows(name: str) -> tuple[Row, ...]:
    """All rows of a real file."""
    path, fields = _FILES[name]
    return tuple(read_rows(data_folder() / path, fields=fields))


def examples(name: str, first: int, count: int, length: int = 256) -> list[Example]:
    """``count`` encoded rows, from row ``first`` on, that keep a response within ``length``."""
    options = EncodeOptions(max_length=length, on_empty="skip")
    found: list[Example] = []
    place = first
    while len(found) < count and place < len(rows(name)):
        more, _ = encode_rows(rows(name)[place : place + count], tokenizer(), options)
        found += more
        place += count
    return found[:count]


def subject(
    kind: str = "far",
    *,
    train_rows: int = 12,
    validation_rows: int = 6,
    retention_rows: int = 8,
    length: int = 256,
    **changes: Any,
) -> Subject:
    """A subject on the real tiny model, with small numbers of everything.

    ``kind`` "far": GSM8K, which the model has never seen; "near": TinyStories, which it was
    trained on. Training, validation and retention rows have nothing in common. ``changes`` are
    fields of ``Subject``.
    """
    name = KINDS[kind]
    given: dict[str, Any] = {
        "model": model(),
        "tokenizer": tokenizer(),
        "train": examples(name, 0, train_rows, length),
        "validation": examples(name, 100, validation_rows, length),
        "retention": {one: examples(one, 180, retention_rows, length) for one in RETENTION},
        "tokens": 600,
        "oracle_tokens": 8,
        "fisher_samples": 24,
        "tuning_steps": 8,
        "batch_size": 4,
        "names": {"model": "stories260K", "train": name},
    }
    return Subject(**given | changes)
