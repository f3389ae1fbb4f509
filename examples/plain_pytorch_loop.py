"""Token values in a training loop of your own: one forward serves scoring and training.

    python examples/plain_pytorch_loop.py

A tiny decoder has learned to write words backwards. Then it gets training data of which half is
wrong. One loop trains on all tokens, one on a random half, and one on the half that is worth most
to the loss on a few clean words. It shows how the loop is written: in this toy half of all words
are wrong and values find them, which they did not on real models (docs/should-i.md).
"""

from __future__ import annotations

import copy
import random

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from alphatoken import Scorer, masked_sft_loss, select_random, select_top

LETTERS = "abcdefgh"
END = ord("\n")


def make_batch(count: int, draw: random.Random, wrong: float = 0.0) -> dict[str, torch.Tensor]:
    """``word>drow`` as bytes; labels are the part after ``>``."""
    ids, labels = [], []
    for _ in range(count):
        word = draw.choices(LETTERS, k=5)
        answer = draw.choices(LETTERS, k=5) if draw.random() < wrong else word[::-1]
        prompt, response = [*map(ord, word), ord(">")], [*map(ord, answer), END]
        ids.append(prompt + response)
        labels.append([-100] * len(prompt) + response)
    batch = torch.tensor(ids)
    return {
        "input_ids": batch,
        "attention_mask": torch.ones_like(batch),
        "labels": torch.tensor(labels),
    }


def pretrained(steps: int) -> LlamaForCausalLM:
    """A model that has seen clean words only."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    draw = random.Random(1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**make_batch(32, draw)).loss.backward()
        optimizer.step()
    return model


def held_out_loss(model: LlamaForCausalLM) -> float:
    with torch.no_grad():
        return float(model(**make_batch(256, random.Random(123))).loss)


def train(start: LlamaForCausalLM, choose: str, steps: int) -> float:
    """Train a copy on "all" tokens, a "random" half, or the half of most "value"."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scorer = Scorer(model, validation=make_batch(48, random.Random(99)))
    draw, noise = random.Random(2), torch.Generator().manual_seed(2)
    for _ in range(steps):
        batch = make_batch(32, draw, wrong=0.5)
        labels = batch.pop("labels")
        if choose == "value":
            with scorer.observe() as observed:
                logits = model(**batch).logits
                values = observed.values(logits, labels)
            keep = select_top(values.total, values.mask, ratio=0.5)
        else:
            logits = model(**batch).logits
            ratio = 0.5 if choose == "random" else 1.0
            keep = select_random(labels != -100, ratio, generator=noise)
        loss = masked_sft_loss(logits, labels, keep, normalization="kept")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return held_out_loss(model)


def main() -> dict[str, float]:
    start = pretrained(steps=150)
    losses = {"before": held_out_loss(start)}
    for choose in ("all", "random", "value"):
        losses[choose] = train(start, choose, steps=60)
    for name, loss in losses.items():
        print(f"{name:8} held-out loss {loss:.3f}")
    return losses


if __name__ == "__main__":
    main()
