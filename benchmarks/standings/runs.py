"""A task, and plain training on a part of its tokens: what values are to predict.

Training is AdamW on ``sum w l / N`` of each step's rows, N the number of their response tokens
whether or not they are trained on: a token that is left out has weight 0, and changes no other's.
``J`` is the mean token loss of the validation rows, which the values are taken against.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from alphatoken import InfluenceFactors
from alphatoken.data import EncodeOptions, Example, Row, Turn, batches, collate, encode_rows
from alphatoken.model.batch import token_losses
from alphatoken.oracle.gradients import batch_mask
from alphatoken.oracle.run import Run
from benchmarks.selection.rows import exchanged, library, mathematics, programs, replaced

Numbers = NDArray[np.float64]
"""One number for each response token of the training rows, row by row."""

BETAS, EPS = (0.9, 0.999), 1e-8

UNITS = ("tokens", "rows")
"""Of which halves are drawn."""


def forward_of(model: Any) -> Any:
    """The model as oracles call it."""
    return lambda inputs: model(**inputs, use_cache=False).logits


@dataclass(frozen=True, eq=False)
class Setting:
    """One model, one task and one way of training.

    Attributes:
        model: where every run starts.
        rows: trained on.
        validation: of J.
        target: other rows of the same kind.
        steps: optimizer steps of a run.
        size: rows of a step.
        rate: highest learning rate; a twentieth of the steps rises to it, the others fall to 0.
        bf16: whether training multiplies in bfloat16; J is in float32.
        good: of each row, whether it is of the target's kind and unspoilt.
        factors: of the training rows' Fisher, fitted once for all questions about a model.
    """

    model: Any
    rows: Sequence[Example]
    validation: Sequence[Example]
    target: Sequence[Example]
    steps: int
    size: int
    rate: float
    bf16: bool = False
    good: NDArray[np.bool_] | None = None
    factors: list[InfluenceFactors] = field(default_factory=list)

    @cached_property
    def tokens(self) -> int:
        """Response tokens of the training rows."""
        return sum(row.response_tokens for row in self.rows)

    @cached_property
    def row_of(self) -> NDArray[np.int64]:
        """Row of each response token."""
        return np.repeat(np.arange(len(self.rows)), [row.response_tokens for row in self.rows])

    def order(self, seed: int) -> list[list[int]]:
        """Rows of each step: every epoch in an order of its own."""
        draw = np.random.default_rng([seed, 1])
        drawn: list[int] = []
        while len(drawn) < self.steps * self.size:
            drawn += draw.permutation(len(self.rows)).tolist()
        return [drawn[s * self.size : (s + 1) * self.size] for s in range(self.steps)]

    def rates(self) -> list[float]:
        """Learning rate of each step."""
        warm = max(1, self.steps // 20)
        rising = [self.rate * (s + 1) / warm for s in range(warm)]
        rest = self.steps - warm
        return rising + [self.rate * (1 - s / rest) for s in range(rest)]

    def run(self, seed: int) -> Run:
        """The same training as formulas, for the oracle."""
        steps = [[self.batch(rows)] for rows in self.order(seed)]
        return Run(steps, self.rates(), betas=BETAS, eps=EPS)

    def placed(self, chosen: Tensor, rows: Sequence[int], numbers: Numbers) -> Tensor:
        """Numbers of these rows' tokens, (b, t), at the response tokens of their batch."""
        weights = torch.zeros(chosen.shape)
        picked = np.concatenate([numbers[self.row_of == r] for r in rows])
        weights[chosen] = torch.as_tensor(picked, dtype=weights.dtype)
        return weights

    def to_numbers(self, batches: Sequence[tuple[Sequence[int], Tensor]]) -> Numbers:
        """Sums over (rows, values (b, t)) of what each token has; the inverse of ``placed``."""
        total = np.zeros(self.tokens)
        for rows, values in batches:
            chosen = batch_mask(self.batch(rows))
            parts = iter(values[chosen].double().tolist())
            for r in rows:
                places = np.flatnonzero(self.row_of == r)
                total[places] += [next(parts) for _ in places]
        return total

    def batch(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """These training rows."""
        return collate([self.rows[r] for r in rows])

    def batches(self) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """All training rows once, (rows, batch)."""
        for start in range(0, len(self.rows), self.size):
            rows = list(range(start, min(start + self.size, len(self.rows))))
            yield rows, self.batch(rows)

    def validations(self) -> list[dict[str, Tensor]]:
        """Validation batches."""
        return list(batches(self.validation, 16))

    def stepped(
        self,
        model: Any,
        order: Sequence[Sequence[int]],
        rates: Sequence[float],
        weights: Numbers | None = None,
    ) -> torch.optim.Optimizer:
        """Train a model in place on the rows of each step, and give its optimizer."""
        stepper = torch.optim.AdamW(
            model.parameters(), lr=self.rate, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True
        )
        for rows, rate in zip(order, rates, strict=True):
            for group in stepper.param_groups:
                group["lr"] = rate
            batch = self.batch(rows)
            chosen = batch_mask(batch)
            w = 1.0 if weights is None else self.placed(chosen, rows, weights)
            stepper.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                losses = losses_of(model, batch)
            ((w * losses).sum() / chosen.sum()).backward()
            stepper.step()
        return stepper

    def train(self, weights: Numbers | None, seed: int) -> dict[str, float]:
        """Train a copy on these weights of its tokens; None for 1 throughout.

        Returns:
            ``validation``: J; ``target``: the mean loss of rows that no value saw.
        """
        model = copy.deepcopy(self.model).train()
        self.stepped(model, self.order(seed), self.rates(), weights)
        return {"validation": _mean(model, self.validation), "target": _mean(model, self.target)}


def encoded(pairs: Iterable[tuple[str, str]], tokenizer: Any, **how: Any) -> list[Example]:
    """Prompts and responses as tokens, without a chat template; ``how`` as of EncodeOptions."""
    rows = [
        Row(i, f"row {i}", (Turn("user", prompt), Turn("assistant", said)))
        for i, (prompt, said) in enumerate(pairs)
    ]
    return encode_rows(rows, tokenizer, EncodeOptions(chat_template=False, **how))[0]


def losses_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Token losses (b, t), 0 off the response."""
    inputs = {name: x for name, x in batch.items() if name != "labels"}
    return token_losses(forward_of(model)(inputs), batch["labels"])


@torch.no_grad()
def _mean(model: Any, rows: Sequence[Example]) -> float:
    """Mean token loss of rows."""
    model.eval()
    total = sum(float(losses_of(model, batch).sum()) for batch in batches(rows, 16))
    return total / sum(row.response_tokens for row in rows)


# --- tasks: real rows, some of them bad, and clean ones of the target -----------------------------

Texts = list[dict[str, Any]]
Spoil = Callable[[Texts, random.Random], tuple[Texts, list[bool]]]
"""Training rows of clean ones, and of each whether it was spoilt."""


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


TASKS: dict[str, tuple[str, Callable[[], Texts], Spoil]] = {
    "words": (
        "GSM8K, 30 % of the words of the training rows are of other rows",
        lambda: mathematics("train"),
        _words,
    ),
    "mixed": (
        "GSM8K is the target; half of the training rows are Python problems (MBPP)",
        lambda: mathematics("train"),
        _half,
    ),
    "responses": (
        "functions of the standard library, 30 % of the training rows have the body of another",
        lambda: library(1200, 3),
        _swapped,
    ),
}
"""A line on the task, the rows of the target's kind, and what makes training rows of them."""


def setting_of(task: str, model: Any, tokenizer: Any, scale: Scale, seed: int = 0) -> Setting:
    """The task on one model; another seed draws other rows."""
    draw, (_, own, spoil) = random.Random(f"standings {task} {seed}"), TASKS[task]
    rows = own()
    draw.shuffle(rows)
    validation = _encoded(rows[:40], tokenizer, scale, scale.validation)
    target = _encoded(rows[40:140], tokenizer, scale, scale.target)
    texts, spoilt = spoil(rows[140:], draw)
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
    fitting = [example for example in made if example.response_tokens >= 16]
    if len(fitting) < count:
        raise RuntimeError(f"{len(fitting)} of {count} rows fit")
    return fitting[:count]
