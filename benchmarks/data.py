"""Real rows and models, in the folders that ALPHATOKEN_DATA and ALPHATOKEN_MODELS name."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alphatoken.demo.models import GEMMA3, SMOLLM2, models_folder
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


# --- models --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A real language model.

    Attributes:
        key: names its files, and begins the names of its rows.
        name: as pages have it.
        place: its folder, from that of the models or of the data.
        shared: whether it lies with the data.
    """

    key: str
    name: str
    place: str
    shared: bool = False

    def folder(self) -> Path:
        """Where it is.

        Raises:
            DataError: it is not there.
        """
        folder = (data_folder() if self.shared else models_folder()) / self.place
        if not (folder / "config.json").is_file():
            raise DataError(
                f"{self.name} is not there",
                got=str(folder),
                why="figures are of real models",
                remedy="`make models` fetches them into $ALPHATOKEN_MODELS (the small decoder lies "
                "in $ALPHATOKEN_DATA); --models chooses among those that are there",
            )
        return folder

    def load(self) -> Any:
        """The model in float32, in evaluation mode."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder(), dtype="float32")

    def tokenizer(self) -> Any:
        """Its tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.folder())


MODELS = {
    model.key: model
    for model in (
        Model("smollm2", "SmolLM2-135M-Instruct", SMOLLM2.name),
        Model("gemma3", "Gemma 3 270M", GEMMA3.name),
        Model("small", "decoder of 260,032 parameters", "stories260K/transformers", shared=True),
    )
}
