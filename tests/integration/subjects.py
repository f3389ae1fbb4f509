"""Subjects of diagnostics: a small trained decoder, real rows, settings that are quick."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from alphatoken.data import EncodeOptions, Example, Row, Turn, encode_rows
from alphatoken.data.stdlib import code_rows, text_rows
from alphatoken.diagnose.subject import Subject
from tests.integration.library_decoder import decoder_folder

KINDS = {"far": "functions", "near": "topics"}
RETENTION = ("topics", "functions", "summaries", "names")


def model_folder() -> Path:
    """5 layers, width 64, 512 tokens, trained on topics of the standard library."""
    return decoder_folder()


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder())


@cache
def _loaded() -> nn.Module:
    from transformers import AutoModelForCausalLM

    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(model_folder())
    return loaded.eval()


def model() -> nn.Module:
    """A fresh copy, float32, in evaluation mode."""
    return copy.deepcopy(_loaded())


@cache
def rows(name: str) -> tuple[Row, ...]:
    """Rows of the standard library, in four forms; no two forms are of the same function."""
    if name == "topics":
        return tuple(text_rows(600))
    code = code_rows(1200)
    if name == "functions":
        return tuple(code[:600])
    if name == "summaries":  # body, then signature and docstring
        return tuple(_row(row, row.response, row.prompt) for row in code[600:900])
    names = ((row, row.prompt.split("(")[0].split()[-1]) for row in code[900:])
    return tuple(_row(row, f"a function named {name}", row.prompt) for row, name in names)


def _row(row: Row, prompt: str, response: str) -> Row:
    return Row(row.index, row.place, (Turn("user", prompt), Turn("assistant", response)))


def examples(name: str, first: int, count: int, length: int = 256) -> list[Example]:
    """``count`` encoded rows, from row ``first`` on, that keep a response within ``length``."""
    return list(_encoded(name, first, count, length))


@cache
def _encoded(name: str, first: int, count: int, length: int) -> tuple[Example, ...]:
    options = EncodeOptions(max_length=length, on_empty="skip")
    result: list[Example] = []
    place = first
    while len(result) < count and place < len(rows(name)):
        more, _ = encode_rows(rows(name)[place : place + count], tokenizer(), options)
        result += more
        place += count
    return tuple(result[:count])


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

    ``kind`` "far": functions, of which the model has seen few; "near": topics, which it was
    trained on. Training, validation and retention rows have nothing in common. ``changes`` are
    fields of ``Subject``.
    """
    name = KINDS[kind]
    fields: dict[str, Any] = {
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
        "names": {"model": "library-260k", "train": name},
    }
    return Subject(**fields | changes)
