"""The trainers of a cell, on rows that are tokenised already, and what they kept."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alphatoken.train.dpo import AlphaDPOConfig, AlphaDPOTrainer
from alphatoken.train.sft import AlphaSFTConfig, AlphaSFTTrainer
from benchmarks.training.plain import TRAINING, Prepared, dataset
from benchmarks.training.tasks import Row


class Counted:
    """Counts what is trained on: tokens, total weight, and how much of it is noise.

    ``wrong`` maps a row's ids to the places of its replaced tokens.
    """

    wrong: dict[tuple[int, ...], list[int]]

    def count(self, wrong: dict[tuple[int, ...], list[int]]) -> None:
        self.wrong = wrong
        self.response = self.kept = 0
        self.weight = self.wrong_weight = 0.0
        record = self.records.micro_batch  # type: ignore[attr-defined]

        def counted(batch: Any, scored: Any, weights: Tensor, *seconds: float) -> None:
            self._count(batch.inputs, weights, batch.mask)
            record(batch, scored, weights, *seconds)

        self.records.micro_batch = counted  # type: ignore[attr-defined]

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if model.training and self.weigher is None:  # type: ignore[attr-defined]
            mask = self.response_labels(inputs) != -100  # type: ignore[attr-defined]
            self._count(inputs, mask.float(), mask)
        return super().compute_loss(model, inputs, *args, **kwargs)  # type: ignore[misc]

    def _count(self, inputs: Any, weights: Tensor, mask: Tensor) -> None:
        self.response += int(mask.sum())
        self.kept += int((weights * mask > 0).sum())
        self.weight += float((weights * mask).sum())
        for row, real, weight in zip(
            inputs["input_ids"], inputs["attention_mask"], weights, strict=True
        ):
            places = self.wrong.get(tuple(row[: int(real.sum())].tolist()), [])
            self.wrong_weight += float(weight[places].sum())


class SFT(Counted, Prepared, AlphaSFTTrainer):
    pass


class DPO(Counted, Prepared, AlphaDPOTrainer):
    pass


def wrong_places(clean: Sequence[Row], noisy: Sequence[Row]) -> dict[tuple[int, ...], list[int]]:
    """Row's ids -> places of the tokens that noise changed; both branches of a pair."""
    found = {}
    for before, after in zip(clean, noisy, strict=True):
        for left, right in zip(_sequences(before), _sequences(after), strict=True):
            places = [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b]
            found[tuple(right)] = places
    return found


def _sequences(row: Row) -> list[list[int]]:
    if "input_ids" in row:
        return [row["input_ids"]]
    return [row["prompt_ids"] + row[key] for key in ("chosen_ids", "rejected_ids")]


def alpha_trainer(
    task: str,
    model: Any,
    tokenizer: Any,
    train: Sequence[Row],
    validation: Sequence[Row],
    retention: Sequence[Row] | None,
    fisher: Any,
    options: dict[str, Any],
    folder: Path,
) -> Any:
    """AlphaSFTTrainer or AlphaDPOTrainer on token ids."""
    torch.manual_seed(options["seed"])
    kind, config = (DPO, AlphaDPOConfig) if task == "dpo" else (SFT, AlphaSFTConfig)
    extra = {"ref_model": copy.deepcopy(model)} if task == "dpo" else {}
    return kind(
        model,
        args=config(output_dir=str(folder), **{**TRAINING, **options}),
        train_dataset=dataset(train),
        validation_dataset=dataset(validation),
        retention_dataset=None if retention is None else dataset(retention),
        fisher=fisher,
        processing_class=tokenizer,
        **extra,
    )
