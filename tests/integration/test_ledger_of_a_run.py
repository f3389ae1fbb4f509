"""The sum of a run's values beside the decrease of the loss: equal under plain SGD alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from alphatoken.train.ledger import UNIT
from alphatoken.train.results import REPORT
from tests.integration.tiny_training import sft, sft_rows

BOUNDS = {"sgd": (1e-3, 0.99, 1.01), "adamw_torch": (1e-5, 5.0, 100.0)}
"""Optimizer -> learning rate, and bounds on decrease over sum."""


class _Sums(TrainerCallback):
    """The ledger's sum after each step."""

    def __init__(self) -> None:
        self.found = [0.0]
        self.trainer: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.found.append(float(self.trainer.ledger.sums()[:, 0].sum()))


@pytest.mark.parametrize("optim", BOUNDS)
def test_the_sum_is_the_decrease_under_plain_sgd(tmp_path: Path, optim: str) -> None:
    """Nowhere is it called one: it depends on the optimizer, and the page shows it under any."""
    rate, low, high = BOUNDS[optim]
    listening = _Sums()
    trainer = sft(
        tmp_path, policy="all", estimator="label", score_layers="all", value_parameters="all",
        retention="none", validation_batch_size=8, held_out_steps=1, held_out_share=0.5,
        max_grad_norm=0.0, max_steps=8, optim=optim, learning_rate=rate,
        train_dataset=sft_rows(64), validation_dataset=sft_rows(16, seed=5), callbacks=[listening],
    )  # fmt: skip
    listening.trainer = trainer
    trainer.train()
    pool = [
        entry["alpha/validation_pool"] for entry in trainer.state.log_history if "loss" in entry
    ]
    decrease = pool[0] - trainer.valuation.objective_gap(len(pool))["pool"]
    assert low < decrease / listening.found[-1] < high
    assert UNIT in (tmp_path / REPORT).read_text(encoding="utf-8")
    assert "decrease" not in UNIT
