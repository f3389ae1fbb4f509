"""What is diagnosed: models, rows, and the command line of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alphatoken.demo.models import GEMMA3, SMOLLM2, models_folder
from benchmarks.data import data_folder

_RETENTION = {
    "tinystories": "tinystories/stories.jsonl,response=text",
    "gsm8k": "gsm8k/train.jsonl",
    "mbpp": "mbpp/train.jsonl,prompt=text,response=code",
    "dolly": "dolly_hhrlhf/train.jsonl",
    "hellaswag": "hellaswag/validation.jsonl,response=query",
}
"""Held-out rows of four sets: what the model must not forget; never the set that is valued."""

_SMALL = "$DATA/stories260K/transformers"


@dataclass(frozen=True)
class Subject:
    """A model, and the rows that it is diagnosed on.

    Attributes:
        name: at the head of its column.
        description: which model and rows these are.
        model: folder.
        train: file of rows.
        more: words of the command line besides.
    """

    name: str
    description: str
    model: str
    train: str
    more: tuple[str, ...] = ()

    def command(self, out: str) -> list[str]:
        """The command line; ``$DATA`` and ``$MODELS`` stand for the folders of data and models."""
        words = ["alphatoken", "diagnose", "all", "--model_name_or_path", self.model]
        words += ["--train_file", f"$DATA/{self.train}", "--validation_rows", "32"]
        for name, place in _RETENTION.items():
            if place.split(",")[0] != self.train:
                words += ["--retention_set", f"{name}=$DATA/{place}"]
        words += ["--max_length", "256", "--on_empty", "skip", *self.more]
        return [*words, "--output_dir", out]

    def words(self, out: Path) -> list[str]:
        """The command line with the folders that the environment names.

        Raises:
            DataError: the folder of data is not there.
        """
        data, models = str(data_folder()), str(models_folder())
        words = self.command(str(out))
        return [word.replace("$DATA", data).replace("$MODELS", models) for word in words]


SUBJECTS: dict[str, Subject] = {
    "stories": Subject(
        "small, stories",
        "a decoder of 260,032 parameters (5 layers, trained on TinyStories), on stories: text like "
        "its own",
        _SMALL,
        "tinystories/stories.jsonl",
        ("--response_column", "text"),
    ),
    "mathematics": Subject(
        "small, mathematics",
        "the same decoder on grade-school mathematics (GSM8K), which it knows nothing of",
        _SMALL,
        "gsm8k/train.jsonl",
    ),
    "smollm2": Subject(
        "SmolLM2-135M-Instruct",
        "SmolLM2-135M-Instruct (30 layers, head tied to the embedding) on the same mathematics",
        f"$MODELS/{SMOLLM2.name}",
        "gsm8k/train.jsonl",
        ("--budget", "15m"),
    ),
    "gemma3": Subject(
        "Gemma 3 270M",
        "Gemma 3 270M (base; 18 layers, two thirds of its parameters in the tied embedding) on the "
        "same mathematics",
        f"$MODELS/{GEMMA3.name}",
        "gsm8k/train.jsonl",
    ),
}
"""In the order of columns."""
