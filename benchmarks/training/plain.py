"""What every run shares, and TRL's own fine-tuning for start models."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from transformers.trainer_pt_utils import LengthGroupedSampler
from trl import SFTConfig, SFTTrainer

from benchmarks.training.tasks import Row, size

BATCH = 8

TRAINING: dict[str, Any] = {
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": 32,
    "lr_scheduler_type": "linear",
    "warmup_steps": 5,
    "max_length": None,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}
"""What all runs share; the optimizer is TRL's default, AdamW."""


class Prepared:
    """Rows are token ids already: TRL has nothing to prepare, and noise survives as it is.

    Batches hold rows of like length, in an order that the seed alone decides.
    """

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset

    def _get_train_sampler(self, *_: Any) -> LengthGroupedSampler:
        generator = torch.Generator().manual_seed(self.args.seed)  # type: ignore[attr-defined]
        lengths = self.train_dataset["length"]  # type: ignore[attr-defined]
        return LengthGroupedSampler(BATCH, lengths=list(lengths), generator=generator)


def dataset(rows: Sequence[Row]) -> Dataset:
    """Rows with their lengths, by which batches are grouped.

    Pairs get text columns too, which are looked at before training and never trained on.
    """
    named = ("prompt", "chosen", "rejected") if "prompt_ids" in rows[0] else ()
    return Dataset.from_list(
        [
            {**row, "length": size(row), **{n: _as_text(row[f"{n}_ids"]) for n in named}}
            for row in rows
        ]
    )


def _as_text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


class PlainSFT(Prepared, SFTTrainer):
    pass


def plain_sft(
    model: Any, tokenizer: Any, rows: Sequence[Row], *, steps: int, learning_rate: float
) -> None:
    """TRL's own fine-tuning, for start models."""
    with tempfile.TemporaryDirectory() as folder:
        options = {**TRAINING, "max_steps": steps, "learning_rate": learning_rate}
        trainer = PlainSFT(
            model,
            args=SFTConfig(output_dir=folder, seed=0, **options),
            train_dataset=dataset(rows),
            processing_class=tokenizer,
        )
        trainer.train()
