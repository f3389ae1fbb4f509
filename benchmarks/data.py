"""The folder of real rows and models that ALPHATOKEN_DATA names, and parts of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alphatoken.errors import DataError

Row = dict[str, Any]


def data_folder() -> Path:
    """The folder of the larger sets.

    Raises:
        DataError: ALPHATOKEN_DATA is not set, or leads nowhere.
    """
    folder = Path(os.environ.get("ALPHATOKEN_DATA") or "no ALPHATOKEN_DATA")
    if not folder.is_dir():
        raise DataError(
            "the folder of data is not there",
            got=str(folder),
            why="the benchmarks take real rows from it, such as gsm8k, tinystories and mbpp",
            remedy="set ALPHATOKEN_DATA to a folder that holds them",
        )
    return folder


def read(name: str) -> list[Row]:
    """Rows of one of its files."""
    with open(data_folder() / name, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def cut(rows: Sequence[Row], **sizes: int | None) -> dict[str, list[Row]]:
    """Parts one after the other; None takes what is left."""
    parts, at = {}, 0
    for name, size in sizes.items():
        end = len(rows) if size is None else at + size
        if end > len(rows):
            raise RuntimeError(f"{name}: {size} rows are asked for, {len(rows) - at} are left")
        parts[name], at = list(rows[at:end]), end
    return parts
