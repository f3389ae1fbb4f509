"""Recipes: what the packaged ones say, and how they are read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from alphatoken.cli import main
from alphatoken.cli.arguments import Arguments, read_arguments, words_of
from alphatoken.cli.recipes import Recipe, accelerate_config, find_recipe, packaged_recipes
from alphatoken.cli.training import changed_options, check_launch
from alphatoken.cli.training_rows import RowReader, check_rows
from alphatoken.diagnose.data import RECOMMENDED
from alphatoken.errors import ConfigError, DataError
from alphatoken.race.arms import PACKAGED
from alphatoken.train.dpo import AlphaDPOConfig
from alphatoken.train.policies.validation_mix import ValidationMix
from alphatoken.train.sft import AlphaSFTConfig
from tests.integration import tiny_training as tiny
from tests.rows import jsonl

ROOT = Path(__file__).parents[2]
RECIPES = [recipe for recipe in packaged_recipes() if "model_name_or_path" in recipe.options]
NAMES = [recipe.name for recipe in RECIPES]
OVERLAYS = [recipe for recipe in packaged_recipes() if recipe.name not in NAMES]
"""Recipes that go on top of others."""
CONFIGURATIONS: dict[str, Any] = {"sft": AlphaSFTConfig, "dpo": AlphaDPOConfig}
MODELS = ("llama", "gemma", "qwen")
TASKS = {
    "magicoder": "ise-uiuc/Magicoder-OSS-Instruct-75K",
    "metamath": "meta-math/MetaMathQA",
    "ultrachat": "HuggingFaceH4/ultrachat_200k",
    "ultrafeedback": "argilla/ultrafeedback-binarized-preferences",
}
"""And the rows of each."""


def read(name: str, *words: str) -> Arguments:
    recipe = find_recipe(name)
    command = recipe.command or "sft"
    return read_arguments(command, ["--config", name, "--use_cpu", *words], CONFIGURATIONS[command])


# --- every recipe -------------------------------------------------------------------------------


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
        "gradient_checkpointing": True, "use_peft": False, "seed": 0, "dataset_name": TASKS[task],
    }  # fmt: skip
    if task == "ultrachat":
        return every | {"policy": "all", "retention": "none", "validation_rows": 0, "turns": "all"}
    every |= {
        "keep_ratio": 0.5, "stability_weight": 1.5, "window": 32, "layers": "3",
        "keep_scope": "global", "kept_normalization": "response" if pairs else "sum",
        "estimator": "alphatoken",
        "validation_mode": "fixed", "validation_rows": 32, "validation_batch_size": 32,
        "held_out_share": 0.0, "held_out_steps": 0,
        "retention": "diagonal", "fisher_samples": 1000, "fisher_prompts": 1000,
        "fisher_max_new_tokens": 256,
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


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("laptop", "meta"))])
@pytest.mark.parametrize("top", OVERLAYS, ids=lambda recipe: recipe.name)
def test_a_recipe_goes_on_top_of_others(top: Recipe, name: str, tmp_path: Path) -> None:
    """As a race; and never without the clean rows that it asks for."""
    clean = tmp_path / "clean.jsonl"
    clean.write_text('{"prompt": "a", "response": "b"}\n' * 16)
    command = find_recipe(name).command or "sft"
    words = ["--config", name, "--config", top.name, "--train_file", str(clean), "--use_cpu"]

    def read_race(*more: str) -> Arguments:
        kind = CONFIGURATIONS[command]
        return read_arguments(command, [*words, "--bf16", "false", *more], kind, race=True)

    said = read_race("--validation_file", str(clean))
    check_rows(said)
    assert said.race is not None
    assert said.race.arms == top.options["arms"] == ["walk-80", "validation-mix"]
    assert said.run.value == top.options["value"] == "walk"
    for option in ("validation_mode", "validation_rows"):
        found = getattr(said.training if hasattr(said.training, option) else said.data, option)
        assert found == top.options[option], option
    assert (said.training.retention, said.training.uncovered) == ("none", "error")
    with pytest.raises(ConfigError, match="--validation_file FILE"):
        check_rows(read_race())


def test_the_recommended_race_is_refused_of_one_run_with_the_line_to_type(tmp_path: Path) -> None:
    """And with the options by which one run does the same without a race."""
    words = ["--config", "laptop-sft", "--config", "recommended", "--train_file", "my rows.jsonl"]
    with pytest.raises(ConfigError) as refused:
        read_arguments("sft", words, AlphaSFTConfig)
    assert f"alphatoken race {shlex.join(words)}" in str(refused.value)
    alone = re.search(r"without a race, (.*) in place of --config recommended", str(refused.value))
    assert alone is not None
    args = read("laptop-sft", *alone[1].split()).training
    assert (args.policy, args.estimator, args.keep_ratio, args.walk_steps) == (
        "top",
        "walk",
        0.8,
        24,
    )
    with pytest.raises(ConfigError, match="alphatoken race --dpo --config laptop-dpo"):
        read_arguments("dpo", ["--config", "laptop-dpo", *words[2:]], AlphaDPOConfig)


def test_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("sft", "dpo", "race"):
        assert main([command, "--help_all"]) == 0
        lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
        for recipe in (*RECIPES, *OVERLAYS):
            listed = any(x.startswith(f"{recipe.name} ") and recipe.about in x for x in lines)
            own = {command, "sft"} if command == "race" else {command}
            assert listed == (recipe.command in own)


HARMFUL: dict[str, Any] = {
    "policy": lambda value: value == "bottom",
    "stability_weight": lambda value: value >= 30,
}
"""Settings that were measured as harmful (docs/log.md): on a small decoder the bottom half cost
3 to 7 of the target loss, lambda = 30 0.8."""


@pytest.mark.parametrize("recipe", RECIPES, ids=NAMES)
def test_no_recipe_sets_what_was_measured_as_harmful(recipe: Recipe) -> None:
    args = read(recipe.name).training
    assert [name for name, harms in HARMFUL.items() if harms(getattr(args, name))] == []


def test_the_recommended_arms_are_what_was_measured() -> None:
    """``walk-80`` of benchmarks/selection/long.yaml at the run's rate; ``mix`` of rivals.yaml."""
    grid = yaml.safe_load((ROOT / "benchmarks/selection/long.yaml").read_text("utf-8"))
    measured = {**grid["options"], **grid["methods"]["walk-80"]}
    recipe = find_recipe("recommended").options
    arm, mix = recipe["arms"]
    assert (arm, mix) == RECOMMENDED  # as `diagnose data` prints them beside an arm more
    rivals = yaml.safe_load((ROOT / "benchmarks/selection/rivals.yaml").read_text("utf-8"))
    assert (mix, None) == (rivals["methods"]["mix"]["policy"], ValidationMix().rows)
    # One row beside every two, which is what rows=None comes to.
    assert rivals["methods"]["mix"]["policy_options"] == {"rows": 1}
    assert rivals["options"]["per_device_train_batch_size"] == 2
    run = read_arguments(
        "sft", ["--config", "laptop-sft", "--config", "recommended", "--use_cpu"], AlphaSFTConfig,
        race=True, over=words_of(PACKAGED[arm]),
    ).training  # fmt: skip
    for name in (
        "policy", "keep_ratio", "estimator", "walk_steps", "objective", "retention",
        "validation_mode",
    ):  # fmt: skip
        assert getattr(run, name) == measured[name], name


# --- overrides ----------------------------------------------------------------------------------


def test_the_command_line_overrides_the_recipe() -> None:
    found = read(
        "magicoder-llama", "--learning-rate", "1e-6", "--keep_ratio=0.25", "--window", "none",
        "--layers", "0,4",
    )  # fmt: skip
    args = found.training
    assert found.model.model_name_or_path == "meta-llama/Llama-3.2-3B"
    assert found.data.dataset_name == "ise-uiuc/Magicoder-OSS-Instruct-75K"
    assert (args.learning_rate, args.keep_ratio, args.window) == (1e-6, 0.25, None)
    assert (args.layers, args.max_length) == ("0,4", 4096)


def test_what_a_recipe_says_of_values_gives_way_to_another_policy(tmp_path: Path) -> None:
    """Named on the command line or by a later recipe; what is said beside it is refused."""
    llama = "magicoder-llama"
    other = read(llama, "--policy", "stm")
    assert {"keep_scope", "kept_normalization"} <= set(other.unread)
    assert changed_options(other) == ["kept_normalization"]  # of the others nothing is lost
    assert read(llama, "--policy", "bottom").training.keep_scope == "global"
    later = tmp_path / "later.yaml"
    later.write_text("policy: stm\n")
    read(llama, "--config", str(later))
    later.write_text("policy: stm\nkeep_scope: global\n")
    with pytest.raises(ConfigError, match="keep_scope belongs to token values"):
        read(llama, "--config", str(later))
    with pytest.raises(ConfigError):
        read(llama, "--policy", "stm", "--keep_scope", "global")


@pytest.mark.parametrize(
    ("words", "expected", "unread"),
    [
        ("laptop-sft --policy alphatoken", ("top", "alphatoken", "linears", "none"),
         ("estimator", "parameters")),
        ("laptop-lora --estimator path", ("all", "path", "linears", "none"),
         ("parameters",)),
        ("laptop-sft --policy label", ("top", "label", "all", "none"), ()),
        ("laptop-dpo --estimator walk", ("top", "walk", "linears", "none"),
         ("retention", "fisher_prompts")),
    ],
)  # fmt: skip
def test_what_a_recipe_says_of_an_estimator_gives_way_to_another(
    words: str, expected: tuple[str, ...], unread: tuple[str, ...]
) -> None:
    found = read(*words.split())
    args = found.training
    assert (args.policy, args.estimator, args.parameters, args.retention) == expected
    assert found.unread == unread


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("laptop-sft --policy alphatoken --parameters all", "for the estimator 'label'"),
        ("laptop-sft --policy alphatoken --estimator label", "that of the estimator 'alphatoken'"),
        ("laptop-dpo --estimator walk --retention diagonal", "a walk has no stability side"),
    ],
)
def test_what_the_command_line_says_of_an_estimator_is_meant(words: str, refused: str) -> None:
    with pytest.raises(ConfigError, match=refused):
        read(*words.split())


def test_a_later_recipe_and_a_walks_own_options_give_way_too(tmp_path: Path) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text(
        "estimator: walk\nwalk_steps: 7\nwalk_learning_rate: 1.0e-4\nretention: none\n"
        "policy: stm\npolicy_options: {threshold: 2.0}\n"
    )
    second.write_text("policy: label\n")
    words = ["--config", str(first), "--config", str(second), "--use_cpu"]
    found = read_arguments("sft", words, AlphaSFTConfig)
    assert found.training.estimator == "label"
    assert found.training.policy_options is None
    assert found.unread == ("estimator", "walk_learning_rate", "walk_steps")


def test_a_later_recipe_goes_before_an_earlier_one(tmp_path: Path) -> None:
    """And the command line before both. YAML reads 3e-4 as text."""
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("about: one\nlearning_rate: 3e-4\nkeep-ratio: 0.7\nseed: 1\n")
    second.write_text("keep_ratio: 0.6\nseed: 2\nlayers: 1\n")
    words = ["--config", str(first), f"--config={second}", "--seed", "3", "--use_cpu"]
    args = read_arguments("sft", words, AlphaSFTConfig).training
    assert (args.learning_rate, args.keep_ratio, args.seed) == (3e-4, 0.6, 3)
    second.write_text("command: dpo\n")
    with pytest.raises(ConfigError, match="second is for `alphatoken dpo`"):
        read_arguments("sft", words, AlphaSFTConfig)


# --- processes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp2", "zero2", "ddp"])
def test_layouts_are_read_by_accelerate_too(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    path, config = accelerate_config(name)
    theirs = load_config_from_file(str(path))
    assert theirs.num_processes == config["num_processes"] == (2 if name == "ddp" else 4)
    assert str(theirs.distributed_type.value) == config["distributed_type"]


def test_a_run_has_the_processes_that_it_is_meant_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are refused, with the line that starts them."""
    base = ["--model_name_or_path", "m", "--output_dir", str(tmp_path), "--bf16", "false"]

    def arguments(*words: str) -> Arguments:
        return read_arguments("sft", [*base, *words], AlphaSFTConfig)

    check_launch(arguments("--accelerate_config", "none"))
    meant = arguments("--accelerate_config", "zero2")
    with pytest.raises(ConfigError, match="no such accelerate_config"):
        check_launch(arguments("--accelerate_config", "fsdp9"))
    with pytest.raises(ConfigError, match=r"accelerate launch --config_file .*zero2\.yaml -m alph"):
        check_launch(meant)
    monkeypatch.setattr(AlphaSFTConfig, "n_gpu", 4)
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 4 -m alphatoken.cli sft"):
        check_launch(arguments())
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(ConfigError, match="would train a model of its own"):
        check_launch(arguments())
    monkeypatch.setenv("WORLD_SIZE", "2")  # one of the processes already
    check_launch(meant)


# --- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config", "magicoder-lama"], "did you mean magicoder-llama"),
        (["--config", "no/such/file.yaml"], "no such recipe"),
        (["--config", "ultrafeedback-llama"], "for `alphatoken dpo`"),
        (["--config", "magicoder-llama", "--keep_ration", "0.5"], "did you mean --keep_ratio?"),
        (["--validation_fil", "x.jsonl"], "did you mean --validation_file?"),
        (["--config", "magicoder-llama", "--keep_ratio", "much"], "invalid float value"),
        (["--config", "magicoder-llama", "--keep_ratio", "0"], "ratio must lie in (0, 1]"),
        (["--config", "magicoder-llama", "--policy", "best"], "known: top, random"),
        (["--model_name_or_path", "m", "--learning_rate"], "expected one argument"),
        (["--model_name_or_path", "m", "stray"], "belongs to no option"),
        ([], "no model is named"),
    ],
)
def test_bad_arguments_are_one_line(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], no_network: None
) -> None:
    assert main(["sft", *words, "--use_cpu"]) == 2
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
    ],
)
def test_a_broken_recipe_is_named(
    tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.yaml").write_text(text)
    words = ["--config", str(tmp_path / "broken.yaml"), "--model_name_or_path", "m"]
    assert main(["sft", *words, "--use_cpu"]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1


# --- a mixture of data sets -----------------------------------------------------------------------


@pytest.fixture
def mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe of TRL's form: two files, of which one has a column too much, and a fraction."""
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    jsonl(tmp_path / "sums.jsonl", [{**row, "note": "x"} for row in tiny.sums(6)])
    birds = [{"prompt": f"name bird {n}", "completion": f" wren {n}"} for n in range(8)]
    jsonl(tmp_path / "birds.jsonl", birds)
    recipe = tmp_path / "recipe.yaml"
    parts = [
        {"path": "json", "data_files": str(tmp_path / "sums.jsonl"), "fraction": 0.75,
         "columns": ["prompt", "completion"]},
        {"path": "json", "data_files": str(tmp_path / "birds.jsonl"), "fraction": 0.25},
    ]  # fmt: skip
    recipe.write_text(yaml.safe_dump({"datasets": parts, "output_dir": str(tmp_path / "out")}))
    return recipe


def test_a_mixture_has_the_rows_that_trl_gives_it(mixture: Path) -> None:
    from trl import DatasetMixtureConfig, get_dataset

    arguments = read(str(mixture))
    rows = RowReader(arguments, tiny.tokenizer()).training_rows()
    parts = yaml.safe_load(mixture.read_text())["datasets"]
    wanted = get_dataset(DatasetMixtureConfig(parts))["train"]
    assert len(rows) == len(wanted) == 8
    found = [(item.row.prompt, item.row.response) for item in rows]
    assert found == [(row["prompt"], row["completion"]) for row in wanted]
    limited = RowReader(read(str(mixture), "--train_limit", "3"), tiny.tokenizer())
    assert [item.row.prompt for item in limited.training_rows()] == [one[0] for one in found[:3]]
    file = str(mixture.parent / "birds.jsonl")
    typed = RowReader(read(str(mixture), "--train_file", file), tiny.tokenizer())
    assert len(typed.training_rows()) == 8
    assert typed.data.datasets == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"streaming": True}, "streamed.*streaming: true"),
        ({"test_split_size": 0.2}, "test_split_size: 0.2.*--eval_data FILE"),
        ({"train_file": "rows.jsonl"}, "one place. Got: train_file and datasets"),
        ({"dataset_name": "who/what"}, "one place. Got: dataset_name and datasets"),
        ({"datasets": [{"pth": "json"}]}, "pth"),
        ({"datasets": "birds.jsonl"}, "no list of data sets"),
    ],
)
def test_what_a_mixture_does_not_do_is_refused(
    mixture: Path, more: dict[str, Any], message: str
) -> None:
    mixture.write_text(yaml.safe_dump({**yaml.safe_load(mixture.read_text()), **more}))
    with pytest.raises(ConfigError, match=message):
        check_rows(read(str(mixture)))


def test_a_mixture_with_a_file_that_is_not_there_is_one_error(mixture: Path) -> None:
    (mixture.parent / "birds.jsonl").unlink()
    with pytest.raises(DataError, match=r"cannot be loaded. Got: .*birds\.jsonl"):
        RowReader(read(str(mixture)), tiny.tokenizer()).training_rows()
