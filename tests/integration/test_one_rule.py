"""Validation is measured by the rule that training has, or the option is refused or its rule said.

At the first step of DPO the policy is its reference, so every pair's preference loss is log 2
under any option: whatever else is logged there was made of two different rules.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset

from alphatoken.cli import main
from alphatoken.errors import AlphaTokenWarning, ConfigError
from alphatoken.train import (
    AlphaConfig,
    AlphaDPOConfig,
    AlphaDPOTrainer,
    AlphaSFTConfig,
    AlphaSFTTrainer,
    AlphaTrainer,
)
from tests.integration.tiny_training import (
    ALPHA,
    dpo,
    model,
    options,
    preference_rows,
    saved,
    sft,
    sums,
    tokenizer,
)


def pairs_trainer(folder: Path, **more: Any) -> AlphaDPOTrainer:
    own = {"held_out_steps": 1, "retention": "none", "learning_rate": 0.03, **more}
    reference = None if own.get("precompute_ref_log_probs") else model()
    rows = preference_rows(24)
    return cast("AlphaDPOTrainer", dpo(folder, ref_model=reference, train_dataset=rows, **own))


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


# --- labels: a collator of one's own, and rows of another form ------------------------------------


def labelled_rows(rows: int, seed: int) -> Dataset:
    """Tokenised, with a column that only the collator knows what to do with."""
    made = tokenizer()
    found = []
    for row in sums(rows, seed):
        ids = made(row["prompt"] + row["completion"])["input_ids"]
        found.append({"input_ids": ids, "labels": ids, "begin": len(ids) // 2})
    return Dataset.from_list(found)


class SecondHalf:
    """A collator that labels what ``begin`` says, and remembers the labels that it made."""

    def __init__(self) -> None:
        self.labelled: dict[tuple[int, ...], int] = {}

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(row["input_ids"]) for row in rows)
        found = {name: torch.zeros(len(rows), width, dtype=torch.long) for name in MADE}
        found["labels"] -= 100
        for i, row in enumerate(rows):
            ids, begin = torch.as_tensor(row["input_ids"]), row["begin"]
            found["input_ids"][i, : len(ids)] = ids
            found["attention_mask"][i, : len(ids)] = 1
            found["labels"][i, begin : len(ids)] = ids[begin:]
            self.labelled[tuple(ids.tolist())] = len(ids) - begin
        return found


MADE = ("input_ids", "labels", "attention_mask")


@pytest.mark.parametrize("kind", ["sft", "plain"])
@pytest.mark.parametrize("how", ["values", "token Fisher", "policy"])
def test_a_collator_of_ones_own_labels_every_batch(tmp_path: Path, kind: str, how: str) -> None:
    """Validation, the Fisher's prompts and sequences, and a pass over the rows."""
    more: dict[str, Any] = {**ALPHA, "remove_unused_columns": False}
    if how == "token Fisher":
        more["fisher_labels"] = "token"
    if how == "policy":
        more["policy"] = "stm"
        more["policy_options"] = {"threshold": 1e6}
    config, trainer_kind = (AlphaSFTConfig, AlphaSFTTrainer) if kind == "sft" else PLAIN
    named = options(tmp_path / "out", **more)
    if kind == "plain":
        del named["max_length"]
    else:
        named["dataset_kwargs"] = {"skip_prepare_dataset": True}
    collator = SecondHalf()
    trainer = trainer_kind(
        model=model(),
        args=config(**named),
        data_collator=collator,
        train_dataset=labelled_rows(16, 0),
        validation_dataset=None if how == "policy" else labelled_rows(12, 5),
        processing_class=tokenizer(),
    )
    rows = labelled_rows(16, 0) if how == "policy" else trainer.rows.validation
    batch = trainer.row_batch([dict(row) for row in rows][:4])
    counts = (batch["labels"] != -100).sum(-1).tolist()
    assert counts == [len(row["input_ids"]) - row["begin"] for row in rows][:4]
    prompts = trainer.fisher_prompts(trainer.train_dataset, 3)
    assert [len(prompt) for prompt in prompts] == labelled_rows(16, 0)["begin"][:3]
    sequences = trainer.fisher_sequences(trainer.train_dataset, 2)
    assert int((sequences["labels"] != -100).sum()) == sum(
        len(row["input_ids"]) - row["begin"] for row in labelled_rows(16, 0).select(range(2))
    )
    trainer.train()
    if how == "policy":
        assert trainer.token_policy.summary
        response = sum(collator.labelled.values())
        assert trainer.weigher._columns is not None
        assert len(trainer.weigher._columns) in (16, response)


PLAIN = (AlphaConfig, AlphaTrainer)


def test_validation_rows_of_another_form_are_said(tmp_path: Path) -> None:
    """Plain text for validation labels its questions; prompts and completions do not."""
    text = [{"text": row["prompt"] + row["completion"]} for row in sums(12, 5)]
    chats = [
        {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "b c"}]}
    ] * 12
    made = tokenizer()
    made.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"

    def trainer(train: Any, held: Any) -> None:
        rows = {"train_dataset": train, "validation_dataset": held}
        sft(tmp_path, retention="none", processing_class=made, **rows)

    for held in (text, chats):
        with pytest.warns(AlphaTokenWarning, match=r"label 100% of their tokens .* another form"):
            trainer(sums(16, 0), held)
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
        "--row_format", "text",
    ]  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["dpo", *map(str, words)]) == 0
    said = capsys.readouterr().err
    assert "note: validation pairs are measured by plain DPO" in said
    assert "AlphaTokenWarning" not in said
