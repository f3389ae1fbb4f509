"""What the trainers take as ``args``: a configuration of ours, however it was made."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser, LlamaForSequenceClassification, TrainingArguments
from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

from alphatoken import Scorer, ScorerConfig
from alphatoken.cli.arguments import read_arguments
from alphatoken.errors import AlphaTokenError, ConfigError, InputError, ModelError
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


def test_a_ratio_in_quotes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keep_ratio must lie in \(0, 1\].*'0.3'"):
        AlphaSFTConfig(str(tmp_path), keep_ratio="0.3")  # type: ignore[arg-type]


# --- parsers of command lines -------------------------------------------------------------------

WORDS = {
    "policy": "bottom", "keep_ratio": "0.25", "layers": "0,2",
    "window": "8", "stability_weight": "0.5", "preconditioner": "null", "fisher_cache": "none",
    "shared_threshold": "true", "export_values": "false", "retention": "none", "use_cpu": "true",
    "objective": "adaptation", "learning_rate": "2e-3", "bf16": "false",
}  # fmt: skip
READ = {
    "policy": "bottom", "keep_ratio": 0.25, "layers": "0,2",
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


# --- wrong things ---------------------------------------------------------------------------------


def frame() -> Any:
    import pandas

    return pandas.DataFrame(tiny.sums(8))


class OwnRows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of a class of one's own, which TRL does not take."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, str]:
        return tiny.sums(8)[index]


WRONG: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "a data frame": (lambda: {"train_dataset": frame()}, r"pandas.*Dataset\.from_pandas"),
    "such validation rows": (lambda: {"validation_dataset": frame()}, "validation data set.*pan"),
    "an Arrow table": (lambda: {"train_dataset": sft_rows(8).data.table}, r"Dataset\(rows"),
    "a generator": (lambda: {"train_dataset": iter(tiny.sums(8))}, r"from_list\(list\(rows\)\)"),
    "rows of an own class": (lambda: {"train_dataset": OwnRows()}, r"from_list\(\[dict\(row\)"),
    "no training rows": (lambda: {"train_dataset": None}, "no training rows.*train_dataset="),
    "no model": (lambda: {"model": None}, "no model.*pass model="),
    "a tokenizer by its old name": (lambda: {"tokenizer": 1}, "Got: tokenizer.*processing_class,"),
    "a misspelt argument": (lambda: {"validation_datset": 1}, "mean validation_dataset"),
    "a model that is not there": (
        lambda: {"model": "no/such-model"}, "no model of this name.*Got: no/such-model"
    ),
    "a folder that is not there": (lambda: {"model": "./nowhere"}, "no such model folder"),
    "a classifier": (
        lambda: {"model": LlamaForSequenceClassification(model().config)}, "no head that predicts"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_things_are_one_error_that_says_what_to_do(kind: str, tmp_path: Path) -> None:
    given, message = WRONG[kind]
    with pytest.raises(AlphaTokenError, match=message) as error:
        tiny.sft(tmp_path, retention="none", **given())
    assert error.value.remedy


def test_a_data_frame_is_no_rows_of_the_plain_trainer_either(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="from_pandas"):
        tiny.made(AlphaTrainer, tmp_path, train_dataset=frame(), policy="standard")
    with pytest.raises(InputError, match="AlphaTrainer takes a model.*'name'.*from_pretrained"):
        tiny.made(AlphaTrainer, tmp_path, model="name", policy="standard")


@pytest.mark.slow
def test_the_remedy_for_a_data_frame_works(tmp_path: Path) -> None:
    from datasets import Dataset

    rows = Dataset.from_pandas(frame(), preserve_index=False)
    tiny.sft(tmp_path, retention="none", train_dataset=rows, max_steps=1).train()


@pytest.mark.parametrize("kind", [AlphaSFTConfig, AlphaDPOConfig, AlphaConfig, ScorerConfig])
def test_misspelt_options_are_named(kind: Any) -> None:
    option, meant = ("estimater", "estimator")
    with pytest.raises(ConfigError, match=f"{kind.__name__} has no such option.*mean {meant}"):
        kind(**{option: "label"})
    if kind is AlphaSFTConfig:
        with pytest.raises(ConfigError, match="max_length, as it is called today"):
            kind(max_seq_length=8)
        with pytest.raises(ConfigError, match="layers, as it is called today"):
            kind(score_layers="all")
    if kind is AlphaConfig:  # which has no option by that other name either
        with pytest.raises(ConfigError, match=r"leave it out; help\(AlphaConfig\)"):
            kind(max_seq_length=8)
    assert copy.copy(ScorerConfig("label")) == pickle.loads(pickle.dumps(ScorerConfig("label")))


@pytest.mark.parametrize("written", ["max_length", "max_seq_length"])
def test_options_of_the_configuration_are_no_arguments(written: str) -> None:
    remedy = r"option of the configuration.*args=AlphaSFTConfig\(max_length=\.\.\.\)"
    with pytest.raises(ConfigError, match=remedy):
        AlphaSFTTrainer("model", train_dataset=[], **{written: 8})  # type: ignore[arg-type]


def test_scorers_say_what_they_take() -> None:
    ids = torch.randint(4, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    with pytest.raises(InputError, match="takes a model, and not its name.*'folder'.*from_pret"):
        Scorer("folder", batch)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config must be a ScorerConfig.*dict: \"{'estimator'"):
        Scorer(model(), batch, config={"estimator": "label"})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="as retention, and not a name.*'diagonal'.*fit_fisher"):
        Scorer(model(), batch, retention="diagonal")
    with pytest.raises(ModelError, match="no head that predicts.*AutoModelForCausalLM"):
        Scorer(LlamaForSequenceClassification(model().config), batch)
