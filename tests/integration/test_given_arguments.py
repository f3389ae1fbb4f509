"""What the trainers take as ``args``: everything that TRL takes, and nothing of it is lost."""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments
from trl import DPOConfig, KTOConfig, ModelConfig, ScriptArguments, SFTConfig, TrlParser

from alphatoken.cli.arguments import read_arguments
from alphatoken.errors import ConfigError
from alphatoken.train import (
    AlphaConfig,
    AlphaDPOConfig,
    AlphaDPOTrainer,
    AlphaOptions,
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

OURS = {field.name: field.default for field in dataclasses.fields(AlphaOptions)}


@dataclass
class HouseSFTConfig(SFTConfig):
    """What a user may have made of TRL's configuration."""

    house: str = "brick"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.counted = getattr(self, "counted", 0) + 1

    @property
    def colour(self) -> str:
        return f"red {self.house}"


@dataclass
class HouseDPOConfig(DPOConfig):
    house: str = "brick"


@dataclass
class HouseArguments(TrainingArguments):
    house: str = "brick"


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


def lost(given: Any, taken: Any) -> dict[str, Any]:
    """Attributes that are not what was given, derived ones too."""
    return {
        name: (value, getattr(taken, name, "missing"))
        for name, value in vars(given).items()
        if getattr(taken, name, "missing") is not value
    }


CASES = [
    (sft, SFTConfig, AlphaSFTConfig),
    (sft, HouseSFTConfig, AlphaSFTConfig),
    (dpo, DPOConfig, AlphaDPOConfig),
    (dpo, HouseDPOConfig, AlphaDPOConfig),
    (plain, TrainingArguments, AlphaConfig),
    (plain, HouseArguments, AlphaConfig),
]


@pytest.mark.parametrize(("make", "theirs", "ours"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_a_configuration_of_trl_is_taken_whole(
    tmp_path: Path, make: Any, theirs: Any, ours: Any
) -> None:
    """Every attribute as given, our options at their defaults; the given one is not touched."""
    folder = tmp_path / "run"
    given = theirs(output_dir=str(folder), **FEW)
    before = dict(vars(given))
    trainer = make(given)
    assert isinstance(trainer.args, ours)
    assert isinstance(trainer.args, theirs)
    assert lost(given, trainer.args) == {}
    assert {name: getattr(trainer.args, name) for name in OURS} == OURS
    assert vars(given) == before
    if theirs is HouseSFTConfig:
        assert trainer.args.colour == "red brick"
        assert trainer.args.counted == 1  # its checks ran once, when the user made it
    result = trainer.train()
    assert result.global_step == 2
    assert trainer.state.log_history[0]["alpha/kept_share"] == pytest.approx(0.5, abs=0.1)
    trainer.save_model(str(folder))
    saved = torch.load(folder / "training_args.bin", weights_only=False)
    assert type(saved) is type(trainer.args)
    assert saved.to_dict() == trainer.args.to_dict()


@pytest.mark.parametrize(
    ("make", "ours", "folder"),
    [(sft, AlphaSFTConfig, "-SFT"), (dpo, AlphaDPOConfig, "-DPO"),
     (plain, AlphaConfig, "tmp_trainer")],
    ids=["sft", "dpo", "plain"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")  # torch, without a GPU
def test_no_arguments_are_trls_defaults_and_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, ours: Any, folder: str
) -> None:
    monkeypatch.chdir(tmp_path)
    expected = ours(output_dir=folder, bf16=torch.cuda.is_available() and ours.bf16 is None)
    trainer = make(None)
    for field in dataclasses.fields(ours):
        if field.name not in ("logging_dir", "accelerator_config", "train_sampling_strategy"):
            assert getattr(trainer.args, field.name) == getattr(expected, field.name), field.name
    trainer.train()
    assert trainer.state.global_step == 3  # three epochs of eight rows


def test_a_model_by_name_and_arguments_by_position(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model().save_pretrained(tmp_path / "house" / "small-model")
    tokenizer().save_pretrained(tmp_path / "house" / "small-model")
    rows = {"validation_dataset": sft_rows(8, seed=5)}
    named = AlphaSFTTrainer("house/small-model", train_dataset=sft_rows(8), **rows)
    assert named.args.output_dir == "small-model-SFT"
    given = SFTConfig(output_dir=str(tmp_path / "run"), dataset_text_field="said", **FEW)
    second = AlphaSFTTrainer("house/small-model", given, None, sft_rows(8), **rows)
    assert second.args.dataset_text_field == "said"
    pairs = {"validation_dataset": preference_rows(8, seed=5)}
    third = AlphaDPOTrainer("house/small-model", None, None, None, preference_rows(8), **pairs)
    assert third.args.output_dir == "small-model-DPO"
    with pytest.raises(TypeError, match="each once"):
        AlphaSFTTrainer("house/small-model", given, args=given, train_dataset=sft_rows(8))


@pytest.mark.parametrize("theirs", [TrainingArguments, HouseArguments])
def test_arguments_of_transformers_in_a_trainer_of_trl(tmp_path: Path, theirs: Any) -> None:
    """As TRL takes them: what it adds has its defaults; secrets that ``to_dict`` masks survive."""
    given = theirs(output_dir=str(tmp_path), weight_decay=0.25, hub_token="secret", **FEW)
    taken = sft(given).args
    assert isinstance(taken, AlphaSFTConfig)
    assert taken.to_dict() | given.to_dict() == taken.to_dict()
    assert taken.hub_token == "secret"
    assert taken.max_length == SFTConfig.max_length
    if theirs is HouseArguments:
        assert vars(taken)["house"] == "brick"


def test_what_belongs_to_another_trainer_is_refused(tmp_path: Path) -> None:
    def of(kind: type) -> Any:
        return kind(output_dir=str(tmp_path), **FEW)

    for make, wrong in (
        (sft, of(DPOConfig)), (sft, of(AlphaDPOConfig)), (sft, {"max_steps": 2}),
        (sft, of(KTOConfig)), (sft, of(AlphaConfig)), (dpo, of(SFTConfig)),
        (dpo, of(AlphaSFTConfig)), (plain, of(AlphaDPOConfig)), (plain, "out"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="args"):
            make(wrong)


def test_an_option_of_ours_in_the_users_class_counts(tmp_path: Path) -> None:
    @dataclass
    class Ratio(SFTConfig):
        keep_ratio: float = 0.25

    assert sft(Ratio(output_dir=str(tmp_path), **FEW)).args.keep_ratio == 0.25
    with pytest.raises(ConfigError, match="keep_ratio"):
        sft(Ratio(output_dir=str(tmp_path), keep_ratio=0.0, **FEW))


def test_joined_arguments_can_be_written_and_read(tmp_path: Path) -> None:
    taken = sft(HouseSFTConfig(output_dir=str(tmp_path), house="straw", **FEW)).args
    place = io.BytesIO()
    torch.save(taken, place)
    place.seek(0)
    again = torch.load(place, weights_only=False)
    assert (again.house, again.colour, again.keep_ratio) == ("straw", "red straw", 0.5)
    changed = dataclasses.replace(again, house="wood", keep_ratio=0.3)
    assert (changed.colour, changed.keep_ratio, type(changed)) == ("red wood", 0.3, type(taken))


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
        "policy_reference: null\nuse_cpu: true\nbf16: false\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found = TrlParser((AlphaSFTConfig,)).parse_args_and_config(["--config", str(recipe)])[0]
    assert (found.policy_options, found.policy_reference) == ({"k": 7}, None)
