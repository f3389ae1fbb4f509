"""Validation is measured by the rule that training has, or the option is refused or its rule said.

At the first step of DPO the policy is its reference, so every pair's preference loss is log 2
under any option: whatever else is logged there was made of two different rules.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest

from alphatoken.errors import AlphaTokenWarning, ConfigError
from alphatoken.train import AlphaDPOConfig, AlphaDPOTrainer
from tests.integration.tiny_training import ALPHA, model, options, preference_rows, tokenizer


def pairs_trainer(folder: Path, **more: Any) -> AlphaDPOTrainer:
    own = {**ALPHA, "held_out_steps": 1, "retention": "none", "learning_rate": 0.03, **more}
    return AlphaDPOTrainer(
        model=model(),
        ref_model=None if own.get("precompute_ref_log_probs") else model(),
        args=AlphaDPOConfig(**options(folder, **own)),
        train_dataset=preference_rows(24),
        validation_dataset=preference_rows(12, seed=5),
        processing_class=tokenizer(),
    )


def looks(trainer: AlphaDPOTrainer) -> list[float]:
    """The pool's preference loss, log by log."""
    return [
        entry["alpha/validation_pool"]
        for entry in trainer.state.log_history
        if "alpha/validation_pool" in entry
    ]


OBJECTIVE = [
    {"loss_type": ["ipo"]},
    {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
    {"label_smoothing": 0.1},
    {"f_divergence_type": "js_divergence"},
    {"use_weighting": True},
    {"ld_alpha": 0.3},
    {"ld_alpha": 0.3, "precompute_ref_log_probs": True},
]
"""Losses of other forms than the one that validation pairs are measured by."""
RULES = [
    {},
    {"precompute_ref_log_probs": True},
    {"beta": 0.5},
    {"sync_ref_model": True},
    *OBJECTIVE,
]


@pytest.mark.parametrize("more", RULES, ids=lambda more: ",".join(more) or "plain")
def test_the_pool_begins_at_log_two(tmp_path: Path, more: dict[str, Any]) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = pairs_trainer(tmp_path, max_steps=1, **more)
        trainer.train()
    assert looks(trainer)[0] == pytest.approx(math.log(2), abs=1e-4)
    texts = [str(one.message) for one in said if issubclass(one.category, AlphaTokenWarning)]
    named = [text for text in texts if "validation pairs" in text]
    assert len(named) == (more in OBJECTIVE)
    for name in more if named else ():
        assert name in named[0] or name in ("precompute_ref_log_probs", "loss_weights")


def test_a_reference_that_follows_the_policy_is_looked_at_anew(tmp_path: Path) -> None:
    """With the reference equal to the policy after every step, the pool stays at log 2."""
    follows = {"ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0}
    trainer = pairs_trainer(tmp_path, sync_ref_model=True, **follows)
    trainer.train()
    assert looks(trainer) == pytest.approx([math.log(2)] * 4, abs=1e-5)


def test_a_likelihood_loss_is_no_preference(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loss_type"):
        AlphaDPOConfig(**options(tmp_path, **ALPHA, loss_type=["sft"]))
    AlphaDPOConfig(**options(tmp_path, loss_type=["sft"], policy="standard"))
