"""Short runs of policies in a layout; what they ended with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration import policy_examples
from tests.integration.distributed.trainers import run, sft


def trained(layout: str, folder: Path, **more: Any) -> dict[str, Any]:
    given = {"policy_cache": str(folder / "cache"), "dataset_num_proc": None, **more}
    return run(sft(layout, folder, validation_dataset=None, **given))


def kept(layout: str, folder: Path) -> dict[str, Any]:
    """A static mask, divided by the kept tokens of the whole step."""
    return trained(layout, folder, policy=policy_examples.EvenIds)


def attention(layout: str, folder: Path) -> dict[str, Any]:
    """Attention of the training forward and a column; ranked by sequence."""
    return trained(layout, folder, policy="sstoken")


def rows(layout: str, folder: Path) -> dict[str, Any]:
    """Chosen rows: the first process's choice."""
    return trained(layout, folder, policy=policy_examples.FirstRows)
