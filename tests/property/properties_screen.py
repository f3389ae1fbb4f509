"""The screen before training, beside losses of the start model taken row by row."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from importlib import import_module
from typing import Any

import torch

from alphatoken.oracle.gradients import token_losses
from tests.property.properties_trainer import _arguments, _tokenizer, made_model, made_rows
from tests.property.reference_step import Asked


def screened_by_hand(
    model: Any, rows: list[dict[str, Any]], share: float, unit: str
) -> list[list[int]]:
    """Labels of the rows that are left."""
    labels, losses = [], {}
    for number, row in enumerate(rows):
        ids = torch.tensor([row["input_ids"]])
        mask = torch.tensor([row["completion_mask"]]).bool()
        mask[:, 0] = False  # predicted by nothing
        labels.append(ids[0].masked_fill(~torch.tensor(row["completion_mask"]).bool(), -100))
        with torch.no_grad():
            found = token_losses(model(input_ids=ids).logits, ids.masked_fill(~mask, -100))[0]
        for place in mask[0].nonzero().flatten().tolist():
            losses[number, place] = float(found[place])
    if unit == "token":
        for number, place in _worst(losses, share):
            labels[number][place] = -100
        return [line.tolist() for line in labels]
    of_row: dict[Any, list[float]] = {}
    for (number, _), loss in losses.items():
        of_row.setdefault(number, []).append(loss)
    gone = _worst({n: sum(one) / len(one) for n, one in of_row.items()}, share)
    return [line.tolist() for number, line in enumerate(labels) if number not in gone]


def _worst(losses: dict[Any, float], share: float) -> list[Any]:
    """floor(share n) keys of highest loss; of equals the later ones."""
    count = int(Fraction(str(share)) * len(losses))
    order = sorted(losses, key=lambda key: (losses[key], key))
    return order[len(order) - count :]


def check_screen(seed: int, share: float, unit: str) -> None:
    """What is left of the training rows is what the start model finds likely enough."""
    import datasets

    train = import_module("alphatoken.train")
    asked = Asked(policy="all", seed=seed, rows=3)
    rows, model = made_rows(asked).train, made_model(asked)
    rows = [*rows, rows[0]]  # one row twice: equal losses
    expected = screened_by_hand(model, rows, share, unit)
    assert expected != screened_by_hand(model, rows, 0.0, unit)
    with tempfile.TemporaryDirectory() as folder:
        options = _arguments(asked, f"{folder}/run")
        options |= {"screen_share": share, "value_unit": unit, "export_values": False}
        trainer = train.AlphaSFTTrainer(
            model,
            args=train.AlphaSFTConfig(**options),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=_tokenizer(),
        )
        read = [
            line.tolist() for batch in trainer.get_train_dataloader() for line in batch["labels"]
        ]
    assert [list(row) for row in trainer.train_dataset["labels"]] == expected
    assert sorted(map(_kept, read)) == sorted(map(_kept, expected))


def _kept(labels: list[int]) -> list[tuple[int, int]]:
    """Place and id of what is learned, whatever the padding."""
    return [(place, label) for place, label in enumerate(labels) if label != -100]
