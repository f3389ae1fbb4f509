"""Training on the validation rows first, against TRL's trainer on one set after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trl import SFTConfig, SFTTrainer

from alphatoken.errors import ConfigError
from alphatoken.policies.validation_first import ValidationFirst
from alphatoken.train import AlphaSFTConfig, AlphaSFTTrainer
from tests.integration import tiny_training as tiny
from tests.property.test_policies_reference import OPTIONS, furthest, reference_by_hand

EPOCHS, RATE = 2.0, 0.3
POLICY = {"epochs": EPOCHS, "learning_rate": RATE}


def run(folder: Path, policy: ValidationFirst, **more: Any) -> AlphaSFTTrainer:
    """On 16 rows, 8 others for validation."""
    torch.manual_seed(11)
    rows = tiny.sft_rows(24)
    trainer = AlphaSFTTrainer(
        model=tiny.model(layers=2),
        args=AlphaSFTConfig(**tiny.options(folder, **{**OPTIONS, **more})),
        train_dataset=rows.select(range(16)),
        validation_dataset=rows.select(range(16, 24)),
        processing_class=tiny.tokenizer(),
        policy=policy,
    )
    trainer.train()
    return trainer


def test_validation_rows_come_first(tmp_path: Path) -> None:
    """The run is TRL's on the validation rows, and then TRL's on the training rows."""
    first = reference_by_hand(tmp_path)
    torch.manual_seed(11)
    second = SFTTrainer(
        model=first,
        args=SFTConfig(**tiny.options(tmp_path / "second", **OPTIONS)),
        train_dataset=tiny.sft_rows(24).select(range(16)),
        processing_class=tiny.tokenizer(),
    )
    second.train()
    ours = run(tmp_path / "ours" / "run", ValidationFirst(**POLICY))
    assert furthest(tiny.weights(ours.model), tiny.weights(second.model)) < 1e-6
    budget = run(tmp_path / "b" / "run", ValidationFirst(**POLICY), policy_mode="budget")
    assert furthest(tiny.weights(budget.model), tiny.weights(second.model)) < 1e-6


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Not from the validation rows again."""
    whole = run(tmp_path / "whole" / "run", ValidationFirst(**POLICY), max_steps=4)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    part = run(tmp_path / "part" / "run", ValidationFirst(**POLICY), **options)
    (checkpoint,) = (tmp_path / "part" / "run").glob("checkpoint-2")
    torch.manual_seed(11)
    rows = tiny.sft_rows(24)
    again = AlphaSFTTrainer(
        model=tiny.model(layers=2),
        args=part.args,
        train_dataset=rows.select(range(16)),
        validation_dataset=rows.select(range(16, 24)),
        processing_class=tiny.tokenizer(),
        policy=ValidationFirst(**POLICY),
    )
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.state.global_step == 4
    assert furthest(tiny.weights(again.model), tiny.weights(whole.model)) < 1e-6


@pytest.mark.parametrize("options", [{"epochs": 0.0}, {"learning_rate": -1.0}])
def test_bad_numbers_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        ValidationFirst(**options)


def test_without_validation_rows_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs a validation dataset"):
        AlphaSFTTrainer(
            model=tiny.model(layers=2),
            args=AlphaSFTConfig(**tiny.options(tmp_path)),
            train_dataset=tiny.sft_rows(8),
            processing_class=tiny.tokenizer(),
            policy=ValidationFirst(),
        )
