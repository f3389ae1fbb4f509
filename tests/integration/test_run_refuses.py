"""What a run refuses before it trains, and before a Fisher is fitted."""

from __future__ import annotations

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
    "no file": ("sft", ["--train_file", "nowhere.jsonl"], "train_file does not exist"),
    "no validation file": (
        "sft", ["--validation_file", "no.jsonl"], "validation_file does not exist"
    ),
    "no Fisher file": ("sft", ["--fisher_file", "no.safetensors"], "fisher_file does not exist"),
    "no template": (
        "sft", ["--chat_template_path", "no.jinja"], "chat_template_path does not exist"
    ),
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
    "all held out": ("sft", ["--held_out_share", "0.9"], "set is too small"),
    "no such layer": ("sft", ["--score_layers", "9"], "within the model"),
    "the paper's pairs and TI-DPO": (
        "dpo", ["--policy", "ti-dpo", "--precompute_ref_log_probs", "true"],
        "asks for the reference's log-probability of a token",
    ),
    "a loss for nothing": (
        "dpo", ["--policy", "ti-dpo", "--label_smoothing", "0.1"], "which label_smoothing does not",
    ),
    "two betas": ("dpo", ["--policy", "ti-dpo", "--beta", "0.3"], "has a beta of its own"),
    "a sum over pairs": ("dpo", ["--kept_normalization", "sum"], "is not defined for DPO"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.integration.tiny_training import saved

    place = saved(tmp_path_factory.mktemp("refused"), 12)
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


@pytest.fixture
def no_fisher(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = import_module("alphatoken.train.run_rows")
    monkeypatch.setattr(rows, "fitted_fisher", lambda *_, **__: pytest.fail("work was done"))


@pytest.mark.usefixtures("no_fisher")
@pytest.mark.parametrize("name", CASES)
def test_it_is_refused(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command, more, said = CASES[name]
    assert main(words(command, more)) == 2
    assert said in capsys.readouterr().err.strip().splitlines()[-1]


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


@pytest.mark.usefixtures("no_fisher")
def test_eight_processes_need_eight_held_out_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 rows, of which the default share holds 6 out: found at once, not at the first step."""
    from accelerate import Accelerator

    monkeypatch.setattr(Accelerator, "num_processes", 8)
    with pytest.raises(ConfigError, match="6 rows, 8 processes"):
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
