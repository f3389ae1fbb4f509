"""Models that training starts from; trained ones are made once and kept in the work folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.training.evaluate import branch
from benchmarks.training.tasks import Row, load_task, model_folder


@dataclass(frozen=True)
class Start:
    """Plain fine-tuning from the pre-trained model.

    Attributes:
        task: whose ``other`` rows are learnt; no cell trains on them.
        steps: of 8 rows.
        chosen: also the chosen replies of the task's training pairs, as warm-ups usually do.
    """

    task: str
    steps: int
    learning_rate: float
    chosen: bool = False

    def rows(self) -> list[Row]:
        """What it is trained on."""
        task = load_task(self.task, tokenizer())
        return task.other + [branch(pair, "chosen") for pair in task.train if self.chosen]


STARTS = {
    "dialogue": Start("dpo", steps=150, learning_rate=1e-3, chosen=True),
    "math_converged": Start("sft_math", steps=900, learning_rate=2e-3),
}
"""Each by name; "base" is the pre-trained model itself."""

OWN = {"sft_code": "base", "sft_math": "base", "dpo": "dialogue"}
"""What each task starts from unless a cell says otherwise: preferences after a warm-up."""


def tokenizer() -> Any:
    """The pre-trained model's."""
    return AutoTokenizer.from_pretrained(model_folder())


def start_folder(name: str, work: Path) -> Path:
    """Where the model of that name stands."""
    return model_folder() if name == "base" else work / "starts" / name


def load_model(name: str, work: Path) -> Any:
    """A fresh copy of a start model."""
    return AutoModelForCausalLM.from_pretrained(start_folder(name, work))


def make_start(name: str, work: Path) -> None:
    """Train and keep the start model of that name, whole or not at all."""
    target = start_folder(name, work)
    if target.exists():
        return
    from benchmarks.training.plain import plain_sft  # it imports TRL, which takes seconds

    start = STARTS[name]
    model = load_model("base", work)
    plain_sft(
        model, tokenizer(), start.rows(), steps=start.steps, learning_rate=start.learning_rate
    )
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer().save_pretrained(partial)
    partial.rename(target)
