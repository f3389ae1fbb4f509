"""What the trainers take as ``args``: a configuration of ours, however it was made."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

from alphatoken.cli.arguments import read_arguments
from alphatoken.errors import ConfigError
from alphatoken.train import (
    AlphaConfig,
    AlphaDPOConfig,
    AlphaDPOTrainer,
    AlphaSFTConfig,
    AlphaSFTTrainer,
    AlphaTrainer,
)
from tests.integration.tiny_training import (
    model,
    preference_rows,
    sft_rows,
    tokenizer,
)

FEW = {"bf16": False, "use_cpu": True, "report_to": [], "max_steps": 2, "save_strategy": "no",
       "per_device_train_batch_size": 4, "disable_tqdm": True, "learning_rate": 1e-2,
       "logging_steps": 1, "dataloader_pin_memory": False}  # fmt: skip


def tokenised(rows: int, seed: int = 0) -> list[dict[str, Any]]:
    found = []
    for row in sft_rows(rows, seed):
        prompt, answer = (tokenizer()(row[k])["input_ids"] for k in ("prompt", "completion"))
        found.append({"input_ids": prompt + answer, "labels": [-100] * len(prompt) + answer})
    return found


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    pad = {"input_ids": 0, "labels": -100}
    found = {
        name: torch.tensor([row[name] + [fill] * (width - len(row[name])) for row in rows])
        for name, fill in pad.items()
    }
    return {**found, "attention_mask": (found["labels"] != -100).long()}


def sft(args: Any, **more: Any) -> AlphaSFTTrainer:
    given = {
        "model": model(), "train_dataset": sft_rows(8), "processing_class": tokenizer(),
        "validation_dataset": sft_rows(8, seed=5), **more,
    }  # fmt: skip
    return AlphaSFTTrainer(args=args, **given)


def dpo(args: Any, **more: Any) -> AlphaDPOTrainer:
    given = {
        "model": model(), "ref_model": model(),
        "train_dataset": preference_rows(8), "processing_class": tokenizer(),
        "validation_dataset": preference_rows(8, seed=5), **more,
    }  # fmt: skip
    return AlphaDPOTrainer(args=args, **given)


def plain(args: Any, **more: Any) -> AlphaTrainer:
    given = {
        "model": model(), "train_dataset": tokenised(8), "data_collator": collate,
        "validation_dataset": tokenised(8, seed=5), **more,
    }  # fmt: skip
    return AlphaTrainer(args=args, **given)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")  # torch, without a GPU
def test_no_arguments_are_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = sft(None)
    assert trainer.args == AlphaSFTConfig()
    with pytest.raises(TypeError, match="multiple values for argument"):
        AlphaSFTTrainer(model(), trainer.args, args=trainer.args, train_dataset=sft_rows(8))


def test_arguments_of_another_trainer_are_refused(tmp_path: Path) -> None:
    """TRL's own too: the message says which class has their fields."""

    def of(kind: type) -> Any:
        return kind(output_dir=str(tmp_path), **FEW)

    for make, wrong in (
        (sft, of(SFTConfig)), (sft, of(AlphaDPOConfig)), (sft, {"max_steps": 2}),
        (sft, of(TrainingArguments)), (dpo, of(AlphaSFTConfig)), (plain, of(AlphaDPOConfig)),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="args must be an Alpha"):
            make(wrong)


# --- parsers of command lines -------------------------------------------------------------------

WORDS = {
    "policy": "bottom", "keep_ratio": "0.25", "score_layers": "0,2",
    "window": "8", "stability_weight": "0.5", "preconditioner": "null", "fisher_cache": "none",
    "shared_threshold": "true", "export_values": "false", "retention": "none", "use_cpu": "true",
    "objective": "adaptation", "learning_rate": "2e-3", "bf16": "false",
}  # fmt: skip
READ = {
    "policy": "bottom", "keep_ratio": 0.25, "score_layers": "0,2",
    "window": 8, "stability_weight": 0.5, "preconditioner": None, "fisher_cache": None,
    "shared_threshold": True, "export_values": False, "retention": "none", "use_cpu": True,
    "objective": "adaptation", "learning_rate": 2e-3, "bf16": False,
}  # fmt: skip


def parsed(parser: Callable[..., Any], kind: Any, words: list[str]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers' own deprecated options
        return parser((ScriptArguments, kind, ModelConfig)).parse_args_into_dataclasses(words)[1]


@pytest.mark.parametrize("parser", [TrlParser, HfArgumentParser], ids=lambda one: one.__name__)
@pytest.mark.parametrize("kind", [AlphaSFTConfig, AlphaDPOConfig, AlphaConfig])
def test_parsers_of_trl_and_transformers_read_our_options(
    tmp_path: Path, parser: Any, kind: Any
) -> None:
    """As in TRL's scripts; and each option as our own command line reads it."""
    words = [word for name, text in WORDS.items() for word in (f"--{name}", text)]
    words += ["--output_dir", str(tmp_path)]
    found = parsed(parser, kind, words)
    assert {name: getattr(found, name) for name in READ} == READ
    assert "--keep_ratio" in parser((kind,)).format_help()
    if kind is not AlphaConfig:
        command = "sft" if kind is AlphaSFTConfig else "dpo"
        ours = read_arguments(command, words, kind).training
        assert {name: getattr(ours, name) for name in READ} == READ


def test_a_recipe_goes_through_trls_parser(tmp_path: Path) -> None:
    """Mappings and null too, which no command line has."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output_dir: {tmp_path}\npolicy: eaft\npolicy_options: {{k: 7}}\n"
        "policy_cache: null\nuse_cpu: true\nbf16: false\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found = TrlParser((AlphaSFTConfig,)).parse_args_and_config(["--config", str(recipe)])[0]
    assert (found.policy_options, found.policy_cache) == ({"k": 7}, None)
