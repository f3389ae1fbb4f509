"""Rows padded on the left whose first token is labelled: it is predicted from a pad token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from tests.integration.tiny_training import model, sft, tokenizer

LENGTHS = (9, 4, 12, 2, 7, 10, 3, 8, 11, 5, 6, 12)


def texts() -> Dataset:
    """Plain text: every token is a label, the first one too."""
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randint(4, 40, (n,), generator=generator).tolist() for n in LENGTHS]
    return Dataset.from_list([{"input_ids": row, "labels": row} for row in rows])


def trainer(folder: Path, **more: Any) -> Any:
    from transformers import DataCollatorForSeq2Seq

    from alphatoken.train import AlphaTrainer

    side = tokenizer()
    side.padding_side = "left"
    return sft(
        folder, AlphaTrainer, data_collator=DataCollatorForSeq2Seq(side, padding=True),
        train_dataset=texts(), processing_class=side,
        validation_dataset=texts().select(range(6)), **more,
    )  # fmt: skip


def gradients(folder: Path, pad: int, **more: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The first batch with another token in its padding, and what one step on it gives."""
    made = trainer(folder, **more)
    made.create_optimizer_and_scheduler(10)
    made.state.max_steps = 10
    batch = dict(next(iter(made.get_train_dataloader())))
    batch["input_ids"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, pad)
    count = (batch["labels"][:, 1:] != -100).sum()
    (carried,), _ = made.get_batch_samples(iter([dict(batch)]), 1, torch.device("cpu"))
    made.training_step(made.model, carried, count)
    found = {n: p.grad.clone() for n, p in made.model.named_parameters() if p.grad is not None}
    return batch, found


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_no_update_depends_on_the_pad_token(tmp_path: Path, ratio: float) -> None:
    batch, one = gradients(tmp_path / "one", 0, keep_ratio=ratio)
    _, two = gradients(tmp_path / "two", 17, keep_ratio=ratio)
    hidden = batch["attention_mask"][:, :-1] == 0
    assert bool(((batch["labels"][:, 1:] != -100) & hidden).any()), "no such row was drawn"
    embedding = "model.embed_tokens.weight"
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=0, atol=1e-7, msg=name)
    assert not bool(one[embedding][0].any()), "the pad token itself was trained on"


def test_at_ratio_one_the_step_is_the_loss_without_those_tokens(tmp_path: Path) -> None:
    """Divided as transformers divides, which counts them."""
    from alphatoken import masked_sft_loss

    batch, found = gradients(tmp_path, 0, keep_ratio=1.0)
    by_hand = model()
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    labels, real = batch["labels"], batch["attention_mask"]
    loss = masked_sft_loss(
        by_hand(**inputs, use_cache=False).logits,
        labels,
        torch.ones_like(labels),
        num_tokens=(labels[:, 1:] != -100).sum(),
        attention_mask=real,
    )
    loss.backward()
    for name, p in by_hand.named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-7, msg=name)
