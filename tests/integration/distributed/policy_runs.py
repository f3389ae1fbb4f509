"""Short runs of policies in a layout; what they ended with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from alphatoken.train import AlphaSFTConfig, AlphaSFTTrainer
from tests.integration import policy_examples
from tests.integration.distributed.trainers import arguments, run
from tests.integration.tiny_training import model, sft_rows, tokenizer


def trained(layout: str, folder: Path, **more: Any) -> dict[str, Any]:
    torch.manual_seed(11)
    given = {"policy_cache": str(folder / "cache"), "dataset_num_proc": None, **more}
    own = given.pop("own", None)
    trainer = AlphaSFTTrainer(
        model=model(),
        args=AlphaSFTConfig(**arguments(layout, folder, **given)),
        train_dataset=sft_rows(64),
        processing_class=tokenizer(),
        policy=own,
    )
    return run(trainer)


def kept(layout: str, folder: Path) -> dict[str, Any]:
    """A static mask, divided by the kept tokens of the whole step."""
    return trained(layout, folder, own=policy_examples.EvenIds)


def attention(layout: str, folder: Path) -> dict[str, Any]:
    """Attention of the training forward and a column; ranked by sequence."""
    return trained(layout, folder, policy="sstoken")


def rows(layout: str, folder: Path) -> dict[str, Any]:
    """Chosen rows: the first process's choice."""
    return trained(layout, folder, own=policy_examples.FirstRows)
