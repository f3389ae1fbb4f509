"""Short fine-tunings from the same start: all tokens, a random half, or the most valuable half."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alphatoken import (
    FisherDrift,
    Scorer,
    ScorerConfig,
    masked_sft_loss,
    select_random,
    select_top,
)
from alphatoken.data import Example, collate
from alphatoken.model.batch import label_mask

__all__ = ["STABILITY_WEIGHT", "Recipe", "Tuned", "fine_tune"]

STABILITY_WEIGHT = 30.0
"""Lambda has no natural unit. Here 30 makes the two sides comparable soon after the start; the
default, 1.5, would leave all to adaptation, and the library would warn about it."""


@dataclass(frozen=True)
class Recipe:
    """How one fine-tuning chooses its tokens: by which estimator, at random, or not at all."""

    name: str
    estimator: str | None = None
    ratio: float = 1.0
    steps: int = 100
    batch_size: int = 16
    learning_rate: float = 1e-3
    seed: int = 0


@dataclass(frozen=True)
class Tuned:
    """The tuned model, and how many tokens its losses summed over."""

    model: Any
    tokens: int


def fine_tune(
    start: nn.Module,
    recipe: Recipe,
    train: Sequence[Example],
    validation: dict[str, Tensor],
    fisher: FisherDrift,
) -> Tuned:
    """Fine-tune a copy of ``start``; all recipes see the same batches in the same order.

    One forward serves scoring and training: the values come from the graph that the masked loss
    is then sent back through.
    """
    model = copy.deepcopy(start).train()
    scorer = None
    if recipe.estimator is not None:
        config = ScorerConfig(estimator=recipe.estimator, stability_weight=STABILITY_WEIGHT)
        scorer = Scorer(model, validation=validation, retention=fisher, config=config)
    draw = random.Random(recipe.seed)
    noise = torch.Generator().manual_seed(recipe.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=0.0)
    tokens = 0
    for _ in range(recipe.steps):
        batch = collate(draw.sample(train, recipe.batch_size))
        labels = batch.pop("labels")
        if scorer is None:
            logits = model(**batch).logits
            keep = select_random(label_mask(labels), recipe.ratio, generator=noise)
        else:
            with scorer.observe() as observed:
                logits = model(**batch).logits
                values = observed.values(logits, labels)
            keep = select_top(values.total, values.mask, recipe.ratio)
        loss = masked_sft_loss(logits, labels, keep, normalization="kept")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        tokens += int(keep.sum())
    return Tuned(model.eval(), tokens)
