"""Validation is measured by the rule that training has, or the option is refused or its rule said.

That it is the same number is a property of ``test_rules.py``.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import pytest

from alphatoken.cli import main
from alphatoken.errors import AlphaTokenWarning
from alphatoken.train import AlphaDPOTrainer
from tests.integration.tiny_training import dpo, model, preference_rows, saved, sft, sums, tokenizer


def pairs_trainer(folder: Path, **more: Any) -> AlphaDPOTrainer:
    own = {"held_out_steps": 1, "retention": "none", "learning_rate": 0.03, **more}
    reference = None if own.get("precompute_ref_log_probs") else model()
    rows = preference_rows(24)
    return cast("AlphaDPOTrainer", dpo(folder, ref_model=reference, train_dataset=rows, **own))


OBJECTIVE = [  # a loss, a number, and that number beside what changes the reference's part
    {"loss_type": ["ipo"]},
    {"label_smoothing": 0.1},
    {"ld_alpha": 0.3, "precompute_ref_log_probs": True},
    *(
        pytest.param(more, marks=pytest.mark.slow)
        for more in (
            {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
            {"f_divergence_type": "js_divergence"},
            {"use_weighting": True},
            {"ld_alpha": 0.3},
        )
    ),
]
"""Losses of other forms than the one that validation pairs are measured by."""


@pytest.mark.parametrize("more", OBJECTIVE, ids=lambda more: ",".join(more))
def test_a_loss_of_another_form_is_said(tmp_path: Path, more: dict[str, Any]) -> None:
    with pytest.warns(AlphaTokenWarning, match="validation pairs are measured") as said:
        pairs_trainer(tmp_path, **more)
    (text,) = [str(one.message) for one in said if "validation pairs" in str(one.message)]
    assert all(n in text for n in more if n not in ("precompute_ref_log_probs", "loss_weights"))


def test_validation_rows_of_another_form_are_said(tmp_path: Path) -> None:
    """Plain text for validation labels its questions; prompts and completions do not."""
    text = [{"text": row["prompt"] + row["completion"]} for row in sums(12, 5)]
    chats = [
        {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "b c"}]}
    ] * 12
    made = tokenizer()
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"

    def trainer(train: Any, validation: Any) -> None:
        rows = {"train_dataset": train, "validation_dataset": validation}
        sft(tmp_path, retention="none", processing_class=made, **rows)

    for validation in (text, chats):
        with pytest.warns(AlphaTokenWarning, match=r"label 100% of their tokens .* another form"):
            trainer(sums(16, 0), validation)
    trainer(text, text)
    trainer(text, sums(16, 0))  # TRL then labels the prompts of these too
    trainer(sums(16, 0), sums(12, 5))


def test_the_command_says_it_in_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = saved(tmp_path, 4)
    words = [
        "--model_name_or_path", place / "model", "--train_file", place / "pairs.jsonl",
        "--loss_type", "ipo", "--validation_rows", "4", "--validation_batch_size", "2",
        "--policy", "top", "--use_cpu", "--bf16", "false", "--max_steps", "1", "--max_length", "64",
        "--save_strategy", "no", "--output_dir", tmp_path / "out", "--report_to", "none",
        "--no_chat_template",
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["dpo", *map(str, words)]) == 0
    said = capsys.readouterr().err
    assert "note: validation pairs are measured by plain DPO" in said
    assert "AlphaTokenWarning" not in said
