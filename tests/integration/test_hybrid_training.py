"""Fine-tuning of a hybrid of softmax attention and gated delta nets by the paper's values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.tiny_training import furthest, hybrid, losses, made, sft, sft_rows, weights

pytestmark = pytest.mark.slow


def trainer(folder: Path, *, alpha: bool = True, peft: Any = None, **more: Any) -> Any:
    from trl import SFTTrainer

    shared = {"model": hybrid(), "peft_config": peft, **more}
    if not alpha:
        return made(SFTTrainer, folder, **shared)
    given = {"train_dataset": sft_rows(), "validation_dataset": sft_rows(24, seed=5), **shared}
    return sft(folder, **{"score_layers": "3", "uncovered": "skip", **given})


@pytest.mark.parametrize("estimator", ["alphatoken", "direct"])
def test_all_tokens_kept_equals_trl_bit_for_bit(tmp_path: Path, estimator: str) -> None:
    """Every step is scored through the graph that trains, and changes nothing of it."""
    shared = {"max_steps": 3, "gradient_accumulation_steps": 2}
    plain = trainer(tmp_path / "trl", alpha=False, **shared)
    valued = trainer(tmp_path / "alpha", keep_ratio=1.0, estimator=estimator, **shared)
    plain.train()
    valued.train()
    assert losses(plain) == losses(valued)
    assert furthest(plain, valued) == 0


def test_adapters_on_the_projections_of_a_delta_net(tmp_path: Path) -> None:
    from peft import LoraConfig

    lora = LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=8,
        target_modules=["in_proj_qkv", "in_proj_b", "v_proj", "down_proj"],
    )  # fmt: skip
    ours = trainer(tmp_path, peft=lora, estimator="alphatoken", keep_ratio=0.5, uncovered="error")
    before = weights(ours.model)
    ours.train()
    moved = {n for n, w in weights(ours.model).items() if not torch.equal(w, before[n])}
    assert any("in_proj_qkv.lora_B" in name for name in moved)
    assert all("lora_" in name for name in moved)
    assert all(torch.isfinite(w).all() for w in weights(ours.model).values())
