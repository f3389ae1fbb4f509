"""Token values in a training loop of your own: one forward serves scoring and training.

    python examples/plain_pytorch_loop.py

A tiny decoder learns to write words backwards. A third of the training responses is wrong; the
loop keeps the most valuable half of the tokens of each batch, measured on a few clean words.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from alphatoken import Scorer, ScorerConfig, masked_sft_loss, select_random, select_top

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


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
        )
    )


def held_out_loss(model: LlamaForCausalLM) -> float:
    batch = make_batch(256, random.Random(123))
    with torch.no_grad():
        return float(model(**batch).loss)


def train(choose: str, steps: int) -> float:
    """Train on half of the tokens, the most valuable ones or random ones; return the loss."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    validation = make_batch(48, random.Random(99))
    scorer = Scorer(model, validation=validation, config=ScorerConfig(estimator="label"))
    draw, noise = random.Random(1), torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = make_batch(32, draw, wrong=1 / 3)
        labels = batch.pop("labels")
        if choose == "value":
            with scorer.observe() as observed:
                logits = model(**batch).logits
                values = observed.values(logits, labels)
            keep = select_top(values.total, values.mask, ratio=0.5)
        else:
            logits = model(**batch).logits
            keep = select_random(labels != -100, 0.5, generator=noise)
        loss = masked_sft_loss(logits, labels, keep, normalization="kept")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return held_out_loss(model)


def main(arguments: Sequence[str] = ()) -> dict[str, float]:
    steps = int(arguments[0]) if arguments else 150
    losses = {choose: train(choose, steps) for choose in ("random", "value")}
    for choose, loss in losses.items():
        print(f"half of the tokens by {choose:6}: held-out loss {loss:.3f}")
    return losses


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
