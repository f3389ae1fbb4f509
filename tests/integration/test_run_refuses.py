"""What a run refuses before it trains, before a Fisher is fitted, and before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl import SFTTrainer

from alphatoken.errors import AlphaTokenError, ConfigError, InputError
from alphatoken.train import AlphaSFTConfig, AlphaSFTTrainer
from alphatoken.train.layouts import check_layout
from tests.both_programs import main
from tests.integration.tiny_training import (
    ALPHA,
    furthest,
    made,
    model,
    options,
    saved,
    sft,
    sft_rows,
    sums,
)

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
    "no such layer": ("sft", ["--layers", "9"], "within the model"),
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
    given = {"train_dataset": sft_rows(8), "validation_dataset": sft_rows(32, seed=5), **more}
    return made(AlphaSFTTrainer, tmp_path, **given)


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
    rows = sums(32, seed=9)
    rows[3]["completion"] = " 1" * 70
    with pytest.raises(InputError, match=r"150 tokens in row 3, limit 128"):
        trainer(tmp_path, max_length=1024, **{which: Dataset.from_list(rows)})


# --- what needs no model ------------------------------------------------------------------------


def config(folder: Path, **more: Any) -> AlphaSFTConfig:
    return AlphaSFTConfig(**{**options(folder), **ALPHA, **more})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "compile": ({"torch_compile": True}, "compile"),
    "Liger": ({"use_liger_kernel": True}, "Liger kernels"),
    "offloading": ({"activation_offloading": True}, "offloaded activations"),
    "smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
    "fp16": ({"fp16": True}, "fp16 does not work"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_are_refused_where_the_configuration_is_made(tmp_path: Path, name: str) -> None:
    more, said = REFUSED[name]
    with pytest.raises(AlphaTokenError, match=said):
        config(tmp_path, **more)


@pytest.mark.parametrize("name", ["Liger", "offloading", "smoothing"])
def test_a_run_that_weighs_nothing_refuses_nothing_of_the_trainers_below(
    tmp_path: Path, name: str
) -> None:
    assert not config(tmp_path, policy="standard", **REFUSED[name][0]).weighs


@pytest.mark.filterwarnings("ignore:.label_smoothing_factor. is deprecated:FutureWarning")
def test_standard_is_trls_trainer_with_what_weights_would_refuse(tmp_path: Path) -> None:
    more = {"label_smoothing_factor": 0.1}
    ours = sft(tmp_path / "ours", validation_dataset=None, policy="standard", **more)
    theirs = made(SFTTrainer, tmp_path / "theirs", **more)
    ours.train()
    theirs.train()
    assert furthest(ours, theirs) == 0


# --- layouts, without their processes ------------------------------------------------------------


class Layout:
    """Stands for the accelerator of a run over processes."""

    mixed_precision, ddp_handler, parallelism_config = "no", None, None

    def __init__(self, name: str) -> None:
        self.distributed_type = "FSDP" if name == "fsdp2" else "DEEPSPEED"
        self.is_fsdp2 = name == "fsdp2"
        stage = SimpleNamespace(zero_stage=int(name[-1]))
        self.state = SimpleNamespace(deepspeed_plugin=stage, fsdp_plugin=None, dynamo_plugin=None)


LABEL = {"estimator": "label", "parameters": "all"}


@pytest.mark.parametrize(
    ("layout", "more", "said"),
    [
        ("fsdp2", {"preconditioner": "frozen"}, ""),
        ("fsdp2", {"preconditioner": "full"}, ""),
        ("fsdp2", {"preconditioner": "frozen", **LABEL}, ""),
        ("fsdp2", {"preconditioner": "full", **LABEL}, "full' cannot be had for label.*'frozen'"),
        ("zero2", {"preconditioner": "frozen"}, "flat partitions.*DDP or FSDP2"),
        ("zero3", {"preconditioner": "full"}, "flat partitions.*DDP or FSDP2"),
    ],
)
def test_a_preconditioner_is_refused_where_it_has_no_state_to_read(
    tmp_path: Path, layout: str, more: dict[str, Any], said: str
) -> None:
    """That it works under FSDP2 is tested in ``test_distributed.py``."""
    args = config(tmp_path, **more)
    with pytest.raises(ConfigError, match=said) if said else nullcontext():
        check_layout(Layout(layout), args, model())


# --- documents one after the other ----------------------------------------------------------------


def test_packed_rows_may_be_longer_than_the_model(tmp_path: Path) -> None:
    """That values at ratio 1 leave such a run as TRL has it is tested in ``test_trainers.py``."""
    more = {"packing": True, "max_length": 256, "retention": "none"}
    assert model().config.max_position_embeddings < 256
    trainer = sft(tmp_path / "ours", train_dataset=sft_rows(96), **more)
    assert max(len(row["input_ids"]) for row in trainer.train_dataset) > 128
    with pytest.raises(AlphaTokenError, match="longer than the model allows"):
        sft(tmp_path / "wrapped", packing_strategy="wrapped", **more)
