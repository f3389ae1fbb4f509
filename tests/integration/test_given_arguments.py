"""What the trainers take as ``args``: a configuration of ours, however it was made."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
from tests.integration import tiny_training as tiny
from tests.integration.tiny_training import model, sft_rows


def trainer(kind: Any, args: Any) -> Any:
    """With everything that it needs beside its configuration."""
    rows = {AlphaTrainer: tiny.tokenised, AlphaDPOTrainer: tiny.preference_rows}
    make = rows.get(kind, sft_rows)
    given = {"ref_model": model()} if kind is AlphaDPOTrainer else {}
    return kind(
        model=model(), args=args, train_dataset=make(8), validation_dataset=make(8, seed=5),
        processing_class=tiny.tokenizer(), **given,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")  # torch, without a GPU
def test_no_arguments_are_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = trainer(AlphaSFTTrainer, None).args
    assert args == AlphaSFTConfig()
    with pytest.raises(TypeError, match="multiple values for argument"):
        AlphaSFTTrainer(model(), args, args=args, train_dataset=sft_rows(8))


def test_arguments_of_another_trainer_are_refused(tmp_path: Path) -> None:
    """TRL's own too: the message says which class has their fields."""

    def of(kind: type) -> Any:
        return kind(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to=[])

    for kind, wrong in (
        (AlphaSFTTrainer, of(SFTConfig)), (AlphaSFTTrainer, of(AlphaDPOConfig)),
        (AlphaSFTTrainer, {"max_steps": 2}), (AlphaSFTTrainer, of(TrainingArguments)),
        (AlphaDPOTrainer, of(AlphaSFTConfig)), (AlphaTrainer, of(AlphaDPOConfig)),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="args must be an Alpha"):
            trainer(kind, wrong)


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
