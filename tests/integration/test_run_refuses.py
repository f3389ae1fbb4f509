"""What a run refuses before any work: tables of what is asked for, the error's type, its cause."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel
from trl import SFTTrainer

from alphatoken.errors import AlphaTokenError, ConfigError, DataError, InputError
from alphatoken.support.storage import no_empty_folder
from alphatoken.train import AlphaSFTConfig, AlphaSFTTrainer
from alphatoken.train.distributed import layout, needs_own_forward, refused_layouts, sharding_of
from alphatoken.train.manifest import RUN
from alphatoken.train.options import AlphaOptions
from alphatoken.train.policies.builtin import Standard
from alphatoken.train.refusals import refused_runs
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

# --- commands -------------------------------------------------------------------------------------

VALUED = ["--validation_rows", "4", "--validation_batch_size", "2", "--retention", "none"]

COMMANDS: dict[str, tuple[str, list[str], str]] = {
    "no file": ("sft", ["--train_file", "nowhere.jsonl"], "train_file does not exist"),
    "no validation file": (
        "sft", ["--validation_file", "no.jsonl"], "validation_file does not exist"
    ),
    "no Fisher file": ("sft", ["--fisher_file", "no.safetensors"], "fisher_file does not exist"),
    "no template": (
        "sft", ["--chat_template_path", "no.jinja"], "chat_template_path does not exist"
    ),
    "a full folder": ("sft", ["--output_dir", "full"], "output folder is not empty"),
    "a folder of values": (
        "sft", ["--output_dir", "scored", "--resume"], "run.json of `alphatoken score`"
    ),
    "the same, to be overwritten": (
        "dpo", ["--output_dir", "scored", "--overwrite_output"], "results of another command"
    ),
    "a file for a folder": ("sft", ["--output_dir", "rows.jsonl"], "output_dir is a file"),
    "two sources": ("sft", ["--dataset_name", "a/b"], "train_file and dataset_name"),
    "a stream": ("sft", ["--dataset_streaming"], "dataset_streaming"),
    "no evaluation rows": ("sft", ["--eval_strategy", "steps"], "--eval_data"),
    "too many to hold out": ("sft", ["--validation_rows", "99"], "validation rows cannot be drawn"),
    "too many prompts": (
        "sft", ["--retention", "diagonal", "--fisher_prompts", "99"], "prompts cannot be drawn",
    ),
    "no validation rows": ("sft", ["--validation_rows", "0"], "values need a validation dataset"),
    "no retention rows": ("sft", ["--retention", "data"], "retention_dataset="),
    "all held out": ("sft", ["--held_out_share", "0.9"], "held_out_share=0"),
    "no such layer": ("sft", ["--layers", "9"], "layers=9"),
    "the paper's pairs and TI-DPO": (
        "dpo", ["--policy", "ti-dpo", "--precompute_ref_log_probs", "true"],
        "asks for the reference's log-probability of a token",
    ),
    "a loss for nothing": ("dpo", ["--policy", "ti-dpo", "--label_smoothing", "0.1"],
                           "which label_smoothing does not"),
    "two betas": ("dpo", ["--policy", "ti-dpo", "--beta", "0.3"], "beta of its own"),
    "a sum over pairs": ("dpo", ["--kept_normalization", "sum"], "kept_normalization='sum'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = saved(tmp_path_factory.mktemp("refused"), 12)
    (place / "full").mkdir()
    (place / "full" / "notes.txt").write_text("mine")
    (place / "earlier").mkdir()
    (place / "earlier" / "run.json").write_text("{}")
    (place / "scored").mkdir()
    (place / "scored" / "run.json").write_text('{"command": "score"}')
    (place / "trained").mkdir()
    (place / "trained" / RUN).write_text("{}")
    return place


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(folder)
    yield folder
    assert not (folder / "out").exists() or not list((folder / "out").glob("checkpoint-*"))


@pytest.fixture
def no_fisher(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = import_module("alphatoken.train.run_rows")
    monkeypatch.setattr(rows, "fitted_fisher", lambda *_, **__: pytest.fail("work was done"))


@pytest.mark.usefixtures("no_fisher", "here")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_training_command_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command, more, cause = COMMANDS[name]
    rows, beta = ("rows.jsonl", []) if command == "sft" else ("pairs.jsonl", ["--beta", "0.1"])
    words = [
        command, "--model_name_or_path", "model", "--train_file", rows, "--output_dir", "out",
        "--use_cpu", "--bf16", "false", "--max_steps", "1", "--report_to", "none", "--max_length",
        "64", *VALUED, *beta, *more,
    ]  # fmt: skip
    assert main(words) == 2
    assert cause in capsys.readouterr().err.strip().splitlines()[-1]
    assert not Path("out").exists(), "nothing is left of it"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", ["score", "diagnose coverage"])
def test_a_refused_command_leaves_no_folder_behind(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor those above it that it made; of one that was there all stays."""
    words = [*command.split(), *MODEL, "--validation_file", "rows.jsonl"]
    Path("mine").mkdir()
    for out in ("new/run", "mine"):
        assert main([*words, "--output_dir", out]) == 2
        assert "are the same file" in capsys.readouterr().err
    assert not Path("new").exists()
    assert Path("mine").is_dir()
    Path("mine").rmdir()


def test_a_folder_that_is_left_empty_goes_again(tmp_path: Path) -> None:
    """With those above it that were made with it, and no other."""
    (tmp_path / "there").mkdir()
    for name in ("there/new/run", "there", "new/kept"):
        with suppress(ZeroDivisionError), no_empty_folder(tmp_path / name):
            (tmp_path / name).mkdir(parents=True, exist_ok=True)
            if name == "new/kept":
                (tmp_path / name / "file").touch()
            raise ZeroDivisionError
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "kept", "new", "there"]


@pytest.mark.usefixtures("no_fisher")
@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("sft", "--resume"),
        ("race", "--resume"),
        ("sft", "--resume_from_checkpoint going/checkpoint-2"),
    ],
)
def test_checkpoints_to_go_on_from_are_not_removed(
    command: str, more: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a command that is typed again with ``--resume`` behind what it began with."""
    (here / "going" / "checkpoint-2").mkdir(parents=True, exist_ok=True)
    words = [
        command, *MODEL, "--validation_file", "rows.jsonl", "--output_dir", "going", "--use_cpu",
        "--bf16", "false", "--max_steps", "40", "--report_to", "none", "--overwrite_output",
    ]  # fmt: skip
    assert main([*words, *more.split()]) == 2
    assert "leave --overwrite_output out to go on" in capsys.readouterr().err
    assert (here / "going" / "checkpoint-2").exists()


MODEL = ("--model_name_or_path", "model", "--train_file", "rows.jsonl")
WORDS: dict[str, tuple[str, ...]] = {
    "fisher": ("fisher", *MODEL, "--output_file"),
    "score": ("score", *MODEL, "--validation_rows", "2", "--output_dir"),
    "merge": ("merge", "--before", "./a", "--after", "./b", "--output_dir"),
}


@pytest.fixture
def nothing_loaded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command must end before tokenizer and model."""
    loading = import_module("alphatoken.model.loading")
    monkeypatch.setattr(loading, "load_or_refuse", lambda *_, **__: pytest.fail("loaded"))


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize(
    ("command", "out", "cause"),
    [
        ("fisher", "rows.jsonl", "input"),
        ("fisher", "pairs.jsonl", "is there already"),
        ("merge", "pairs.jsonl", "exists"),
        ("score", "earlier", "holds an earlier run"),
        ("score", "trained", "holds a training run"),
    ],
)
def test_nothing_is_overwritten_unasked(
    command: str, out: str, cause: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert main([*WORDS[command], out]) == 2
    assert cause in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.usefixtures("nothing_loaded")
@pytest.mark.parametrize("command", WORDS)
def test_what_cannot_be_written_is_said_first(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert main([*WORDS[command], "new"]) == 1
    assert "No space left on device" in capsys.readouterr().err


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("command", ["score", "fisher"])
def test_layers_that_the_model_lacks_are_said_before_its_weights_are_loaded(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        PreTrainedModel, "from_pretrained", lambda *_, **__: pytest.fail("weights were loaded")
    )
    assert main([*WORDS[command], "new", "--layers", "99"]) == 2
    assert "layers=99, model depth 3" in capsys.readouterr().err


def test_a_full_disk_is_no_wrong_input(tmp_path: Path) -> None:
    """The command's status is that of a file's error."""
    from alphatoken.cli.program import guarded
    from alphatoken.cli.training import _save

    def last(_: str) -> None:
        raise OSError(28, "No space left on device")

    def save_model() -> int:
        _save(SimpleNamespace(save_model=last), str(tmp_path))
        return 0

    with pytest.raises(DataError, match="trained model could not be written"):
        save_model()
    assert guarded("alphatoken", save_model, traceback=False) == 1


# --- rows, found before the Fisher is fitted ------------------------------------------------------


def trainer(tmp_path: Path, **more: Any) -> Any:
    rows = {"train_dataset": sft_rows(8), "validation_dataset": sft_rows(32, seed=5)}
    return made(AlphaSFTTrainer, tmp_path, **rows | more)


@pytest.mark.usefixtures("no_fisher")
def test_eight_processes_need_eight_held_out_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 rows, of which the default share holds 6 out: found at once, not at the first step."""
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


def test_packed_rows_may_be_longer_than_the_model(tmp_path: Path) -> None:
    """That values at ratio 1 leave such a run as TRL has it is tested in ``test_trainers.py``."""
    more = {"packing": True, "max_length": 256, "retention": "none"}
    assert model().config.max_position_embeddings < 256
    trainer = sft(tmp_path / "ours", train_dataset=sft_rows(96), **more)
    assert max(len(row["input_ids"]) for row in trainer.train_dataset) > 128
    with pytest.raises(AlphaTokenError, match="longer than the model allows"):
        sft(tmp_path / "wrapped", packing_strategy="wrapped", **more)


# --- the configuration ----------------------------------------------------------------------------


def config(folder: Path, **more: Any) -> AlphaSFTConfig:
    return AlphaSFTConfig(**{**options(folder), **ALPHA, **more})


@pytest.mark.parametrize("more", [{}, {"retention": "data", "objective": "adaptation"}])
def test_retention_rows_that_nothing_reads_are_refused(tmp_path: Path, more: Any) -> None:
    """Under a control as under the run that it is compared with."""
    for policy in ("top", "random"):
        own = {"retention": "none", "retention_dataset": sft_rows(6, seed=7), **more}
        with pytest.raises(AlphaTokenError, match="no retention rows are wanted"):
            sft(tmp_path, policy=policy, **own)
    sft(tmp_path, policy="random", **own | {"retention": "data", "objective": "both"})


SETTINGS: dict[str, dict[str, Any]] = {
    "torch_compile": {"torch_compile": True},
    "use_liger_kernel": {"use_liger_kernel": True},
    "activation_offloading": {"activation_offloading": True},
    "label_smoothing_factor": {"label_smoothing_factor": 0.1},
    "fp16": {"fp16": True},
    "hub_strategy": {"push_to_hub": True, "hub_strategy": "checkpoint"},
}


@pytest.mark.parametrize("option", SETTINGS)
def test_a_configuration_is_refused_where_it_is_made(tmp_path: Path, option: str) -> None:
    with pytest.raises(AlphaTokenError, match=option) as caught:
        config(tmp_path, **SETTINGS[option])
    assert caught.value.remedy
    if option.startswith(("use_liger", "activation", "label")):
        weighs_nothing = config(tmp_path, policy="standard", **SETTINGS[option])
        assert not weighs_nothing.weighs, "TRL's own trainer may have it"


@pytest.mark.filterwarnings("ignore:.label_smoothing_factor. is deprecated:FutureWarning")
def test_standard_is_trls_trainer_with_what_weights_would_refuse(tmp_path: Path) -> None:
    more = {"label_smoothing_factor": 0.1}
    ours = sft(tmp_path / "ours", validation_dataset=None, policy="standard", **more)
    theirs = made(SFTTrainer, tmp_path / "theirs", **more)
    ours.train()
    theirs.train()
    assert furthest(ours, theirs) == 0


# --- layouts, without their processes -------------------------------------------------------------


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    """A real one; what a GPU or a second process would have put into its state is put there."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}


def arguments(**changed: Any) -> Any:
    own = {"n_gpu": 0, "gradient_checkpointing": True, **changed}
    return SimpleNamespace(**{**vars(AlphaOptions()), "needs_values": True, **own})


def in_layout(kind: DistributedType, version: int = 2, **plugins: Any) -> Callable[[Any], None]:
    """Puts a layout into the state of an accelerator."""

    def put(state: Any) -> None:
        fsdp = {"fsdp_version": version, "activation_checkpointing": False, **plugins}
        state.distributed_type = kind
        state.fsdp_plugin = SimpleNamespace(**fsdp)
        stage = SimpleNamespace(selected=True, zero_stage=plugins.get("stage"))
        state.deepspeed_plugins = {"default": stage}

    return put


def parallel(**sizes: int) -> Callable[[Any], None]:
    return lambda state: setattr(state, "parallelism_config", ParallelismConfig(**sizes))


def compiled(*, inside: bool) -> nn.Module:
    linear = nn.Linear(2, 2)
    if not inside:
        return torch.compile(linear, backend="eager")  # type: ignore[return-value]
    linear.compile(backend="eager")
    return linear


def spread(*devices: int) -> nn.Module:
    linear: Any = nn.Linear(2, 2)
    linear.hf_device_map = {f"model.layers.{n}": device for n, device in enumerate(devices)}
    return linear


FSDP, ZERO = DistributedType.FSDP, DistributedType.DEEPSPEED
LABEL = {"estimator": "label", "parameters": "all"}
FROZEN, FULL = {"preconditioner": "frozen"}, {"preconditioner": "full"}
Case = tuple[Callable[[Any], None] | None, dict[str, Any], Callable[[], nn.Module] | None, str]
LAYOUTS: dict[str, Case] = {
    "one process": (None, {}, None, ""),
    "static graph": (None, {"ddp_static_graph": True}, None, "ddp_static_graph=False"),
    "DataParallel": (None, {"n_gpu": 2}, None, "2 GPUs.*accelerate launch"),
    # TRL loads a name with device_map="auto" and sets n_gpu to 1: past the refusal above.
    "a device map": (None, {}, lambda: spread(0, 1, 1), "device_map over 0, 1"),
    "a device map of one": (None, {}, lambda: spread(0), ""),
    "a compiled model": (None, {}, lambda: compiled(inside=False), "torch_compile=False"),
    "compiled inside": (None, {}, lambda: compiled(inside=True), "torch_compile=False"),
    "tensor parallelism": (parallel(tp_size=2), {}, None, "tp_size=2"),
    "context parallelism": (parallel(cp_size=2), {}, None, "cp_size=2"),
    "sequence parallelism": (parallel(sp_size=2), {}, None, "sp_size=2"),
    "FSDP1": (in_layout(FSDP, 1), {}, None, "fsdp1.*fsdp_version: 2"),
    "Megatron": (in_layout(DistributedType.MEGATRON_LM), {}, None, "megatron_lm.*FSDP2"),
    "XLA": (in_layout(DistributedType.XLA), {}, None, "xla.*DDP"),
    "FSDP's checkpointing": (
        in_layout(FSDP, activation_checkpointing=True), {}, None, "gradient_checkpointing=True"
    ),
    "reentrant checkpointing": (
        None, {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, None,
        "use_reentrant.*scoring_forward='own'",
    ),
    "FSDP2 in bf16": (in_layout(FSDP), {"bf16": True, **LABEL}, None, "label.*bf16"),
    "FSDP2, frozen": (in_layout(FSDP), FROZEN, None, ""),
    "FSDP2, full": (in_layout(FSDP), FULL, None, ""),
    "FSDP2, frozen label": (in_layout(FSDP), FROZEN | LABEL, None, ""),
    "FSDP2, full label": (in_layout(FSDP), FULL | LABEL, None, "'full'.*label.*'frozen'"),
    "ZeRO-2, frozen": (in_layout(ZERO, stage=2), FROZEN, None, "zero2.*DDP or FSDP2"),
    "ZeRO-3, full": (in_layout(ZERO, stage=3), FULL, None, "zero3.*DDP or FSDP2"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_a_layout_rules_out(accelerator: Accelerator, name: str) -> None:
    """That values are right in the others is tested in ``test_distributed.py``."""
    put, more, build, cause = LAYOUTS[name]
    if put is not None:
        put(accelerator.state)
    policy = Standard()  # which needs no values, so that no more is asked of the model
    whole = nn.Linear(2, 2) if build is None else build()
    refusal = next(refused_runs(accelerator, arguments(**more), whole, policy), None)
    if not cause:
        assert refusal is None
        return
    with pytest.raises(ConfigError, match=cause) as caught:
        raise refusal or AssertionError("it is not refused")
    assert caught.value.why
    assert caught.value.remedy


def test_static_graph_by_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    handler = DistributedDataParallelKwargs(static_graph=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    (refusal,) = refused_layouts(accelerator, arguments(), nn.Linear(2, 2))
    assert "static_graph" in str(refusal)
    AcceleratorState._reset_state(reset_partial_state=True)


def test_one_process_is_a_layout(accelerator: Accelerator) -> None:
    assert layout(accelerator) == "single"
    assert sharding_of(accelerator, nn.Linear(2, 2)) is None
    assert not needs_own_forward(accelerator, AlphaOptions())
    assert needs_own_forward(accelerator, AlphaOptions(keep_scope="global"))
    assert needs_own_forward(accelerator, AlphaOptions(scoring_forward="own"))
