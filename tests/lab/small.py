"""What several tests of the lab build: files of rows, and stages of policies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphatoken.train.policy import PolicyStage
from alphatoken.train.sft import padded_batch
from tests.rows import jsonl


def write(path: Path, rows: Sequence[Any]) -> str:
    return str(jsonl(path, rows))


def right_padded(rows: Any) -> Any:
    return padded_batch(rows, 0, "cpu")


def stage(folder: Path, rows: Any, model: Any, **changes: Any) -> PolicyStage:
    """Of a run without validation rows, three rows a batch."""
    fields: dict[str, Any] = {
        "validation": (), "row_batch": right_padded, "batch_size": 3, "progress": False
    }  # fmt: skip
    return PolicyStage(model=model, rows=rows, folder=folder, **fields | changes)
