"""Recipes and the plan: every packaged recipe passes ``--dry-run`` offline, and says the truth."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from alphatoken.cli import main
from alphatoken.cli.arguments import Arguments, read_arguments
from alphatoken.cli.launching import layout_of, wants_launch
from alphatoken.cli.planning import plan_run
from alphatoken.cli.recipes import Recipe, accelerate_config, find_recipe, packaged_recipes
from alphatoken.errors import AlphaTokenError, ConfigError, UnsupportedError
from alphatoken.train.dpo import AlphaDPOConfig
from alphatoken.train.plan import Layout, Plan, make_plan
from alphatoken.train.sft import AlphaSFTConfig

RECIPES = [recipe for recipe in packaged_recipes() if "model_name_or_path" in recipe.options]
NAMES = [recipe.name for recipe in RECIPES]
OVERLAYS = [recipe for recipe in packaged_recipes() if recipe.name not in NAMES]
"""Recipes that go on top of others."""
PRINTED = [find_recipe(name) for name in ("laptop-lora", "magicoder-qwen", "ultrafeedback-gemma")]
CONFIGURATIONS: dict[str, Any] = {"sft": AlphaSFTConfig, "dpo": AlphaDPOConfig}
MODELS = {"llama": 3_212_749_824, "gemma": 4_300_079_472, "qwen": 9_409_813_744}
"""Parameters of the real checkpoints, as the hub counts them."""

TASKS = ("magicoder", "metamath", "ultrachat", "ultrafeedback")


def read(name: str, *words: str) -> Arguments:
    recipe = find_recipe(name)
    command = recipe.command or "sft"
    return read_arguments(command, ["--config", name, "--dry-run", *words], CONFIGURATIONS[command])


@cache
def plan(name: str, *words: str) -> Plan:
    arguments = read(name, *words)
    return plan_run(arguments, layout_of(arguments))


# --- every recipe -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("recipe", PRINTED, ids=lambda recipe: recipe.name)
def test_dry_run_prints_the_plan_offline(
    recipe: Recipe, no_network: None, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    assert main([str(recipe.command), "--config", recipe.name, "--dry-run"]) == 0
    assert time.monotonic() - started < 60
    said = yaml.safe_load(capsys.readouterr().out)
    assert said["model"]["name"] == recipe.options["model_name_or_path"]
    assert said["steps"] == plan(recipe.name).steps
    assert said["options"].keys() == plan(recipe.name).options.keys()


def test_the_papers_settings_are_all_there() -> None:
    expected = {f"{task}-{model}" for task in TASKS for model in MODELS}
    assert expected <= set(NAMES)
    assert all(recipe.about and "\n" not in recipe.about for recipe in RECIPES)


def the_papers_numbers(task: str, model: str) -> dict[str, Any]:
    """Main text and App. "Implementation Details", "Training and Validation Setup", in YAML."""
    pairs = task == "ultrafeedback"
    length, epochs = {"ultrachat": (2048, 2), "ultrafeedback": (2048, 3)}.get(task, (4096, 3))
    rate = 1e-5 if model == "qwen" else 2e-5
    every = {
        "max_length": length, "num_train_epochs": epochs,
        "learning_rate": pytest.approx(rate / 10 if pairs else rate, rel=1e-9),
        "lr_scheduler_type": "cosine", "optim": "adamw_torch", "warmup_steps": 0,
        "weight_decay": 0.0, "max_grad_norm": 0.0, "bf16": True, "dtype": "float32",
        "gradient_checkpointing": True, "use_peft": False, "seed": 0,
    }  # fmt: skip
    if task == "ultrachat":
        return every | {"policy": "all", "retention": "none", "validation_rows": 0, "turns": "all"}
    every |= {
        "keep_ratio": 0.5, "stability_weight": 1.5, "window": 32, "score_layers": "3",
        "keep_scope": "global", "kept_normalization": "response" if pairs else "sum",
        "estimator": "alphatoken", "on_leak": "remove",
        "validation_mode": "fixed", "validation_rows": 32, "validation_batch_size": 32,
        "held_out_share": 0.0, "held_out_steps": 0,
        "retention": "diagonal", "fisher_samples": 1000, "fisher_prompts": 1000,
        "fisher_labels": "sequence", "fisher_max_new_tokens": 256,
    }  # fmt: skip
    if not pairs:
        return every | {"completion_only_loss": True}
    return every | {
        "beta": 0.1, "loss_type": ["sigmoid"], "precompute_ref_log_probs": True,
        "max_prompt_length": 1024, "max_response_length": 1024, "long_prompts": "cut",
        "shared_threshold": False, "masked_logit": False,
    }  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_what_the_paper_says(task: str, model: str) -> None:
    """Number by number, as the file says it; and no number of training stands there besides."""
    said = dict(find_recipe(f"{task}-{model}").options)
    expected = the_papers_numbers(task, model)
    assert {name: said.pop(name, "not said") for name in expected} == expected
    processes = accelerate_config(said["accelerate_config"])[1]["num_processes"]
    rows = said.pop("per_device_train_batch_size") * said.pop("gradient_accumulation_steps")
    assert processes * rows == (128 if task == "ultrachat" else 64)
    said.pop("validation_micro_batch_size", None)  # how they are run, and what is written
    left = {n for n, value in said.items() if isinstance(value, int | float) and value is not False}
    assert left == {"logging_steps", "save_steps", "save_total_limit"}


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("task", TASKS)
def test_what_is_planned_is_what_the_recipe_says(task: str, model: str) -> None:
    arguments = read(f"{task}-{model}")
    found, args = plan(f"{task}-{model}"), arguments.training
    expected = the_papers_numbers(task, model)
    assert found.batch["rows"] == (128 if task == "ultrachat" else 64)
    assert found.batch["length"] == expected["max_length"]
    assert found.layout["processes"] == 4
    assert found.model["parameters"] == MODELS[model]
    assert args.learning_rate == expected["learning_rate"]
    assert args.needs_values == (task != "ultrachat")
    if task != "ultrachat":
        assert len(found.scored["layers"]) == 3


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("laptop", "meta"))])
@pytest.mark.parametrize("top", OVERLAYS, ids=lambda recipe: recipe.name)
def test_a_recipe_goes_on_top_of_others(
    top: Recipe, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where it is of the same command; and never without the clean rows that it asks for."""
    clean = tmp_path / "clean.jsonl"
    clean.write_text('{"prompt": "a", "response": "b"}\n' * 16)
    words = [str(top.command), "--config", name, "--config", top.name, "--dry-run"]
    if find_recipe(name).command != top.command:
        assert main([*words, "--validation_file", str(clean)]) == 2
        assert "another command" in capsys.readouterr().err
        return
    if not name.startswith("laptop"):
        assert main([*words, "--validation_file", str(clean)]) == 2
        assert "4 processes" in capsys.readouterr().err
        words += ["--accelerate_config", "none"]
    assert main([*words, "--validation_file", str(clean)]) == 0
    options = yaml.safe_load(capsys.readouterr().out)["options"]
    assert "retention" not in options  # back at its default, which no plan lists
    for option, value in top.options.items():
        assert option == "retention" or options[option]["value"] == value, option
    assert main(words) == 2
    assert "--validation_file FILE" in capsys.readouterr().err


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for recipe in (*RECIPES, *OVERLAYS):
        assert any(line.startswith(recipe.name) and recipe.about in line for line in lines)


def test_every_choice_of_a_paper_recipe_is_an_option_and_has_a_comment() -> None:
    for recipe in RECIPES:
        text = recipe.path.read_text(encoding="utf-8")
        assert text.startswith("#")
        if not recipe.name.startswith("laptop"):
            assert text.count('App. "') + text.count("main text") >= 5


HARMFUL: dict[str, Any] = {
    "policy": lambda value: value == "bottom",
    "stability_weight": lambda value: value >= 30,
}
"""Settings that docs/results.md measured as harmful: the bottom half costs 3 to 7 of the target
loss, lambda = 30 0.8."""


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_no_recipe_sets_what_was_measured_as_harmful(recipe: Recipe) -> None:
    args = read(recipe.name).training
    assert [name for name, harms in HARMFUL.items() if harms(getattr(args, name))] == []


# --- overrides ----------------------------------------------------------------------------------


def test_the_command_line_overrides_the_recipe() -> None:
    found = plan(
        "magicoder-llama", "--learning-rate", "1e-6", "--keep_ratio=0.25", "--window", "none",
        "--score_layers", "0,4", "--num_processes", "8",
    )  # fmt: skip
    assert found.options["learning_rate"] == (1e-6, 2e-5)
    assert found.options["window"] == (None, 32)
    assert found.scored["layers"] == [0, 4]
    assert found.layout["processes"] == 8
    assert found.batch["rows"] == 128
    assert found.batch["kept_at_most"] == found.batch["tokens_at_most"] // 4


@pytest.mark.parametrize(
    ("words", "share"),
    [
        (["--policy", "token-cleaning"], 0.6),
        (["--policy", "stm"], None),
        (["--policy", "stm", "--policy_mode", "budget"], 0.5),
        (["--policy", "all"], 1.0),
    ],
)
def test_the_plan_says_what_a_policy_keeps(words: list[str], share: float | None) -> None:
    """The published share of its own rule, not the budget that it does not look at."""
    found = plan("magicoder-llama", *words)
    assert found.batch["keep_ratio"] == share
    if share is None:
        assert found.batch["kept_at_most"] == found.batch["tokens_at_most"]


def test_what_a_recipe_says_of_values_gives_way_to_another_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Named on the command line or by a later recipe; what is said beside it is refused."""
    found = plan("magicoder-llama", "--policy", "stm")
    assert not {"keep_scope", "kept_normalization"} & set(found.options)
    assert "keep_scope, kept_normalization of the recipe: of no use to policy stm" in str(
        found.notes
    )
    assert plan("magicoder-llama", "--policy", "bottom").options["keep_scope"][0] == "global"
    assert plan("magicoder-llama", "--policy", "harmless").options.get("keep_scope") is None
    later = tmp_path / "later.yaml"
    later.write_text("policy: stm\n")
    words = ["sft", "--config", "magicoder-llama", "--config", str(later), "--dry-run"]
    assert main(words) == 0
    later.write_text("policy: stm\nkeep_scope: global\n")
    capsys.readouterr()
    assert main(words) == 2
    assert "keep_scope belongs to token values" in capsys.readouterr().err
    assert main([*words[:3], "--policy", "stm", "--keep_scope", "global", "--dry-run"]) == 2


@pytest.mark.parametrize("model", MODELS)
def test_ti_dpo_runs_on_the_papers_recipe(model: str) -> None:
    """As published, with its triplet loss; the reference stays in memory."""
    found = plan(f"ultrafeedback-{model}", "--policy", "ti-dpo")
    assert "precompute_ref_log_probs" in str(found.notes)


def test_options_that_are_the_default_are_not_listed() -> None:
    found = plan("magicoder-llama")
    assert "stability_weight" not in found.options  # written in the recipe, and the default
    assert found.options["max_length"] == (4096, 1024)
    assert not {"dry_run", "use_cpu", "accelerate_config"} & set(found.options)


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("learning_rate: 3e-4\nkeep-ratio: 0.7\nscore_layers: 1\nenv: {MINE: 1}\n")
    arguments = read_arguments("sft", ["--config", str(recipe), "--use_cpu"], AlphaSFTConfig)
    assert arguments.training.learning_rate == 3e-4  # YAML reads 3e-4 as text
    assert arguments.training.keep_ratio == 0.7
    assert arguments.recipe is not None
    assert arguments.recipe.env == {"MINE": "1"}


def test_a_later_recipe_goes_before_an_earlier_one(tmp_path: Path) -> None:
    """And the command line before both."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("about: one\nlearning_rate: 3.0e-4\nkeep_ratio: 0.7\nseed: 1\nenv: {A: 1}\n")
    second.write_text("keep_ratio: 0.6\nseed: 2\nscore_layers: 1\nenv: {B: 2}\n")
    words = ["--config", str(first), f"--config={second}", "--seed", "3", "--use_cpu"]
    found = read_arguments("sft", words, AlphaSFTConfig)
    args, recipe = found.training, found.recipe
    assert (args.learning_rate, args.keep_ratio, args.seed) == (3e-4, 0.6, 3)
    assert recipe is not None
    assert (recipe.about, recipe.env) == ("one", {"A": "1", "B": "2"})
    assert recipe.name == "first, second"
    second.write_text("command: dpo\n")
    with pytest.raises(ConfigError, match="second is for `alphatoken dpo`"):
        read_arguments("sft", words, AlphaSFTConfig)


@pytest.mark.parametrize("name", ["fsdp2", "zero2", "ddp"])
def test_layouts_are_read_by_accelerate_too(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path, config = accelerate_config(name)
    count = 4 if name in ("fsdp2", "zero2") else 2
    theirs = load_config_from_file(str(path))
    assert theirs.num_processes == config["num_processes"] == count
    assert str(theirs.distributed_type.value) == config["distributed_type"]
    mixed = name in ("fsdp2", "zero2")
    assert Layout.read(config) == Layout(name, count, mixed)


@pytest.mark.parametrize(
    ("gpus", "words", "layout"),
    [
        (0, [], Layout()),
        (1, [], Layout()),
        (4, [], Layout("ddp", 4, False)),
        (4, ["--num_processes", "2"], Layout("ddp", 2, False)),
        (4, ["--num_processes", "1"], Layout()),
        (4, ["--accelerate_config", "none"], Layout()),
        (4, ["--use_cpu"], Layout()),
        (0, ["--use_cpu", "--num_processes", "3"], Layout("ddp", 3, False)),
        (4, ["--accelerate_config", "zero2"], Layout("zero2", 4)),
        (8, ["--accelerate_config", "zero2", "--num_processes", "8"], Layout("zero2", 8)),
    ],
)
def test_processes_without_a_layout_of_ones_own(
    gpus: int, words: list[str], layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are GPUs, unless something else is asked for."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    base = ["--model_name_or_path", "m", "--output_dir", str(tmp_path), "--bf16", "false"]
    arguments = read_arguments("sft", [*base, *words], AlphaSFTConfig)
    assert layout_of(arguments) == layout
    assert wants_launch(arguments) == (layout.processes > 1)
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        with monkeypatch.context() as started:
            started.setenv(name, "1")
            assert wants_launch(arguments) == (layout.processes > 1)
            started.setenv(name, "2")
            asked = "--accelerate_config" in words
            assert wants_launch(arguments) == (asked and layout.processes > 1)
            if name.startswith("SLURM") and not asked:
                with pytest.raises(ConfigError, match="would each train alone"):
                    layout_of(arguments)
                started.setenv("WORLD_SIZE", "2")
                assert layout_of(arguments).processes == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not wants_launch(arguments), "this is one of the processes already"


# --- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config", "magicoder-lama"], "did you mean magicoder-llama"),
        (["--config", "no/such/file.yaml"], "no such recipe"),
        (["--config", "ultrafeedback-llama"], "for `alphatoken dpo`"),
        (["--config", "magicoder-llama", "--keep_ration", "0.5"], "did you mean keep_ratio"),
        (["--config", "magicoder-llama", "--keep_ratio", "much"], "invalid float value"),
        (["--config", "magicoder-llama", "--keep_ratio", "0"], "ratio must lie in (0, 1]"),
        (["--config", "magicoder-llama", "--policy", "best"], "there is no such policy"),
        (["--config", "magicoder-llama", "--row_format", "xml"], "invalid choice"),
        (["--config", "magicoder-llama", "--accelerate_config", "fsdp9"], "no such accelerate"),
        (["--config", "magicoder-llama", "--accelerate_config", "fsdp1"], "fsdp_version: 2"),
        (["--config", "magicoder-llama", "--score_layers", "40"], "within the model"),
        (["--config", "magicoder-llama", "--estimator", "label"], "sharded weights"),
        (
            ["--config", "magicoder-llama", "--model_name_or_path", "runs/none"],
            (
                "no model folder of this name, and none in the hub's cache. Got: runs/none. "
                "Remedy: --model_name_or_path FOLDER"
            ),
        ),
        (["--model_name_or_path", "m", "--learning_rate"], "expected one argument"),
        (["--model_name_or_path", "m", "stray"], "belongs to no option"),
        ([], "no model is named"),
    ],
)
def test_bad_arguments_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], no_network: None
) -> None:
    assert main(["sft", *words, "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert said.lower() in captured.err.lower()
    assert captured.err.count("\n") == 1
    assert not captured.out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rate: [", "cannot be read"),
        ("- one\n- two\n", "holds no options"),
        ("lerning_rate: 1\n", "did you mean learning_rate"),
        ("model_shape: llama\n", "model_shape of the recipe is not of its kind"),
        ("env: 3\n", "env of the recipe"),
    ],
)
def test_a_broken_recipe_is_named(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.yaml").write_text(text)
    words = ["--config", str(tmp_path / "broken.yaml"), "--model_name_or_path", "m", "--dry-run"]
    assert main(["sft", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_a_shape_that_is_none_is_refused(tmp_path: Path) -> None:
    recipe = tmp_path / "shape.yaml"
    recipe.write_text("model_name_or_path: a/b\nmodel_shape: {model_type: no_such_model}\n")
    with pytest.raises(ConfigError, match="not a model's shape"):
        plan(str(recipe))


# --- the numbers of the plan --------------------------------------------------------------------


def small(layers: int = 4, width: int = 64, vocabulary: int = 96, **more: Any) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, vocab_size=vocabulary, **more,
        )
    )  # fmt: skip


def options(tmp_path: Path, kind: Any = AlphaSFTConfig, **more: Any) -> Any:
    return kind(output_dir=str(tmp_path), use_cpu=True, bf16=False, **more)


def test_steps_are_those_that_transformers_takes(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    for rows, micro, accumulation, epochs in ((100, 4, 4, 3), (17, 4, 2, 1), (3, 4, 4, 2.5)):
        shape = {
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": accumulation,
            "num_train_epochs": epochs,
        }
        args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **shape)
        trainer = Trainer(small(2), args, train_dataset=[{"input_ids": [1]}] * rows)
        loader = trainer.get_train_dataloader()
        expected = trainer.set_initial_training_values(args, loader)
        plan = make_plan(small(), options(tmp_path, **shape), Layout(), command="sft", rows=rows)
        assert plan.steps["steps"] == expected[-1]


def test_what_a_run_would_refuse_the_plan_refuses(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MixtralConfig

    config = MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, num_local_experts=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(AlphaTokenError, match="router weight"):
        make_plan(model, options(tmp_path), Layout(), command="sft")
    found = make_plan(model, options(tmp_path, uncovered="skip"), Layout(), command="sft")
    assert any("left out" in note for note in found.notes)


def test_layers_without_a_rule_are_refused_by_name(tmp_path: Path) -> None:
    """A gated convolution has none; a gated delta net has one."""
    from transformers import AutoModelForCausalLM, Lfm2Config

    config = Lfm2Config(
        hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, num_hidden_layers=2, layer_types=["full_attention", "conv"],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    shape = {"uncovered": "skip", "score_layers": "1"}
    with pytest.raises(UnsupportedError, match=r"layers\.1 \(conv\)"):
        make_plan(model, options(tmp_path, estimator="direct", **shape), Layout(), command="sft")
    make_plan(model, options(tmp_path, estimator="label", **shape), Layout(), command="sft")
    hybrid = plan("ultrafeedback-qwen", "--accelerate_config", "none")
    assert hybrid.scored["estimator"] == "alphatoken"


def test_adapters_are_scored_by_their_factors() -> None:
    found = plan("laptop-lora")
    assert all("lora_" in name for name in found.scored["linears"])
    assert found.model["trainable"] < found.model["parameters"] / 10


def test_a_vision_tower_is_not_trained() -> None:
    found = plan("magicoder-gemma")
    assert found.model["parameters"] - found.model["trainable"] > 400e6
    assert not any("vision" in name for name in found.scored["linears"])
