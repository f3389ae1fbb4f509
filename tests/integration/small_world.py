"""A tiny saved model with rows, a moved copy and a Fisher, as the command line finds them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from alphatoken.cli import main
from tests.rows import jsonl
from tests.tiny_language import draw_exchanges, make_model, make_tokenizer


@dataclass(frozen=True)
class World:
    """A saved tiny model, a moved copy of it, and data files."""

    folder: Path

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def score(self, out: Path, *more: object, **changed: object) -> int:
        """Exit status of ``score`` on the small files; keyword arguments replace options."""
        options = {
            "model": self / "moved",
            "train": self / "train.jsonl",
            "validation": self / "validation.jsonl",
            "out": out,
            "batch_size": 4,
            "shard_size": 8,
        } | changed
        return main(["score", *flags(options), "--quiet", *map(str, more)])

    def fit(self, out: Path, *more: object, **changed: object) -> int:
        """Exit status of ``fisher`` on the reference model and the file of prompts."""
        options = {
            "model": self / "reference",
            "train": self / "prompts.jsonl",
            "output_file": out,
            "samples": 4,
            "max_new_tokens": 8,
        } | changed
        return main(["fisher", *flags(options), "--quiet", *map(str, more)])


SHORT = {
    "batch_size": "per_device_train_batch_size", "fisher": "fisher_file",
    "limit": "train_limit", "model": "model_name_or_path", "out": "output_dir",
    "ratio": "keep_ratio", "scope": "keep_scope",
    "train": "train_file", "validation": "validation_file",
}  # fmt: skip
"""Words of these tests for options that most of them give."""


def flags(options: Mapping[str, object]) -> list[str]:
    """Options as words of a command; None is left out."""
    given = {SHORT.get(key, key): value for key, value in options.items() if value is not None}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def saved_model(folder: Path, seed: int = 0) -> Path:
    """An untrained model of the tiny language, and its tokenizer."""
    tokenizer = make_tokenizer()
    make_model(tokenizer, seed=seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, count: int, seed: int) -> Path:
    """Rows of the tiny language as JSONL."""
    exchanges = draw_exchanges(count, random.Random(seed))
    rows = [{"prompt": e.prompt, "response": " ".join(e.response)} for e in exchanges]
    return jsonl(path, rows)


def make_world(folder: Path) -> World:
    """Everything saved in a folder, a Fisher fitted by the command among it."""
    tokenizer, model = make_tokenizer(), make_model(make_tokenizer())
    for name in ("reference", "moved"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    write_rows(folder / "train.jsonl", 20, seed=1)
    write_rows(folder / "validation.jsonl", 6, seed=2)
    write_rows(folder / "prompts.jsonl", 5, seed=3)
    world = World(folder)
    assert world.fit(folder / "fisher.safetensors", samples=6) == 0
    return world
