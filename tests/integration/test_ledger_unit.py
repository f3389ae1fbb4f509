"""What the sum of a run's values predicts of the loss, by optimizer; and that the run says so."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from alphatoken.train import AlphaSFTConfig, AlphaSFTTrainer
from alphatoken.train.ledger_unit import ledger_unit
from alphatoken.train.manifest import RESULTS
from alphatoken.train.report import REPORT
from tests.integration.tiny_training import model, options, sft_rows, tokenizer


class _Sums(TrainerCallback):
    """The ledger's sum after each step."""

    def __init__(self) -> None:
        self.found = [0.0]
        self.trainer: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.found.append(float(self.trainer.ledger.accumulated().sums[:, 0].sum()))


def run(folder: Path, **more: Any) -> tuple[list[float], list[float], AlphaSFTTrainer]:
    """(validation objective, ledger's sum) before each step and after the last; all parameters."""
    kind = {
        "policy": "all", "estimator": "label", "score_layers": "all", "value_parameters": "all",
        "retention": "none", "validation_batch_size": 8, "held_out_steps": 1,
        "held_out_share": 0.5, "max_grad_norm": 0.0, "learning_rate": 1e-5, **more,
    }  # fmt: skip
    listening = _Sums()
    trainer = AlphaSFTTrainer(
        model=model(),
        args=AlphaSFTConfig(**options(folder, **kind)),
        train_dataset=sft_rows(64),
        validation_dataset=sft_rows(16, seed=5),
        processing_class=tokenizer(),
        callbacks=[listening],
    )
    listening.trainer = trainer
    trainer.train()
    logs = trainer.state.log_history
    pool = [entry["alpha/validation_pool"] for entry in logs if "loss" in entry]
    return [*pool, trainer.valuation.objective_gap(len(pool))["pool"]], listening.found, trainer


CASES = {
    "sgd": ({"optim": "sgd", "learning_rate": 1e-3}, 0, (0.99, 1.01), True),
    "sgd, decay": (
        {"optim": "sgd", "learning_rate": 1e-3, "weight_decay": 10.0},
        0,
        (1.1, 2.0),
        False,
    ),
    "adamw": ({}, 0, (5.0, 100.0), False),
    "adamw, full": ({"preconditioner": "full", "precondition_after": 2}, 4, (5.0, 100.0), False),
    "no momentum, full": (
        {"preconditioner": "full", "precondition_after": 2, "adam_beta1": 0.0, "max_steps": 32},
        24,
        (1.0, 1.1),
        True,
    ),
}
"""Options; the step from which on; bounds on decrease / sum there; whether it is called one."""


@pytest.mark.parametrize("name", CASES)
def test_the_sum_is_a_decrease_where_it_is_called_one(tmp_path: Path, name: str) -> None:
    more, first, (low, high), is_decrease = CASES[name]
    losses, sums, trainer = run(tmp_path, **{"max_steps": 8, **more})
    slope = (losses[first] - losses[-1]) / (sums[-1] - sums[first])
    assert low < slope < high
    unit = json.loads((tmp_path / RESULTS / "values" / "summary.json").read_text())["unit"]
    assert unit.startswith("predicted decrease") == is_decrease
    assert ("no decrease of a loss" in unit) != is_decrease
    if not is_decrease or "full" in name:
        assert type(trainer.optimizer.optimizer).__name__ in unit
    assert unit.split("(")[0] in (tmp_path / REPORT).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("optimizer", "preconditioner", "words"),
    [
        (partial(torch.optim.SGD, momentum=0.9), None, "no decrease of a loss, since SGD carries"),
        (partial(torch.optim.SGD, weight_decay=0.1), None, "since SGD moves weights toward zero"),
        (partial(torch.optim.SGD, maximize=True), None, "since SGD climbs the loss"),
        (partial(torch.optim.RMSprop, weight_decay=0.1), "full", "since RMSprop moves weights"),
        (torch.optim.RMSprop, "full", "by the steps of RMSprop from step 3 on"),
        (partial(torch.optim.RMSprop, momentum=0.9), "full", "since RMSprop carries"),
        (torch.optim.AdamW, "full", "since AdamW carries"),
        (torch.optim.AdamW, "frozen", "since AdamW has a denominator that moves"),
        (torch.optim.AdamW, None, "since AdamW steps along another direction"),
    ],
)
def test_what_stands_in_the_way_is_said(
    optimizer: Any, preconditioner: str | None, words: str
) -> None:
    made = optimizer([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    assert words in ledger_unit(made, preconditioner, 3)
    assert ledger_unit(SimpleNamespace(optimizer=made), preconditioner, 3) == ledger_unit(
        made, preconditioner, 3
    )


def test_step_sizes_of_several_groups_are_said() -> None:
    """The rate at which each began counts: a schedule ends with all of them at 0."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in (0.1, 0.2)]
    made = torch.optim.SGD(groups)
    torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.0)
    assert "no decrease of a loss, since SGD has several step sizes" in ledger_unit(made, None, 0)


def test_momentum_is_said(tmp_path: Path) -> None:
    _, _, trainer = run(tmp_path, optim="sgd", optim_args="momentum=0.9", max_steps=1)
    del trainer
    unit = json.loads((tmp_path / RESULTS / "values" / "summary.json").read_text())["unit"]
    assert "no decrease of a loss, since SGD carries" in unit
