"""Rows of tests: their files, and encoded ones of random ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from alphatoken.data import Example, Row


def jsonl(path: Path, rows: Iterable[object]) -> Path:
    """One line a row; a text is the line itself, whatever it says."""
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
    return path


def drawn_rows(
    lengths: Iterable[tuple[int, int]], vocabulary: int = 11, seed: int = 0, least: int = 3
) -> list[Example]:
    """Rows of drawn tokens, (prompt, response) long; ids from 3 on, clear of special ones."""
    generator = np.random.default_rng(seed)
    examples = []
    for index, (prompt, response) in enumerate(lengths):
        ids = generator.integers(least, vocabulary, prompt + response).tolist()
        labels = [-100] * prompt + ids[prompt:]
        examples.append(Example(Row(index, f"rows, line {index + 1}", ()), ids, labels))
    return examples


def renumbered(rows: Sequence[Example], step: int = 3) -> list[Example]:
    """The same rows, drawn from a file in which they are every ``step``-th."""
    return [
        replace(row, row=replace(row.row, index=step * place)) for place, row in enumerate(rows)
    ]


def random_rows(
    lengths: Sequence[int], *, vocabulary: int = 11, prompt: int = 2, seed: int = 7
) -> list[Example]:
    """Rows of random ids; all but the first ``prompt`` tokens are response."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for number, length in enumerate(lengths):
        ids = torch.randint(1, vocabulary, (length,), generator=generator).tolist()
        labels = [-100] * prompt + ids[prompt:]
        examples.append(Example(Row(number, f"row {number}", ()), ids, labels))
    return examples
