"""What a run refuses before it trains, ``--dry-run`` refuses, with the same sentence."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from alphatoken.errors import ConfigError, InputError
from tests.both_programs import main

SFT = ["--validation_rows", "4", "--validation_batch_size", "2", "--retention", "none"]
DPO = [*SFT, "--beta", "0.1"]

CASES: dict[str, tuple[str, list[str], str]] = {
    "no file": ("sft", ["--train_file", "nowhere.jsonl"], "train_file is not there"),
    "no validation file": ("sft", ["--validation_file", "no.jsonl"], "validation_file is not"),
    "no Fisher file": ("sft", ["--fisher_file", "no.safetensors"], "fisher_file is not there"),
    "no template": ("sft", ["--chat_template_path", "no.jinja"], "chat_template_path is not"),
    "a full folder": ("sft", ["--output_dir", "full"], "the output folder is not empty"),
    "a file for a folder": ("sft", ["--output_dir", "rows.jsonl"], "output_dir is a file"),
    "two sources": ("sft", ["--dataset_name", "a/b"], "from one place"),
    "a stream": ("sft", ["--dataset_streaming"], "streamed data sets"),
    "no evaluation rows": ("sft", ["--eval_strategy", "steps"], "evaluation needs rows"),
    "too many to hold out": ("sft", ["--validation_rows", "99"], "validation rows cannot be drawn"),
    "too many prompts": (
        "sft", ["--retention", "diagonal", "--fisher_prompts", "99"], "prompts cannot be drawn",
    ),
    "no validation rows": ("sft", ["--validation_rows", "0"], "values need a validation dataset"),
    "no retention rows": ("sft", ["--retention", "data"], "needs a retention dataset"),
    "a small pool": (
        "sft", ["--validation_mode", "pool", "--validation_batch_size", "4"], "set is too small",
    ),
    "all held out": ("sft", ["--held_out_share", "0.9"], "set is too small"),
    "too long": ("sft", ["--max_length", "200"], "more than the model allows. Got: 200, limit 128"),
    "label smoothing": ("sft", ["--label_smoothing_factor", "0.1"], "label_smoothing_factor"),
    "compiled": ("sft", ["--torch_compile", "true"], "a compiled model"),
    "reentrant": (
        "sft", ["--gradient_checkpointing", "true",
                "--gradient_checkpointing_kwargs", '{"use_reentrant": true}'], "reentrant",
    ),
    "shared and global": (
        "sft", ["--keep_scope", "global", "--scoring_forward", "shared"], "cannot share",
    ),
    "pairs of no such layer": (
        "sft", ["--policy", "all", "--no_export_values", "--collect_value_propagation", "1",
                "--score_layers", "9"], "within the model",
    ),
    "no such layer": ("sft", ["--score_layers", "9"], "within the model"),
    "no second model": ("sft", ["--policy", "rho-1"], "needs a reference model"),
    "a second model for nothing": (
        "sft", ["--policy_reference", "model"], "scores with no second model",
    ),
    "a policy without validation": (
        "sft", ["--policy", "less", "--validation_rows", "0"], "needs a validation dataset",
    ),
    "samples of packed rows": (
        "sft", ["--policy", "less", "--packing", "true"], "cannot be chosen from packed rows",
    ),
    "options that do nothing": ("sft", ["--policy", "stm", "--keep_scope", "global"], "keep_scope"),
    "another family": ("sft", ["--policy", "ti-dpo"], "is made for preference pairs"),
    "the paper's pairs and TI-DPO": (
        "dpo", ["--policy", "ti-dpo", "--precompute_ref_log_probs", "true"],
        "asks for the reference's log-probability of a token",
    ),
    "a loss for nothing": (
        "dpo", ["--policy", "ti-dpo", "--label_smoothing", "0.1"], "which label_smoothing does not",
    ),
    "two betas": ("dpo", ["--policy", "ti-dpo", "--beta", "0.3"], "has a beta of its own"),
    "masked sums": (
        "dpo", ["--masked_logit", "true", "--precompute_ref_log_probs", "true"], "masked_logit",
    ),
    "a sum over pairs": ("dpo", ["--kept_normalization", "sum"], "is not defined for DPO"),
    "processes by MPI": ("sft", ["--accelerate_config", "alone.yaml"], "by MPI only"),
    "no ratio": ("dpo", ["--keep_ratio", "0"], "keep_ratio must lie in (0, 1]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.integration.tiny_training import saved

    place = saved(tmp_path_factory.mktemp("refused"), 12)
    (place / "alone.yaml").write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    (place / "full").mkdir()
    (place / "full" / "notes.txt").write_text("mine")
    return place


def words(command: str, more: list[str]) -> list[str]:
    rows = "rows.jsonl" if command == "sft" else "pairs.jsonl"
    given = SFT if command == "sft" else DPO
    return [
        command, "--model_name_or_path", "model", "--train_file", rows, "--output_dir", "out",
        "--use_cpu", "--bf16", "false", "--max_steps", "1", "--report_to", "none", "--max_length",
        "64", *given, *more,
    ]  # fmt: skip


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(folder)
    yield folder
    assert not (folder / "out").exists() or not list((folder / "out").glob("checkpoint-*"))


@pytest.mark.parametrize("name", CASES)
def test_the_plan_refuses_what_the_run_refuses(
    name: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, more, said = CASES[name]
    rows = import_module("alphatoken.train.run_rows")
    monkeypatch.setattr(rows, "fitted_fisher", lambda *_, **__: pytest.fail("work was done"))
    errors = []
    for ending in (["--dry-run"], []):
        assert main([*words(command, more), *ending]) == 2, ending
        found = capsys.readouterr()
        errors.append(found.err.strip().splitlines()[-1])
    assert said in errors[0]
    assert errors[0] == errors[1]


def test_what_the_plan_accepts_is_no_mistake_of_the_table(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("sft", "dpo"):
        assert main([*words(command, []), "--dry-run"]) == 0, capsys.readouterr().err
    (here / "none.yaml").write_text("model_name_or_path: model\nuse_cpu: true\nbf16: false\n")
    assert main(["sft", "--config", "none.yaml", "--dry-run"]) == 0
    assert "No training rows are named: the run would refuse" in capsys.readouterr().out


# --- what is found before the Fisher is fitted ----------------------------------------------------


def trainer(tmp_path: Path, **more: Any) -> Any:
    from tests.integration.tiny_training import model, options, sft_rows, tokenizer

    train = import_module("alphatoken.train")
    given = {
        "train_dataset": sft_rows(8), "validation_dataset": sft_rows(32, seed=5),
        **{k: more.pop(k) for k in ("train_dataset", "validation_dataset") if k in more},
    }  # fmt: skip
    args = train.AlphaSFTConfig(**{**options(tmp_path), **more})
    return train.AlphaSFTTrainer(model=model(), args=args, processing_class=tokenizer(), **given)


@pytest.fixture
def no_fisher(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = import_module("alphatoken.train.run_rows")
    monkeypatch.setattr(rows, "fitted_fisher", lambda *_, **__: pytest.fail("work was done"))


@pytest.mark.usefixtures("no_fisher")
def test_eight_processes_need_eight_held_out_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 rows, of which the default share holds 6 out: found at once, not at the first step."""
    from accelerate import Accelerator

    monkeypatch.setattr(Accelerator, "num_processes", 8)
    with pytest.raises(ConfigError, match="6 of 32 rows, 8 processes"):
        trainer(tmp_path)
    with pytest.raises(ConfigError, match="4 rows, 8 processes"):
        trainer(tmp_path, validation_batch_size=4)


@pytest.mark.usefixtures("no_fisher")
@pytest.mark.parametrize("which", ["train_dataset", "validation_dataset"])
def test_rows_longer_than_the_model_are_found_at_once(tmp_path: Path, which: str) -> None:
    """TRL's default length is longer than this model's; it is the rows that matter then."""
    from datasets import Dataset

    from tests.integration.tiny_training import sums

    rows = sums(32, seed=9)
    rows[3]["completion"] = " 1" * 70
    with pytest.raises(InputError, match=r"150 tokens in row 3, limit 128"):
        trainer(tmp_path, max_length=1024, **{which: Dataset.from_list(rows)})


# --- every place that refuses ---------------------------------------------------------------------

TRAINED = "raised in the training loop"
ROWS = "about the content of rows, which the plan does not read"
PYTHON = "arguments that the command line does not pass"
MACHINE = "about this machine, the file system or other processes"
PLACES: dict[str, str] = {
    "train/checks.py:check_given": "no validation rows",
    "train/checks.py:check_watch": "sharded weights, as check_layout has them",
    "train/checks.py:refuse_scope": "in test_recipes: a gated convolution, experts",
    "train/checks.py:check_pool": "test_eight_processes_need_eight_held_out_rows",
    "train/checks.py:check_lengths": ROWS,
    "train/checks.py:_check_length": "too long",
    "train/checks.py:_check_policy": "samples of packed rows",
    "train/checks.py:require_validation": "a policy without validation",
    "train/checks.py:require_second_model": "no second model",
    "train/checks.py:_check_attention": "in test_policy_trainers",
    "train/dpo.py:check_alpha": "a sum over pairs",
    "train/dpo.py:_check_masked_logit": "masked sums",
    "train/dpo.py:check_pair_policy": "the paper's pairs and TI-DPO",
    "train/dpo.py:refuse_base": ROWS,
    "train/dpo.py:_check_lengths": "in test_pair_lengths",
    "train/dpo.py:prepare_rows": ROWS,
    "train/sft.py:refuse_losses": "label smoothing",
    "train/sft.py:with_responses": ROWS,
    "train/sft.py:fisher_sequences": ROWS,
    "train/given.py:by_name": PYTHON,
    "train/given.py:own_config": PYTHON,
    "train/layouts.py:check_layout": "compiled",
    "train/mixin.py:prepare_rows": "abstract",
    "train/mixin.py:row_batch": "abstract",
    "train/mixin.py:tokenised": "abstract",
    "train/mixin.py:fisher_prompts": "abstract",
    "train/mixin.py:fisher_sequences": "abstract",
    "train/mixin.py:_refuse_virtual_tokens": PYTHON,
    "train/mixin.py:_without_step": PYTHON,
    "train/run_rows.py:fit_or_load_fisher": ROWS,
    "train/run_rows.py:_require_fisher_covers": "in test_remedies: asked where a Fisher is fitted",
    "train/gradient_weights.py:__call__": "label smoothing",
    "train/gradient_weights.py:require_finite": TRAINED,
    "train/gradient_weights.py:entropy": "sharded layouts, as _check_policy has them",
    "train/policy_weigher.py:_prepare": "a fault of the policy's own code",
    "train/policy_weigher.py:_train_on_rows": "samples of packed rows",
    "train/policy_weigher.py:loss": TRAINED,
    "train/policy_weigher.py:_loss_of_policy": TRAINED,
    "train/policy_weigher.py:_batch_after_forward": TRAINED,
    "train/policy_stage.py:__init__": PYTHON,
    "train/policy_stage.py:_pair": ROWS,
    "train/policy_stage.py:make_stage": "sharded weights, as _check_policy has them",
    "train/policy_stage.py:_second_model": PYTHON,
    "train/policy_stage.py:select_rows": "a fault of the policy's own code",
    "train/pair_watch.py:pair_watch": PYTHON,
    "train/pair_watch.py:softmax_layers": "pairs of no such layer",
    "train/pool.py:__post_init__": "a small pool",
    "train/pool.py:_check": "all held out",
    "train/pool.py:rows": TRAINED,
    "train/pool.py:share_of": "test_eight_processes_need_eight_held_out_rows",
    "train/fisher_cache.py:check_fisher_rows": PYTHON,
    "train/fisher_cache.py:_path": MACHINE,
    "train/fisher_cache.py:_as_other": MACHINE,
    "train/fisher_cache.py:broadcast": MACHINE,
    "train/fisher_cache.py:_require_whole": MACHINE,
    "train/given_rows.py:as_dataset": PYTHON,
    "train/given_rows.py:_of_records": PYTHON,
    "train/datasets.py:sft_problems": ROWS,
    "train/datasets.py:preference_problems": ROWS,
    "train/datasets.py:_columns": ROWS,
    "train/datasets.py:__getitem__": ROWS,
    "train/datasets.py:_usable": ROWS,
    "cli/training.py:require_libraries": MACHINE,
    "cli/training.py:_require_model": "test_dialect: asked before the plan and the run part ways",
    "cli/training.py:check_files": "no file",
    "cli/training.py:check_output": "a full folder",
    "cli/training.py:build_trainer": "in test_cli_train: weights cut off, which no plan reads",
    "cli/training.py:_train": TRAINED,
    "cli/training.py:_save": TRAINED,
    "cli/training_rows.py:check_source": "two sources",
    "cli/training_rows.py:training_rows": "the plan says so in a note: a recipe names no rows",
    "cli/training_rows.py:source_rows": MACHINE,
    "cli/training_rows.py:__init__": "a chat template is the tokenizer's, which is not loaded",
    "cli/training_rows.py:_usable": ROWS,
    "cli/training_rows.py:_report": ROWS,
    "cli/training_rows.py:_hub": MACHINE,
    "cli/launching.py:_require_devices": MACHINE,
    "cli/launching.py:_require_launcher": "processes by MPI",
    "cli/launching.py:_require_one_task": "in test_recipes: tasks of SLURM",
    "train/layouts.py:check_same_weights": MACHINE,
}
"""Each function between the command line and the first step that raises -> the case above that
shows the plan to raise the same, or why a plan cannot. Options that contradict each other are
refused where the configuration is made, and both make it: options.py, policy_names.py, policies."""


def test_every_place_that_refuses_is_in_the_table() -> None:
    found = set()
    for module in sorted({place.partition(":")[0] for place in PLACES}):
        path = Path(import_module("alphatoken").__file__ or "").parent / module
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and any(
                isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(function)
            ):
                found.add(f"{module}:{function.name}")
    assert found == set(PLACES)
    reasons = {TRAINED, ROWS, PYTHON, MACHINE, "abstract"}
    for place, why in PLACES.items():
        known = why in CASES or why in globals() or why in reasons or " " in why
        assert known, place
