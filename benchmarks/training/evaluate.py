"""What a trained model is measured by: losses on rows that nothing else has seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.training.tasks import IGNORE, Row, size

BATCH = 32


def mean_loss(model: Any, rows: Sequence[Row]) -> float:
    """Mean loss of the labelled tokens, over all rows together."""
    total = count = 0.0
    for batch in _batches(rows):
        losses, mask = token_losses(model, batch)
        total, count = total + float(losses.double().sum()), count + float(mask.sum())
    return total / count


def preferences(
    model: Any, pairs: Sequence[Row], reference: Sequence[tuple[float, float]], beta: float
) -> dict[str, float]:
    """Mean of ``-log sigma(s)``, share of pairs with s > 0, and mean s, all without masks."""
    logit = torch.tensor(
        [
            beta * ((chosen - old_chosen) - (rejected - old_rejected))
            for (chosen, rejected), (old_chosen, old_rejected) in zip(
                response_scores(model, pairs), reference, strict=True
            )
        ],
        dtype=torch.float64,
    )
    return {
        "loss": float(-F.logsigmoid(logit).mean()),
        "accuracy": float((logit > 0).double().mean()),
        "margin": float(logit.mean()),
    }


def response_scores(model: Any, pairs: Sequence[Row]) -> list[tuple[float, float]]:
    """(log pi of chosen, log pi of rejected) of each pair, summed over the response."""
    return list(zip(*(_scores(model, pairs, side) for side in ("chosen", "rejected")), strict=True))


def _scores(model: Any, pairs: Sequence[Row], side: str) -> list[float]:
    found: list[float] = []
    for batch in _batches([branch(pair, side) for pair in pairs]):
        losses, _ = token_losses(model, batch)
        found += (-losses.double().sum(1)).tolist()
    return found


def branch(pair: Row, side: str) -> Row:
    """One side of a pair as a labelled row."""
    prompt, response = pair["prompt_ids"], pair[f"{side}_ids"]
    return {"input_ids": prompt + response, "labels": [IGNORE] * len(prompt) + response}


@torch.no_grad()
def token_losses(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Losses (rows, length - 1), 0 where nothing is labelled, and where something is."""
    was_training = model.training
    model.eval()
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
    ).logits
    model.train(was_training)
    labels = batch["labels"][:, 1:]
    losses = F.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels, ignore_index=IGNORE, reduction="none"
    )
    return losses, labels != IGNORE


def _batches(rows: Sequence[Row]) -> Iterator[dict[str, Tensor]]:
    for begin in range(0, len(rows), BATCH):
        part = rows[begin : begin + BATCH]
        length = max(size(row) for row in part)
        yield {
            "input_ids": _padded(part, "input_ids", 0, length),
            "labels": _padded(part, "labels", IGNORE, length),
            "attention_mask": torch.tensor(
                [[1] * size(row) + [0] * (length - size(row)) for row in part]
            ),
        }


def _padded(rows: Sequence[Row], key: str, value: int, length: int) -> Tensor:
    return torch.tensor([row[key] + [value] * (length - len(row[key])) for row in rows])
