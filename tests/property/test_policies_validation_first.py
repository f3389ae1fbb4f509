"""Training on the validation rows first, against TRL's trainer on one set after the other."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from trl import SFTTrainer

from alphatoken.errors import ConfigError
from alphatoken.train import AlphaSFTTrainer
from alphatoken.train.policies.builtin import ValidationFirst
from tests.integration import tiny_training as tiny

OPTIONS = {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 3}
EPOCHS, RATE = 2.0, 0.3
POLICY = {"epochs": EPOCHS, "learning_rate": RATE}


def reference_by_hand(folder: Path) -> torch.nn.Module:
    """TRL's own trainer on the validation rows: eight rows twice, one a step."""
    rows = tiny.prepared(folder / "rows", tiny.sft_rows(24).select(range(16, 24)))
    options = {**OPTIONS, "max_steps": -1, "num_train_epochs": EPOCHS, "learning_rate": RATE}
    options["per_device_train_batch_size"] = 1
    torch.manual_seed(11)
    own = {"model": tiny.model(layers=2), "train_dataset": Dataset.from_list(rows), **options}
    trainer = tiny.made(SFTTrainer, folder / "hand", **own)
    trainer.train()
    result: torch.nn.Module = trainer.model
    return result


def run(folder: Path, policy: ValidationFirst, **more: Any) -> AlphaSFTTrainer:
    """On 16 rows, 8 others for validation."""
    trainer = made(folder, policy, **more)
    trainer.train()
    return trainer


def made(folder: Path, policy: Any, kind: Any = AlphaSFTTrainer, **more: Any) -> Any:
    """A trainer that has trained on the validation rows."""
    rows = tiny.sft_rows(24)
    own = {"model": tiny.model(layers=2), "validation_dataset": rows.select(range(16, 24))}
    own["train_dataset"] = rows.select(range(16))
    return tiny.made(kind, folder, policy=policy, **{**own, **OPTIONS, **more})


@pytest.mark.slow
def test_validation_rows_come_first(tmp_path: Path) -> None:
    """The run is TRL's on the validation rows, and then TRL's on the training rows.

    Proves: Validation rows first (exact), against TRL on the same rows.
    """
    first = reference_by_hand(tmp_path)
    torch.manual_seed(11)
    rows = tiny.sft_rows(24).select(range(16))
    second = tiny.made(SFTTrainer, tmp_path / "second", model=first, train_dataset=rows, **OPTIONS)
    second.train()
    ours = run(tmp_path / "ours" / "run", ValidationFirst(**POLICY))
    assert tiny.furthest(ours, second) < 1e-6


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Not from the validation rows again."""
    whole = run(tmp_path / "whole" / "run", ValidationFirst(**POLICY), max_steps=4)
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run(tmp_path / "part" / "run", ValidationFirst(**POLICY), **options)
    (checkpoint,) = (tmp_path / "part" / "run").glob("checkpoint-2")
    again = made(tmp_path / "part" / "run", ValidationFirst(**POLICY), **options)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert again.state.global_step == 4
    assert tiny.furthest(again, whole) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {
            "warmup_steps": 100, "gradient_accumulation_steps": 16,
            "lr_scheduler_type": "cosine", "max_steps": 2,
        },
        {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": False},
    ],
    ids=lambda more: next(iter(more)),
)  # fmt: skip
def test_the_first_training_has_a_schedule_of_its_own(tmp_path: Path, more: dict[str, Any]) -> None:
    """Two dozen steps are all inside a warm-up, and one step if they accumulate.

    Proves: Validation rows first (exact), against the same training in a run of another schedule.
    """
    plain = made(tmp_path / "plain" / "run", ValidationFirst(**POLICY))
    rows = {"eval_dataset": tiny.sft_rows(4, 9)} if "eval_strategy" in more else {}
    other = made(tmp_path / "other" / "run", ValidationFirst(**POLICY), **rows, **more)
    assert tiny.furthest(plain, SimpleNamespace(model=tiny.model(layers=2))) > 0.01
    assert tiny.furthest(plain, other) == 0


@pytest.mark.slow
def test_it_has_two_dozen_steps_where_the_rows_allow(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is announced."""
    trained: list[int] = []
    train = AlphaSFTTrainer.train

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = train(self, *args, **kwargs)
        trained.append(self.state.global_step)
        return result

    monkeypatch.setattr(AlphaSFTTrainer, "train", counted)
    run(tmp_path / "run", ValidationFirst(epochs=6.0, learning_rate=RATE))
    said = capfd.readouterr().err
    assert "training on 8 rows first, 6 epochs, batches of 2, rate 0.3, constant" in said
    assert trained == [24, 3]
    made(tmp_path / "run", ValidationFirst(epochs=6.0, learning_rate=RATE))
    assert "by an earlier run" in capfd.readouterr().err


def test_a_trained_start_is_of_its_adapters(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same factors under another scale are trained anew, in the folder that runs share."""
    for number, scale in enumerate((8, 64, 8)):
        config = LoraConfig(**{**tiny.LORA, "lora_alpha": scale})
        made(tmp_path / str(number), ValidationFirst(epochs=1.0), peft_config=config)
        assert ("by an earlier run" in capfd.readouterr().err) == (number == 2)


@pytest.mark.slow
def test_an_evaluation_at_the_start_is_of_the_run(tmp_path: Path) -> None:
    rows = {"eval_dataset": tiny.sft_rows(4, 9)}
    more = {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2}
    trainer = made(tmp_path / "run", ValidationFirst(**POLICY), **rows, **more)
    trainer.train()
    assert "eval_loss" in trainer.state.log_history[0]


@pytest.mark.slow
def test_an_optimizer_that_was_handed_over_has_its_kind_and_settings(tmp_path: Path) -> None:
    model = tiny.model(layers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    arguments = {"model": model, "optimizers": (optimizer, None)}
    arguments["optim"] = "adamw_torch"
    handed = made(tmp_path / "a" / "run", ValidationFirst(**POLICY), **arguments)
    named = made(tmp_path / "b" / "run", ValidationFirst(**POLICY), optim_args="momentum=0.9")
    assert tiny.furthest(handed, named) < 1e-6


class Half:
    """A collator that labels the second half of each row, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.calls += 1
        labelled = []
        for row in rows:
            ids, half = list(row["input_ids"]), len(row["input_ids"]) // 2
            labelled.append({"input_ids": ids, "labels": [-100] * half + ids[half:]})
        return tiny.padded(labelled)


@pytest.mark.slow
def test_a_collator_of_ones_own_makes_its_batches_too(tmp_path: Path) -> None:
    collator = Half()
    made(tmp_path / "run", ValidationFirst(**POLICY), data_collator=collator)
    assert collator.calls >= 16


class Asking(AlphaSFTTrainer):
    """A subclass with an argument of its own, which its loss needs."""

    def __init__(self, *args: Any, factor: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.factor = factor

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return self.factor * super().compute_loss(*args, **kwargs)


@pytest.mark.slow
def test_a_subclass_has_no_part_in_it_and_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = made(tmp_path / "run", ValidationFirst(**POLICY), Asking, factor=0.5)
    assert "by AlphaSFTTrainer: Asking has no part in it" in capfd.readouterr().err
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize("options", [{"epochs": 0.0}, {"learning_rate": -1.0}])
def test_bad_numbers_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        ValidationFirst(**options)
