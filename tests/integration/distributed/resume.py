"""Jobs of a run that is killed and goes on, in any layout."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from alphatoken.train import AlphaSFTConfig, AlphaSFTTrainer
from tests.integration import tiny_training as tiny
from tests.integration.distributed.worker import device_options


class _Die(TrainerCallback):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(layout: str, folder: Path) -> AlphaSFTTrainer:
    common = tiny.options(
        folder / "out", max_steps=4, save_strategy="steps", save_steps=2,
        per_device_train_batch_size=2, **{**tiny.ALPHA, "retention": "none", "score_layers": "1"},
        objective="adaptation", gradient_checkpointing=False,
    )  # fmt: skip
    common.update(device_options(layout))
    return AlphaSFTTrainer(
        model=tiny.model(),
        args=AlphaSFTConfig(**common),
        train_dataset=tiny.sft_rows(24),
        validation_dataset=tiny.sft_rows(24, seed=5),
        processing_class=tiny.tokenizer(),
    )


def whole(layout: str, folder: Path) -> list[Any]:
    return _trained(trainer(layout, folder), None)


def killed(layout: str, folder: Path) -> None:
    doomed = trainer(layout, folder.with_name("interrupted"))
    doomed.add_callback(_Die())
    doomed.train()


def resumed(layout: str, folder: Path) -> list[Any]:
    return _trained(trainer(layout, folder.with_name("interrupted")), True)


def _trained(one: AlphaSFTTrainer, resume: bool | None) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one.train(resume_from_checkpoint=resume)
    logged = [entry for entry in one.state.log_history if "loss" in entry]
    return [logged, one.ledger.state_tensors()]
