"""Tasks of the standings: real rows, some of them bad, and clean ones of the target."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alphatoken.data import Example
from benchmarks.selection.rows import exchanged, library, mathematics, programs, replaced
from benchmarks.standings.runs import Setting, encoded
from benchmarks.standings.yardsticks import UNITS

Texts = list[dict[str, Any]]


@dataclass(frozen=True)
class Scale:
    """Sizes of a task on one model.

    Attributes:
        rates: by task, the best for plain training of rates a factor of 2 apart.
        letters: of a prompt that are kept, its last; a small model has no room for more.
        bf16: whether runs multiply in bfloat16 (autocast); values are taken in float32.
        subsets: of each unit.
        again: of these, how many are trained on under a second seed too.
        units: of which halves are drawn.
        drops: random ones of each size; with 0 nothing is dropped by any value.
        without: values that this model has no room or time for.
    """

    rows: int
    length: int
    steps: int
    size: int
    rates: Mapping[str, float]
    validation: int = 16
    target: int = 48
    letters: int = 480
    bf16: bool = False
    subsets: int = 64
    again: int = 32
    units: tuple[str, ...] = UNITS
    drops: int = 8
    without: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Task:
    """What is trained on, and what for.

    Attributes:
        says: the task in one line.
        own: rows of the target's kind: validation, target, and what is trained on.
        spoilt: makes the training rows of them, and says of each whether it was spoilt.
    """

    says: str
    own: Callable[[], Texts]
    spoilt: Callable[[Texts, random.Random], tuple[Texts, list[bool]]]


def _words(rows: Texts, draw: random.Random) -> tuple[Texts, list[bool]]:
    """All rows alike."""
    return replaced(rows, 0.3, draw)[0], [True] * len(rows)


def _half(rows: Texts, draw: random.Random) -> tuple[Texts, list[bool]]:
    """Every other row, and as many programs."""
    own = rows[::2]
    others = draw.sample(programs("train"), min(len(rows) - len(own), len(programs("train"))))
    mixed = [(row, False) for row in own] + [(row, True) for row in others]
    mixed = draw.sample(mixed, len(mixed))
    return [row for row, _ in mixed], [spoilt for _, spoilt in mixed]


def _swapped(rows: Texts, draw: random.Random) -> tuple[Texts, list[bool]]:
    return exchanged(rows, 0.3, draw)


TASKS = {
    "words": Task(
        "GSM8K, 30 % of the words of the training rows are of other rows",
        lambda: mathematics("train"),
        _words,
    ),
    "mixed": Task(
        "GSM8K is the target; half of the training rows are Python problems (MBPP)",
        lambda: mathematics("train"),
        _half,
    ),
    "responses": Task(
        "functions of the standard library, 30 % of the training rows have the body of another",
        lambda: library(1200, 3),
        _swapped,
    ),
}


def setting_of(task: str, model: Any, tokenizer: Any, scale: Scale, seed: int = 0) -> Setting:
    """The task on one model; another seed draws other rows."""
    draw, chosen = random.Random(f"standings {task} {seed}"), TASKS[task]
    rows = chosen.own()
    draw.shuffle(rows)
    validation = _encoded(rows[:40], tokenizer, scale, scale.validation)
    target = _encoded(rows[40:140], tokenizer, scale, scale.target)
    texts, spoilt = chosen.spoilt(rows[140:], draw)
    train = _encoded(texts, tokenizer, scale, scale.rows)
    good = np.array([not spoilt[example.row.index] for example in train])
    return Setting(
        *(model, train, validation, target, scale.steps, scale.size, scale.rates[task]),
        bf16=scale.bf16,
        good=good,
    )


def _encoded(texts: Texts, tokenizer: Any, scale: Scale, count: int) -> Sequence[Example]:
    pairs = [(one["prompt"][-scale.letters :], one["response"]) for one in texts]
    made = encoded(pairs, tokenizer, max_length=scale.length, on_empty="skip")
    found = [example for example in made if example.response_tokens >= 16]
    if len(found) < count:
        raise RuntimeError(f"{len(found)} of {count} rows fit")
    return found[:count]
